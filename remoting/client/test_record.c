/* The state of an event's last record: its table of states, and that a look never sees parts of two records. */
#include "record.h"
#include "test.h"

static struct sl_record r;
static uint64_t waited, calls;

static struct sl_recorded look(void)
{
	return sl_record_look(&r, waited, calls);
}

/* A record in stream 7, behind what has the mark 9 there. */
static bool record(bool forward)
{
	struct sl_made m = { .stream = 7, .seq = 9, .waited = waited, .behind = 3, .one_stream = true, .forward = forward };
	bool follow;

	sl_record_begin(&r);
	follow = sl_record_made(&r, &m);
	CHECK(m.generation == r.generation);
	sl_record_end(&r, true, ++calls);
	return follow;
}

/* What a query does that finds nothing. */
static void ask(void)
{
	struct sl_recorded l = look();

	CHECK(!l.complete && !l.reported);
	sl_record_ask(&r, l.generation, waited);
}

static void completion(void)
{
	struct sl_recorded l;
	uint32_t first, seen;

	sl_record_reset(&r, false);
	l = look();
	CHECK(l.complete && !l.ask && !l.reported && !l.followed);
	CHECK(!record(false));
	l = look();
	first = l.generation;
	CHECK(!l.complete && !l.ask && !l.newer && l.stream == 7 && l.seq == 9 && l.behind == 3);
	calls++;
	CHECK(look().newer);
	sl_record_complete(&r, first - 1);
	CHECK(!look().complete && !sl_record_done(&r, first, &seen) && seen == first - 1);
	sl_record_complete(&r, first);
	CHECK(look().complete && sl_record_done(&r, first, &seen));
	sl_record_complete(&r, first - 1); /* late */
	CHECK(look().complete);
	record(false);
	CHECK(!look().complete);
	sl_record_answered(&r, first + 1);
	CHECK(look().complete);

	/* A new event in the same memory: frames of the one before say nothing of it. */
	record(false);
	sl_record_reset(&r, false);
	CHECK(look().complete);
	record(false);
	sl_record_complete(&r, first + 2);
	CHECK(!look().complete);

	/* What the shim cannot count is asked for each time, whatever frames say. */
	record(true);
	sl_record_complete(&r, look().generation);
	sl_record_answered(&r, look().generation);
	CHECK(look().ask && !look().complete);
	record(false);
	CHECK(!look().ask);
	sl_record_external(&r);
	sl_record_complete(&r, look().generation);
	record(false);
	CHECK(look().ask && !look().complete);
}

static void states(void)
{
	struct sl_made all = { .waited = waited };

	sl_record_reset(&r, false);
	record(false);
	ask();
	CHECK(look().reported && !look().followed);
	waited++; /* a wait may have covered the record */
	CHECK(!look().reported);
	ask();
	CHECK(look().reported);
	sl_record_unwatch(&r); /* the worker's word that it cannot, before the answer is read */
	CHECK(!look().reported);
	ask();
	sl_record_ask(&r, look().generation - 1, waited + 5); /* the question was of the record before */
	CHECK(look().reported);
	record(false);
	CHECK(!look().reported);

	/* Followed as long as each record is looked at before the next. */
	sl_record_follow(&r, true);
	look();
	CHECK(record(false) && look().followed && look().reported && sl_record_followed(&r, look().generation));
	sl_record_ask(&r, look().generation, waited);
	CHECK(look().followed); /* a question changes nothing of that */
	CHECK(record(false) && record(false) == false && !look().followed && !look().reported);

	/* Not in a capture, not behind all streams, and not if others record it as well. */
	sl_record_follow(&r, true);
	look();
	CHECK(!record(true) && !look().followed && record(false) && look().followed);
	sl_record_begin(&r);
	CHECK(!sl_record_made(&r, &all) && !look().followed && !look().seq);
	sl_record_end(&r, true, calls);
	sl_record_external(&r);
	CHECK(!record(false) && !look().followed);
}

static void fetching(void)
{
	sl_record_reset(&r, false);
	record(false);
	CHECK(!sl_record_fetched(&r, look().generation));
	sl_record_fetch(&r, look().generation);
	CHECK(sl_record_fetched(&r, look().generation));
	sl_record_external(&r);
	CHECK(!sl_record_fetched(&r, look().generation));
}

/* ---- threads ---- */

#define THREADS 4
#define ROUNDS 2000

static _Atomic uint32_t over;

static void *records(void *arg)
{
	(void)arg;
	for (int i = 0; i < ROUNDS; i++) {
		struct sl_made m = { .one_stream = true };

		sl_record_begin(&r);
		m.stream = r.generation + 1; /* nobody else changes it now */
		m.seq = 2 * (uint64_t)m.stream;
		if (sl_record_made(&r, &m) && i % 3 == 0)
			sl_record_unwatch(&r);
		CHECK(m.generation == m.stream, "a record of another thread came in between");
		sl_record_end(&r, true, 0);
		if (i % 2)
			sl_record_complete(&r, m.generation);
	}
	atomic_fetch_add(&over, 1);
	return NULL;
}

static void *looks(void *arg)
{
	uint32_t last = 0;

	(void)arg;
	while (atomic_load(&over) < THREADS) {
		struct sl_recorded l = sl_record_look(&r, 0, 0);

		CHECK(l.stream == l.generation && l.seq == 2 * (uint64_t)l.generation, "parts of two records");
		CHECK(l.generation >= last, "an older record after a newer one");
		last = l.generation;
		sl_record_follow(&r, true);
		if (!l.reported)
			sl_record_ask(&r, l.generation, 0);
	}
	return NULL;
}

/* Waits for the frame of a record as an event's wait does. */
static void *waits(void *arg)
{
	uint32_t generation = *(uint32_t *)arg, seen;

	while (!sl_record_done(&r, generation, &seen) && sl_record_followed(&r, generation))
		sl_record_sleep(&r, seen);
	return NULL;
}

static void threads(void)
{
	struct sl_made m = { 0 };
	pthread_t t[2 * THREADS];
	uint32_t generation;

	sl_record_reset(&r, false);
	m.stream = r.generation + 1;
	m.seq = 2 * (uint64_t)m.stream;
	sl_record_begin(&r);
	sl_record_made(&r, &m);
	sl_record_end(&r, true, 0);
	for (unsigned i = 0; i < 2 * THREADS; i++)
		CHECK(!pthread_create(&t[i], NULL, i % 2 ? looks : records, NULL));
	for (unsigned i = 0; i < 2 * THREADS; i++)
		pthread_join(t[i], NULL);

	/* Each of these ends a wait: the frame, the word that there will be none, another record. */
	for (unsigned how = 0; how < 3; how++) {
		sl_record_follow(&r, true);
		look();
		CHECK(record(false));
		generation = look().generation;
		for (unsigned i = 0; i < THREADS; i++)
			CHECK(!pthread_create(&t[i], NULL, waits, &generation));
		while (!atomic_load(&r.sleepers))
			;
		if (how == 0)
			sl_record_complete(&r, generation);
		else if (how == 1)
			sl_record_unwatch(&r);
		else
			record(false);
		for (unsigned i = 0; i < THREADS; i++)
			pthread_join(t[i], NULL);
	}
}

int main(void)
{
	completion();
	states();
	fetching();
	threads();
	puts("record: ok");
	return 0;
}
