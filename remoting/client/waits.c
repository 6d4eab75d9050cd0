/* See waits.h. A thread's sum is its own; the table has a lock. */
#define _GNU_SOURCE
#include "waits.h"
#include "conf.h"
#include "ctx.h"
#include "deadline.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { NAMES = 1024, SHOWN = 24 };

bool sl_waits_on;

static struct row {
	const char *name;
	uint64_t calls, trips, ns, longest;
} table[NAMES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void sl_waits_start(void)
{
	const char *trace = sl_config("SLUICE_TRACE");

	sl_waits_on = trace && *trace == '1';
}

int64_t sl_waits_begin(void)
{
	return __builtin_expect(!sl_waits_on, 1) ? 0 : sl_now_ns();
}

void sl_waits_end(int64_t since, bool asked)
{
	struct sl_thread *t;

	if (__builtin_expect(!since, 1))
		return;
	t = sl_tls();
	t->waited_ns += (uint64_t)(sl_waits_begin() - since);
	t->waited_trips += asked;
	t->waited = true;
}

void sl_waits_take(const char *name)
{
	struct sl_thread *t = sl_tls();
	size_t i = (uintptr_t)name / 8 % NAMES, last = (i + NAMES - 1) % NAMES;

	if (!t->waited)
		return;
	pthread_mutex_lock(&lock);
	while (table[i].name && strcmp(table[i].name, name) && i != last)
		i = (i + 1) % NAMES;
	table[i].name = name;
	table[i].calls++;
	table[i].trips += t->waited_trips;
	table[i].ns += t->waited_ns;
	if (table[i].longest < t->waited_ns)
		table[i].longest = t->waited_ns;
	pthread_mutex_unlock(&lock);
	t->waited = false;
	t->waited_ns = t->waited_trips = 0;
}

static int longer(const void *a, const void *b)
{
	const struct row *x = a, *y = b;

	return x->ns != y->ns ? (x->ns < y->ns ? 1 : -1) : strcmp(x->name, y->name);
}

static void add(struct row *to, const struct row *r)
{
	to->calls += r->calls;
	to->trips += r->trips;
	to->ns += r->ns;
	if (to->longest < r->longest)
		to->longest = r->longest;
}

static int line(char *at, size_t room, const struct row *r)
{
	return snprintf(at, room, "sluice: %10llu %12llu %12.3f %12.3f %12.3f  %s\n", (unsigned long long)r->calls, (unsigned long long)r->trips,
			(double)r->ns / 1e6, (double)r->ns / 1e6 / (double)(r->calls ? r->calls : 1), (double)r->longest / 1e6, r->name);
}

/* One write, so that the tables of several processes do not mix. */
void sl_waits_write(void)
{
	struct row all = { .name = "all" }, others = { .name = "others" };
	char text[8192];
	size_t rows = 0;
	int n;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < NAMES; i++)
		if (table[i].name)
			table[rows++] = table[i];
	qsort(table, rows, sizeof *table, longer);
	n = snprintf(text, sizeof text, "sluice: process %d (%s) waited for the worker in these calls; times in ms\n"
		     "sluice: %10s %12s %12s %12s %12s  function\n", (int)getpid(), program_invocation_short_name, "calls", "round trips", "total", "mean", "longest");
	for (size_t i = 0; i < rows; i++) {
		add(&all, &table[i]);
		if (i < SHOWN)
			n += line(text + n, sizeof text - (size_t)n, &table[i]);
		else
			add(&others, &table[i]);
	}
	if (others.calls)
		n += line(text + n, sizeof text - (size_t)n, &others);
	n += line(text + n, sizeof text - (size_t)n, &all);
	memset(table, 0, sizeof table);
	pthread_mutex_unlock(&lock);
	if (write(2, text, (size_t)n) < 0)
		return;
}
