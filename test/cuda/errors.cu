/*
 * errors MODE: CUDA's own errors, with CUDA's own manners.
 *
 * plain    wrong arguments are refused and forgotten once read; the device goes on working
 * illegal  a kernel that writes to a wild address breaks the context: every later call says so
 */
#include "check.h"

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

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "illegal"))
		return illegal();
	return plain();
}
