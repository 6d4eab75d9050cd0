/*
 * Corners of the driver's interface: launches as before CUDA 4, calls in callbacks and without a context, and tensor
 * maps of every kind: what they are made of is the driver's, so they are compared with each other.
 */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include "check.h"

#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

extern "C" __global__ void legacy_fill(int *v, float scale, int add)
{
	extern __shared__ int room[];
	int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;

	room[threadIdx.y * blockDim.x + threadIdx.x] = (int)(i * scale);
	v[i] += room[threadIdx.y * blockDim.x + threadIdx.x] + add;
}

static void *driver;

#define CU(f) ((decltype(&f))find(#f))

static void *find(const char *name)
{
	void *f = dlsym(driver, name);

	REQUIRE(f, "%s", name);
	return f;
}

#define IS(call, want) do { CUresult is_ = (call); REQUIRE(is_ == (want), "it is %d", (int)is_); } while (0)
#define OK(call) IS(call, CUDA_SUCCESS)

static int sum_of(int *d, int n)
{
	int *h = (int *)malloc(n * sizeof *h), sum = 0;

	CHECK(cudaDeviceSynchronize());
	CHECK(cudaMemcpy(h, d, n * sizeof *h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		sum += h[i];
	free(h);
	CHECK(cudaMemset(d, 0, n * sizeof *h));
	return sum;
}

static void launches(void)
{
	const int n = 1024;
	cudaStream_t s;
	CUfunction f;
	int *d, one, grid, async;

	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaMemset(d, 0, n * sizeof *d));
	CHECK(cudaStreamCreate(&s));
	CHECK(cudaGetFuncBySymbol((cudaFunction_t *)&f, (const void *)legacy_fill));
	IS(CU(cuFuncSetBlockShape)(f, 0, 1, 1), CUDA_ERROR_INVALID_VALUE);
	IS(CU(cuFuncSetBlockShape)(f, 4096, 1, 1), CUDA_ERROR_INVALID_VALUE);
	OK(CU(cuFuncSetBlockShape)(f, 32, 4, 1));
	IS(CU(cuFuncSetSharedSize)(f, 1 << 20), CUDA_ERROR_INVALID_VALUE);
	OK(CU(cuFuncSetSharedSize)(f, 32 * 4 * sizeof(int)));
	IS(CU(cuParamSetSize)(f, 100000), CUDA_ERROR_INVALID_VALUE);
	OK(CU(cuParamSetSize)(f, 16));
	OK(CU(cuParamSetv)(f, 0, &d, sizeof d));
	OK(CU(cuParamSetf)(f, 8, 0.5f));
	OK(CU(cuParamSeti)(f, 12, 3));
	IS(CU(cuParamSetv)(f, 100000, &d, sizeof d), CUDA_ERROR_INVALID_VALUE);
	OK(CU(cuLaunch)(f));
	one = sum_of(d, n);
	IS(CU(cuLaunchGrid)(f, 0, 1), CUDA_ERROR_INVALID_VALUE);
	OK(CU(cuLaunchGrid)(f, 4, 2));
	grid = sum_of(d, n);
	OK(CU(cuParamSeti)(f, 12, 5));
	OK(CU(cuLaunchGridAsync)(f, 2, 1, s));
	OK(CU(cuParamSeti)(f, 12, 1000)); /* the launch had the one before */
	async = sum_of(d, n);
	CHECK(cudaStreamDestroy(s));
	printf("legacy: %d, %d, %d\n", one, grid, async);
}

#if CUDA_VERSION >= 12000
static CUtensorMap tiled(void *at, cuuint32_t width)
{
	const cuuint64_t dim[3] = { 64, 32, 16 }, stride[2] = { 128, 4096 };
	const cuuint32_t box[3] = { width, 4, 2 }, step[3] = { 1, 1, 1 };
	CUtensorMap m;

	memset(&m, 0, sizeof m);
	OK(CU(cuTensorMapEncodeTiled)(&m, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, at, dim, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
				      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
	return m;
}

static CUresult im2col(CUtensorMap *m, void *at, int corner, cuuint32_t rank)
{
	const cuuint64_t dim[4] = { 64, 16, 16, 8 }, stride[3] = { 128, 2048, 32768 };
	const int lower[2] = { corner, corner }, upper[2] = { corner, corner };
	const cuuint32_t step[4] = { 1, 1, 1, 1 };

	memset(m, 0, sizeof *m);
	return CU(cuTensorMapEncodeIm2col)(m, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, at, dim, stride, lower, upper, 32, 64, step,
					   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
					   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Of one dimension a tensor has no strides; the driver wants to be told where they are all the same. */
static CUresult line(CUtensorMap *m, void *at, const cuuint64_t *stride)
{
	const cuuint64_t dim = 1024;
	const cuuint32_t box = 64, step = 1;

	memset(m, 0, sizeof *m);
	return CU(cuTensorMapEncodeTiled)(m, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, at, &dim, stride, &box, &step, CU_TENSOR_MAP_INTERLEAVE_NONE,
					  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static void maps(void)
{
	const cuuint64_t none[1] = { 0 };
	CUtensorMap a, b, c;
	char *p;

	CHECK(cudaMalloc(&p, 4 << 20));
	a = tiled(p, 32);
	b = tiled(p + 4096, 32);
	c = tiled(p, 16);
	REQUIRE(memcmp(&a, &b, sizeof a) && memcmp(&a, &c, sizeof a), "maps that differ");
	OK(CU(cuTensorMapReplaceAddress)(&a, p + 4096));
	REQUIRE(!memcmp(&a, &b, sizeof a), "a map whose address is replaced");
	IS(CU(cuTensorMapReplaceAddress)(&a, p + 1), CUDA_ERROR_INVALID_VALUE);
	OK(im2col(&a, p, -1, 4));
	OK(im2col(&b, p, -1, 4));
	OK(im2col(&c, p, -2, 4));
	REQUIRE(!memcmp(&a, &b, sizeof a) && memcmp(&a, &c, sizeof a), "maps for convolutions");
	IS(im2col(&c, p, -1, 2), CUDA_ERROR_INVALID_VALUE);
	OK(line(&a, p, none));
	IS(line(&a, p, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK(cudaFree(p));
}
#endif

struct seen {
	CUdeviceptr p;
	CUresult result[2];
};

/* In a function that a stream calls, CUDA may not be called. */
static void CUDART_CB inside(cudaStream_t, cudaError_t, void *result)
{
	CUdeviceptr base;
	size_t size;
	CUcontext c;

	struct seen *seen = (struct seen *)result;

	seen->result[0] = CU(cuCtxGetCurrent)(&c);
	seen->result[1] = ((CUresult (*)(CUdeviceptr *, size_t *, CUdeviceptr))find("cuMemGetAddressRange_v2"))(&base, &size, seen->p);
}

static void contexts(void)
{
	struct seen seen;
	cudaStream_t s;
	CUcontext c;
	void *p;

	CHECK(cudaMalloc(&p, 1 << 20));
	CHECK(cudaStreamCreate(&s));
	seen.p = (CUdeviceptr)p;
	CHECK(cudaStreamAddCallback(s, inside, &seen, 0));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(seen.result[0] == CUDA_ERROR_NOT_PERMITTED && seen.result[1] == CUDA_ERROR_NOT_PERMITTED, "in a callback: %d, %d", (int)seen.result[0],
		(int)seen.result[1]);
	CHECK(cudaStreamDestroy(s));

	/* Memory can be freed without a context. */
	OK(CU(cuCtxGetCurrent)(&c));
	OK(CU(cuCtxSetCurrent)(NULL));
	OK(((CUresult (*)(CUdeviceptr))find("cuMemFree_v2"))((CUdeviceptr)p));
	OK(CU(cuCtxSetCurrent)(c));
}

int main()
{
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	REQUIRE(driver, "libcuda.so.1");
	CHECK(cudaFree(0));
	launches();
	contexts();
#if CUDA_VERSION >= 12000
	int major;

	CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
	if (major >= 9) /* before, there is no such hardware */
		maps();
#endif
	return pass();
}
