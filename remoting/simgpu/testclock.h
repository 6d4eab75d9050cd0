/* What tests of the engine and its clock need besides testing.h. */
#ifndef SLUICE_SIM_TESTCLOCK_H
#define SLUICE_SIM_TESTCLOCK_H

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

#define COST "SLUICE_SIM_COST=_Z4nonev:300,*:20,copy:10,inner:1000"
#define SLOW "SLUICE_SIM_IDLE=1000"
#define STILL "SLUICE_SIM_IDLE=1000000"

static inline uint64_t clock_ns(void)
{
	uint64_t t = 0;

	CHECK(!sluice_sim_clock(0, &t));
	return t;
}

static inline bool near(uint64_t have, uint64_t want, uint64_t off)
{
	bool ok = have + off >= want && have <= want + off;

	if (!ok)
		fprintf(stderr, "%llu ns, not %llu\n", (unsigned long long)have, (unsigned long long)want);
	return ok;
}

/* Memory that forked processes share. */
static inline volatile uint32_t *shared(void)
{
	void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static inline void set_word(volatile uint32_t *w, uint32_t v)
{
	__atomic_store_n(w, v, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, w, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Waits for the other process, in real time; a process that slept here would be idle. */
static inline void await(volatile uint32_t *w, uint32_t v)
{
	while (__atomic_load_n(w, __ATOMIC_SEQ_CST) != v)
		sched_yield();
}

static inline void sleep_kernel(CUfunction f, int ms, CUstream s)
{
	CU(run1(f, s, (void *[]){ &ms }));
}

/* A process that does not outlive its parent, however that ends. */
static inline pid_t child(void)
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

static inline void reap(pid_t pid, int want)
{
	int st;

	CHECK(waitpid(pid, &st, 0) == pid);
	CHECK(WIFSIGNALED(st) ? WTERMSIG(st) == want : WEXITSTATUS(st) == want);
}

#endif
