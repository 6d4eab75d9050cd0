/* See record.h. */
#define _GNU_SOURCE
#include "record.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void futex(_Atomic uint32_t *w, int op, uint32_t v, const struct timespec *t)
{
	syscall(SYS_futex, w, op | FUTEX_PRIVATE_FLAG, v, t, NULL, 0);
}

static void wake(struct sl_record *r)
{
	if (atomic_load(&r->sleepers))
		futex(&r->complete, FUTEX_WAKE, INT_MAX, NULL);
}

/* Generations may wrap. */
static bool reached(uint32_t complete, uint32_t generation)
{
	return (int32_t)(complete - generation) >= 0;
}

void sl_record_reset(struct sl_record *r, bool external)
{
	pthread_mutex_lock(&r->lock);
	/* Not from 0: EVENT frames for the event that had this memory before may still come. */
	r->generation++;
	atomic_store(&r->complete, r->generation);
	r->stream = 0;
	r->seq = r->calls = r->asked = r->behind = 0;
	r->forward = r->follow = r->wanted = false;
	r->external = external;
	r->fetched = 0;
	r->watch = SL_UNWATCHED;
	pthread_mutex_unlock(&r->lock);
}

void sl_record_external(struct sl_record *r)
{
	pthread_mutex_lock(&r->lock);
	r->external = true;
	pthread_mutex_unlock(&r->lock);
}

/* ---- recording ---- */

void sl_record_begin(struct sl_record *r)
{
	pthread_mutex_lock(&r->turn);
}

bool sl_record_made(struct sl_record *r, struct sl_made *m)
{
	bool follow;

	pthread_mutex_lock(&r->lock);
	m->generation = ++r->generation;
	r->stream = m->stream;
	r->seq = m->seq;
	r->behind = m->behind;
	r->forward = m->forward;
	/* The record before was never queried: stop following. */
	r->follow = r->follow && r->wanted;
	r->wanted = false;
	follow = r->follow && m->one_stream && !r->forward && !r->external;
	r->watch = follow ? SL_FOLLOWED : SL_UNWATCHED;
	r->asked = m->waited;
	pthread_mutex_unlock(&r->lock);
	wake(r); /* who waits for the frame of the record before asks for that one now */
	return follow;
}

void sl_record_end(struct sl_record *r, bool made, uint64_t calls)
{
	if (made) {
		pthread_mutex_lock(&r->lock);
		r->calls = calls;
		pthread_mutex_unlock(&r->lock);
	}
	pthread_mutex_unlock(&r->turn);
}

/* ---- asking ---- */

struct sl_recorded sl_record_look(struct sl_record *r, uint64_t waited, uint64_t calls)
{
	struct sl_recorded l;

	pthread_mutex_lock(&r->lock);
	r->wanted = true;
	l.generation = r->generation;
	l.stream = r->stream;
	l.seq = r->seq;
	l.ask = r->forward || r->external;
	l.complete = !l.ask && reached(atomic_load(&r->complete), r->generation);
	l.reported = !l.ask && r->watch != SL_UNWATCHED && r->asked == waited;
	l.followed = !l.ask && r->watch == SL_FOLLOWED;
	l.newer = r->calls != calls;
	l.behind = l.ask ? 0 : r->behind;
	pthread_mutex_unlock(&r->lock);
	return l;
}

void sl_record_ask(struct sl_record *r, uint32_t generation, uint64_t waited)
{
	pthread_mutex_lock(&r->lock);
	if (r->generation == generation) {
		r->asked = waited;
		if (r->watch == SL_UNWATCHED)
			r->watch = SL_ASKED;
	}
	pthread_mutex_unlock(&r->lock);
}

void sl_record_follow(struct sl_record *r, bool follow)
{
	pthread_mutex_lock(&r->lock);
	r->follow = follow;
	pthread_mutex_unlock(&r->lock);
}

void sl_record_unwatch(struct sl_record *r)
{
	pthread_mutex_lock(&r->lock);
	r->watch = SL_UNWATCHED;
	pthread_mutex_unlock(&r->lock);
	wake(r);
}

/* ---- knowing ---- */

void sl_record_complete(struct sl_record *r, uint32_t generation)
{
	uint32_t old = atomic_load(&r->complete);

	while (!reached(old, generation) && !atomic_compare_exchange_weak(&r->complete, &old, generation))
		;
	wake(r);
}

void sl_record_answered(struct sl_record *r, uint32_t generation)
{
	bool count;

	pthread_mutex_lock(&r->lock);
	count = !r->forward && !r->external;
	pthread_mutex_unlock(&r->lock);
	if (count)
		sl_record_complete(r, generation);
}

bool sl_record_fetched(struct sl_record *r, uint32_t generation)
{
	bool done;

	pthread_mutex_lock(&r->lock);
	done = r->fetched == generation && !r->forward && !r->external;
	pthread_mutex_unlock(&r->lock);
	return done;
}

void sl_record_fetch(struct sl_record *r, uint32_t generation)
{
	pthread_mutex_lock(&r->lock);
	r->fetched = generation;
	pthread_mutex_unlock(&r->lock);
}

/* ---- waiting ---- */

bool sl_record_done(struct sl_record *r, uint32_t generation, uint32_t *seen)
{
	*seen = atomic_load(&r->complete);
	return reached(*seen, generation);
}

bool sl_record_followed(struct sl_record *r, uint32_t generation)
{
	bool yes;

	pthread_mutex_lock(&r->lock);
	yes = r->watch == SL_FOLLOWED && r->generation == generation;
	pthread_mutex_unlock(&r->lock);
	return yes;
}

void sl_record_sleep(struct sl_record *r, uint32_t seen)
{
	const struct timespec nap = { 0, 1000000 }; /* to notice an announced turn, and the end of the session */

	atomic_fetch_add(&r->sleepers, 1);
	futex(&r->complete, FUTEX_WAIT, seen, &nap);
	atomic_fetch_sub(&r->sleepers, 1);
}
