// thief endless|queued: leaves work on the GPU that outlasts any turn. It prints "ready" and the socket of its lease once
// everything is set up, and begins when it has read a line, or the end, of standard input. Then it waits for its work until it is ended.
//
//	endless	a kernel that does not end
//	queued	8 kernels of half a second behind a wait for a value in memory, which it writes when all of them are queued
#include "kernels.cuh"

#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>

// Uses all of the GPU until that many ns of the global timer have passed, or for ever if 0.
__global__ void k_spin(unsigned long long ns, float *out)
{
	unsigned long long from, now;
	float x = threadIdx.x;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
	do {
		for (int i = 0; i < 1000; i++)
			x = x * 0.999f + 0.5f;
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	} while (!ns || now - from < ns);
	out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

static void driver(CUresult rc, const char *what)
{
	if (rc != CUDA_SUCCESS) {
		fprintf(stderr, "thief: %s: error %d\n", what, rc);
		_exit(3);
	}
}

template <typename F> static F entry(const char *name)
{
	static void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	void *f = lib ? dlsym(lib, name) : nullptr;

	if (!f) {
		fprintf(stderr, "thief: the driver has no %s\n", name);
		_exit(3);
	}
	return reinterpret_cast<F>(f);
}

int main(int argc, char **argv)
{
	bool queued = argc == 2 && !strcmp(argv[1], "queued");
	if (!queued && (argc != 2 || strcmp(argv[1], "endless"))) {
		fprintf(stderr, "usage: thief endless|queued\n");
		return 2;
	}
	auto wait = entry<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>("cuStreamWaitValue32_v2");
	auto write = entry<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>("cuStreamWriteValue32_v2");
	cudaDeviceProp p;
	cudaStream_t st, other;
	float *out;
	void *word;
	CU(cudaGetDeviceProperties(&p, 0));
	CU(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
	CU(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
	unsigned blocks = p.multiProcessorCount * (p.maxThreadsPerMultiProcessor / 256);
	CU(cudaMalloc(&out, sizeof(float) * blocks * 256));
	CU(cudaMalloc(&word, 4));
	CU(cudaMemset(word, 0, 4));
	k_spin<<<blocks, 256, 0, st>>>(1000, out); // what is loaded at first use is loaded now
	CU(cudaDeviceSynchronize());
	const char *socket = getenv("SLUICE_SOCKET");
	printf("ready %s\n", socket ? socket : "-");
	fflush(stdout);
	(void)getchar();
	if (queued) {
		driver(wait(st, (CUdeviceptr)word, 1, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue32");
		for (int i = 0; i < 8; i++)
			k_spin<<<blocks, 256, 0, st>>>(500000000, out);
		driver(write(other, (CUdeviceptr)word, 1, 0), "cuStreamWriteValue32");
	} else {
		k_spin<<<blocks, 256, 0, st>>>(0, out);
	}
	CU(cudaGetLastError());
	CU(cudaStreamSynchronize(st));
	return 0;
}
