// The work of a tenant, in items: a kind of load, cut into pieces whose end an
// event tells. With -DSIMULATED there is no GPU: items take their known cost on a
// clock that all tenants share, so that the arbiter can be tried anywhere:
//
//   g++ -std=c++17 -DSIMULATED -x c++ tenant.cu -o tenant
//   echo 'try mode=turns secs=1 gemm:30 gemm:70' | ./tenant 2
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

enum Kind { GEMM, COPY, SMALL, SYNC, MIXED, GRAPH, LONG, BURST, IDLE, KINDS };
static const char *const kind_names[KINDS] = {"gemm", "copy", "small", "sync", "mixed", "graph", "long", "burst", "idle"};

static inline int64_t now_ns()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static inline int kind_of(const char *name)
{
	for (int k = 0; k < KINDS; k++)
		if (!strcmp(name, kind_names[k]))
			return k;
	return -1;
}

// What one turn was by the GPU's own clocks.
struct TurnTime {
	double event_us;	// between two events
	int64_t first, last;	// its own clock, ns: first kernel, last kernel
};

static const int RING = 512;	// items in flight at most, and their events
static const int TURNS = 8;	// turns whose times are not read yet

#ifdef SIMULATED
struct SimClock { volatile int64_t free_at; volatile int owner; };
static SimClock *sim_clock;

struct Gpu {
	int64_t done[RING], t0[TURNS], t1[TURNS];
	unsigned head = 0, tail = 0;
	int self = 0;

	void init(void *) {}
	void submit(int k)
	{
		static const int64_t cost[KINDS] = {430000, 120000, 45000, 8000, 200000, 300000, 11000000, 430000, 0};
		int64_t now = now_ns();
		if (sim_clock->owner != self) {	// a context switch
			sim_clock->owner = self;
			sim_clock->free_at = (sim_clock->free_at > now ? sim_clock->free_at : now) + 100000;
		}
		int64_t start = sim_clock->free_at > now ? sim_clock->free_at : now;
		sim_clock->free_at = done[head++ % RING] = start + cost[k];
		if (k == SYNC)
			while (now_ns() < start + cost[k])
				;
	}
	unsigned flying() { return head - tail; }
	bool oldest_done() { return now_ns() >= done[tail % RING]; }
	void retire() { tail++; }
	void turn_begin(int n) { t0[n % TURNS] = sim_clock->free_at > now_ns() ? sim_clock->free_at : now_ns(); }
	void turn_end(int n) { t1[n % TURNS] = sim_clock->free_at; }
	TurnTime turn_time(int n)
	{
		return {(t1[n % TURNS] - t0[n % TURNS]) / 1e3, t0[n % TURNS], t1[n % TURNS]};
	}
};
#else
#include "kernels.cuh"

__global__ void k_stamp(int64_t *at)
{
	unsigned long long t;
	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
	*(volatile int64_t *)at = (int64_t)t;
}

struct Gpu {
	static const int M = 4096, N = 4096, K = 512;
	static const size_t COPIED = 256u << 20, HOST = 1u << 20;
	cudaStream_t st = nullptr;
	cudaEvent_t done[RING], e0[TURNS], e1[TURNS];
	float *A, *B, *C, *scratch;
	char *src, *dst, *host;
	int64_t *stamps;
	cudaGraphExec_t graph;
	unsigned head = 0, tail = 0, mixed = 0;

	void init(void *stream)
	{
		st = (cudaStream_t)stream;
		if (!st)
			CU(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
		for (auto &e : done)
			CU(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
		for (int i = 0; i < TURNS; i++) {
			CU(cudaEventCreate(&e0[i]));
			CU(cudaEventCreate(&e1[i]));
		}
		CU(cudaMalloc(&A, sizeof(float) * M * K));
		CU(cudaMalloc(&B, sizeof(float) * K * N));
		CU(cudaMalloc(&C, sizeof(float) * M * N));
		CU(cudaMalloc(&scratch, 1 << 20));
		CU(cudaMalloc(&src, COPIED));
		CU(cudaMalloc(&dst, COPIED));
		CU(cudaHostAlloc(&host, HOST, cudaHostAllocDefault));
		CU(cudaHostAlloc(&stamps, 2 * TURNS * sizeof(int64_t), cudaHostAllocDefault));
		memset(host, 1, HOST);
		memset(stamps, 0, 2 * TURNS * sizeof(int64_t));
		k_fill<<<1024, 256, 0, st>>>(A, (size_t)M * K, 1);
		k_fill<<<1024, 256, 0, st>>>(B, (size_t)K * N, 2);
		k_fill<<<1024, 256, 0, st>>>((float *)src, COPIED / 4, 3);
		CU(cudaMemsetAsync(scratch, 0, 1 << 20, st));
		cudaGraph_t g;
		CU(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
		for (int i = 0; i < 16; i++) {
			k_gemm<<<dim3(N / 128, 4), 256, 0, st>>>(A, B, C, 512, N, 64, 1);
			k_small<<<132, 256, 0, st>>>(scratch);
		}
		CU(cudaStreamEndCapture(st, &g));
		CU(cudaGraphInstantiate(&graph, g, 0));
		CU(cudaGraphUpload(graph, st));
		for (int i = 0; i < TURNS; i++)	// so that every event and every kernel was used once
			turn_begin(i), turn_end(i);
		CU(cudaStreamSynchronize(st));
	}

	void gemm(int rounds) { k_gemm<<<dim3(N / 128, M / 128), 256, 0, st>>>(A, B, C, M, N, K, rounds); }

	void submit(int k)
	{
		switch (k) {
		case GEMM:
		case BURST:
			gemm(1);
			break;
		case COPY:
			CU(cudaMemcpyAsync(dst, src, COPIED, cudaMemcpyDeviceToDevice, st));
			break;
		case SMALL:
			for (int i = 0; i < 16; i++)
				k_small<<<4, 128, 0, st>>>(scratch);
			break;
		case SYNC:
			k_small<<<4, 128, 0, st>>>(scratch);
			CU(cudaStreamSynchronize(st));
			break;
		case MIXED:
			CU(cudaMemcpyAsync(src, host, HOST, cudaMemcpyHostToDevice, st));
			k_gemm<<<dim3(N / 128, M / 128), 256, 0, st>>>(A, B, C, M, N, 128, 1);
			CU(cudaMemcpyAsync(dst, src, COPIED / 4, cudaMemcpyDeviceToDevice, st));
			for (int i = 0; i < 8; i++)
				k_small<<<132, 256, 0, st>>>(scratch);
			if (++mixed % 4 == 0)
				CU(cudaStreamSynchronize(st));
			break;
		case GRAPH:
			CU(cudaGraphLaunch(graph, st));
			break;
		case LONG:
			gemm(26);
			break;
		}
		CU(cudaEventRecord(done[head++ % RING], st));
	}
	unsigned flying() { return head - tail; }
	bool oldest_done()
	{
		cudaError_t e = cudaEventQuery(done[tail % RING]);
		if (e == cudaErrorNotReady)
			return false;
		CU(e);
		return true;
	}
	void retire() { tail++; }

	void turn_begin(int n)
	{
		CU(cudaEventRecord(e0[n % TURNS], st));
		k_stamp<<<1, 1, 0, st>>>(&stamps[2 * (n % TURNS)]);
	}
	void turn_end(int n)
	{
		k_stamp<<<1, 1, 0, st>>>(&stamps[2 * (n % TURNS) + 1]);
		CU(cudaEventRecord(e1[n % TURNS], st));
	}
	TurnTime turn_time(int n)
	{
		float ms = 0;
		CU(cudaEventSynchronize(e1[n % TURNS]));
		CU(cudaEventElapsedTime(&ms, e0[n % TURNS], e1[n % TURNS]));
		return {ms * 1e3, stamps[2 * (n % TURNS)], stamps[2 * (n % TURNS) + 1]};
	}
};
#endif
