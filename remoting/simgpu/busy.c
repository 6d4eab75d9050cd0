/*
 * How much of the time the simulated GPUs were busy, and for which process, for NVML.
 *
 * A sample is what every process has used up to a moment. The last few are kept for
 * each device, so that a caller who gives the time of its last sample gets the usage
 * since that time and nothing else.
 */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "busy.h"
#include "engine.h"

#define LOOKS 8
#define FRESH 20000000	/* ns: the utilisation and the processes, asked one after the other, are one sample */

struct look {
	uint64_t at, real, stamp;	/* in ns, by the device's clock and the monotonic clock, and in us since 1970. 0: none */
	int n;
	struct sim_load load[SIM_MAX_PROC];
};

static struct {
	pthread_mutex_t lock;
	struct look look[SIM_MAX_DEV][LOOKS];
	int newest[SIM_MAX_DEV];
	uint64_t busy[SIM_MAX_DEV], at[SIM_MAX_DEV];	/* of the last utilisation */
	unsigned int util[SIM_MAX_DEV];
} b = { .lock = PTHREAD_MUTEX_INITIALIZER };

static uint64_t ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* The time that the busy time is a part of. */
static uint64_t device_ns(int dev)
{
	return engine_on() ? engine_now(dev) : ns(CLOCK_MONOTONIC);
}

unsigned int busy_device(int dev)
{
	struct sim_load p[SIM_MAX_PROC];
	uint64_t now, busy = 0;
	unsigned int u;
	int n = state_loads(dev, p, SIM_MAX_PROC);

	for (int i = 0; i < n; i++)
		busy += p[i].busy;
	now = device_ns(dev);
	pthread_mutex_lock(&b.lock);
	if (!b.at[dev]) {
		b.at[dev] = now;
		b.busy[dev] = busy;
	} else if (now - b.at[dev] > 50000000) {
		uint64_t part = busy > b.busy[dev] ? (busy - b.busy[dev]) * 100 / (now - b.at[dev]) : 0;

		b.util[dev] = part > 100 ? 100 : (unsigned int)part;
		b.at[dev] = now;
		b.busy[dev] = busy;
	}
	u = b.util[dev];
	pthread_mutex_unlock(&b.lock);
	return u;
}

/* The newest sample, taken now unless it is fresh. Called with the lock held. */
static struct look *look(int dev)
{
	struct look *l = &b.look[dev][b.newest[dev]];
	uint64_t now = ns(CLOCK_MONOTONIC);

	if (l->at && now - l->real < FRESH)
		return l;
	b.newest[dev] = (b.newest[dev] + 1) % LOOKS;
	l = &b.look[dev][b.newest[dev]];
	l->n = state_loads(dev, l->load, SIM_MAX_PROC);
	l->at = device_ns(dev);
	l->real = ns(CLOCK_MONOTONIC);
	l->stamp = ns(CLOCK_REALTIME) / 1000;
	return l;
}

static const struct sim_load *find(const struct look *l, const struct sim_load *p)
{
	for (int i = 0; i < l->n; i++)
		if (l->load[i].pid == p->pid && l->load[i].start == p->start)
			return &l->load[i];
	return NULL;
}

int busy_processes(int dev, uint64_t since, struct busy_sample *out, int max)
{
	const struct look *now, *then = NULL;
	int k = 0;

	pthread_mutex_lock(&b.lock);
	now = look(dev);
	/*
	 * The newest sample that is not newer than since, or else the oldest. A caller may give the time at
	 * which it called last, by its own clock, for since.
	 */
	for (int i = 1; i < LOOKS; i++) {
		const struct look *l = &b.look[dev][(b.newest[dev] + LOOKS - i) % LOOKS];

		if (!l->at)
			break;
		then = l;
		if (l->stamp <= since + FRESH / 1000)
			break;
	}
	for (int i = 0; then && i < now->n; i++) {
		const struct sim_load *p = &now->load[i], *q = find(then, p);
		uint64_t used, part;

		used = p->busy - (q && q->busy < p->busy ? q->busy : q ? p->busy : 0);
		part = now->at > then->at ? (used * 100 + (now->at - then->at) / 2) / (now->at - then->at) : 0;
		if (!part)
			continue;
		if (k < max)
			out[k] = (struct busy_sample){ p->pid, part > 100 ? 100 : (unsigned int)part, now->stamp };
		k++;
	}
	pthread_mutex_unlock(&b.lock);
	return k;
}
