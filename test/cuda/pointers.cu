/*
 * Addresses of page-locked host memory that no launch shows: they lie in a table in device memory, as in NCCL's
 * communicators, and in a list whose members are page-locked memory themselves. No address of the device was ever asked for.
 */
#include "check.h"

#include <string.h>

enum { N = 1 << 18, TABLES = 400, LINKS = 5 };

struct link {
	unsigned value;
	struct link *next;
};

struct table {
	const unsigned *in;
	unsigned *out;
	unsigned *flag;
	struct link *first;
	char rest[64];
};

extern "C" __global__ void ptr_follow(const struct table *t, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		t->out[i] = t->in[i] + 1;
	if (!i) {
		*t->flag += 1;
		for (struct link *l = t->first; l; l = l->next)
			l->value *= 2;
	}
}

struct host {
	struct table table;
	unsigned *in, *out, *flag;
	struct link *links[LINKS];
};

static void *locked(size_t n)
{
	void *p;

	CHECK(cudaHostAlloc(&p, n, cudaHostAllocDefault));
	memset(p, 0, n);
	return p;
}

static void make(struct host *h, unsigned base)
{
	memset(h, 0, sizeof *h);
	h->in = (unsigned *)locked(N * sizeof *h->in);
	h->out = (unsigned *)locked(N * sizeof *h->out);
	h->flag = (unsigned *)locked(sizeof *h->flag);
	for (unsigned i = 0; i < N; i++)
		h->in[i] = base + i;
	for (int i = 0; i < LINKS; i++)
		h->links[i] = (struct link *)locked(sizeof *h->links[i]);
	for (int i = 0; i < LINKS; i++) {
		h->links[i]->value = base + i;
		h->links[i]->next = i + 1 < LINKS ? h->links[i + 1] : NULL;
	}
	h->table.in = h->in;
	h->table.out = h->out;
	h->table.flag = h->flag;
	h->table.first = h->links[0];
}

static void check(struct host *h, const struct table *t, unsigned base)
{
	for (unsigned round = 1; round <= 3; round++) {
		for (unsigned i = 0; i < N; i++)
			h->in[i] = base * round + i;
		ptr_follow<<<N / 256, 256>>>(t, N);
		CHECK(cudaDeviceSynchronize());
		for (unsigned i = 0; i < N; i++)
			REQUIRE(h->out[i] == base * round + i + 1, "round %u, element %u is %u", round, i, h->out[i]);
		REQUIRE(*h->flag == round, "the flag is %u after %u rounds", *h->flag, round);
		for (int i = 0; i < LINKS; i++)
			REQUIRE(h->links[i]->value == (base + i) << round, "round %u, link %d has %u", round, i, h->links[i]->value);
	}
}

static void done(struct host *h)
{
	CHECK(cudaFreeHost(h->in));
	CHECK(cudaFreeHost(h->out));
	CHECK(cudaFreeHost(h->flag));
	for (int i = 0; i < LINKS; i++)
		CHECK(cudaFreeHost(h->links[i]));
}

int main()
{
	static struct table many[TABLES];
	struct table *there, *copy;
	struct host h;
	cudaStream_t s;

	CHECK(cudaMalloc(&there, sizeof many));
	/* One table, by a blocking copy. */
	make(&h, 1000);
	CHECK(cudaMemcpy(there, &h.table, sizeof h.table, cudaMemcpyHostToDevice));
	check(&h, there, 1000);
	done(&h);
	/* In the middle of many, by an asynchronous copy from page-locked memory. */
	make(&h, 77);
	copy = (struct table *)locked(sizeof many);
	copy[TABLES / 2] = h.table;
	CHECK(cudaStreamCreate(&s));
	CHECK(cudaMemcpyAsync(there, copy, sizeof many, cudaMemcpyHostToDevice, s));
	CHECK(cudaStreamSynchronize(s));
	check(&h, there + TABLES / 2, 77);
	CHECK(cudaFreeHost(copy));
	/* The memory is new at an address that was known. */
	done(&h);
	make(&h, 5);
	CHECK(cudaMemcpy2D(there, sizeof h.table, &h.table, sizeof h.table, sizeof h.table, 1, cudaMemcpyHostToDevice));
	check(&h, there, 5);
	done(&h);
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaFree(there));
	printf("pointers: 3 tables\nPASS\n");
	return 0;
}
