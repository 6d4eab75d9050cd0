// green SECONDS: two tenants as two threads of one process, each in a green context
// with its own multiprocessors. JSON lines like those of tenant, for table.py.
#include "work.cuh"

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#define DRIVER(f) reinterpret_cast<decltype(&f)>(driver(#f))

static void *driver(const char *name)
{
	static void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	void *f = lib ? dlsym(lib, name) : nullptr;

	if (!f) {
		fprintf(stderr, "no %s in the driver\n", name);
		exit(2);
	}
	return f;
}

#define DR(call)                                                       \
	do {                                                           \
		CUresult e_ = (call);                                  \
		if (e_ != CUDA_SUCCESS) {                              \
			fprintf(stderr, "%s: error %d\n", #call, e_);  \
			exit(3);                                       \
		}                                                      \
	} while (0)

struct Part {
	CUgreenCtx green;
	CUcontext ctx;
	CUstream stream;
	unsigned sms;
	Gpu gpu;
	std::vector<unsigned> done;
};

static void open_part(Part &p, CUdevResource &sm)
{
	CUdevResourceDesc desc;
	DR(DRIVER(cuDevResourceGenerateDesc)(&desc, &sm, 1));
	DR(DRIVER(cuGreenCtxCreate)(&p.green, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM));
	DR(DRIVER(cuCtxFromGreenCtx)(&p.ctx, p.green));
	DR(DRIVER(cuCtxSetCurrent)(p.ctx));
	DR(DRIVER(cuGreenCtxStreamCreate)(&p.stream, p.green, CU_STREAM_NON_BLOCKING, 0));
	p.sms = sm.sm.smCount;
	p.gpu.init(p.stream);
	for (int k = 0; k < IDLE; k++)
		p.gpu.submit(k);
	CU(cudaStreamSynchronize(p.stream));
	while (p.gpu.flying())
		p.gpu.retire();
}

static void run(Part &p, int kind, int64_t measure, int64_t end)
{
	DR(DRIVER(cuCtxSetCurrent)(p.ctx));
	p.done.assign((end - measure) / 10000000 + 1, 0);
	for (;;) {
		int64_t now = now_ns();
		while (p.gpu.flying() && p.gpu.oldest_done()) {
			p.gpu.retire();
			if (now >= measure && now < end)
				p.done[(now - measure) / 10000000]++;
		}
		if (now >= end)
			break;
		if (p.gpu.flying() < 4)
			p.gpu.submit(kind);
	}
	CU(cudaStreamSynchronize(p.stream));
	while (p.gpu.flying())
		p.gpu.retire();
}

static void cell(Part *p, int n, const int *kinds, double secs)
{
	int64_t measure = now_ns() + 200000000, end = measure + (int64_t)(secs * 1e9);
	std::vector<std::thread> threads;
	unsigned all = 0;
	for (int i = 0; i < n; i++)
		all += p[i].sms;
	for (int i = 0; i < n; i++)
		threads.emplace_back([=] { run(p[i], kinds[i], measure, end); });
	for (auto &t : threads)
		t.join();
	std::string name = "green";
	for (int i = 0; i < n; i++)
		name += "." + std::to_string(p[i].sms);
	printf("{\"cell\": \"%s\", \"line\": \"green contexts\", \"secs\": %.3f, \"turns\": 0, \"tenants\": [", name.c_str(), secs);
	for (int i = 0; i < n; i++) {
		printf("%s{\"kind\": \"%s\", \"percent\": %.2f, \"done\": [", i ? ", " : "", kind_names[kinds[i]],
		       n == 1 ? 100.0 : 100.0 * p[i].sms / all);
		for (size_t k = 0; k + 1 < p[i].done.size(); k++)
			printf("%s%u", k ? "," : "", p[i].done[k]);
		printf("]}");
	}
	printf("]}\n");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	double secs = argc > 1 ? atof(argv[1]) : 0.6;
	CU(cudaFree(nullptr));
	CUdevResource all;
	DR(DRIVER(cuDeviceGetDevResource)(0, &all, CU_DEV_RESOURCE_TYPE_SM));
	static const unsigned wanted[] = {66, 40, 13};
	static const unsigned flags[] = {0, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING};
	for (unsigned f : flags)
		for (unsigned w : wanted) {
			CUdevResource part, rest;
			unsigned groups = 1;
			if (DRIVER(cuDevSmResourceSplitByCount)(&part, &groups, &all, &rest, f, w) != CUDA_SUCCESS || groups != 1) {
				fprintf(stderr, "no split at %u of %u, flags %u\n", w, all.sm.smCount, f);
				continue;
			}
			fprintf(stderr, "asked %u of %u multiprocessors, flags %u: got %u and %u\n",
				w, all.sm.smCount, f, part.sm.smCount, rest.sm.smCount);
			if (f && w != 40)
				continue;
			Part *p = new Part[2];
			open_part(p[0], part);
			open_part(p[1], rest);
			static const int kinds[][2] = {{GEMM, GEMM}, {GEMM, COPY}, {COPY, COPY}};
			for (auto &k : kinds)
				if (w == 66 || k[1] != COPY || k[0] != COPY)
					cell(p, 2, k, secs);
		}
	return 0;
}
