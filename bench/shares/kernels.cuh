// The kernels of the loads, and what says that a call failed.
#pragma once
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include <unistd.h>

// A file's name without the folders that it was compiled in: what a program says goes into raw logs.
static inline const char *cu_file(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

#define CU(x)                                                                             \
	do {                                                                              \
		cudaError_t e_ = (x);                                                     \
		if (e_ != cudaSuccess) {                                                  \
			fprintf(stderr, "%s:%d: %s: %s\n", cu_file(__FILE__), __LINE__, #x, cudaGetErrorString(e_)); \
			_exit(3);                                                         \
		}                                                                         \
	} while (0)

// C = A * B in float32, tiles of 128 x 128, 8 x 8 for each thread; the sizes are multiples of 128.
// Each round computes the product anew, which makes a kernel as long as one wants.
__global__ void __launch_bounds__(256, 2) k_gemm(const float *A, const float *B, float *C, int M, int N, int K, int rounds)
{
	__shared__ float As[8][128], Bs[8][128];
	const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
	const int row0 = blockIdx.y * 128, col0 = blockIdx.x * 128;
	const int ar = tid / 2, ac = tid % 2 * 4, br = tid / 32, bc = tid % 32 * 4;
	float acc[8][8] = {};

	for (int r = 0; r < rounds; r++) {
		for (int k = 0; k < K; k += 8) {
			float4 a = *reinterpret_cast<const float4 *>(&A[(size_t)(row0 + ar) * K + k + ac]);
			As[ac][ar] = a.x, As[ac + 1][ar] = a.y, As[ac + 2][ar] = a.z, As[ac + 3][ar] = a.w;
			*reinterpret_cast<float4 *>(&Bs[br][bc]) =
				*reinterpret_cast<const float4 *>(&B[(size_t)(k + br) * N + col0 + bc]);
			__syncthreads();
#pragma unroll
			for (int i = 0; i < 8; i++) {
				float x[8], y[8];
#pragma unroll
				for (int j = 0; j < 8; j++)
					x[j] = As[i][ty * 8 + j], y[j] = Bs[i][tx * 8 + j];
#pragma unroll
				for (int p = 0; p < 8; p++)
#pragma unroll
					for (int q = 0; q < 8; q++)
						acc[p][q] += x[p] * y[q];
			}
			__syncthreads();
		}
	}
	for (int p = 0; p < 8; p++)
		for (int q = 0; q < 8; q++)
			C[(size_t)(row0 + ty * 8 + p) * N + col0 + tx * 8 + q] = acc[p][q];
}

__global__ void k_small(float *p) { p[blockIdx.x * blockDim.x + threadIdx.x] += 1.0f; }

__global__ void k_fill(float *p, size_t n, unsigned seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
		unsigned x = (unsigned)i * 2654435761u ^ seed;
		x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
		p[i] = (x & 0xffff) / 65536.0f - 0.5f;
	}
}
