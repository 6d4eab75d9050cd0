/*
 * Page-locked host memory of several MiB that kernels read and write, by its own address and by the device's: what the
 * program writes before a launch the kernel reads, what the kernel writes the program reads after it has waited, and of a
 * page that both write to each keeps its own bytes.
 */
#include "check.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

enum { N = 1 << 20, PARTS = 4, PAGE_WORDS = 1024 };

struct job {
	const unsigned *in;
	unsigned *out;
	int n;
};

extern "C" __global__ void zc_add(const unsigned *in, unsigned *out, int n, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		out[i] = in[i] + what;
}

/* By a pointer that lies in device memory. */
extern "C" __global__ void zc_behind(unsigned **where, int n, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		(*where)[i] += what;
}

extern "C" __global__ void zc_job(struct job j, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < j.n; i += gridDim.x * blockDim.x)
		j.out[i] = j.in[i] + what;
}

/* Every second word. */
extern "C" __global__ void zc_odd(unsigned *v, int n, unsigned what)
{
	for (int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x) + 1; i < n; i += 2 * gridDim.x * blockDim.x)
		v[i] = what;
}

extern "C" __global__ void zc_hold(long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
}

static void expect(const unsigned *v, int n, unsigned base, const char *what)
{
	for (int i = 0; i < n; i++)
		REQUIRE(v[i] == base + i, "%s: element %d is %u, not %u", what, i, v[i], base + i);
}

static void fill(unsigned *v, int n, unsigned base)
{
	for (int i = 0; i < n; i++)
		v[i] = base + i;
}

/* Written, read, written again in places. */
static void rounds(unsigned *in, unsigned *out)
{
	unsigned *din, *dout;

	CHECK(cudaHostGetDevicePointer(&din, in, 0));
	CHECK(cudaHostGetDevicePointer(&dout, out, 0));
	for (unsigned round = 0; round < 5; round++) {
		fill(in, N, round);
		zc_add<<<32, 128>>>(round % 2 ? in : din, round % 2 ? out : dout, N, 1000);
		CHECK(cudaDeviceSynchronize());
		expect(out, N, round + 1000, "a round");
	}
	for (int at = 17; at < N; at += 40009) { /* one word in many pages */
		in[at] += 5;
		zc_add<<<32, 128>>>(in, out, N, 1);
		CHECK(cudaDeviceSynchronize());
		REQUIRE(out[at] == in[at] + 1 && out[at + 1] == in[at + 1] + 1, "word %d: %u and %u", at, out[at], in[at]);
	}
}

/* Within a structure, and by part of the block. */
static void structures(unsigned *in, unsigned *out)
{
	struct job j = { in + N / 2, out + 3, N / 4 };

	fill(in, N, 7);
	zc_job<<<8, 64>>>(j, 1);
	CHECK(cudaDeviceSynchronize());
	expect(out + 3, N / 4, 7 + N / 2 + 1, "a structure");
}

/* Memory whose device pointer was asked for is reached by a pointer that no parameter shows. */
static void hidden(unsigned *in)
{
	unsigned **where;

	fill(in, N, 2);
	CHECK(cudaMalloc(&where, sizeof *where));
	CHECK(cudaMemcpy(where, &in, sizeof in, cudaMemcpyHostToDevice));
	zc_behind<<<8, 64>>>(where, N, 1);
	CHECK(cudaDeviceSynchronize());
	expect(in, N, 3, "behind a pointer");
	CHECK(cudaFree(where));
}

/* The kernel writes the odd words while the program writes the even ones of the same pages. */
static void neighbours(unsigned *v, cudaStream_t s)
{
	for (unsigned round = 1; round < 4; round++) {
		zc_hold<<<1, 1, 0, s>>>(5000000ll);
		zc_odd<<<8, 64, 0, s>>>(v, N, round);
		for (int i = 0; i < N; i += 2)
			v[i] = 100 + round;
		CHECK(cudaStreamSynchronize(s));
		for (int i = 0; i < N; i++)
			REQUIRE(v[i] == (i % 2 ? round : 100 + round), "round %u, word %d: %u", round, i, v[i]);
	}
}

/* Copies and fills of memory that kernels reach, and what follows them in the stream. */
static void copies(unsigned *in, unsigned *out, cudaStream_t s)
{
	unsigned *d, *plain = (unsigned *)malloc(N * sizeof *plain);

	CHECK(cudaMalloc(&d, N * sizeof *d));
	fill(in, N, 3);
	CHECK(cudaMemcpyAsync(d, in, N * sizeof *d, cudaMemcpyHostToDevice, s));
	zc_add<<<8, 64, 0, s>>>(d, d, N, 1);
	CHECK(cudaMemcpyAsync(out, d, N * sizeof *d, cudaMemcpyDeviceToHost, s));
	zc_add<<<8, 64, 0, s>>>(out, in, N, 1);
	CHECK(cudaMemcpyAsync(d, in, N * sizeof *d, cudaMemcpyHostToDevice, s));
	CHECK(cudaStreamSynchronize(s));
	expect(out, N, 4, "copied out");
	expect(in, N, 5, "written by a kernel behind a copy");
	CHECK(cudaMemcpy(plain, d, N * sizeof *d, cudaMemcpyDeviceToHost));
	expect(plain, N, 5, "copied in behind a kernel");
	/* a blocking copy has read its source when it returns, whatever is before it in the stream */
	for (unsigned round = 0; round < 3; round++) {
		zc_hold<<<1, 1>>>(20000000ll);
		fill(in, N, 5 + round);
		CHECK(cudaMemcpy(d, in, N * sizeof *d, cudaMemcpyDefault));
		memset(in, 0, 64);
		zc_add<<<8, 64>>>(in, in, 16, 0);
		CHECK(cudaMemcpy(plain, d, N * sizeof *d, cudaMemcpyDeviceToHost));
		expect(plain, N, 5 + round, "a source that is written after the copy");
	}
	fill(in, N, 5);
	fill(plain, N, 5);
	CHECK(cudaMemset(out, 1, 4096));
	REQUIRE(out[0] == 0x01010101 && out[1023] == 0x01010101 && out[1024] == 4 + 1024, "filled: %x %x %u", out[0], out[1023], out[1024]);
	CHECK(cudaMemcpy2D(out, 8192, in, 4096, 4096, N / 2048, cudaMemcpyDefault));
	for (int r = 0; r < N / 2048; r++)
		REQUIRE(out[r * 2048] == 5u + r * 1024 && out[r * 2048 + 1023] == 5u + r * 1024 + 1023, "row %d: %u", r, out[r * 2048]);
	CHECK(cudaMemcpy(in, plain, N * sizeof *in, cudaMemcpyHostToHost));
	expect(in, N, 5, "copied within the host");
	CHECK(cudaFree(d));
	free(plain);
}

/* By an event that is polled, and in a host function, which leaves something for the next kernel. */
static void CUDART_CB twice(void *p)
{
	unsigned *v = (unsigned *)p;

	for (int i = 0; i < N; i++)
		v[i] *= 2;
}

static void others(unsigned *in, unsigned *out, cudaStream_t s)
{
	cudaEvent_t e;

	CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
	fill(in, N, 1);
	zc_add<<<8, 64, 0, s>>>(in, out, N, 1);
	CHECK(cudaEventRecord(e, s));
	while (cudaEventQuery(e) == cudaErrorNotReady)
		;
	cudaGetLastError();
	expect(out, N, 2, "after an event");
	CHECK(cudaLaunchHostFunc(s, twice, out));
	zc_add<<<8, 64, 0, s>>>(out, in, N, 0);
	CHECK(cudaStreamSynchronize(s));
	for (int i = 0; i < N; i++)
		REQUIRE(in[i] == 2u * (2 + i), "behind a host function: element %d is %u", i, in[i]);
	CHECK(cudaEventDestroy(e));
}

/* A graph reads what the program has at each launch, not what it had at the capture. */
static void graphs(unsigned *in, unsigned *out, cudaStream_t s)
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	zc_add<<<8, 64, 0, s>>>(in, out, N, 1);
	CHECK(cudaStreamEndCapture(s, &graph));
	CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
	for (unsigned round = 0; round < 3; round++) {
		fill(in, N, 50 + round);
		CHECK(cudaGraphLaunch(exec, s));
		CHECK(cudaStreamSynchronize(s));
		expect(out, N, 51 + round, "a graph");
	}
	CHECK(cudaGraphExecDestroy(exec));
	CHECK(cudaGraphDestroy(graph));
}

/* Several threads look at what one kernel has left. */
static void threads(unsigned *in, unsigned *out)
{
	std::thread t[PARTS];

	for (unsigned round = 0; round < 3; round++) {
		fill(in, N, round);
		zc_add<<<8, 64>>>(in, out, N, 1);
		CHECK(cudaDeviceSynchronize());
		for (int k = 0; k < PARTS; k++)
			t[k] = std::thread([=] {
				for (int i = k; i < N; i += PARTS)
					REQUIRE(out[i] == round + 1 + i, "thread %d, element %d: %u", k, i, out[i]);
			});
		for (int k = 0; k < PARTS; k++)
			t[k].join();
	}
}

/* A handler that the program installs later gets its own faults, and no others. */
static volatile sig_atomic_t caught;
static unsigned *volatile closed;

static void on_fault(int sig, siginfo_t *info, void *)
{
	(void)sig;
	if (info->si_addr != (void *)closed)
		_exit(3);
	caught = 1;
	_exit(4);
}

static void handlers(unsigned *in, unsigned *out)
{
	struct sigaction a = {};
	int status;
	pid_t child;

	a.sa_sigaction = on_fault;
	a.sa_flags = SA_SIGINFO;
	fill(in, N, 9);
	sigaction(SIGSEGV, &a, NULL);
	zc_add<<<8, 64>>>(in, out, N, 1);
	CHECK(cudaDeviceSynchronize());
	expect(out, N, 10, "with a handler of the program's");
	child = fork();
	if (!child) {
		in[0] = out[0]; /* the child has the memory as it was */
		closed = (unsigned *)16;
		*closed = 1;
		_exit(5);
	}
	REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 4, "the child ended with %x", status);
}

int main()
{
	unsigned *in, *out;
	cudaStream_t s;

	CHECK(cudaHostAlloc(&in, N * sizeof *in, cudaHostAllocMapped));
	CHECK(cudaMallocHost(&out, N * sizeof *out));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	zc_hold<<<1, 1>>>(1);
	rounds(in, out);
	structures(in, out);
	hidden(in);
	neighbours(out, s);
	copies(in, out, s);
	others(in, out, s);
	graphs(in, out, s);
	threads(in, out);
	handlers(in, out);
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaFreeHost(in));
	for (int round = 0; round < 20; round++) { /* memory comes and goes */
		CHECK(cudaMallocHost(&in, (round % 3 + 1) * 8192));
		in[5] = round;
		zc_add<<<1, 32>>>(in, out, 1024, 1);
		CHECK(cudaDeviceSynchronize());
		REQUIRE(out[5] == round + 1u && !in[6], "round %d: %u", round, out[5]);
		CHECK(cudaFreeHost(in));
	}
	CHECK(cudaFreeHost(out));
	printf("zerocopy: %d words each way\n", N);
	return pass();
}
