/*
 * errors MODE: CUDA's own errors, with CUDA's own manners.
 *
 * plain    wrong arguments are refused and forgotten once read; the device goes on working
 * illegal  a kernel that writes to a wild address breaks the context: every later call says so
 * sticky CODE HOW  a kernel ends with the driver's error CODE, which the simulated GPU can be told; call HOW is the first that
 *          says so. Every other call that needs the context then returns CODE, and goes on to do so
 */
#include "check.h"
#include "driver.h"

#include <string.h>

extern "C" __global__ void set(int *p, int v)
{
	*p = v;
}

static int plain(void)
{
	int *d, h = 0, count;
	void *wild = (void *)0x12345678;

	CHECK(cudaMalloc(&d, sizeof *d));
	CHECK(cudaGetDeviceCount(&count));
	set<<<1, 4096>>>(d, 1);
	/* the runtime of CUDA 13 says it differently from the ones before */
	EXPECT(cudaGetLastError(), CUDART_VERSION >= 13000 ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration);
	EXPECT(cudaGetLastError(), cudaSuccess);
	set<<<1, 1, 64 << 20>>>(d, 1);
	EXPECT(cudaGetLastError(), cudaErrorInvalidValue);
	{
		int one = 1;
		void *args[] = { &d, &one };

		EXPECT(cudaLaunchCooperativeKernel((void *)set, dim3(1 << 20), dim3(128), args, 0, 0), cudaErrorCooperativeLaunchTooLarge);
		EXPECT(cudaGetLastError(), cudaErrorCooperativeLaunchTooLarge);
	}
	EXPECT(cudaSetDevice(count), cudaErrorInvalidDevice);
	EXPECT(cudaGetLastError(), cudaErrorInvalidDevice);
	EXPECT(cudaFree(wild), cudaErrorInvalidValue);
	EXPECT(cudaGetLastError(), cudaErrorInvalidValue);
	EXPECT(cudaFuncSetAttribute(set, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 20), cudaErrorInvalidValue);
	EXPECT(cudaGetLastError(), cudaErrorInvalidValue);
	EXPECT(cudaMemcpy(d, &h, sizeof h, (cudaMemcpyKind)77), cudaErrorInvalidMemcpyDirection);
	EXPECT(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
	set<<<1, 1>>>(d, 42);
	CHECK(cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost));
	REQUIRE(h == 42, "the device came back with %d", h);
	printf("errors: plain errors are refused and forgotten\n");
	return pass();
}

static int illegal(void)
{
	int *d, h;

	CHECK(cudaMalloc(&d, sizeof *d));
	set<<<1, 1>>>((int *)0x10, 1);
	CHECK(cudaGetLastError());
	EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
	EXPECT(cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
	set<<<1, 1>>>(d, 1);
	EXPECT(cudaGetLastError(), cudaErrorIllegalAddress);
	EXPECT(cudaMalloc(&d, 1 << 20), cudaErrorIllegalAddress);
	EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
	/* what is known of devices and contexts is told all the same: PyTorch asks while it reports the error */
	EXPECT(cudaGetDeviceCount(&h), cudaSuccess);
	EXPECT(cudaDeviceGetAttribute(&h, cudaDevAttrWarpSize, 0), cudaSuccess);
	EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
	printf("errors: an illegal address stays\n");
	return pass();
}

/* On a real GPU this is an illegal address, whatever the code is. */
extern "C" __global__ void harm(int code)
{
	*(volatile int *)0x10 = code;
}

static int sticky(CUresult code, int how)
{
	enum { N = 256 };
	static int host[N];
	CUresult err;
	CUstream s;
	CUevent before, behind;
	CUdeviceptr d, other;
	CUgraph graph;
	CUgraphExec exec;
	CUmemoryPool pool;
	CUarray array;
	CUdevice dev;
	cudaFunction_t kernel;
	CUDA_ARRAY_DESCRIPTOR desc = { N, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1 };
	size_t free, total;
	void *locked;
	float ms;
	int one = 1, value;
	void *args[] = { &one };

	CHECK(cudaFree(0));
	DRIVER(CU(cuCtxGetDevice)(&dev));
	DRIVER(CU(cuStreamCreate)(&s, 0));
	DRIVER(CU(cuEventCreate)(&before, 0));
	DRIVER(CU(cuEventCreate)(&behind, 0));
	DRIVER(CU(cuMemAlloc_v2)(&d, sizeof host));
	DRIVER(CU(cuArrayCreate_v2)(&array, &desc));
	DRIVER(CU(cuDeviceGetDefaultMemPool)(&pool, dev));
	DRIVER(CU(cuGraphCreate)(&graph, 0));
	DRIVER(CU(cuGraphInstantiateWithFlags)(&exec, graph, 0));
	CHECK(cudaGetFuncBySymbol(&kernel, (const void *)set));
	DRIVER(CU(cuEventRecord)(before, s));
	DRIVER(CU(cuStreamSynchronize)(s));
	harm<<<1, 1, 0, s>>>(code);
	DRIVER(CU(cuEventRecord)(behind, s));
	switch (how) {
	case 0:
		err = CU(cuCtxSynchronize)();
		break;
	case 1:
		err = CU(cuStreamSynchronize)(s);
		break;
	case 2:
		err = CU(cuEventSynchronize)(behind);
		break;
	case 3:
		while ((err = CU(cuEventQuery)(behind)) == CUDA_ERROR_NOT_READY)
			;
		break;
	case 4:
		while ((err = CU(cuStreamQuery)(s)) == CUDA_ERROR_NOT_READY)
			;
		break;
	default:
		err = CU(cuMemcpyDtoH_v2)(host, d, sizeof host);
	}
	REQUIRE(err == code, "the first call: %d", (int)err);
	for (int round = 0; round < 2; round++) {
		EXPECT_DRIVER(CU(cuCtxSynchronize)(), code);
		EXPECT_DRIVER(CU(cuStreamSynchronize)(s), code);
		EXPECT_DRIVER(CU(cuStreamQuery)(s), code);
		EXPECT_DRIVER(CU(cuEventSynchronize)(before), code);
		EXPECT_DRIVER(CU(cuEventSynchronize)(behind), code);
		EXPECT_DRIVER(CU(cuEventQuery)(before), code);
		EXPECT_DRIVER(CU(cuEventQuery)(behind), code);
		EXPECT_DRIVER(CU(cuEventElapsedTime)(&ms, before, behind), code);
		EXPECT_DRIVER(CU(cuEventRecord)(before, s), code);
		EXPECT_DRIVER(CU(cuStreamWaitEvent)(s, before, 0), code);
		EXPECT_DRIVER(CU(cuEventCreate)(&before, 0), code);
		EXPECT_DRIVER(CU(cuStreamCreate)(&s, 0), code);
		EXPECT_DRIVER(CU(cuStreamGetFlags)(s, (unsigned *)&value), code);
		EXPECT_DRIVER(CU(cuLaunchKernel)((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, s, args, NULL), code);
		EXPECT_DRIVER(CU(cuFuncGetAttribute)(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, (CUfunction)kernel), code);
		EXPECT_DRIVER(CU(cuGraphLaunch)(exec, s), code);
		EXPECT_DRIVER(CU(cuGraphCreate)(&graph, 0), code);
		EXPECT_DRIVER(CU(cuMemAlloc_v2)(&other, sizeof host), code);
		EXPECT_DRIVER(CU(cuMemAllocAsync)(&other, sizeof host, s), code);
		EXPECT_DRIVER(CU(cuMemAllocManaged)(&other, sizeof host, CU_MEM_ATTACH_GLOBAL), code);
		EXPECT_DRIVER(CU(cuMemHostAlloc)(&locked, sizeof host, 0), code);
		EXPECT_DRIVER(CU(cuMemGetInfo_v2)(&free, &total), code);
		EXPECT_DRIVER(CU(cuMemPoolTrimTo)(pool, 0), code);
		EXPECT_DRIVER(CU(cuMemsetD8_v2)(d, 0, sizeof host), code);
		EXPECT_DRIVER(CU(cuMemsetD32Async)(d, 0, N, s), code);
		EXPECT_DRIVER(CU(cuMemcpyHtoD_v2)(d, host, sizeof host), code);
		EXPECT_DRIVER(CU(cuMemcpyDtoH_v2)(host, d, sizeof host), code);
		EXPECT_DRIVER(CU(cuMemcpyDtoDAsync_v2)(d, d, 4, s), code);
		EXPECT_DRIVER(CU(cuMemcpyHtoA_v2)(array, 0, host, N), code);
		EXPECT_DRIVER(CU(cuArrayGetDescriptor_v2)(&desc, array), code);
		EXPECT_DRIVER(CU(cuArrayCreate_v2)(&array, &desc), code);
		EXPECT_DRIVER(CU(cuMemFree_v2)(d), code);
		/* what is known of devices and contexts is told all the same */
		EXPECT_DRIVER(CU(cuDeviceGetCount)(&value), CUDA_SUCCESS);
		EXPECT_DRIVER(CU(cuCtxGetDevice)(&dev), CUDA_SUCCESS);
	}
	printf("errors: every call returns it\n");
	return pass();
}

int main(int argc, char **argv)
{
	if (argc > 3 && !strcmp(argv[1], "sticky"))
		return sticky((CUresult)atoi(argv[2]), atoi(argv[3]));
	if (argc > 1 && !strcmp(argv[1], "illegal"))
		return illegal();
	return plain();
}
