/* How long threads look for an answer, on a clock and a number of processors of our own. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/wait.h>
#include <time.h>

#include "test.h"

static int64_t at = 1000000000; /* ns */

static int test_clock(struct timespec *t)
{
	t->tv_sec = at / 1000000000;
	t->tv_nsec = at % 1000000000;
	return 0;
}

#define clock_gettime(id, t) ((void)(id), test_clock(t))
#include "attention.c"
#undef clock_gettime

#define US 1000

/* Looks until told to sleep, us. */
static int64_t looks(bool awaited, int64_t step)
{
	const struct sl_waiters o = { .threads = awaited };
	int64_t since = 0, from = at;

	while (sl_look(&since, &o))
		at += step;
	return (at - from) / US;
}

/* With processors to spare an answer is looked for a while, each time anew. */
static void an_answer(void)
{
	processors_known = SPARE;
	CHECK(looks(false, US) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(looks(true, US) == LOOK_NS / US);
	processors_known = SPARE - 1;
	CHECK(looks(true, US) == 0);
	/* A clock that jumps ends it too. */
	processors_known = SPARE;
	CHECK(looks(true, (int64_t)3600 * 1000000000) == (int64_t)3600 * 1000000);
}

/* Looks until told to sleep, us. */
static int64_t lingers(const struct sl_waiters *o)
{
	int64_t since = 0, from = at;

	while (sl_look(&since, o))
		at += US;
	return (at - from) / US;
}

/* Between an answer and the next call that waits the receiver looks for as long as such a call is likely to come. */
static void the_gaps(void)
{
	const struct { int64_t gap, linger; } learned[] = {
		{ 30, 60 }, { 400, 800 }, { 999, 1000 }, { 1001, 500 }, { 100000, 250 }, { 40, 80 }, { 5000, 40 },
	};
	struct sl_waiters o = { 0 };
	int64_t since = 0, from;

	processors_known = SPARE;
	sl_waiters_add(&o, 1);
	for (size_t i = 0; i < sizeof learned / sizeof *learned; i++) {
		sl_answered(&o);
		sl_waiters_add(&o, -1);
		at += learned[i].gap * US;
		sl_waiters_add(&o, 1);
		CHECK(o.linger == learned[i].linger * US, "after %lld us: %lld ns", (long long)learned[i].gap, (long long)o.linger);
	}
	/* It looks that long after an answer, and from the moment that a call waits for as long as for any answer. */
	sl_answered(&o);
	sl_waiters_add(&o, -1);
	CHECK(lingers(&o) == 40);
	CHECK(lingers(&o) == 0);
	sl_answered(&o);
	from = at;
	for (int i = 0; sl_look(&since, &o); i++) {
		if (i == 20)
			sl_waiters_add(&o, 1);
		at += US;
	}
	CHECK(at - from == 20 * US + LOOK_NS, "%lld ns", (long long)(at - from));
	processors_known = SPARE - 1;
	sl_answered(&o);
	CHECK(lingers(&o) == 0);
}

/* Before a turn everybody looks, whatever the worker says no longer than 5 ms, and no more than half of the time. */
static void a_turn(void)
{
	const uint32_t said[] = { 1, 300, 2000, SL_MAX_TURN_US, SL_MAX_TURN_US + 1, 1u << 31, UINT32_MAX };
	int64_t again = 0, other = 0, looked = 0, from;

	processors_known = 2;
	CHECK(!sl_attend(&again, 0) && !again && looks(false, US) == 0);
	for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
		int64_t want = said[i] < SL_MAX_TURN_US ? said[i] : SL_MAX_TURN_US;

		CHECK(sl_attend(&again, said[i]), "%u us", said[i]);
		CHECK(looks(i & 1, US) == want, "%u us", said[i]);
		CHECK(!sl_attend(&again, said[i]) && looks(true, US) == 0, "%u us at once again", said[i]);
		at += want * US;
	}
	from = at;
	while (at < from + (int64_t)1000000000) {
		sl_attend(&again, UINT32_MAX);
		looked += looks(true, US) * US;
		at += 10 * US;
	}
	CHECK(looked <= (int64_t)510000000, "%lld ns of a second", (long long)looked);

	/* Of two workers, who has more to say is heard. */
	at += (int64_t)1000000000;
	again = 0;
	CHECK(sl_attend(&again, 3000) && sl_attend(&other, 10));
	CHECK(looks(false, US) == 3000);
}

/* On a single processor nobody looks: the worker, or its answer, may need that. */
static void alone(void)
{
	int64_t again = 0;
	cpu_set_t one;
	int status;
	pid_t p = fork();

	CHECK(p >= 0);
	if (!p) {
		CHECK(!sched_getaffinity(0, sizeof one, &one));
		for (int i = 0, seen = 0; i < CPU_SETSIZE; i++)
			if (CPU_ISSET(i, &one) && seen++)
				CPU_CLR(i, &one);
		CHECK(!sched_setaffinity(0, sizeof one, &one));
		processors_known = 0;
		CHECK(sl_processors() == 1);
		CHECK(!sl_attend(&again, 2000) && looks(true, US) == 0);
		exit(0);
	}
	CHECK(waitpid(p, &status, 0) == p && !status);
	processors_known = 0;
	CHECK(sl_processors() >= 1 && sl_processors() == processors_known);
}

int main(void)
{
	an_answer();
	the_gaps();
	a_turn();
	alone();
	return 0;
}
