/*
 * Memory pools of the host: what is allocated there is page-locked memory that the program and kernels use, it is freed in the order of a
 * stream, and the pool counts what there is.
 *
 * hostpool captured: also what Sluice refuses in a capture.
 */
#include "driver.h"

#include <string.h>
#include <unistd.h>

extern "C" __global__ void hostpool_add(unsigned *p, int n, unsigned by)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		p[i] += by;
}

static const int N = 1 << 18;
static const size_t BYTES = N * sizeof(unsigned);

/* Declared by CUDA 12.3 and later. */
static const CUmemLocationType HOST = (CUmemLocationType)2;
static const CUmemLocation AT_HOST = { HOST, 0 }, AT_DEVICE = { CU_MEM_LOCATION_TYPE_DEVICE, 0 };

typedef CUresult (*pool_of)(CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
typedef CUresult (*set_pool)(CUmemLocation *, CUmemAllocationType, CUmemoryPool);

static CUmemoryPool make(CUmemLocation at, size_t most)
{
	CUmemPoolProps props;
	CUmemoryPool pool;

	memset(&props, 0, sizeof props);
	props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	props.location = at;
	memcpy((char *)&props + 24, &most, sizeof most); /* maxSize, declared by CUDA 12.2 and later */
	DRIVER(CU(cuMemPoolCreate)(&pool, &props));
	return pool;
}

static unsigned long long attribute(CUmemoryPool pool, CUmemPool_attribute a)
{
	cuuint64_t v = ~0ull;

	DRIVER(CU(cuMemPoolGetAttribute)(pool, a, &v));
	return v;
}

static void is(CUmemoryPool pool, CUmemPool_attribute a, unsigned long long want)
{
	unsigned long long v = attribute(pool, a);

	REQUIRE(v == want, "attribute %d is %llu, not %llu", (int)a, v, want);
}

static unsigned *allocate(CUmemoryPool pool, size_t n, cudaStream_t s)
{
	CUdeviceptr p = 0;

	DRIVER(CU(cuMemAllocFromPoolAsync)(&p, n, pool, s));
	REQUIRE(p, "no memory");
	return (unsigned *)p;
}

static void release(unsigned *p, cudaStream_t s)
{
	DRIVER(CU(cuMemFreeAsync)((CUdeviceptr)p, s));
}

/* The program, kernels and copies use the same memory. */
static void used(CUmemoryPool pool, cudaStream_t s)
{
	unsigned *p = allocate(pool, BYTES, s), *d, *back = allocate(pool, BYTES, s);

	CHECK(cudaMalloc(&d, BYTES));
	for (int i = 0; i < N; i++)
		p[i] = i;
	hostpool_add<<<N / 256, 256, 0, s>>>(p, N, 7);
	CHECK(cudaMemcpyAsync(d, p, BYTES, cudaMemcpyDefault, s));
	hostpool_add<<<N / 256, 256, 0, s>>>(d, N, 3);
	CHECK(cudaMemcpyAsync(back, d, BYTES, cudaMemcpyDefault, s));
	CHECK(cudaStreamSynchronize(s));
	for (int i = 0; i < N; i++)
		REQUIRE(p[i] == i + 7u && back[i] == i + 10u, "word %d is %u and %u", i, p[i], back[i]);
	is(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 2 * BYTES);
	release(p, s);
	release(back, s);
	EXPECT_DRIVER(CU(cuMemFreeAsync)((CUdeviceptr)p, s), CUDA_ERROR_INVALID_VALUE);
	CHECK(cudaFree(d));
}

/*
 * Freed memory is its stream's until that gets there: the copy before the free still finds it. What is allocated next may be the
 * same memory, which the program must not touch before the stream is there.
 */
static void ordered(CUmemoryPool pool, cudaStream_t s)
{
	unsigned *d, h;

	CHECK(cudaMalloc(&d, BYTES));
	for (int round = 0; round < 20; round++) {
		unsigned *p = allocate(pool, BYTES, s);

		for (int i = 0; i < N; i++)
			p[i] = round;
		for (int k = 0; k < 3; k++)
			hostpool_add<<<N / 256, 256, 0, s>>>(p, N, 1);
		CHECK(cudaMemcpyAsync(d, p, BYTES, cudaMemcpyDefault, s));
		release(p, s);
		p = allocate(pool, BYTES, s);
		CHECK(cudaMemsetAsync(p, 0xff, BYTES, s));
		release(p, s);
		CHECK(cudaMemcpyAsync(&h, d + N - 1, sizeof h, cudaMemcpyDefault, s));
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(h == round + 3u, "round %d: %u", round, h);
	}
	CHECK(cudaFree(d));
	/* What the stream has passed is given back by and by. */
	for (int i = 0; attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); i++) {
		REQUIRE(i < 60000, "%llu bytes are still reserved", attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
		DRIVER(CU(cuMemPoolTrimTo)(pool, 0));
		usleep(1000);
	}
}

static void pointers(CUmemoryPool pool)
{
	unsigned *p = allocate(pool, 100, 0);
	cudaPointerAttributes at;
	CUmemoryPool its = NULL;
	CUcontext context = (CUcontext)p;
	CUmemPoolPtrExportData data;
	int fd;

	CHECK(cudaPointerGetAttributes(&at, p + 3));
	REQUIRE(at.type == cudaMemoryTypeHost && at.hostPointer == p + 3 && at.devicePointer == p + 3, "type %d", at.type);
	DRIVER(CU(cuPointerGetAttribute)(&its, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, (CUdeviceptr)p));
	REQUIRE(its == pool, "another pool");
	DRIVER(CU(cuPointerGetAttribute)(&context, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)p));
	REQUIRE(!context, "it has a context");
	EXPECT_DRIVER(CU(cuMemFreeHost)(p), CUDA_ERROR_INVALID_VALUE);
	EXPECT_DRIVER(CU(cuMemPoolExportPointer)(&data, (CUdeviceptr)p), CUDA_ERROR_INVALID_VALUE);
	EXPECT_DRIVER(CU(cuMemPoolExportToShareableHandle)(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_ERROR_INVALID_VALUE);
	DRIVER(CU(cuMemFree_v2)((CUdeviceptr)p));
	EXPECT_DRIVER(CU(cuMemFree_v2)((CUdeviceptr)p), CUDA_ERROR_INVALID_VALUE);
}

static void attributes(CUmemoryPool pool)
{
	cuuint64_t v = 1 << 20;
	int off = 0, on = 7;

	DRIVER(CU(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &v));
	is(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 1 << 20);
	DRIVER(CU(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &on));
	REQUIRE(on == 1, "reuse %d", on);
	DRIVER(CU(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &off));
	DRIVER(CU(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &on));
	REQUIRE(on == 0, "reuse %d", on);
	REQUIRE(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH) >= 2 * BYTES, "most %llu", attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH));
	EXPECT_DRIVER(CU(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &v), CUDA_ERROR_INVALID_VALUE);
	EXPECT_DRIVER(CU(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &v), CUDA_ERROR_INVALID_VALUE);
	/* Back to what is in use; a driver may count memory that cuMemFree has just been given. */
	v = 0;
	DRIVER(CU(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &v));
	is(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
	EXPECT_DRIVER(CU(cuMemPoolGetAttribute)(pool, (CUmemPool_attribute)99, &v), CUDA_ERROR_INVALID_VALUE);
	DRIVER(CU(cuMemPoolTrimTo)(pool, 0));
}

static void access(CUmemoryPool pool)
{
	CUmemAccessDesc set = { AT_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemLocation at = AT_HOST, device = AT_DEVICE, none = { CU_MEM_LOCATION_TYPE_DEVICE, 99 };
	CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;

	DRIVER(CU(cuMemPoolGetAccess)(&flags, pool, &at));
	REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "the host's access is %d", (int)flags);
	DRIVER(CU(cuMemPoolSetAccess)(pool, &set, 1));
	DRIVER(CU(cuMemPoolGetAccess)(&flags, pool, &device));
	REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "the device's access is %d", (int)flags);
	EXPECT_DRIVER(CU(cuMemPoolGetAccess)(&flags, pool, &none), CUDA_ERROR_INVALID_VALUE);
	set.location = none;
	EXPECT_DRIVER(CU(cuMemPoolSetAccess)(pool, &set, 1), CUDA_ERROR_INVALID_DEVICE);
}

/* A pool has a bound, and one that is destroyed goes with its last memory. */
static void ends(cudaStream_t s)
{
	CUmemAccessDesc set = { AT_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemoryPool pool = make(AT_HOST, 64 << 20);
	unsigned *p;
	CUdeviceptr none;

	DRIVER(CU(cuMemPoolSetAccess)(pool, &set, 1)); /* which a new pool of the host's memory does not give */
	p = allocate(pool, BYTES, s);
	EXPECT_DRIVER(CU(cuMemAllocFromPoolAsync)(&none, 128 << 20, pool, s), CUDA_ERROR_OUT_OF_MEMORY);
	DRIVER(CU(cuMemPoolDestroy)(pool));
	p[N - 1] = 5;
	hostpool_add<<<N / 256, 256, 0, s>>>(p, N, 1);
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(p[N - 1] == 6, "%u after the pool's end", p[N - 1]);
	release(p, s);
	CHECK(cudaStreamSynchronize(s));
}

/* The host has a default pool and a current one. */
static void current(void)
{
	pool_of get_default = driver("cuMemGetDefaultMemPool", (pool_of)NULL), get = driver("cuMemGetMemPool", (pool_of)NULL);
	set_pool set = driver("cuMemSetMemPool", (set_pool)NULL);
	CUmemLocation at = AT_HOST, device = AT_DEVICE;
	CUmemoryPool first, now, pool, devices;

	DRIVER(get_default(&first, &at, CU_MEM_ALLOCATION_TYPE_PINNED));
	DRIVER(get(&now, &at, CU_MEM_ALLOCATION_TYPE_PINNED));
	REQUIRE(now == first, "the current pool is not the default one");
	pool = make(AT_HOST, 0);
	devices = make(AT_DEVICE, 0);
	DRIVER(set(&at, CU_MEM_ALLOCATION_TYPE_PINNED, pool));
	EXPECT_DRIVER(set(&at, CU_MEM_ALLOCATION_TYPE_PINNED, devices), CUDA_ERROR_INVALID_VALUE);
	EXPECT_DRIVER(set(&device, CU_MEM_ALLOCATION_TYPE_PINNED, pool), CUDA_ERROR_INVALID_VALUE);
	EXPECT_DRIVER(CU(cuDeviceSetMemPool)(0, pool), CUDA_ERROR_INVALID_VALUE);
	DRIVER(get(&now, &at, CU_MEM_ALLOCATION_TYPE_PINNED));
	REQUIRE(now == pool, "the current pool is not the one that was set");
	DRIVER(CU(cuMemPoolDestroy)(pool));
	DRIVER(get(&now, &at, CU_MEM_ALLOCATION_TYPE_PINNED));
	REQUIRE(now == first, "the default pool is not back");
	EXPECT_DRIVER(CU(cuMemPoolDestroy)(first), CUDA_ERROR_INVALID_VALUE);
	DRIVER(CU(cuMemPoolDestroy)(devices));
}

/* In a capture neither allocations nor frees are served, and the capture is not harmed. */
static void captured(CUmemoryPool pool, cudaStream_t s)
{
	unsigned *p = allocate(pool, BYTES, s);
	CUdeviceptr none;
	cudaGraph_t graph;

	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
	EXPECT_DRIVER(CU(cuMemAllocFromPoolAsync)(&none, BYTES, pool, s), CUDA_ERROR_NOT_SUPPORTED);
	EXPECT_DRIVER(CU(cuMemFreeAsync)((CUdeviceptr)p, s), CUDA_ERROR_NOT_SUPPORTED);
	hostpool_add<<<N / 256, 256, 0, s>>>(p, N, 1);
	CHECK(cudaStreamEndCapture(s, &graph));
	CHECK(cudaGraphDestroy(graph));
	release(p, s);
}

int main(int argc, char **argv)
{
	cudaStream_t s;
	CUmemoryPool pool;
	int supported = 0;

	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CU(cuDeviceGetAttribute)(&supported, (CUdevice_attribute)144, 0);
	REQUIRE(supported == 1, "pools of host memory: %d", supported);
	pool = make(AT_HOST, 0);
	is(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 0);
	access(pool);
	used(pool, s);
	ordered(pool, s);
	pointers(pool);
	if (argc > 1 && !strcmp(argv[1], "captured"))
		captured(pool, s);
	attributes(pool);
	ends(s);
	current();
	DRIVER(CU(cuMemPoolDestroy)(pool));
	CHECK(cudaDeviceSynchronize());
	printf("hostpool: %d words each way\nPASS\n", N);
	return 0;
}
