/* Processes that share a GPU, what NVML says of them, and faults on demand. */
#include "testing.h"

/* NVML, as a worker opens it */

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process;
typedef struct { unsigned int pid; unsigned long long stamp; unsigned int sm, mem, enc, dec; } sample;

static struct {
	int (*init)(void), (*count)(unsigned int *), (*index)(unsigned int, void **), (*memory)(void *, memory_v1 *);
	int (*procs)(void *, unsigned int *, process *), (*name)(void *, char *, unsigned int);
	int (*uuid)(void *, char *, unsigned int), (*util)(void *, unsigned int *), (*shutdown)(void);
	int (*by_uuid)(const char *, void **), (*busy)(void *, sample *, unsigned int *, unsigned long long);
	void *dev;
} nv;

static void nvml(void)
{
	char path[4096];
	void *so;

	snprintf(path, sizeof(path), "%s/libnvidia-ml.so.1", test_dir);
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	CHECK(so != NULL);
	if (!so)
		_exit(3);
	*(void **)&nv.init = dlsym(so, "nvmlInit_v2");
	*(void **)&nv.count = dlsym(so, "nvmlDeviceGetCount_v2");
	*(void **)&nv.index = dlsym(so, "nvmlDeviceGetHandleByIndex_v2");
	*(void **)&nv.memory = dlsym(so, "nvmlDeviceGetMemoryInfo");
	*(void **)&nv.procs = dlsym(so, "nvmlDeviceGetComputeRunningProcesses_v3");
	*(void **)&nv.name = dlsym(so, "nvmlDeviceGetName");
	*(void **)&nv.uuid = dlsym(so, "nvmlDeviceGetUUID");
	*(void **)&nv.util = dlsym(so, "nvmlDeviceGetUtilizationRates");
	*(void **)&nv.by_uuid = dlsym(so, "nvmlDeviceGetHandleByUUID");
	*(void **)&nv.busy = dlsym(so, "nvmlDeviceGetProcessUtilization");
	*(void **)&nv.shutdown = dlsym(so, "nvmlShutdown");
	CHECK(!nv.init() && !nv.index(0, &nv.dev));
}

static unsigned long long used_by(int pid)
{
	unsigned int n = 64;
	process p[64];

	CHECK(!nv.procs(nv.dev, &n, p));
	for (unsigned int i = 0; i < n; i++)
		if (p[i].pid == (unsigned int)pid)
			return p[i].used;
	return 0;
}

/* A second process: takes a context and bytes, says so, waits to be killed. */
static pid_t holder(size_t bytes, CUresult *result)
{
	CUresult r;
	int ready[2];
	pid_t pid;

	CHECK(!pipe(ready));
	pid = fork();
	if (!pid) {
		CUdeviceptr p;

		begin();
		r = cuMemAlloc_v2(&p, bytes);
		if (write(ready[1], &r, sizeof(r)) < 0)
			_exit(1);
		pause();
		_exit(0);
	}
	close(ready[1]);
	CHECK(read(ready[0], result, sizeof(*result)) == sizeof(*result));
	close(ready[0]);
	return pid;
}

static void t_compete(void)
{
	size_t n, total, before;
	memory_v1 m;
	CUdeviceptr p;
	CUresult r;
	pid_t a, b;
	int st;

	a = holder(300 * MIB, &r);
	IS(r, CUDA_SUCCESS);
	b = holder(200 * MIB, &r);		/* 512 - 2 * 64 - 300 is not enough */
	IS(r, CUDA_ERROR_OUT_OF_MEMORY);
	nvml();
	CHECK(!nv.memory(nv.dev, &m));
	CHECK(m.total == 512 * MIB && m.used == (300 + 128) * MIB && m.free == m.total - m.used);
	CHECK(used_by(a) == 364 * MIB && used_by(b) == 64 * MIB);
	kill(b, SIGTERM);
	waitpid(b, &st, 0);
	begin();
	CU(cuMemGetInfo_v2(&before, &total));
	CHECK(before == (512 - 364 - 64) * MIB);
	CHECK(used_by((int)getpid()) == 64 * MIB);
	IS(cuMemAlloc_v2(&p, before + 1), CUDA_ERROR_OUT_OF_MEMORY);
	kill(a, SIGKILL);			/* dead is enough, reaped it need not be */
	for (int i = 0; i < 200 && used_by(a); i++)
		usleep(5000);
	CU(cuMemGetInfo_v2(&n, &total));
	CHECK(n == before + 364 * MIB);
	waitpid(a, &st, 0);
	CU(cuMemAlloc_v2(&p, n));
	CHECK(used_by((int)getpid()) == 512 * MIB);
}

/* Killed at any moment, also within an allocation: nothing stays behind. */
static void t_kill(void)
{
	unsigned int seed = 7;
	size_t n, n0, total;

	begin();
	CU(cuMemGetInfo_v2(&n0, &total));
	for (int i = 0; i < 40; i++) {
		pid_t pid = fork();
		int st;

		if (!pid) {
			/* a fork after use is refused, so begin anew */
			execl("/proc/self/exe", "test_share", "--churn", NULL);
			_exit(1);
		}
		usleep((useconds_t)(3000 + rand_r(&seed) % 15000));
		kill(pid, SIGKILL);
		waitpid(pid, &st, 0);
		CU(cuMemGetInfo_v2(&n, &total));
		CHECK(n == n0);
	}
}

static int churn(void)
{
	CUdeviceptr p[8] = { 0 };

	begin();
	for (unsigned int i = 0;; i++) {
		if (p[i % 8])
			CU(cuMemFree_v2(p[i % 8]));
		CU(cuMemAlloc_v2(&p[i % 8], (i % 5 + 1) * MIB));
	}
	return 0;
}

/* Several processes take and give back at once; what all hold never exceeds what there is. */
static void t_crowd(void)
{
	CUdeviceptr p[64] = { 0 };
	memory_v1 m;
	pid_t pid[4];
	CUcontext c;
	int st;

	nvml();
	for (int i = 0; i < 4; i++) {
		pid[i] = fork();
		if (pid[i])
			continue;
		CU(cuInit(0));
		while (cuDevicePrimaryCtxRetain(&c, 0))	/* the others may have it all just now */
			usleep(100);
		CU(cuCtxSetCurrent(c));
		srand((unsigned int)i);
		for (int k = 0; k < 3000; k++) {
			int at = rand() % 64;

			if (p[at]) {
				CU(cuMemFree_v2(p[at]));
				p[at] = 0;
			} else if (cuMemAlloc_v2(&p[at], (size_t)(rand() % 16) * MIB + 1)) {
				p[at] = 0;
			}
		}
		_exit(0);
	}
	for (int i = 0; i < 300; i++) {
		CHECK(!nv.memory(nv.dev, &m) && m.used <= m.total);
		usleep(100);
	}
	for (int i = 0; i < 4; i++) {
		waitpid(pid[i], &st, 0);
		CHECK(st == 0);
	}
	CHECK(!nv.memory(nv.dev, &m) && m.used == 0);
}

static void t_nvml(void)
{
	unsigned int n, util[2];
	char text[96];
	int ms = 300;
	void *args[] = { &ms }, *d;
	CUfunction f;

	nvml();
	CHECK(!nv.count(&n) && n == 1);
	CHECK(!nv.name(nv.dev, text, sizeof(text)) && strstr(text, "Simulated"));
	CHECK(!nv.uuid(nv.dev, text, sizeof(text)) && !strncmp(text, "GPU-", 4));
	CHECK(!nv.by_uuid(text, &d) && d == nv.dev);
	CHECK(nv.uuid((void *)&n, text, sizeof(text)) == 2);
	CHECK(nv.uuid(nv.dev, text, 5) == 7);
	begin();
	f = kernel("_Z5sleepi");
	CHECK(!nv.util(nv.dev, util));
	CU(run1(f, NULL, args));
	CU(cuCtxSynchronize());
	CHECK(!nv.util(nv.dev, util) && util[0] > 60);
	CHECK(!nv.shutdown());
	CHECK(nv.count(&n) == 1);
}

static unsigned long long wall_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (unsigned long long)t.tv_sec * 1000000ULL + (unsigned long long)t.tv_nsec / 1000;
}

/* The busy time of a process in ms since a look at *stamp, which becomes this one's; -1: not told of. */
static double busy_of(int pid, unsigned long long *stamp)
{
	unsigned long long now = wall_us(), then = *stamp;
	unsigned int n = 0;
	sample s[64];
	int r;

	*stamp = now;
	r = nv.busy(nv.dev, NULL, &n, then);
	if (r == 6)
		return -1;
	CHECK(r == 7 && n && n <= 64);
	CHECK(!nv.busy(nv.dev, s, &n, then));
	for (unsigned int i = 0; i < n; i++)
		if (s[i].pid == (unsigned int)pid) {
			CHECK(s[i].sm <= 100 && s[i].stamp > then);
			return s[i].sm * (double)(now - then) / 1e5;
		}
	return -1;
}

static void t_busy(void)
{
	unsigned long long stamp = wall_us();
	int me = (int)getpid(), ms = 10000, st, ready[2];
	void *args[] = { &ms };
	double t, all, start;
	CUstream a, b;
	CUfunction f;
	pid_t pid;

	nvml();
	CHECK(busy_of(me, &stamp) == -1);
	CHECK(!pipe(ready));
	start = now_ms();
	pid = fork();
	if (!pid) {				/* in the middle of a long kernel */
		begin();
		f = kernel("_Z5sleepi");
		CU(run1(f, NULL, args));
		CHECK(write(ready[1], "", 1) == 1);
		pause();
	}
	CHECK(read(ready[0], &st, 1) == 1);
	usleep(150000);
	t = busy_of(pid, &stamp);
	CHECK(t > 90 && t < now_ms() - start + 20);
	usleep(50000);
	kill(pid, SIGKILL);
	waitpid(pid, &st, 0);
	CHECK(busy_of(pid, &stamp) == -1);	/* who has ended is not told of, as on a real GPU */
	begin();
	f = kernel("_Z5sleepi");
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	usleep(30000);
	busy_of(me, &stamp);
	start = now_ms();
	ms = 200;
	CU(run1(f, a, args));
	CU(run1(f, b, args));
	usleep(100000);
	t = busy_of(me, &stamp);		/* both still run, side by side */
	CHECK(t > 80 && t < now_ms() - start + 40);
	CU(cuCtxSynchronize());
	usleep(300000);
	all = t + busy_of(me, &stamp);
	CHECK(all > 170 && all < 390);		/* one after the other they would take 400 */
}

/* faults */

static void t_slow(void)
{
	int ms = 0;
	void *args[] = { &ms };
	double start;
	CUfunction f;

	begin();
	f = kernel("_Z5sleepi");
	start = now_ms();
	CU(run1(f, NULL, args));
	CU(cuCtxSynchronize());
	CHECK(now_ms() - start >= 80);
}

static void sticky(CUresult want)
{
	CUdeviceptr p;
	CUstream s;
	CUevent e;
	CUcontext c;
	CUdevice d;
	int n;

	IS(cuCtxSynchronize(), want);
	IS(cuMemAlloc_v2(&p, 4), want);
	IS(cuStreamCreate(&s, 0), want);
	IS(cuEventCreate(&e, 0), want);
	IS(cuStreamSynchronize(NULL), want);
	IS(cuStreamQuery(CU_STREAM_PER_THREAD), want);
	CU(cuDeviceGetCount(&n));
	CU(cuCtxGetCurrent(&c));
	CU(cuCtxGetDevice(&d));
}

static void t_illegal(void)
{
	int k = 1, add = 1, v = -1;
	CUdeviceptr p, q;
	void *args[] = { &p, &k, &add };
	CUfunction f;
	CUcontext c;

	begin();
	f = kernel("_Z3madPiii");
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuMemsetD32_v2(p, 0, 1));
	CU(run1(f, NULL, args));
	CU(run1(f, NULL, args));
	CU(cuCtxSynchronize());
	CU(run1(f, NULL, args));		/* the third, as asked */
	IS(cuMemcpyDtoH_v2(&v, p, 4), CUDA_ERROR_ILLEGAL_ADDRESS);
	CHECK(v == -1);				/* nothing runs after it */
	sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
	CU(cuCtxCreate_v2(&c, 0, 0));		/* another context is not touched */
	CU(cuMemAlloc_v2(&q, 4));
	CU(cuCtxDestroy_v2(c));
	sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
	CU(cuDevicePrimaryCtxReset_v2(0));
	CU(cuDevicePrimaryCtxRetain(&c, 0));
	CU(cuMemAlloc_v2(&p, 4));
}

/* A twin that looks before it writes. */
static void t_checked(void)
{
	CUdeviceptr p = 0x12345000;
	int k = 1, add = 1, assert_ = CUDA_ERROR_ASSERT;
	void *args[] = { &p, &k, &add }, *fargs[] = { &assert_ };
	CUfunction f, g;
	CUcontext c;

	c = begin();
	f = kernel("_Z3madPiii");
	CU(run1(f, NULL, args));
	sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
	CU(cuDevicePrimaryCtxReset_v2(0));
	CU(cuDevicePrimaryCtxRetain(&c, 0));
	g = kernel("_Z5faulti");
	CU(run1(g, NULL, fargs));
	sticky(CUDA_ERROR_ASSERT);
}

static void t_hang(void)
{
	int ms = 1;
	void *args[] = { &ms };
	CUfunction f, g;
	CUcontext c;
	CUstream s, o;

	begin();
	CU(cuCtxCreate_v2(&c, 0, 0));
	f = kernel("_Z5sleepi");
	g = kernel("_Z3sayi");
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&o, CU_STREAM_NON_BLOCKING));
	CU(run1(f, s, args));
	CU(run1(g, o, args));
	CU(cuStreamSynchronize(o));		/* others go on */
	usleep(50000);
	IS(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
	CU(cuCtxDestroy_v2(c));			/* and it ends with its context */
}

static void t_alloc(void)
{
	CUdeviceptr p;

	begin();				/* the context is the first */
	CU(cuMemAlloc_v2(&p, 4));
	IS(cuMemAlloc_v2(&p, 4), CUDA_ERROR_OUT_OF_MEMORY);
	CU(cuMemAlloc_v2(&p, 4));
}

static void t_init(void)
{
	int n;

	IS(cuInit(0), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuDeviceGetCount(&n), CUDA_ERROR_SYSTEM_NOT_READY);
}

static void t_none(void)
{
	IS(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "two processes compete", t_compete, { "SLUICE_SIM_MEM=512M" } },
		{ "killed at any moment", t_kill, { NULL } },
		{ "a crowd", t_crowd, { "SLUICE_SIM_MEM=512M", "SLUICE_SIM_CTX_MEM=32M" } },
		{ "nvml", t_nvml, { NULL } },
		{ "busy time of processes", t_busy, { NULL } },
		{ "fault: slow", t_slow, { "SLUICE_SIM_FAULT=slow=_Z5sleepi:80" } },
		{ "fault: illegal address", t_illegal, { "SLUICE_SIM_FAULT=illegal=_Z3madPiii:3" } },
		{ "fault: found by a twin", t_checked, { NULL } },
		{ "fault: hang", t_hang, { "SLUICE_SIM_FAULT=hang=_Z5sleepi" } },
		{ "fault: allocation", t_alloc, { "SLUICE_SIM_FAULT=alloc=3" } },
		{ "fault: init", t_init, { "SLUICE_SIM_FAULT=init=802" } },
		{ "no device", t_none, { "SLUICE_SIM_DEVICES=0" } },
		{ NULL, NULL, { NULL } },
	};

	if (argc == 2 && !strcmp(argv[1], "--churn"))
		return churn();
	return run_tests(tests, argc, argv);
}
