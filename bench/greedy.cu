// greedy MODE: takes all memory that is reported free, then more by a way that
// is no allocation: kernels with large local memory, variables of modules,
// streams, graphs, pools, limits. Ends with 0 when the way came to an end in
// an error, 1 when it did not. gpu-test.sh looks at NVML meanwhile.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#define DRIVER(f) reinterpret_cast<decltype(&f)>(driver(#f))

static void *driver(const char *name)
{
	static void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	void *f = lib ? dlsym(lib, name) : nullptr;

	if (!f) {
		printf("no %s in the driver\n", name);
		exit(2);
	}
	return f;
}

// 128 KiB of local memory for each thread
__global__ void deep(int *out, int n)
{
	volatile int a[32768];

	for (int i = 0; i < n; i++)
		a[i * 7919 % 32768] = i;
	out[threadIdx.x] = a[n * 31 % 32768];
}

__global__ void tick(int *out) { atomicAdd(out, 1); }

__global__ void busy(long long cycles)
{
	for (long long t = clock64(); clock64() - t < cycles;)
		;
}

static const char *const big = ".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .global .align 4 .b8 big[4294967296];\n"
	".visible .entry touch(.param .u64 p)\n{\n\t.reg .u64 %rd<2>;\n\tld.param.u64 %rd1, [p];\n"
	"\tst.global.u32 [%rd1], 1;\n\tret;\n}\n";

// Leaves about that many bytes free.
static void fill(size_t leave)
{
	size_t free_now, total, n;
	void *p;

	cudaMemGetInfo(&free_now, &total);
	for (n = free_now > leave ? free_now - leave : 0; n >= 1 << 21; n /= 2)
		while (cudaMemGetInfo(&free_now, &total) == cudaSuccess && free_now >= n + leave && cudaMalloc(&p, n) == cudaSuccess)
			;
	cudaGetLastError();
	cudaMemGetInfo(&free_now, &total);
	printf("%zu MiB of %zu free\n", free_now >> 20, total >> 20);
}

static int refused(const char *what, int rc, long n)
{
	if (!rc)
		return printf("%s was never refused, %ld times\n", what, n), 1;
	printf("%s refused with %d at %ld\n", what, rc, n);
	return 0;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	cudaStream_t s;
	int *word, rc = 0;
	long n = 0;

	if (cudaMalloc(&word, 4096) || cudaStreamCreate(&s))
		return printf("no device\n"), 2;
	tick<<<1, 1, 0, s>>>(word);
	cudaStreamSynchronize(s);
	if (!strcmp(mode, "local")) {
		fill(512u << 20);
		deep<<<1, 32>>>(word, 100);
		rc = cudaDeviceSynchronize();
		if (!rc)
			rc = cudaGetLastError();
	} else if (!strcmp(mode, "module")) {
		CUmodule m;

		fill(512u << 20);
		rc = DRIVER(cuModuleLoadData)(&m, big);
	} else if (!strcmp(mode, "library")) {
		CUlibrary l;
		CUkernel k;
		void *args[] = { &word };

		fill(512u << 20);
		rc = DRIVER(cuLibraryLoadData)(&l, big, nullptr, nullptr, 0, nullptr, nullptr, 0);
		if (!rc && !(rc = DRIVER(cuLibraryGetKernel)(&k, l, "touch")) &&
		    !(rc = DRIVER(cuLaunchKernel)(reinterpret_cast<CUfunction>(k), 1, 1, 1, 1, 1, 1, 0, nullptr, args, nullptr)))
			rc = DRIVER(cuCtxSynchronize)();
	} else if (!strcmp(mode, "streams")) {
		cudaStream_t t;

		fill(0);
		for (; n < 20000 && !rc; n++)
			if (!(rc = cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking)) && n % 64 == 63)
				rc = cudaStreamSynchronize(t);
	} else if (!strcmp(mode, "graphs")) {
		cudaGraph_t g;
		cudaGraphExec_t x;

		fill(0);
		rc = cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
		for (int i = 0; i < 20000 && !rc; i++) {
			tick<<<1, 1, 0, s>>>(word);
			rc = cudaGetLastError();
		}
		if (!rc)
			rc = cudaStreamEndCapture(s, &g);
		for (; n < 100 && !rc; n++)
			if (!(rc = cudaGraphInstantiate(&x, g, 0)) && !(rc = cudaGraphLaunch(x, s)))
				rc = cudaStreamSynchronize(s);
	} else if (!strcmp(mode, "pools")) {
		cudaMemPoolProps props = {};
		cudaMemPool_t pool;
		void *p;

		props.allocType = cudaMemAllocationTypePinned;
		props.location.type = cudaMemLocationTypeDevice;
		fill(256u << 20);
		for (; n < 64 && !rc; n++) {
			if ((rc = cudaMemPoolCreate(&pool, &props)))
				break;
			if (!(rc = cudaMallocFromPoolAsync(&p, 64u << 20, pool, s))) {
				busy<<<1, 1, 0, s>>>(20000000);
				if (!(rc = cudaFreeAsync(p, s)))
					rc = cudaMemPoolDestroy(pool);
			}
		}
		// A pool that is destroyed gives its memory back: then there is no end, and no harm.
		if (!rc)
			rc = cudaMalloc(&p, 512u << 20);
	} else if (!strcmp(mode, "stack")) {
		fill(512u << 20);
		rc = cudaDeviceSetLimit(cudaLimitStackSize, 65536);
	} else {
		return printf("greedy local|module|library|streams|graphs|pools|stack\n"), 2;
	}
	fflush(stdout);
	rc = refused(mode, rc, n);
	fflush(stdout);
	_exit(rc);
}
