// share LOAD [DEPTH]: a tenant that keeps one kind of work before the GPU, DEPTH items of it,
// and says what it was delivered. An unmodified CUDA program: it knows nothing of turns.
//
// It prints "ready" and the socket of its lease once everything is set up, and reads one line from standard input:
//
//   BEGIN MEASURE END [off FROM TO]... [period LENGTH [beat FROM TO]...] [slot LENGTH] [die AT] [tell AT]
//
// all of them ns of CLOCK_MONOTONIC. Off: no work in that time. Beat: of every period since MEASURE only these parts,
// in their order, have work. Die and tell: once a turn of its own has begun after AT, it kills itself, or prints
// "turn NS"; a turn begins after a gap of 4 ms. At the end: one line of JSON, items and the longest gap between
// two of them for every slot, 100 ms if not told.
#include "kernels.cuh"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

static const int64_t TURN_GAP = 4000000;

static int64_t now_ns()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void sleep_until(int64_t at)
{
	timespec t = {(time_t)(at / 1000000000), (long)(at % 1000000000)};
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

// An item of each load is 10 us to 12 ms of an H200's time; depth is enough of them for 1.5 ms. Small kernels
// are given as programs give them: many, and then a wait for some of them.
struct Load {
	const char *name;
	int depth, at_once; // items in flight at most, and waited for at once
};
static const Load loads[] = {{"gemm", 4, 1}, {"copy", 12, 1}, {"small", 64, 32}, {"mixed", 6, 1}, {"graph", 4, 1}, {"sync", 1, 1}, {"long", 2, 1}};

class Gpu {
	static const int M = 4096, N = 4096, K = 512;
	static const size_t HOST = 256 << 10;
	cudaStream_t st;
	std::vector<cudaEvent_t> done;
	float *A, *B, *C, *scratch;
	char *src, *dst, *host;
	cudaGraphExec_t graph = nullptr;
	std::string load;
	unsigned head = 0, tail = 0, mixed = 0;
	size_t copied;

	void gemm(int k, int rounds) { k_gemm<<<dim3(N / 128, M / 128), 256, 0, st>>>(A, B, C, M, N, k, rounds); }

	void capture()
	{
		cudaGraph_t g;
		CU(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
		for (int i = 0; i < 16; i++) {
			k_gemm<<<dim3(N / 128, 4), 256, 0, st>>>(A, B, C, 512, N, 64, 1);
			k_small<<<132, 256, 0, st>>>(scratch);
		}
		CU(cudaStreamEndCapture(st, &g));
		CU(cudaGraphInstantiateWithFlags(&graph, g, 0));
		CU(cudaGraphUpload(graph, st));
	}

public:
	Gpu(const char *what, int depth) : done(depth), load(what)
	{
		const char *mib = getenv("SHARE_COPY_MIB"); // a simulated GPU copies in the host's memory
		copied = (size_t)(mib ? atoi(mib) : 256) << 20;
		CU(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
		for (auto &e : done)
			CU(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
		CU(cudaMalloc(&A, sizeof(float) * M * K));
		CU(cudaMalloc(&B, sizeof(float) * K * N));
		CU(cudaMalloc(&C, sizeof(float) * M * N));
		CU(cudaMalloc(&scratch, 1 << 20));
		CU(cudaMalloc(&src, copied));
		CU(cudaMalloc(&dst, copied));
		CU(cudaHostAlloc(&host, HOST, cudaHostAllocDefault));
		memset(host, 1, HOST);
		k_fill<<<1024, 256, 0, st>>>(A, (size_t)M * K, 1);
		k_fill<<<1024, 256, 0, st>>>(B, (size_t)K * N, 2);
		k_fill<<<1024, 256, 0, st>>>((float *)src, copied / 4, 3);
		CU(cudaMemsetAsync(scratch, 0, 1 << 20, st));
		if (load == "graph")
			capture();
		for (int i = 0; i < 3; i++) // what is loaded at first use is loaded now
			submit();
		while (flying())
			wait();
		CU(cudaStreamSynchronize(st));
		CU(cudaGetLastError());
	}

	void submit()
	{
		if (load == "gemm") {
			gemm(K, 1);
		} else if (load == "long") {
			gemm(K, 20);
		} else if (load == "copy") {
			CU(cudaMemcpyAsync(dst, src, copied, cudaMemcpyDeviceToDevice, st));
		} else if (load == "small") {
			for (int i = 0; i < 16; i++)
				k_small<<<4, 128, 0, st>>>(scratch);
		} else if (load == "sync") {
			k_small<<<4, 128, 0, st>>>(scratch);
		} else if (load == "graph") {
			CU(cudaGraphLaunch(graph, st));
		} else { // mixed: a bit of everything, and now and then a wait for all of it
			CU(cudaMemcpyAsync(src, host, HOST, cudaMemcpyHostToDevice, st));
			gemm(128, 1);
			CU(cudaMemcpyAsync(dst, src, copied / 4, cudaMemcpyDeviceToDevice, st));
			for (int i = 0; i < 8; i++)
				k_small<<<132, 256, 0, st>>>(scratch);
			if (++mixed % 32 == 0)
				CU(cudaStreamSynchronize(st));
		}
		CU(cudaEventRecord(done[head++ % done.size()], st));
	}
	size_t flying() const { return head - tail; }
	bool full() const { return flying() == done.size(); }
	// wait for the oldest n items to end
	void wait(unsigned n = 1)
	{
		tail += n;
		CU(cudaEventSynchronize(done[(tail - 1) % done.size()]));
	}
};

struct Order {
	int64_t begin = 0, measure = 0, end = 0, die = 0, tell = 0, slot = 100000000, period = 0;
	std::vector<std::pair<int64_t, int64_t>> off, beats;

	bool read(FILE *f)
	{
		char line[4096], *save = nullptr;
		if (!fgets(line, sizeof line, f) || sscanf(line, "%ld %ld %ld", &begin, &measure, &end) != 3)
			return false;
		strtok_r(line, " \n", &save);
		strtok_r(nullptr, " \n", &save);
		strtok_r(nullptr, " \n", &save);
		for (char *w = strtok_r(nullptr, " \n", &save); w; w = strtok_r(nullptr, " \n", &save)) {
			char *v = strtok_r(nullptr, " \n", &save);
			if (!v)
				return false;
			if (!strcmp(w, "die"))
				die = atoll(v);
			else if (!strcmp(w, "tell"))
				tell = atoll(v);
			else if (!strcmp(w, "slot"))
				slot = atoll(v);
			else if (!strcmp(w, "period"))
				period = atoll(v);
			else if (char *to = strtok_r(nullptr, " \n", &save); to && !strcmp(w, "off"))
				off.push_back({atoll(v), atoll(to)});
			else if (to && !strcmp(w, "beat"))
				beats.push_back({atoll(v), atoll(to)});
			else
				return false;
		}
		return end > measure && measure >= begin && slot > 0 && (beats.empty() || period >= beats.back().second);
	}

	// idle_until is the end of the pause that now is in, or 0.
	int64_t idle_until(int64_t now) const
	{
		for (auto &o : off)
			if (now >= o.first && now < o.second)
				return o.second;
		if (beats.empty())
			return 0;
		if (now < measure)
			return measure + beats[0].first;
		int64_t in = (now - measure) % period;
		for (auto &b : beats)
			if (in < b.second)
				return in < b.first ? now - in + b.first : 0;
		return now - in + period + beats[0].first;
	}
};

class Tenant {
	Order o;
	Gpu &gpu;
	std::vector<unsigned> items;
	std::vector<int64_t> gap;
	std::vector<float> lat; // us from giving an item to its end, for sync
	int64_t last = 0;
	unsigned at_once;
	bool waits;

	void note(int64_t now, unsigned n)
	{
		if (now >= o.measure && now < o.end) {
			size_t slot = (now - o.measure) / o.slot;
			items[slot] += n;
			if (last)
				gap[slot] = std::max(gap[slot], now - last);
		}
		bool turn = last && now - last > TURN_GAP;
		last = now;
		if (o.tell && now > o.tell && (turn || now > o.tell + 1000000000)) {
			o.tell = 0;
			printf("turn %ld\n", now);
			fflush(stdout);
		}
		if (o.die && now > o.die && (turn || now > o.die + 1000000000)) {
			printf("dies %ld\n", now);
			fflush(stdout);
			raise(SIGKILL);
		}
	}

	void rest(int64_t until)
	{
		while (gpu.flying()) {
			gpu.wait();
			note(now_ns(), 1);
		}
		sleep_until(std::min(until, o.end));
		last = 0;
	}

public:
	Tenant(const Order &order, Gpu &g, unsigned n, bool sync)
		: o(order), gpu(g), items((o.end - o.measure) / o.slot + 1), gap(items.size()), at_once(n), waits(sync)
	{
	}

	void run()
	{
		sleep_until(o.begin);
		for (int64_t now; (now = now_ns()) < o.end;) {
			if (int64_t until = o.idle_until(now)) {
				rest(until);
				continue;
			}
			while (!gpu.full())
				gpu.submit();
			gpu.wait(at_once);
			int64_t then = now_ns();
			note(then, at_once);
			if (waits && now >= o.measure && lat.size() < 4000000)
				lat.push_back((then - now) / 1e3f);
		}
		while (gpu.flying())
			gpu.wait();
	}

	void print(const char *load)
	{
		auto at = [&](double p) { return lat.empty() ? 0.0f : lat[(size_t)(p * (lat.size() - 1))]; };
		std::sort(lat.begin(), lat.end());
		printf("{\"load\": \"%s\", \"measure\": %ld, \"end\": %ld, \"lat_us\": [%.1f, %.1f, %.1f, %.1f], \"items\": [", load, o.measure,
		       o.end, at(0.5), at(0.9), at(0.99), at(1));
		for (size_t i = 0; i + 1 < items.size(); i++)
			printf("%s%u", i ? "," : "", items[i]);
		printf("], \"gap_us\": [");
		for (size_t i = 0; i + 1 < gap.size(); i++)
			printf("%s%ld", i ? "," : "", gap[i] / 1000);
		printf("]}\n");
		fflush(stdout);
	}
};

int main(int argc, char **argv)
{
	const Load *l = nullptr;
	for (auto &each : loads)
		if (argc > 1 && !strcmp(argv[1], each.name))
			l = &each;
	int depth = l && argc > 2 ? atoi(argv[2]) : l ? l->depth : 0;
	if (depth < 1) {
		fprintf(stderr, "usage: share gemm|copy|small|mixed|graph|sync|long [DEPTH]\n");
		return 2;
	}
	Gpu gpu(l->name, depth);
	const char *socket = getenv("SLUICE_SOCKET");
	printf("ready %s\n", socket ? socket : "-");
	fflush(stdout);
	Order o;
	if (!o.read(stdin)) {
		fprintf(stderr, "share: no times were given, or wrong ones\n");
		return 2;
	}
	Tenant t(o, gpu, depth % l->at_once ? 1 : l->at_once, depth == 1);
	t.run();
	t.print(l->name);
	CU(cudaDeviceSynchronize());
	return 0;
}
