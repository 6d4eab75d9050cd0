/* What work costs on the simulated clock, and how that clock goes, for one process and for several. */
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "engine.h"
#include "testing.h"

int sluice_sim_clock(int dev, uint64_t *ns);
void sluice_sim_wait(int dev, const uint32_t *word, uint32_t old, uint64_t until, int blocked);

#define US 1000ULL
#define MS 1000000ULL

static uint64_t clock_ns(void)
{
	uint64_t t = 0;

	CHECK(!sluice_sim_clock(0, &t));
	return t;
}

static bool near(uint64_t have, uint64_t want, uint64_t off)
{
	bool ok = have + off >= want && have <= want + off;

	if (!ok)
		fprintf(stderr, "%llu ns, not %llu\n", (unsigned long long)have, (unsigned long long)want);
	return ok;
}

/* Memory that forked processes share. */
static volatile uint32_t *shared(void)
{
	void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static void set_word(volatile uint32_t *w, uint32_t v)
{
	__atomic_store_n(w, v, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, w, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* For the other process, in real time; who slept here would be at rest. */
static void await(volatile uint32_t *w, uint32_t v)
{
	while (__atomic_load_n(w, __ATOMIC_SEQ_CST) != v)
		sched_yield();
}

static void sleep_kernel(CUfunction f, int ms, CUstream s)
{
	CU(run1(f, s, (void *[]){ &ms }));
}

/* A process that does not outlive its parent, however that ends. */
static pid_t child(void)
{
	pid_t parent = getpid(), pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
	}
	return pid;
}

static void reap(pid_t pid, int want)
{
	int st;

	CHECK(waitpid(pid, &st, 0) == pid);
	CHECK(WIFSIGNALED(st) ? WTERMSIG(st) == want : WEXITSTATUS(st) == want);
}

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

/* one process */

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

static void t_idle(void)
{
	uint64_t t, u;

	begin();
	t = clock_ns();
	usleep(50000);
	u = clock_ns();
	CHECK(u - t >= 4900 * US && u - t < 100 * MS);	/* 10 times slower, on a machine that has other things to do */
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

/* Alone, nobody has anything to do before the time comes. */
static void t_jump(void)
{
	double real = now_ms();
	uint64_t t;

	begin();
	for (int i = 0; i < 100; i++) {
		t = clock_ns();
		sluice_sim_wait(0, NULL, 0, t + 1000 * MS, 1);
		CHECK(near(clock_ns() - t, 1000 * MS, MS));
	}
	CHECK(now_ms() - real < 5000);
	real = now_ms();
	t = clock_ns();
	sluice_sim_wait(0, NULL, 0, t + 1000 * MS, 0);	/* a timer says nothing of work, but none comes */
	CHECK(near(clock_ns() - t, 1000 * MS, MS));
	CHECK(now_ms() - real < 500);
	t = clock_ns();
	sluice_sim_wait(0, NULL, 0, t - 1, 1);
	sluice_sim_wait(0, (const uint32_t *)&test_bad, 99, t + 1000 * MS, 1);
	CHECK(clock_ns() < t + 100 * MS);
}

/* several */

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

/* A token that is handed to and fro between two who wait for each other. */
static void t_hand(void)
{
	volatile uint32_t *w = shared();
	double real = now_ms();
	uint64_t t0, t;
	pid_t pid;

	pid = child();
	begin();
	CUfunction f = kernel("_Z4nonev");
	uint32_t self = pid ? 0 : 1;

	CU(run1(f, NULL, NULL));	/* who has not begun is not waited for */
	CU(cuCtxSynchronize());
	set_word(&w[1 + self], 1);
	await(&w[2 - self], 1);
	t0 = clock_ns();
	for (uint32_t i = self; i < 400; i += 2) {
		while ((t = __atomic_load_n(w, __ATOMIC_SEQ_CST)) != i)
			sluice_sim_wait(0, (const uint32_t *)w, (uint32_t)t, clock_ns() + 60000 * MS, 1);
		CU(run1(f, NULL, NULL));
		CU(cuCtxSynchronize());
		set_word(w, i + 1);
	}
	if (!pid)
		exit(test_bad);
	reap(pid, 0);
	/* Nobody was skipped, so the clock has never run to anybody's limit. */
	CHECK(near(clock_ns() - t0, 400 * 300 * US, 3000 * MS));
	CHECK(now_ms() - real < 20000);
}

/* Who is busy elsewhere is waited for; who sleeps, is stopped or dead is not. */
static void t_rest(void)
{
	volatile uint32_t *w = shared();
	double real;
	uint64_t t;
	pid_t pid;

	pid = child();
	begin();
	if (!pid) {
		CUfunction f = kernel("_Z4nonev");

		CU(run1(f, NULL, NULL));
		CU(cuCtxSynchronize());
		set_word(w, 1);
		for (double end = now_ms() + 300; now_ms() < end;)
			;
		set_word(w, 2);
		while (!w[1])
			usleep(1000);
		sluice_sim_wait(0, (const uint32_t *)&w[2], 0, UINT64_MAX / 2, 1);
		set_word(w, 3);
		pause();
	}
	await(w, 1);
	t = clock_ns();
	while (w[0] == 1 && clock_ns() < t + 1000000 * MS)
		sluice_sim_wait(0, (const uint32_t *)w, 1, t + 1000000 * MS, 1);
	CHECK(w[0] == 2 && clock_ns() - t < 10000 * MS);
	await(w, 2);
	real = now_ms();
	t = clock_ns();
	sluice_sim_wait(0, NULL, 0, t + 1000000 * MS, 1);		/* it sleeps */
	CHECK(near(clock_ns() - t, 1000000 * MS, MS) && now_ms() - real < 2000);
	set_word(&w[1], 1);
	usleep(20000);
	real = now_ms();
	sluice_sim_wait(0, NULL, 0, clock_ns() + 1000000 * MS, 1);	/* it waits, too */
	CHECK(now_ms() - real < 2000);
	kill(pid, SIGSTOP);
	real = now_ms();
	sluice_sim_wait(0, NULL, 0, clock_ns() + 1000000 * MS, 1);
	set_word(&w[2], 1);
	sluice_sim_wait(0, NULL, 0, clock_ns() + 1000000 * MS, 1);
	CHECK(now_ms() - real < 2000);
	kill(pid, SIGCONT);
	await(w, 3);
	kill(pid, SIGKILL);
	sluice_sim_wait(0, NULL, 0, clock_ns() + 1000000 * MS, 1);
	reap(pid, SIGKILL);
	sluice_sim_wait(0, NULL, 0, clock_ns() + 1000000 * MS, 1);
	CHECK(now_ms() - real < 4000);
}

/* The time of one who was killed while it waited holds nobody up when it comes. */
static void t_late(void)
{
	volatile uint32_t *w = shared();
	double real;
	uint64_t t;
	pid_t pid = child();

	begin();
	CUfunction f = kernel("_Z4nonev");

	CU(run1(f, NULL, NULL));
	CU(cuCtxSynchronize());
	t = clock_ns() + 2 * MS;
	if (!pid) {
		set_word(w, 1);
		sluice_sim_wait(0, (const uint32_t *)&w[1], 0, clock_ns() + 50 * MS, 1);
		set_word(w, 2);
		pause();
	}
	while (!w[0])
		sched_yield();
	usleep(2000);
	kill(pid, SIGKILL);
	reap(pid, SIGKILL);
	real = now_ms();
	for (int i = 0; i < 10; i++)
		sluice_sim_wait(0, NULL, 0, clock_ns() + 20 * MS, 1);
	CHECK(w[0] == 2 || clock_ns() >= t);
	CHECK(now_ms() - real < 1000);
	CHECK(clock_ns() >= t + 150 * MS);
}

/* A timer goes off about when it should, however fast the clock runs under it. */
static void t_timer(void)
{
	uint64_t t, late = 0;
	pid_t pid = child();

	begin();
	CUfunction f = kernel("_Z4nonev");

	if (!pid) {
		for (;;) {
			CU(run1(f, NULL, NULL));
			CU(cuCtxSynchronize());
		}
	}
	for (int i = 0; i < 50; i++) {
		t = clock_ns() + 20 * MS;
		sluice_sim_wait(0, NULL, 0, t, 1);
		if (clock_ns() > t + late)
			late = clock_ns() - t;
	}
	kill(pid, SIGKILL);
	reap(pid, SIGKILL);
	CHECK(late < 500 * MS);		/* waking is real, and the other does 300 us meanwhile in as little as 5 */
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

static void t_bad(void)
{
	static const char *const bad[] = { "count", ":1", "a:x", "a:-1", "copy:0", "a:1,,b", "a:1e99" };

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]) - 2; i++) {
		setenv("SLUICE_SIM_COST", bad[i], 1);
		IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
	}
	setenv("SLUICE_SIM_COST", bad[6], 1);
	IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
	setenv("SLUICE_SIM_COST", "a:1", 1);
	setenv("SLUICE_SIM_IDLE", "0.5", 1);
	IS(cuInit(0), CUDA_ERROR_INVALID_VALUE);
}

#define COST "SLUICE_SIM_COST=_Z4nonev:300,*:20,copy:10,inner:1000"
#define SLOW "SLUICE_SIM_IDLE=1000"
#define STILL "SLUICE_SIM_IDLE=1000000"

static const struct test tests[] = {
	{ "no costs, no clock", t_off, { NULL } },
	{ "costs", t_costs, { COST, STILL } },
	{ "copies and sets", t_copies, { COST, STILL } },
	{ "an idle device's clock", t_idle, { COST, "SLUICE_SIM_IDLE=10" } },
	{ "utilisation by the clock", t_busy, { COST, SLOW } },
	{ "the clock jumps", t_jump, { COST, STILL } },
	{ "two processes", t_two, { COST, SLOW, "SLUICE_SIM_SWITCH=150" } },
	{ "a token between two", t_hand, { COST, SLOW } },
	{ "at rest or not", t_rest, { COST, SLOW } },
	{ "killed while it waits", t_late, { COST, SLOW } },
	{ "timers", t_timer, { COST, SLOW } },
	{ "long kernels", t_long, { COST, SLOW, "SLUICE_SIM_FAULT=hang=_Z3sayi" } },
	{ "killed", t_killed, { COST, SLOW } },
	{ "settings that make no sense", t_bad, { NULL } },
	{ NULL, NULL, { NULL } },
};

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "--churn"))
		return churn();
	return run_tests(tests, argc, argv);
}
