/*
 * The engine of a device, in the state file that all processes of the machine share.
 *
 * Work runs in order of arrival and takes no real time of its own: it adds its cost to the clock (clock.c), in
 * slices, between which other processes' work may run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "idle.h"

#define MS 1000000ULL
#define SLICE (2 * MS)		/* simulated: the longest slice; other processes' work may run after each */
#define SPAN (1 * MS)		/* simulated: the resolution of the trace */
#define GAP 20000		/* simulated ns: a pause longer than this shows in the trace */
#define MAX_COST 64

struct cost { char name[128]; uint64_t ns; };

static struct {
	bool on;
	struct cost cost[MAX_COST];
	int n;
	double copy, inner;		/* bytes per ns, 0: free */
	uint64_t change;		/* ns to switch to another process's context */
	int trace;
} cfg = { .trace = -1 };

static _Atomic uint64_t tag;

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
	const char *trace = getenv("SLUICE_SIM_TRACE"), *quiet = getenv("SLUICE_SIM_QUIET"), *watch = getenv("SLUICE_SIM_WATCH");
	char *copy, *save = NULL;
	double v = 0, pace = 1, rest = 5;
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
		fprintf(stderr, "simgpu: SLUICE_SIM_COST=%s: want NAME:us, *:us, copy:GB/s or inner:GB/s, separated by commas\n", cost);
		return -1;
	}
	if ((change && *change && !number(change, 0, 1e9, &v)) || (idle && *idle && !number(idle, 1, 1e6, &pace)) ||
	    (quiet && *quiet && !number(quiet, 1, 1e4, &rest))) {
		fprintf(stderr, "simgpu: SLUICE_SIM_SWITCH is a number of us, SLUICE_SIM_IDLE one from 1 to 1000000, "
			"SLUICE_SIM_QUIET one of ms from 1 to 10000\n");
		return -1;
	}
	cfg.change = (uint64_t)(v * 1000);
	clock_config(pace);
	idle_config(rest);
	if (watch && *watch && idle_watch(watch)) {
		fprintf(stderr, "simgpu: SLUICE_SIM_WATCH=%s: not a file of %zu bytes that can be mapped\n", watch,
			SIM_MAX_PROC * sizeof(struct sim_watch));
		return -1;
	}
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

int engine_fresh(struct sim_engine *e)
{
	pthread_mutexattr_t a;
	int rc;

	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	rc = pthread_mutex_init(&e->lock, &a);
	pthread_mutexattr_destroy(&a);
	e->clock = clock_real();	/* any time is right, except for callers that do not know yet that it is simulated */
	e->real = e->clock;
	return rc ? -EINVAL : 0;
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

uint64_t engine_step(int dev, uint64_t cost, bool aside)
{
	struct sim_engine *e = state_engine(dev);
	uint64_t real, start, step = cost < SLICE ? cost : SLICE;
	bool other;

	clock_lock(e);
	clock_yield(e, state_phys(dev));
	real = clock_real();
	start = clock_now(e, real);
	other = e->owner != state_slot() + 1 && !aside;
	if (other)
		start += cfg.change;
	if (!aside) {
		e->owner = state_slot() + 1;
		span_add(e, state_phys(dev), start, start + step, other, real);
	}
	clock_set(e, start + step, real);
	if (state_slot() >= 0)
		atomic_fetch_add(&state_slots()[state_slot()].busy_ns[state_phys(dev)], step);
	clock_stir(e, dev, real);
	clock_ring(e, start + step);
	clock_unlock(e);
	return step;
}

void engine_leave(void)
{
	for (int dev = 0; cfg.on && dev < SIM_MAX_DEV; dev++) {
		struct sim_engine *e = state_engine(dev);

		clock_lock(e);
		if (e->span.pid == getpid())
			span_end(e, clock_real());
		clock_leave(e);
		clock_unlock(e);
	}
}
