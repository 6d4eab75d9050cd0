/*
 * The clock of an engine.
 *
 * While nothing runs, the clock follows real time, divided by SLUICE_SIM_IDLE, so that a processor that is slow to
 * give the next piece of work hardly counts. A thread that waits for a time of this clock waits here
 * (sluice_sim_wait), and when no process has work the clock jumps to the earliest of these times.
 *
 * Everything of an engine is under its lock, except the words of processes (struct sim_proc), which are atomic.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "idle.h"

#define API __attribute__((visibility("default")))
#define MS 1000000ULL
#define NAP (5 * MS)		/* real: how often a waiting thread checks the clock */
#define PATIENCE (10000 * MS)	/* real: how long to wait for a process that could run but is not scheduled */
#define LEAD (2 * MS)		/* simulated: others' work runs at most this far ahead of a process that may have work and has done nothing */

static double pace = 1;		/* real time per simulated time while nothing runs */

void clock_config(double idle) { pace = idle; }

uint64_t clock_real(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

static struct sim_proc *me(void)
{
	int slot = state_slot();

	return slot < 0 ? NULL : &state_slots()[slot];
}

/* A thread that waits for the lock sleeps, but its process is not idle: it counts itself. */
void clock_lock(struct sim_engine *e)
{
	struct sim_proc *p = me();

	if (p)
		atomic_fetch_add(&p->entering, 1);
	if (pthread_mutex_lock(&e->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&e->lock);
	if (p)
		atomic_fetch_sub(&p->entering, 1);
}

void clock_unlock(struct sim_engine *e)
{
	pthread_mutex_unlock(&e->lock);
}

uint64_t clock_now(const struct sim_engine *e, uint64_t real)
{
	return e->clock + (real > e->real ? (uint64_t)((double)(real - e->real) / pace) : 0);
}

void clock_set(struct sim_engine *e, uint64_t clock, uint64_t real)
{
	e->clock = clock;
	e->real = real;
}

uint64_t engine_now(int dev)
{
	struct sim_engine *e = state_engine(dev);
	uint64_t t;

	clock_lock(e);
	t = clock_now(e, clock_real());
	clock_unlock(e);
	return t;
}

/* what this process does */

void clock_stir(struct sim_engine *e, int dev, uint64_t real)
{
	struct sim_proc *p = me();

	e->ask = 0;
	if (!p)
		return;
	atomic_store(&p->stir_clock[state_phys(dev)], clock_now(e, real));
	atomic_store(&p->stir_ns[state_phys(dev)], real);
}

void engine_stir(int dev)
{
	struct sim_engine *e;

	if (!engine_on())
		return;
	e = state_engine(dev);
	clock_lock(e);
	clock_stir(e, dev, clock_real());
	clock_unlock(e);
}

/* waiting for a time */

static int futex(uint32_t *word, int op, uint32_t value, const struct timespec *t)
{
	return (int)syscall(SYS_futex, word, op, value, t, NULL, 0);
}

static void ring(struct sim_wait *w)
{
	__atomic_fetch_add(&w->ring, 1, __ATOMIC_SEQ_CST);
	futex(&w->ring, FUTEX_WAKE, INT_MAX, NULL);
}

/* Sleeps for ns of real time, or until w is rung or the futex word is woken; true if it was the word. */
static bool doze(const uint32_t *word, uint32_t old, struct sim_wait *w, uint32_t rings, uint64_t ns)
{
	uint64_t end = clock_real() + ns;
	struct timespec at = { (time_t)(end / 1000000000), (long)(end % 1000000000) };
	struct timespec rel = { 0, (long)(ns < MS ? ns : MS) };
	struct futex_waitv v[2] = {
		{ .val = rings, .uaddr = (uintptr_t)&w->ring, .flags = FUTEX_32 },
		{ .val = old, .uaddr = (uintptr_t)word, .flags = FUTEX_32 },
	};
	int rc = (int)syscall(SYS_futex_waitv, v, word ? 2 : 1, 0, &at, CLOCK_MONOTONIC);

	if (rc >= 0 || (errno != ENOSYS && errno != EPERM))
		return rc == 1;
	/* Kernels before 5.16 wait for one futex only: wait for the word, and check the rest often. */
	if (word)
		return !futex((uint32_t *)(uintptr_t)word, FUTEX_WAIT, old, &rel);
	futex(&w->ring, FUTEX_WAIT, rings, &rel);
	return false;
}

bool clock_ring(struct sim_engine *e, uint64_t clock)
{
	bool any = false;

	for (int i = 0; i < SIM_MAX_WAIT; i++) {
		struct sim_wait *w = &e->wait[i];

		if (!w->pid || w->until > clock)
			continue;
		any = true;
		ring(w);
	}
	return any;
}

/* Forgets threads whose time has come but which cannot run. */
static void drop_due(struct sim_engine *e, uint64_t clock)
{
	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].until <= clock && idle_stopped(e->wait[i].pid))
			e->wait[i].pid = 0;
}

/* Which slots' processes can give no work until another process wakes them. */
static void who_blocks(struct sim_engine *e, int dev, bool blocked[SIM_MAX_PROC])
{
	memset(blocked, 0, SIM_MAX_PROC * sizeof(*blocked));
	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].blocked && e->wait[i].slot >= 0)
			blocked[e->wait[i].slot] = atomic_load(&state_slots()[e->wait[i].slot].up[dev]) <= 0;
}

/* Whether all processes are idle; dev is the machine's number. */
static bool all_rest(struct sim_engine *e, int dev, uint64_t real)
{
	struct sim_proc *p = state_slots();
	bool blocked[SIM_MAX_PROC];

	who_blocks(e, dev, blocked);
	for (int i = 0; i < SIM_MAX_PROC; i++)
		if (p[i].pid && p[i].contexts[dev] && !blocked[i] && !idle_is(&p[i], dev, real))
			return false;
	return true;
}

/* Whether all waiting threads have checked their word since all processes were found idle. */
static bool all_looked(struct sim_engine *e, uint64_t real)
{
	bool all = true;

	for (int i = 0; i < SIM_MAX_WAIT; i++) {
		struct sim_wait *w = &e->wait[i];

		if (!w->pid || w->seen >= e->ask)
			continue;
		if (idle_due(e->ask, real) && idle_stopped(w->pid)) {
			w->pid = 0;
			continue;
		}
		all = false;
	}
	return all;
}

/* Moves the clock to the earliest time that a thread waits for, if no process has work before it. */
static void jump(struct sim_engine *e, int dev)
{
	uint64_t real = clock_real(), first = UINT64_MAX, clock = clock_now(e, real);

	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].until < first)
			first = e->wait[i].until;
	if (first == UINT64_MAX)
		return;
	if (first <= clock) {		/* a thread whose time has come goes first */
		drop_due(e, clock);
		clock_ring(e, clock);
		return;
	}
	if (!all_rest(e, dev, real)) {
		e->ask = 0;
		return;
	}
	if (!e->ask) {
		e->ask = real;
		for (int i = 0; i < SIM_MAX_WAIT; i++)
			if (e->wait[i].pid && e->wait[i].seen < real)
				ring(&e->wait[i]);
	}
	if (!all_looked(e, real))
		return;
	clock_set(e, first, real);
	e->ask = 0;
	clock_ring(e, first);
}

static struct sim_wait *wait_new(struct sim_engine *e, uint64_t until, bool blocked)
{
	for (int i = 0; i < SIM_MAX_WAIT; i++) {
		struct sim_wait *w = &e->wait[i];

		if (w->pid)
			continue;
		w->slot = state_slot();
		w->blocked = blocked;
		w->until = until;
		w->pid = getpid();
		return w;
	}
	return NULL;
}

static bool changed(const uint32_t *word, uint32_t old)
{
	return word && __atomic_load_n(word, __ATOMIC_SEQ_CST) != old;
}

static void wait_until(struct sim_engine *e, int dev, struct sim_wait *w, const uint32_t *word, uint32_t old)
{
	bool woken = false;

	while (!woken && w->pid == getpid() && !changed(word, old)) {
		uint64_t clock, real = clock_real(), nap;
		uint32_t rings = __atomic_load_n(&w->ring, __ATOMIC_SEQ_CST);

		w->seen = real;
		if (clock_now(e, real) < w->until)
			jump(e, dev);
		clock = clock_now(e, clock_real());
		if (clock >= w->until)
			return;
		nap = w->until - clock > NAP ? NAP : (uint64_t)((double)(w->until - clock) * pace) + 1000;
		clock_unlock(e);
		woken = doze(word, old, w, rings, nap > NAP ? NAP : nap);
		clock_lock(e);
	}
}

static __thread bool awake[SIM_MAX_DEV];	/* whether this thread is a timer that has woken */

/* A timer does not give work when it wakes. It is waited for only until it sleeps here again. */
static void thread_up(struct sim_engine *e, int dev, bool up)
{
	struct sim_proc *p = me();
	uint64_t real = clock_real();

	e->ask = 0;
	if (!p || awake[dev] == up)
		return;
	awake[dev] = up;
	atomic_store(&p->stir_clock[dev], clock_now(e, real));
	atomic_store(&p->up_clock[dev], clock_now(e, real));
	atomic_store(&p->up_ns[dev], real);
	atomic_fetch_add(&p->up[dev], up ? 1 : -1);
}

API void sluice_sim_wait(int dev, const uint32_t *word, uint32_t old, uint64_t until, int blocked)
{
	struct timespec nap = { 0, (long)MS };
	struct sim_engine *e;
	struct sim_wait *w;

	if (!engine_on() || dev < 0 || dev >= SIM_MAX_DEV || !state_engine(dev)) {
		nanosleep(&nap, NULL);
		return;
	}
	e = state_engine(dev);
	clock_lock(e);
	thread_up(e, state_phys(dev), false);
	w = clock_now(e, clock_real()) < until ? wait_new(e, until, blocked) : NULL;
	if (w) {
		wait_until(e, state_phys(dev), w, word, old);
		if (w->pid == getpid())
			w->pid = 0;
	}
	if (blocked)
		clock_stir(e, dev, clock_real());
	else
		thread_up(e, state_phys(dev), true);
	clock_unlock(e);
}

API int sluice_sim_clock(int dev, uint64_t *ns)
{
	if (!ns || dev < 0 || dev >= SIM_MAX_DEV || !engine_on() || !state_engine(dev))
		return -1;
	*ns = engine_now(dev);
	return 0;
}

/* letting others go first */

/* Lets threads run whose time has come. */
static void yield_due(struct sim_engine *e)
{
	struct timespec nap = { 0, 20000 };
	uint64_t since = clock_real();
	bool dropped = false;

	while (clock_ring(e, clock_now(e, clock_real()))) {
		if (!dropped && idle_due(since, clock_real())) {
			drop_due(e, clock_now(e, clock_real()));
			dropped = true;
		}
		if (clock_real() > since + PATIENCE)
			return;
		clock_unlock(e);
		nanosleep(&nap, NULL);
		clock_lock(e);
	}
}

/*
 * Whether a timer has been awake for LEAD, in a process that runs. If none of its threads does, the timer may wait for the caller, who
 * may hold a lock of theirs. The caller is not waited for.
 */
static bool timer_late(const struct sim_proc *p, int slot, int dev, uint64_t clock)
{
	return atomic_load(&p->up[dev]) > (slot == state_slot() && awake[dev]) &&
	       clock >= atomic_load(&p->up_clock[dev]) + LEAD && idle_runs(p->pid);
}

/* Whether a process that may soon have work has done nothing for LEAD; forgive gives it another LEAD. */
static bool others_late(struct sim_engine *e, int dev, uint64_t clock, bool forgive)
{
	struct sim_proc *p = state_slots();
	bool blocked[SIM_MAX_PROC], late = false;
	uint64_t real = clock_real();

	who_blocks(e, dev, blocked);
	for (int i = 0; i < SIM_MAX_PROC && !late; i++) {
		if (!p[i].pid || !p[i].contexts[dev] || blocked[i])
			continue;
		if (!timer_late(&p[i], i, dev, clock) && (i == state_slot() ||
		    clock < atomic_load(&p[i].stir_clock[dev]) + LEAD || idle_is(&p[i], dev, real)))
			continue;
		if (forgive) {
			atomic_store(&p[i].stir_clock[dev], clock);
			atomic_store(&p[i].up_clock[dev], clock);
		} else {
			late = true;
		}
	}
	return late;
}

/*
 * Holds the clock back for processes that are about to do something: what takes them a moment of real time is much
 * more simulated time of others' work.
 */
static void yield_others(struct sim_engine *e, int dev)
{
	uint64_t since = clock_real();
	long ns = 10000;

	while (others_late(e, dev, clock_now(e, clock_real()), false)) {
		if (clock_real() > since + PATIENCE) {
			others_late(e, dev, clock_now(e, clock_real()), true);
			return;
		}
		clock_unlock(e);
		nanosleep(&(struct timespec){ 0, ns }, NULL);
		ns = ns < 400000 ? ns * 2 : ns;
		clock_lock(e);
	}
}

void clock_yield(struct sim_engine *e, int dev)
{
	yield_due(e);
	yield_others(e, dev);
}

void clock_leave(struct sim_engine *e)
{
	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid == getpid())
			e->wait[i].pid = 0;
	e->ask = 0;
}
