// Looks for what another process left in a GPU's memory.
//
//   leftovers write END   fills memory of every kind with a mark, prints its process id, then ends: exit, wait (to be
//                         killed), busy (waits with a kernel that does not end), cap (after an allocation that was refused)
//   leftovers read        takes memory of every kind, as much as there is, and counts the marks in it
//   leftovers control     does both in one process: memory that is freed and taken again may hold what it held, so
//                         this shows that marks are found where they are
//
// For each kind one line of JSON: bytes looked at, marks found, words that are not zero. LEFTOVERS_MIB is the size of
// an allocation (256).
#include <cuda_runtime.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MARK 0x5ec7e7a11f0a9b3dull
#define LOCAL 4096 /* words of a thread's local memory */

static int failed;

static int ok(cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return 1;
	cudaGetLastError();
	fprintf(stderr, "leftovers: %s: %s\n", what, cudaGetErrorName(e));
	return 0;
}

__device__ unsigned long long marks, filled;

__global__ void fill(unsigned long long *p, size_t n)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i] = MARK;
}

__global__ void look(const unsigned long long *p, size_t n)
{
	unsigned long long m = 0, f = 0;

	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
		m += p[i] == MARK;
		f += p[i] != 0;
	}
	atomicAdd(&marks, m);
	atomicAdd(&filled, f);
}

extern __shared__ unsigned long long shared[];

__global__ void fill_shared(size_t n)
{
	for (size_t i = threadIdx.x; i < n; i += blockDim.x)
		((volatile unsigned long long *)shared)[i] = MARK;
}

__global__ void look_shared(size_t n)
{
	unsigned long long m = 0, f = 0;

	for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
		unsigned long long v = ((volatile unsigned long long *)shared)[i];
		m += v == MARK;
		f += v != 0;
	}
	atomicAdd(&marks, m);
	atomicAdd(&filled, f);
}

__global__ void fill_local(volatile int *one)
{
	volatile unsigned long long a[LOCAL];

	for (int i = 0; i < LOCAL; i += *one)
		a[i] = MARK;
}

__global__ void look_local(volatile int *one)
{
	volatile unsigned long long a[LOCAL];
	unsigned long long m = 0, f = 0;

	for (int i = 0; i < LOCAL; i += *one) {
		unsigned long long v = a[i];
		m += v == MARK;
		f += v != 0;
	}
	atomicAdd(&marks, m);
	atomicAdd(&filled, f);
}

__global__ void endless(volatile int *one)
{
	while (*one)
		;
}

static void reset(void)
{
	unsigned long long zero = 0;

	cudaMemcpyToSymbol(marks, &zero, 8);
	cudaMemcpyToSymbol(filled, &zero, 8);
}

static void found(const char *kind, size_t bytes, unsigned long long m, unsigned long long f)
{
	printf("{\"memory\": \"%s\", \"bytes\": %zu, \"marks\": %llu, \"not_zero\": %llu}\n", kind, bytes, m, f);
	fflush(stdout);
}

static void report(const char *kind, size_t bytes)
{
	unsigned long long m = 0, f = 0;

	if (!ok(cudaDeviceSynchronize(), kind))
		failed = 1;
	cudaMemcpyFromSymbol(&m, marks, 8);
	cudaMemcpyFromSymbol(&f, filled, 8);
	found(kind, bytes, m, f);
	reset();
}

static int sms, shared_most;
static int *one;

/* Each way of taking memory gives pieces of it; all are kept until the process ends, or freed by let_go. */
struct taken { void *p; size_t n; int how; };
static struct taken pieces[4096];
static int npieces;
enum { LINEAR, POOL, MANAGED, VMM, ARRAY, HOST };
static const char *const names[] = { "device", "pool", "managed", "vmm", "array", "host" };

static void *take(int how, size_t n)
{
	void *p = NULL;
	cudaError_t e = cudaSuccess;

	switch (how) {
	case LINEAR: e = cudaMalloc(&p, n); break;
	case POOL: e = cudaMallocAsync(&p, n, 0); break;
	case MANAGED: e = cudaMallocManaged(&p, n); break;
	case HOST: e = cudaMallocHost(&p, n); break;
	case VMM: {
		CUmemAllocationProp prop;
		CUmemAccessDesc a;
		CUmemGenericAllocationHandle h;
		CUdeviceptr d;

		memset(&prop, 0, sizeof(prop));
		prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
		prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		a.location = prop.location;
		a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		static void *lib;
		if (!lib)
			lib = dlopen("libcuda.so.1", RTLD_NOW);
#define FN(name) ((decltype(&name))dlsym(lib, #name))
		if (FN(cuMemCreate)(&h, n, &prop, 0) || FN(cuMemAddressReserve)(&d, n, 0, 0, 0) || FN(cuMemMap)(d, n, 0, h, 0) || FN(cuMemSetAccess)(d, n, &a, 1))
			e = cudaErrorMemoryAllocation;
		p = (void *)d;
		break;
	}
	case ARRAY: {
		cudaArray_t a;
		cudaChannelFormatDesc f = cudaCreateChannelDesc(32, 32, 0, 0, cudaChannelFormatKindUnsigned);

		e = cudaMallocArray(&a, &f, 8192, n / 8 / 8192);
		p = a;
		break;
	}
	}
	if (e != cudaSuccess) {
		cudaGetLastError();
		return NULL;
	}
	if (npieces < 4096)
		pieces[npieces++] = (struct taken){ p, n, how };
	return p;
}

static void let_go(void)
{
	while (npieces) {
		struct taken *q = &pieces[--npieces];

		if (q->how == ARRAY)
			cudaFreeArray((cudaArray_t)q->p);
		else if (q->how == POOL)
			cudaFreeAsync(q->p, 0);
		else if (q->how == HOST)
			cudaFreeHost(q->p);
		else if (q->how != VMM)
			cudaFree(q->p);
	}
	cudaDeviceSynchronize();
}

static void *bounce;
static size_t piece = (size_t)256 << 20;

/* Takes up to most bytes of a kind and writes or reads them. */
static void kind(int how, size_t most, int write)
{
	size_t done = 0;

	for (; done < most; done += piece) {
		void *p = take(how, piece);

		if (!p)
			break;
		if (how == ARRAY) {
			size_t rows = piece / 8 / 8192;

			if (write) {
				fill<<<sms * 4, 256>>>((unsigned long long *)bounce, piece / 8);
				ok(cudaMemcpy2DToArray((cudaArray_t)p, 0, 0, bounce, 65536, 65536, rows, cudaMemcpyDeviceToDevice), "to array");
			} else {
				cudaMemset(bounce, 0, piece);
				ok(cudaMemcpy2DFromArray(bounce, 65536, (cudaArray_t)p, 0, 0, 65536, rows, cudaMemcpyDeviceToDevice), "from array");
				look<<<sms * 4, 256>>>((unsigned long long *)bounce, piece / 8);
			}
		} else if (how == HOST) {
			unsigned long long *h = (unsigned long long *)p, m = 0, f = 0;

			for (size_t i = 0; i < piece / 8; i++) {
				if (write)
					h[i] = MARK;
				m += h[i] == MARK;
				f += h[i] != 0;
			}
			if (!write) {
				found(names[how], piece, m, f);
				return;
			}
		} else if (write)
			fill<<<sms * 4, 256>>>((unsigned long long *)p, piece / 8);
		else
			look<<<sms * 4, 256>>>((unsigned long long *)p, piece / 8);
	}
	if (!write && how != HOST)
		report(names[how], done);
	else if (write)
		ok(cudaDeviceSynchronize(), names[how]);
}

static void chip(int write)
{
	size_t n = (size_t)shared_most / 8;

	for (int i = 0; i < 8; i++)
		if (write)
			fill_shared<<<sms * 4, 256, shared_most>>>(n);
		else
			look_shared<<<sms * 4, 256, shared_most>>>(n);
	if (!write)
		report("shared", (size_t)shared_most * sms * 4 * 8);
	if (write)
		fill_local<<<sms * 8, 256>>>(one);
	else
		look_local<<<sms * 8, 256>>>(one);
	if (!write)
		report("local", (size_t)LOCAL * 8 * sms * 8 * 256);
	ok(cudaDeviceSynchronize(), "shared and local");
}

static void all(int write, size_t device)
{
	chip(write); /* first: what is left on the chip is soon overwritten */
	for (int how = POOL; how <= HOST; how++) {
		kind(how, piece * 4, write);
		if (!write)
			let_go();
	}
	kind(LINEAR, device, write);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "read", *end = argc > 2 ? argv[2] : "exit";
	size_t free_ = 0, total = 0, most;
	int yes = 1;

	if (getenv("LEFTOVERS_MIB"))
		piece = (size_t)atoi(getenv("LEFTOVERS_MIB")) << 20;
	if (!ok(cudaMalloc(&one, 4), "cudaMalloc"))
		return 1;
	cudaMemcpy(one, &yes, 4, cudaMemcpyHostToDevice);
	cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
	cudaDeviceGetAttribute(&shared_most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
	cudaFuncSetAttribute(fill_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_most);
	cudaFuncSetAttribute(look_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_most);
	reset();
	ok(cudaMalloc(&bounce, piece), "bounce");
	cudaMemset(bounce, 0, piece);
	cudaMemGetInfo(&free_, &total);
	most = free_ > 4 * piece ? free_ - 2 * piece : free_;
	if (!strcmp(what, "control")) {
		chip(1);
		chip(0);
		kind(LINEAR, piece * 4, 1);
		let_go();
		kind(LINEAR, piece * 4, 0);
		let_go();
		kind(POOL, piece * 4, 1);
		let_go();
		kind(POOL, piece * 4, 0);
		return failed;
	}
	if (strcmp(what, "write")) {
		all(0, most);
		return failed;
	}
	all(1, most > 40 * piece ? most - 24 * piece : most / 2);
	chip(1);
	if (!strcmp(end, "cap")) {
		void *p;
		while (cudaMalloc(&p, piece) == cudaSuccess)
			fill<<<sms * 4, 256>>>((unsigned long long *)p, piece / 8);
		fprintf(stderr, "leftovers: refused: %s\n", cudaGetErrorName(cudaGetLastError()));
		cudaDeviceSynchronize();
		printf("written %d\n", getpid());
		fflush(stdout);
		_exit(0);
	}
	if (!strcmp(end, "busy"))
		endless<<<1, 1>>>(one);
	printf("written %d\n", getpid());
	fflush(stdout);
	while (strcmp(end, "exit"))
		pause();
	return failed;
}
