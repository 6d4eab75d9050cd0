/*
 * Words in page-locked memory by which a program and a running kernel tell each other something: each sees what the other
 * writes while the kernel runs. What one has written before a flag is there when the other sees the flag.
 */
#include "check.h"

#include <stdint.h>
#include <string.h>

enum { ROUNDS = 50, DATA = 200 };

struct shared {
	volatile unsigned go, done;
	volatile unsigned in[DATA], out[DATA];
};

/* Answers each round; gives up after a time, so that nothing hangs. */
extern "C" __global__ void fl_serve(struct shared *b, int rounds, int n, long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	for (int r = 1; r <= rounds; r++) {
		while (b->go != (unsigned)r) {
			asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
			if (t - t0 > ns)
				return;
		}
		__threadfence_system();
		for (int i = 0; i < n; i++)
			b->out[i] = b->in[i] + r;
		__threadfence_system();
		b->done = r;
	}
}

static void serve(struct shared *b, cudaStream_t s)
{
	memset(b, 0, sizeof *b);
	fl_serve<<<1, 1, 0, s>>>(b, ROUNDS, DATA, 20000000000ll);
	CHECK(cudaGetLastError());
	for (unsigned r = 1; r <= ROUNDS; r++) {
		double t0 = seconds();

		for (int i = 0; i < DATA; i++)
			b->in[i] = r * i;
		__sync_synchronize();
		b->go = r;
		while (b->done != r)
			REQUIRE(seconds() - t0 < 15, "round %u was not answered", r);
		__sync_synchronize();
		for (int i = 0; i < DATA; i++)
			REQUIRE(b->out[i] == r * i + r, "round %u: word %d is %u", r, i, b->out[i]);
	}
	CHECK(cudaStreamSynchronize(s));
}

int main()
{
	struct shared *pinned, *own = (struct shared *)malloc(sizeof *own);
	cudaStream_t s;

	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaHostAlloc(&pinned, sizeof *pinned, cudaHostAllocMapped));
	serve(pinned, s);
	serve(pinned, s);
	CHECK(cudaHostRegister(own, sizeof *own, cudaHostRegisterDefault));
	serve(own, s);
	CHECK(cudaHostUnregister(own));
	CHECK(cudaFreeHost(pinned));
	free(own);
	printf("flags: %d rounds\n", ROUNDS);
	return pass();
}
