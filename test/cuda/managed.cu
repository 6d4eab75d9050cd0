/*
 * Managed memory: one address for the program and for kernels, in blocks of a word to many MiB.
 */
#include "check.h"

#include <string.h>

enum { N = 3 << 20, NODES = 700 };

struct node {
	struct node *next;
	unsigned value;
};

extern "C" __global__ void mg_add(unsigned *v, int n, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		v[i] += what;
}

extern "C" __global__ void mg_walk(struct node *list, unsigned what)
{
	for (; list; list = list->next)
		list->value += what;
}

static void large(void)
{
	unsigned *v;

	CHECK(cudaMallocManaged(&v, N * sizeof *v));
	for (int i = 0; i < N; i += 1 << 18)
		REQUIRE(!v[i], "new memory holds %u", v[i]);
	for (unsigned round = 0; round < 3; round++) {
		for (int i = 0; i < N; i++)
			v[i] = i + round;
		mg_add<<<32, 128>>>(v, N, 10);
		mg_add<<<32, 128>>>(v, N, 1);
		CHECK(cudaDeviceSynchronize());
		for (int i = 0; i < N; i++)
			REQUIRE(v[i] == i + round + 11, "round %u, element %d: %u", round, i, v[i]);
	}
	v[N / 2] = 5; /* one page */
	mg_add<<<32, 128>>>(v + N / 2, 1, 1);
	CHECK(cudaDeviceSynchronize());
	REQUIRE(v[N / 2] == 6 && v[N / 2 + 1] == N / 2 + 1 + 2 + 11, "one word: %u, its neighbour %u", v[N / 2], v[N / 2 + 1]);
	CHECK(cudaFree(v));
}

/* Blocks of a few bytes that point at each other. */
static void list(void)
{
	struct node *head = NULL, *n;
	unsigned sum = 0;

	for (int i = 0; i < NODES; i++) {
		CHECK(cudaMallocManaged(&n, sizeof *n));
		n->next = head;
		n->value = i;
		head = n;
	}
	for (int round = 0; round < 3; round++) {
		mg_walk<<<1, 1>>>(head, 1000);
		CHECK(cudaDeviceSynchronize());
		if (!round)
			head->value += 7;
	}
	for (n = head; n; n = n->next)
		sum += n->value;
	REQUIRE(sum == 3000u * NODES + NODES * (NODES - 1) / 2 + 7, "the list's sum is %u", sum);
	while (head) {
		n = head->next;
		CHECK(cudaFree(head));
		head = n;
	}
}

/* With copies, fills and streams. */
static void mixed(void)
{
	unsigned *v, *d, *plain = (unsigned *)malloc(N);
	cudaStream_t s;

	CHECK(cudaStreamCreate(&s));
	CHECK(cudaMallocManaged(&v, N));
	CHECK(cudaMalloc(&d, N));
	CHECK(cudaStreamAttachMemAsync(s, v, 0, cudaMemAttachSingle));
	CHECK(cudaMemset(v, 0, N));
	v[3] = 4;
	CHECK(cudaMemcpyAsync(d, v, N, cudaMemcpyDefault, s));
	mg_add<<<8, 64, 0, s>>>(d, N / 4, 1);
	CHECK(cudaMemcpyAsync(v, d, N, cudaMemcpyDefault, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(v[3] == 5 && v[4] == 1, "copied back: %u %u", v[3], v[4]);
	memset(plain, 1, N);
	CHECK(cudaMemcpy(v, plain, N, cudaMemcpyDefault));
	REQUIRE(v[0] == 0x01010101 && v[N / 4 - 1] == 0x01010101, "from pageable memory: %x", v[0]);
	v[1] = 2;
	CHECK(cudaMemcpy(plain, v, N, cudaMemcpyDefault));
	REQUIRE(plain[1] == 2 && plain[2] == 0x01010101, "to pageable memory: %x", plain[1]);
	CHECK(cudaFree(v));
	CHECK(cudaFree(d));
	CHECK(cudaStreamDestroy(s));
	free(plain);
}

static void questions(void)
{
	cudaPointerAttributes a;
	unsigned *v;
	int yes, concurrent, mostly = 3;

	CHECK(cudaDeviceGetAttribute(&yes, cudaDevAttrManagedMemory, 0));
	CHECK(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
	REQUIRE(yes, "the device says that it has no managed memory");
	EXPECT(cudaMallocManaged(&v, 8, 9), cudaErrorInvalidValue);
	cudaGetLastError();
	CHECK(cudaMallocManaged(&v, 100));
	CHECK(cudaPointerGetAttributes(&a, v + 3));
	REQUIRE(a.type == cudaMemoryTypeManaged && a.devicePointer == v + 3 && a.hostPointer == v + 3, "type %d, %p, %p", (int)a.type, a.devicePointer, a.hostPointer);
#if CUDART_VERSION < 13000
	CHECK(cudaMemAdvise(v, 100, cudaMemAdviseSetReadMostly, 0));
	if (concurrent)
		CHECK(cudaMemPrefetchAsync(v, 100, 0, 0));
#else
	cudaMemLocation where = { cudaMemLocationTypeDevice, 0 };

	CHECK(cudaMemAdvise(v, 100, cudaMemAdviseSetReadMostly, where));
	if (concurrent)
		CHECK(cudaMemPrefetchAsync(v, 100, where, 0, 0));
#endif
	CHECK(cudaMemRangeGetAttribute(&mostly, sizeof mostly, cudaMemRangeAttributeReadMostly, v, 100));
	REQUIRE(mostly == 1, "read mostly is %d", mostly);
	CHECK(cudaFree(v));
	EXPECT(cudaFree(v), cudaErrorInvalidValue);
	cudaGetLastError();
}

int main()
{
	large();
	list();
	mixed();
	questions();
	printf("managed: %d words, %d nodes\n", N, NODES);
	return pass();
}
