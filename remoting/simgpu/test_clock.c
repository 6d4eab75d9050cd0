/* How the simulated clock goes when nothing runs, and who is waited for. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "testclock.h"

static void t_idle(void)
{
	uint64_t t, u;

	begin();
	t = clock_ns();
	usleep(50000);
	u = clock_ns();
	CHECK(u - t >= 4900 * US && u - t < 100 * MS);	/* 10 times slower, on a machine that has other things to do */
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

/* The clock waits for a process that is busy elsewhere, not for one that sleeps, is stopped or dead. */
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

/* The process behind SLUICE_SIM_WATCH says when a process is idle. */
static void *sleeper(void *until)
{
	sluice_sim_wait(0, NULL, 0, *(uint64_t *)until, 1);
	return NULL;
}

static void t_watch(void)
{
	char path[4096];
	volatile uint32_t *w = shared();
	size_t size = SIM_MAX_PROC * sizeof(struct sim_watch);
	struct sim_watch *watch, *asked = NULL;
	uint64_t until;
	pthread_t t;
	pid_t pid;
	int fd;

	snprintf(path, sizeof(path), "%s.watch", getenv("SLUICE_SIM_STATE"));
	setenv("SLUICE_SIM_WATCH", path, 1);
	fd = open(path, O_RDWR | O_CREAT, 0600);
	CHECK(!ftruncate(fd, (off_t)size));
	watch = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	pid = child();
	begin();
	if (!pid) {
		CU(run1(kernel("_Z4nonev"), NULL, NULL));
		CU(cuCtxSynchronize());
		set_word(w, 1);
		pause();
	}
	await(w, 1);
	unlink(path);
	until = clock_ns() + 1000 * MS;
	CHECK(!pthread_create(&t, NULL, sleeper, &until));
	while (!asked)
		for (int i = 0; i < SIM_MAX_PROC && !asked; i++)
			if (atomic_load(&watch[i].want))
				asked = &watch[i];
	CHECK(atomic_load(&asked->pid) == pid);
	usleep(50000);	/* time to do it wrong */
	CHECK(clock_ns() < until - 500 * MS);
	atomic_store(&asked->asleep, atomic_load(&asked->want));
	pthread_join(t, NULL);
	CHECK(near(clock_ns(), until, 10 * MS));
	kill(pid, SIGKILL);
	reap(pid, SIGKILL);
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

static _Atomic uint64_t looks, longest;
static _Atomic bool over;

static void *look_often(void *unused)
{
	uint64_t last, t;

	sluice_sim_wait(0, NULL, 0, clock_ns() + MS, 0);
	for (last = clock_ns(); !over; last = t, looks++) {
		for (double real = now_ms(); now_ms() < real + 1;)
			;
		sluice_sim_wait(0, NULL, 0, last + MS, 0);
		t = clock_ns();
		if (t - last > longest)
			longest = t - last;
	}
	return unused;
}

/* A timer of the process whose work runs is waited for too, if that process has done nothing for a while: another's work runs between. */
static void t_own_timer(void)
{
	volatile uint32_t *w = shared();
	pid_t pid = child();
	pthread_t timer;
	uint32_t others;
	uint64_t t;

	begin();
	CUfunction f = kernel("_Z4nonev");

	if (!pid) {
		for (uint32_t n = 1;; n++) {
			CU(run1(f, NULL, NULL));
			CU(cuCtxSynchronize());
			set_word(w, n);
		}
	}
	while (!*w)	/* who has not begun is not waited for */
		sched_yield();
	CHECK(!pthread_create(&timer, NULL, look_often, NULL));
	while (looks < 3)
		usleep(100);
	longest = 0;
	others = *w;
	t = clock_ns();
	for (int i = 0; i < 10; i++)
		CU(run1(f, NULL, NULL));
	CU(cuCtxSynchronize());
	CHECK(clock_ns() - t >= 100 * MS && *w > others);
	over = true;
	CHECK(!pthread_join(timer, NULL));
	kill(pid, SIGKILL);
	reap(pid, SIGKILL);
	CHECK(near(longest, 8 * MS, 7 * MS));
}

static const struct test tests[] = {
	{ "an idle device's clock", t_idle, { COST, "SLUICE_SIM_IDLE=10" } },
	{ "the clock jumps", t_jump, { COST, STILL } },
	{ "a token between two", t_hand, { COST, SLOW } },
	{ "idle or not", t_rest, { COST, SLOW } },
	{ "idle as others say", t_watch, { COST, SLOW } },
	{ "killed while it waits", t_late, { COST, SLOW } },
	{ "timers", t_timer, { COST, SLOW } },
	{ "a timer of one's own", t_own_timer, { "SLUICE_SIM_COST=_Z4nonev:10000", STILL } },
	{ NULL, NULL, { NULL } },
};

int main(int argc, char **argv)
{
	return run_tests(tests, argc, argv);
}
