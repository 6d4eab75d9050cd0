/* What work costs on the simulated engine, for one process and for several, whatever becomes of them. */
#include <fcntl.h>
#include <stdatomic.h>

#include "testclock.h"

static void t_off(void)
{
	uint64_t t = 7;

	begin();
	CHECK(sluice_sim_clock(0, &t) && t == 7);
	sluice_sim_wait(0, NULL, 0, 1000, 0);
}

static void t_costs(void)
{
	CUfunction count, mad, sleep;
	int one = 1, ms = 7;
	CUdeviceptr p;
	CUevent e[5];
	float t;

	begin();
	count = kernel("_Z4nonev");
	mad = kernel("_Z3madPiii");
	sleep = kernel("_Z5sleepi");
	CU(cuMemAlloc_v2(&p, 4));
	for (int i = 0; i < 5; i++)
		CU(cuEventCreate(&e[i], 0));
	CU(cuEventRecord(e[0], NULL));
	CU(run1(count, NULL, NULL));			/* by name */
	CU(cuEventRecord(e[1], NULL));
	CU(run1(mad, NULL, (void *[]){ &p, &one, &one }));	/* as any */
	CU(cuEventRecord(e[2], NULL));
	CU(run1(sleep, NULL, (void *[]){ &ms }));	/* as the twin says */
	CU(cuEventRecord(e[3], NULL));
	CU(cuCtxSynchronize());
	CU(cuEventElapsedTime(&t, e[0], e[1]));
	CHECK(near((uint64_t)(t * 1e6f), 300 * US, 2 * US));
	CU(cuEventElapsedTime(&t, e[1], e[2]));
	CHECK(near((uint64_t)(t * 1e6f), 20 * US, 2 * US));
	CU(cuEventElapsedTime(&t, e[2], e[3]));
	CHECK(near((uint64_t)(t * 1e6f), 7 * MS, 2 * US));
}

static void t_copies(void)
{
	static char buf[4 << 20];
	CUdeviceptr p, q;
	uint64_t t;

	begin();
	CU(cuMemAlloc_v2(&p, sizeof(buf)));
	CU(cuMemAlloc_v2(&q, sizeof(buf)));
	t = clock_ns();
	CU(cuMemcpyHtoD_v2(p, buf, 4000000));		/* 10 GB/s */
	CHECK(near(clock_ns() - t, 400 * US, 20 * US));
	t = clock_ns();
	CU(cuMemcpyDtoD_v2(q, p, 4000000));		/* 1000 GB/s */
	CU(cuCtxSynchronize());
	CHECK(near(clock_ns() - t, 4 * US, 20 * US));
	t = clock_ns();
	CU(cuMemsetD32_v2(q, 1, 1000000));
	CU(cuCtxSynchronize());
	CHECK(near(clock_ns() - t, 4 * US, 20 * US));
}

static void t_busy(void)
{
	CUfunction f;
	uint64_t t;
	int (*init)(void), (*index)(unsigned int, void **), (*util)(void *, unsigned int *);
	int (*look)(int, uint64_t *);
	unsigned int u[2];
	char path[4096];
	void *so, *dev;

	snprintf(path, sizeof(path), "%s/libnvidia-ml.so.1", test_dir);
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	CHECK(so != NULL);
	*(void **)&init = dlsym(so, "nvmlInit_v2");
	*(void **)&index = dlsym(so, "nvmlDeviceGetHandleByIndex_v2");
	*(void **)&util = dlsym(so, "nvmlDeviceGetUtilizationRates");
	*(void **)&look = dlsym(so, "sluice_sim_clock");
	begin();
	f = kernel("_Z5sleepi");
	CHECK(!init() && !index(0, &dev) && !util(dev, u));
	for (int i = 0; i < 10; i++) {
		sleep_kernel(f, 15, NULL);
		CU(cuCtxSynchronize());
		sluice_sim_wait(0, NULL, 0, clock_ns() + 5 * MS, 1);
	}
	CHECK(!util(dev, u));
	CHECK(u[0] >= 70 && u[0] <= 76);
	CHECK(!look(0, &t) && near(t, clock_ns(), MS));
}

/* several */

static size_t trace(struct sim_span *out, size_t max)
{
	int fd = open(getenv("SLUICE_SIM_TRACE"), O_RDONLY);
	ssize_t n = read(fd, out, max * sizeof(*out));

	close(fd);
	unlink(getenv("SLUICE_SIM_TRACE"));
	return n > 0 ? (size_t)n / sizeof(*out) : 0;
}

static void trace_on(void)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s.trace", getenv("SLUICE_SIM_STATE"));
	setenv("SLUICE_SIM_TRACE", path, 1);
}

static void t_two(void)
{
	static struct sim_span s[4096];
	struct { uint64_t busy, items; } got[2] = { { 0, 0 } };
	volatile uint32_t *w = shared();
	uint64_t last = 0;
	pid_t pid;
	size_t n;

	trace_on();
	pid = child();
	begin();
	CUfunction f = kernel("_Z4nonev");

	set_word(&w[pid ? 0 : 1], 1);
	await(&w[pid ? 1 : 0], 1);
	for (int i = 0; i < 300; i++) {
		CU(run1(f, NULL, NULL));
		if (i % 10 == 0)
			CU(cuCtxSynchronize());
	}
	CU(cuCtxSynchronize());
	if (!pid)
		exit(test_bad);
	reap(pid, 0);
	for (int i = 0; i < 10; i++)	/* ends the spans of before */
		CU(run1(f, NULL, NULL));
	CU(cuCtxSynchronize());
	n = trace(s, 4096);
	CHECK(n > 100 && n < 4096);
	for (size_t i = 0; i < n; i++) {
		bool turn = i && s[i].pid != s[i - 1].pid;

		CHECK(s[i].start >= last + (turn ? 150 * US : 0));	/* and the switch before */
		CHECK(s[i].end - s[i].start >= s[i].busy && s[i].busy == s[i].items * 300 * US);
		last = s[i].end;
		got[s[i].pid == pid].busy += s[i].busy;
		got[s[i].pid == pid].items += s[i].items;
	}
	CHECK(got[1].items == 300 && got[0].items >= 300);
}

/* Work of others gets in between the slices of a long kernel, and past one that never ends. */
static void t_long(void)
{
	volatile uint32_t *w = shared();
	CUfunction count;
	uint64_t t;
	pid_t pid = child();

	begin();
	count = kernel("_Z4nonev");
	if (!pid) {
		CUfunction f = kernel("_Z5sleepi"), hang = kernel("_Z3sayi");

		sleep_kernel(f, 1, NULL);
		CU(cuCtxSynchronize());
		set_word(w, 1);
		await(w, 2);
		sleep_kernel(f, 600000, NULL);
		CU(run1(hang, NULL, (void *[]){ &(int){ 1 } }));
		pause();
	}
	CU(run1(count, NULL, NULL));
	CU(cuCtxSynchronize());
	await(w, 1);
	t = clock_ns();
	set_word(w, 2);
	while (clock_ns() < t + 10 * MS) {
		CU(run1(count, NULL, NULL));
		CU(cuCtxSynchronize());
		usleep(200);
	}
	t = clock_ns();
	for (int i = 0; i < 20; i++) {
		CU(run1(count, NULL, NULL));
		CU(cuCtxSynchronize());
	}
	CHECK(clock_ns() - t < 2000 * MS);	/* of 600 s */
	kill(pid, SIGKILL);
	reap(pid, SIGKILL);
	t = clock_ns();
	CU(run1(count, NULL, NULL));
	CU(cuCtxSynchronize());
	CHECK(clock_ns() - t < 10 * MS);
}

static int churn(void)
{
	CUfunction f;

	begin();
	f = kernel("_Z4nonev");
	for (unsigned int i = 0;; i++) {
		CU(run1(f, NULL, NULL));
		if (i % 3 == 0)
			CU(cuCtxSynchronize());
		if (i % 5 == 0)
			sluice_sim_wait(0, NULL, 0, clock_ns() + i % 7 * MS, (int)i % 2);
	}
	return 0;
}

/* Killed at any instant, nobody is kept from going on. */
static void t_killed(void)
{
	unsigned int seed = 11;
	double real;
	CUfunction f;
	int st;

	begin();
	f = kernel("_Z4nonev");
	for (int i = 0; i < 40; i++) {
		pid_t pid = child();

		if (!pid) {
			execl("/proc/self/exe", "test_engine", "--churn", NULL);
			_exit(1);
		}
		usleep((useconds_t)(3000 + rand_r(&seed) % 12000));
		kill(pid, SIGKILL);
		if (i % 2)
			waitpid(pid, &st, 0);
		real = now_ms();
		CU(run1(f, NULL, NULL));
		CU(cuCtxSynchronize());
		sluice_sim_wait(0, NULL, 0, clock_ns() + 1000 * MS, 1);
		CHECK(now_ms() - real < 2000);
		if (!(i % 2))
			waitpid(pid, &st, 0);
	}
}

/* One who dies with the engine's lock keeps nobody from it, be it that others wait already or not. */
static struct sim_shared *state;

static void *kill_when_awaited(void *pid)
{
	for (bool some = false; !some; sched_yield())
		for (int i = 0; i < SIM_MAX_PROC && !some; i++)
			some = atomic_load(&state->proc[i].entering) > 0;
	kill(*(pid_t *)pid, SIGKILL);
	return NULL;
}

static void t_locked(void)
{
	volatile uint32_t *w = shared();
	CUfunction f;
	int fd;

	begin();
	f = kernel("_Z4nonev");
	fd = open(getenv("SLUICE_SIM_STATE"), O_RDWR);
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(state != MAP_FAILED);
	close(fd);
	for (uint32_t i = 1; i <= 10; i++) {
		pid_t pid = child();
		double real;
		pthread_t t;
		uint64_t clock;

		if (!pid) {
			pthread_mutex_lock(&state->engine[0].lock);
			set_word(w, i);
			pause();
		}
		await(w, i);
		if (i % 2) {
			kill(pid, SIGKILL);
			reap(pid, SIGKILL);
		} else {
			CHECK(!pthread_create(&t, NULL, kill_when_awaited, &pid));
		}
		real = now_ms();
		CU(run1(f, NULL, NULL));
		CU(cuCtxSynchronize());
		clock = clock_ns();
		sluice_sim_wait(0, NULL, 0, clock + 1000 * MS, 1);
		CHECK(near(clock_ns() - clock, 1000 * MS, MS));
		CHECK(now_ms() - real < 2000);
		if (i % 2 == 0) {
			pthread_join(t, NULL);
			reap(pid, SIGKILL);
		}
	}
}

static void t_bad(void)
{
	static const char *const bad[] = { "count", ":1", "a:x", "a:-1", "copy:0", "a:1e99", "a:1,b" };

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		setenv("SLUICE_SIM_COST", bad[i], 1);
		IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
	}
	setenv("SLUICE_SIM_COST", "a:1", 1);
	setenv("SLUICE_SIM_IDLE", "0.5", 1);
	IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
	unsetenv("SLUICE_SIM_IDLE");
	setenv("SLUICE_SIM_WATCH", "/dev/null", 1);
	IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
}

static const struct test tests[] = {
	{ "no costs, no clock", t_off, { NULL } },
	{ "costs", t_costs, { COST, STILL } },
	{ "copies and sets", t_copies, { COST, STILL } },
	{ "utilisation by the clock", t_busy, { COST, SLOW } },
	{ "two processes", t_two, { COST, SLOW, "SLUICE_SIM_SWITCH=150" } },
	{ "long kernels", t_long, { COST, SLOW, "SLUICE_SIM_FAULT=hang=_Z3sayi" } },
	{ "killed", t_killed, { COST, SLOW } },
	{ "a lock of the dead", t_locked, { COST, SLOW } },
	{ "settings that make no sense", t_bad, { NULL } },
	{ NULL, NULL, { NULL } },
};

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "--churn"))
		return churn();
	return run_tests(tests, argc, argv);
}
