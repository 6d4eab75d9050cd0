// What small calls cost: empty launches, launch and synchronise, 4-byte copies,
// event queries, in microseconds. One JSON line; medians over repeats, with the
// processor time of this process per launch beside them. `launch pair` has what a
// launch costs the process's processors on each of two devices, in turn, instead.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>
#include <sys/resource.h>
#include <cuda_runtime.h>

#define CHECK(call)                                                              \
	do {                                                                     \
		cudaError_t e_ = (call);                                         \
		if (e_ != cudaSuccess) {                                         \
			fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_)); \
			exit(1);                                                 \
		}                                                                \
	} while (0)

__global__ void empty() {}
__global__ void add(int *p, int v) { *p += v; }

static double now_us()
{
	using namespace std::chrono;
	return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

static double cpu_us()
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return (r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1e6 + r.ru_utime.tv_usec + r.ru_stime.tv_usec;
}

struct figure {
	double median, min, max, cpu;
};

// Microseconds per call: the median, smallest and largest of the repeats.
static figure measure(int repeats, int calls, const std::function<void()> &call, const std::function<void()> &after)
{
	std::vector<double> us, cpu;

	for (int r = 0; r < repeats + 1; r++) {
		double t0 = now_us(), c0 = cpu_us();

		for (int i = 0; i < calls; i++)
			call();
		double t1 = now_us();

		after();
		double c1 = cpu_us();

		if (r == 0)
			continue; // warm-up
		us.push_back((t1 - t0) / calls);
		cpu.push_back((c1 - c0) / calls);
	}
	std::sort(us.begin(), us.end());
	std::sort(cpu.begin(), cpu.end());
	return {us[us.size() / 2], us.front(), us.back(), cpu[cpu.size() / 2]};
}

static void print(const char *name, figure f)
{
	printf(", \"%s\": [%.3f, %.3f, %.3f, %.3f]", name, f.median, f.min, f.max, f.cpu);
}

// Blocks of launches on devices 0 1 1 0, so that a processor that grows slower or faster favours neither.
static int pair()
{
	static const int order[] = {0, 1, 1, 0};
	std::vector<double> us[2];
	cudaStream_t s[2];

	for (int d = 0; d < 2; d++) {
		CHECK(cudaSetDevice(d));
		CHECK(cudaStreamCreateWithFlags(&s[d], cudaStreamNonBlocking));
	}
	for (int block = 0; block < 4 * 16; block++) {
		int d = order[block % 4];

		CHECK(cudaSetDevice(d));
		figure f = measure(1, 20000, [&] { empty<<<1, 1, 0, s[d]>>>(); }, [&] { CHECK(cudaStreamSynchronize(s[d])); });
		us[d].push_back(f.cpu);
	}
	printf("{\"bench\": \"launch_pair\", \"cpu_us\": [");
	for (int d = 0; d < 2; d++) {
		for (size_t i = 0; i < us[d].size(); i++)
			printf("%s%.4f", i ? ", " : d ? "], [" : "[", us[d][i]);
	}
	printf("]]}\n");
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "pair"))
		return pair();
	int scale = argc > 1 ? atoi(argv[1]) : 100; // percent of the full number of waiting calls
	int *p, host = 0, back = -1;
	cudaStream_t s;
	cudaEvent_t e;

	if (scale < 1)
		scale = 1;
	CHECK(cudaMalloc(&p, sizeof *p));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
	CHECK(cudaMemset(p, 0, sizeof *p));
	CHECK(cudaDeviceSynchronize());

	auto none = [] {};
	auto sync = [&] { CHECK(cudaStreamSynchronize(s)); };
	int waits = std::max(10, 20 * scale);

	printf("{\"bench\": \"launch\"");
	print("launch_us", measure(7, 20000, [&] { empty<<<1, 1, 0, s>>>(); }, sync));
	// The queue kept full and drained: what a launch costs from end to end.
	figure total = measure(5, 1, [&] {
		for (int i = 0; i < 20000; i++)
			empty<<<1, 1, 0, s>>>();
		CHECK(cudaStreamSynchronize(s));
	}, none);
	print("launch_drained_us", {total.median / 20000, total.min / 20000, total.max / 20000, total.cpu / 20000});
	print("launch_sync_us", measure(5, waits, [&] {
		empty<<<1, 1, 0, s>>>();
		CHECK(cudaStreamSynchronize(s));
	}, none));
	print("h2d4_us", measure(5, waits, [&] { CHECK(cudaMemcpy(p, &host, 4, cudaMemcpyHostToDevice)); }, none));
	print("d2h4_us", measure(5, waits, [&] { CHECK(cudaMemcpy(&back, p, 4, cudaMemcpyDeviceToHost)); }, none));
	CHECK(cudaEventRecord(e, s));
	sync();
	print("event_query_us", measure(5, 2000, [&] { CHECK(cudaEventQuery(e)); }, none));
	print("event_record_us", measure(5, 5000, [&] { CHECK(cudaEventRecord(e, s)); }, sync));

	// And the arithmetic must have been done, once each.
	CHECK(cudaMemset(p, 0, sizeof *p));
	CHECK(cudaDeviceSynchronize());
	for (int i = 0; i < 1000; i++)
		add<<<1, 1, 0, s>>>(p, i);
	sync();
	CHECK(cudaMemcpy(&back, p, 4, cudaMemcpyDeviceToHost));
	CHECK(cudaGetLastError());
	printf(", \"sum\": %d}\n", back);
	if (back != 499500) {
		fprintf(stderr, "1000 additions gave %d, not 499500\n", back);
		return 1;
	}
	return 0;
}
