/*
 * The engine of a device and its clock, in the state file that all processes of the machine share.
 *
 * Work runs in order of arrival and takes no real time of its own: it adds its cost to the clock, in slices, between
 * which other processes' work may come. While nothing runs the clock goes with real time, divided by SLUICE_SIM_IDLE, so
 * that a processor that is slow to give the next piece of work hardly counts. Who waits for a time of this clock does so
 * here (sluice_sim_wait), and where nobody has work the clock jumps to the first of these times.
 *
 * That nobody has work is said by the processes themselves, for it cannot be seen: a process either waits here, says
 * that it is blocked, and has found its futex word unchanged since everybody was last seen at rest; or it has given no
 * work for SLUICE_SIM_QUIET and none of its threads can run. One that the kernel just does not let run is therefore waited for,
 * however long that lasts, and a process that is stopped or dead is not.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

#define API __attribute__((visibility("default")))
#define MS 1000000ULL
#define SLICE (2 * MS)		/* simulated: work of other processes may come in between */
#define NAP (5 * MS)		/* real: how often a wait looks around */
#define PATIENCE (50 * MS)	/* real: for a thread whose time has come and that does not wake; at least */
#define LEAD (2 * MS)		/* simulated: others' work goes no further while a process that is not at rest does nothing */
#define SPAN (1 * MS)		/* simulated: the trace is no finer */
#define GAP 20000		/* simulated ns: a pause longer than this shows in the trace */
#define MAX_COST 64

struct cost { char name[128]; uint64_t ns; };

static struct {
	bool on;
	struct cost cost[MAX_COST];
	int n;
	double copy, inner;		/* bytes per ns, 0: free */
	uint64_t change;		/* ns for another process's context to come on */
	double idle;
	uint64_t quiet;			/* real ns: a process that did nothing for so long may be at rest */
	int trace;
} cfg = { .idle = 1, .quiet = 5 * MS, .trace = -1 };

static _Atomic uint64_t tag;

static uint64_t real_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* configuration */

static bool number(const char *s, double min, double max, double *out)
{
	char *end;
	double v;

	if (!s || !*s)
		return false;
	errno = 0;
	v = strtod(s, &end);
	if (errno || *end || !(v >= min && v <= max))
		return false;
	*out = v;
	return true;
}

static bool parse_cost(char *item)
{
	char *colon = strrchr(item, ':');
	struct cost *c = &cfg.cost[cfg.n];
	double v;

	if (!colon || colon == item || !number(colon + 1, 0, 1e9, &v))
		return false;
	*colon = 0;
	if (!strcmp(item, "copy") || !strcmp(item, "inner")) {
		if (v <= 0)
			return false;
		*(item[0] == 'c' ? &cfg.copy : &cfg.inner) = v;
		return true;
	}
	if (cfg.n == MAX_COST || strlen(item) >= sizeof(c->name))
		return false;
	strcpy(c->name, item);
	c->ns = (uint64_t)(v * 1000);
	cfg.n++;
	return true;
}

int engine_config(void)
{
	const char *cost = getenv("SLUICE_SIM_COST"), *change = getenv("SLUICE_SIM_SWITCH"), *idle = getenv("SLUICE_SIM_IDLE");
	const char *trace = getenv("SLUICE_SIM_TRACE"), *quiet = getenv("SLUICE_SIM_QUIET");
	char *copy, *save = NULL;
	double v = 0, rest = 5;
	bool ok = true;

	if (cfg.on || !cost || !*cost)
		return 0;
	copy = strdup(cost);
	if (!copy)
		return -1;
	for (char *p = strtok_r(copy, ",", &save); p && ok; p = strtok_r(NULL, ",", &save))
		ok = parse_cost(p);
	free(copy);
	if (!ok) {
		fprintf(stderr, "simgpu: SLUICE_SIM_COST=%s: not NAME:us, *:us, copy:GB/s or inner:GB/s, divided by commas\n", cost);
		return -1;
	}
	if ((change && *change && !number(change, 0, 1e9, &v)) || (idle && *idle && !number(idle, 1, 1e6, &cfg.idle)) ||
	    (quiet && *quiet && !number(quiet, 1, 1e4, &rest))) {
		fprintf(stderr, "simgpu: SLUICE_SIM_SWITCH is a number of us, SLUICE_SIM_IDLE one from 1 to 1000000, "
			"SLUICE_SIM_QUIET one of ms from 1 to 10000\n");
		return -1;
	}
	cfg.change = (uint64_t)(v * 1000);
	cfg.quiet = (uint64_t)(rest * 1e6);
	if (trace && *trace) {
		cfg.trace = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
		if (cfg.trace < 0) {
			fprintf(stderr, "simgpu: SLUICE_SIM_TRACE=%s: %s\n", trace, strerror(errno));
			return -1;
		}
	}
	cfg.on = true;
	return 0;
}

bool engine_on(void) { return cfg.on; }

uint64_t engine_kernel(const char *name)
{
	uint64_t any = 0;

	for (int i = 0; i < cfg.n; i++) {
		if (!strcmp(cfg.cost[i].name, name))
			return cfg.cost[i].ns;
		if (!strcmp(cfg.cost[i].name, "*"))
			any = cfg.cost[i].ns;
	}
	return any;
}

uint64_t engine_bytes(uint64_t bytes, bool inner)
{
	double rate = inner ? cfg.inner : cfg.copy;

	return rate > 0 ? (uint64_t)((double)bytes / rate) : 0;
}

/* the lock and the clock */

int engine_fresh(struct sim_engine *e)
{
	pthread_mutexattr_t a;
	int rc;

	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	rc = pthread_mutex_init(&e->lock, &a);
	pthread_mutexattr_destroy(&a);
	e->clock = real_ns();		/* any will do, but for those who do not know yet that it is simulated */
	e->real = real_ns();
	return rc ? -EINVAL : 0;
}

static struct sim_proc *me(void)
{
	int slot = state_slot();

	return slot < 0 ? NULL : &state_slots()[slot];
}

/* Who waits for the lock sleeps, but is not at rest: it says so. */
static void lock(struct sim_engine *e)
{
	struct sim_proc *p = me();

	if (p)
		atomic_fetch_add(&p->entering, 1);
	if (pthread_mutex_lock(&e->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&e->lock);
	if (p)
		atomic_fetch_sub(&p->entering, 1);
}

static void unlock(struct sim_engine *e)
{
	pthread_mutex_unlock(&e->lock);
}

static uint64_t now(const struct sim_engine *e, uint64_t real)
{
	return e->clock + (real > e->real ? (uint64_t)((double)(real - e->real) / cfg.idle) : 0);
}

static void set(struct sim_engine *e, uint64_t clock, uint64_t real)
{
	e->clock = clock;
	e->real = real;
}

uint64_t engine_now(int dev)
{
	struct sim_engine *e = state_engine(dev);
	uint64_t t;

	lock(e);
	t = now(e, real_ns());
	unlock(e);
	return t;
}

/* who is at rest */

static void stir(struct sim_engine *e, int dev, uint64_t real)
{
	struct sim_proc *p = me();

	e->ask = 0;
	if (!p)
		return;
	atomic_store(&p->stir_clock[state_phys(dev)], now(e, real));
	atomic_store(&p->stir_ns[state_phys(dev)], real);
}

void engine_stir(int dev)
{
	struct sim_engine *e;

	if (!cfg.on)
		return;
	e = state_engine(dev);
	lock(e);
	stir(e, dev, real_ns());
	unlock(e);
}

/* The state of a thread as /proc has it; 0: gone. */
static char thread_state(const char *path)
{
	char buf[512];
	const char *p;
	ssize_t n;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return 0;
	n = read(fd, buf, sizeof(buf) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	buf[n] = 0;
	p = strrchr(buf, ')');
	return p && p[1] == ' ' ? p[2] : 0;
}

static bool stopped_or_dead(int pid)
{
	char path[64], state;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	state = thread_state(path);
	return !state || strchr("TtZX", state);
}

/* Whether any thread of a process but the caller's can run now. */
static bool runnable(int pid)
{
	char path[320], state;
	struct dirent *d;
	bool found = false;
	int self = (int)syscall(SYS_gettid);
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	dir = opendir(path);
	if (!dir)
		return false;
	while (!found && (d = readdir(dir))) {
		if (d->d_name[0] == '.' || atoi(d->d_name) == self)
			continue;
		snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", pid, d->d_name);
		state = thread_state(path);
		found = state == 'R' || state == 'D';
	}
	closedir(dir);
	return found;
}

/* Once found at rest a process is so until it does something. */
static bool at_rest(struct sim_proc *p, int dev, uint64_t real)
{
	uint64_t last = atomic_load(&p->stir_ns[dev]);

	if (!last)
		return true;	/* it has not begun */
	if (atomic_load(&p->entering))
		return real > last + cfg.quiet && stopped_or_dead(p->pid);
	if (atomic_load(&p->rest_ns[dev]) == last)
		return true;
	if (real < last + cfg.quiet || runnable(p->pid))
		return false;
	atomic_store(&p->rest_ns[dev], last);
	return true;
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

/* Sleeps for ns of real time, until the bell rings or word's futex is woken; true: word's. */
static bool doze(const uint32_t *word, uint32_t old, struct sim_wait *w, uint32_t bell, uint64_t ns)
{
	uint64_t end = real_ns() + ns;
	struct timespec at = { (time_t)(end / 1000000000), (long)(end % 1000000000) };
	struct timespec rel = { 0, (long)(ns < MS ? ns : MS) };
	struct futex_waitv v[2] = {
		{ .val = bell, .uaddr = (uintptr_t)&w->ring, .flags = FUTEX_32 },
		{ .val = old, .uaddr = (uintptr_t)word, .flags = FUTEX_32 },
	};
	int rc = (int)syscall(SYS_futex_waitv, v, word ? 2 : 1, 0, &at, CLOCK_MONOTONIC);

	if (rc >= 0 || (errno != ENOSYS && errno != EPERM))
		return rc == 1;
	/* A kernel before 5.16: word alone, and look often for the rest. */
	if (word)
		return !futex((uint32_t *)(uintptr_t)word, FUTEX_WAIT, old, &rel);
	futex(&w->ring, FUTEX_WAIT, bell, &rel);
	return false;
}

/* Wakes those whose time has come; returns whether there are any. */
static bool ring_due(struct sim_engine *e, uint64_t clock)
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

/* Forgets threads that are due and cannot come. */
static void drop_due(struct sim_engine *e, uint64_t clock)
{
	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].until <= clock && stopped_or_dead(e->wait[i].pid))
			e->wait[i].pid = 0;
}

/* Which slots' processes can give no work until somebody wakes them. */
static void who_blocks(struct sim_engine *e, bool blocked[SIM_MAX_PROC])
{
	memset(blocked, 0, SIM_MAX_PROC * sizeof(*blocked));
	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].blocked && e->wait[i].slot >= 0)
			blocked[e->wait[i].slot] = true;
}

/* Whether everybody is at rest; dev is the machine's number. */
static bool all_rest(struct sim_engine *e, int dev, uint64_t real)
{
	struct sim_proc *p = state_slots();
	bool blocked[SIM_MAX_PROC];

	who_blocks(e, blocked);
	for (int i = 0; i < SIM_MAX_PROC; i++)
		if (p[i].pid && p[i].contexts[dev] && !blocked[i] && !at_rest(&p[i], dev, real))
			return false;
	return true;
}

/* Whether all that wait have looked since everybody was found at rest. */
static bool all_looked(struct sim_engine *e, uint64_t real)
{
	bool all = true;

	for (int i = 0; i < SIM_MAX_WAIT; i++) {
		struct sim_wait *w = &e->wait[i];

		if (!w->pid || w->seen >= e->ask)
			continue;
		if (real > e->ask + cfg.quiet && stopped_or_dead(w->pid)) {
			w->pid = 0;
			continue;
		}
		all = false;
	}
	return all;
}

/* Moves the clock to the first time that is waited for, if nobody has anything to do before. */
static void jump(struct sim_engine *e, int dev)
{
	uint64_t real = real_ns(), first = UINT64_MAX, clock = now(e, real);

	for (int i = 0; i < SIM_MAX_WAIT; i++)
		if (e->wait[i].pid && e->wait[i].until < first)
			first = e->wait[i].until;
	if (first == UINT64_MAX)
		return;
	if (first <= clock) {		/* whose time has come goes first */
		drop_due(e, clock);
		ring_due(e, clock);
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
	set(e, first, real);
	e->ask = 0;
	ring_due(e, first);
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

/* Under the lock, but for the sleep. */
static void wait_until(struct sim_engine *e, int dev, struct sim_wait *w, const uint32_t *word, uint32_t old)
{
	bool woken = false;

	while (!woken && w->pid == getpid() && !changed(word, old)) {
		uint64_t clock, real = real_ns(), nap;
		uint32_t bell = __atomic_load_n(&w->ring, __ATOMIC_SEQ_CST);

		w->seen = real;
		if (now(e, real) < w->until)
			jump(e, dev);
		clock = now(e, real_ns());
		if (clock >= w->until)
			return;
		nap = w->until - clock > NAP ? NAP : (uint64_t)((double)(w->until - clock) * cfg.idle) + 1000;
		unlock(e);
		woken = doze(word, old, w, bell, nap > NAP ? NAP : nap);
		lock(e);
	}
}

API void sluice_sim_wait(int dev, const uint32_t *word, uint32_t old, uint64_t until, int blocked)
{
	struct timespec nap = { 0, (long)MS };
	struct sim_engine *e;
	struct sim_wait *w;

	if (!cfg.on || dev < 0 || dev >= SIM_MAX_DEV || !state_engine(dev)) {
		nanosleep(&nap, NULL);
		return;
	}
	e = state_engine(dev);
	lock(e);
	e->ask = 0;
	w = now(e, real_ns()) < until ? wait_new(e, until, blocked) : NULL;
	if (w) {
		wait_until(e, state_phys(dev), w, word, old);
		if (w->pid == getpid())
			w->pid = 0;
	}
	stir(e, dev, real_ns());
	unlock(e);
}

API int sluice_sim_clock(int dev, uint64_t *ns)
{
	if (!ns || dev < 0 || dev >= SIM_MAX_DEV || !cfg.on || !state_engine(dev))
		return -1;
	*ns = engine_now(dev);
	return 0;
}

/* running */

void engine_tag(uint64_t t) { atomic_store(&tag, t); }

static void span_end(struct sim_engine *e, uint64_t real)
{
	e->span.real = real;
	if (cfg.trace >= 0 && e->span.pid && write(cfg.trace, &e->span, sizeof(e->span)) != sizeof(e->span)) {
		fprintf(stderr, "simgpu: the trace cannot be written: %s\n", strerror(errno));
		cfg.trace = -1;
	}
	memset(&e->span, 0, sizeof(e->span));
}

static void span_add(struct sim_engine *e, int dev, uint64_t start, uint64_t end, bool other, uint64_t real)
{
	struct sim_span *s = &e->span;

	if (s->pid && (other || end > s->start + SPAN || start > s->end + GAP))
		span_end(e, real);
	if (!s->pid) {
		s->dev = (uint32_t)dev;
		s->pid = getpid();
		s->start = start;
	}
	s->tag = atomic_load(&tag);
	s->end = end;
	s->busy += end - start;
	s->items++;
}

/* Threads whose time has come go first: let them. Under the lock. */
static void yield_due(struct sim_engine *e)
{
	struct timespec nap = { 0, 20000 };
	uint64_t since = real_ns();
	bool dropped = false;

	while (ring_due(e, now(e, real_ns()))) {
		if (!dropped && real_ns() > since + cfg.quiet) {
			drop_due(e, now(e, real_ns()));
			dropped = true;
		}
		if (real_ns() > since + (cfg.quiet > PATIENCE ? cfg.quiet : PATIENCE))
			return;
		unlock(e);
		nanosleep(&nap, NULL);
		lock(e);
	}
}

/* Whether a process that may have work in a moment has done nothing for LEAD; with forgive it may go on so for another. */
static bool others_late(struct sim_engine *e, int dev, uint64_t clock, bool forgive)
{
	struct sim_proc *p = state_slots();
	bool blocked[SIM_MAX_PROC], late = false;
	uint64_t real = real_ns();

	who_blocks(e, blocked);
	for (int i = 0; i < SIM_MAX_PROC && !late; i++) {
		if (!p[i].pid || !p[i].contexts[dev] || i == state_slot() || blocked[i] ||
		    clock < atomic_load(&p[i].stir_clock[dev]) + LEAD || at_rest(&p[i], dev, real))
			continue;
		if (forgive)
			atomic_store(&p[i].stir_clock[dev], clock);
		else
			late = true;
	}
	return late;
}

/* The clock does not run away from those who are about to do something: what takes them a moment of real time takes others'
 * work much more of the simulated one. Under the lock. */
static void yield_others(struct sim_engine *e, int dev)
{
	uint64_t since = real_ns();
	long ns = 10000;

	while (others_late(e, dev, now(e, real_ns()), false)) {
		if (real_ns() > since + 2 * cfg.quiet) {
			others_late(e, dev, now(e, real_ns()), true);
			return;
		}
		unlock(e);
		nanosleep(&(struct timespec){ 0, ns }, NULL);
		ns = ns < 400000 ? ns * 2 : ns;
		lock(e);
	}
}

uint64_t engine_step(int dev, uint64_t cost)
{
	struct sim_engine *e = state_engine(dev);
	uint64_t real, start, step = cost < SLICE ? cost : SLICE;
	bool other;

	lock(e);
	yield_due(e);
	yield_others(e, state_phys(dev));
	real = real_ns();
	start = now(e, real);
	other = e->owner != state_slot() + 1;
	if (other)
		start += cfg.change;
	e->owner = state_slot() + 1;
	set(e, start + step, real);
	span_add(e, state_phys(dev), start, start + step, other, real);
	if (me())
		atomic_fetch_add(&me()->busy_ns[state_phys(dev)], step);
	stir(e, dev, real);
	ring_due(e, start + step);
	unlock(e);
	return step;
}

void engine_leave(void)
{
	for (int dev = 0; cfg.on && dev < SIM_MAX_DEV; dev++) {
		struct sim_engine *e = state_engine(dev);

		lock(e);
		if (e->span.pid == getpid())
			span_end(e, real_ns());
		for (int i = 0; i < SIM_MAX_WAIT; i++)
			if (e->wait[i].pid == getpid())
				e->wait[i].pid = 0;
		e->ask = 0;
		unlock(e);
	}
}
