/* See background.h. */
#include "background.h"
#include "bulk.h"
#include "ctx.h"
#include "mirror.h"
#include "peer.h"
#include "session.h"
#include "stats.h"
#include "upload.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define FRAMES_MOST (4u << 20)	/* bytes of frames that are kept: some 30,000 launches */
#define COPIES_MOST (64u << 20)	/* bytes of copies at a time, unless there is one only */
#define CHUNK (64u << 10)	/* of frames */

/* One of both: a copy, or frames one after another. */
struct sl_kept {
	struct sl_kept *next;
	bool copy;
	struct sl_copy_in in;
	size_t n, room;
	uint8_t data[];
};

static _Atomic unsigned stops;

/* Waits until the thread has done something. Called with order held, which it gives up meanwhile. */
static void wait_moved(struct sl_peer *t)
{
	sl_cond_wait(&t->background.moved, &t->order, -1);
}

static void add(struct sl_background *g, struct sl_kept *k)
{
	if (g->last)
		g->last->next = k;
	else
		g->first = k;
	g->last = k;
	sl_cond_broadcast(&g->work);
}

/* ---- the thread ---- */

/* Nothing is kept any more: later frames go their usual way. */
static void close_up(struct sl_peer *t)
{
	__atomic_store_n(&t->background.open, false, __ATOMIC_RELEASE);
	sl_bulk_release(t);
	sl_cond_broadcast(&t->background.moved);
}

static void send_copy(struct sl_peer *t, const struct sl_copy_in *c)
{
	struct sl_background *g = &t->background;
	CUresult err;

	g->now = c;
	pthread_mutex_unlock(&t->order);
	err = sl_upload_now(c);
	/* The call has succeeded already. */
	if (err && !sl_dead())
		sl_die(err, "a copy to the device could not be sent");
	__atomic_fetch_add(&sl_stats.background, c->n, __ATOMIC_RELAXED);
	pthread_mutex_lock(&t->order);
	g->now = NULL;
	g->copies -= c->n;
	__atomic_store_n(&g->sent, g->sent + 1, __ATOMIC_RELAXED);
}

static void *run(void *arg)
{
	struct sl_peer *t = arg;
	struct sl_background *g = &t->background;

	sl_tls()->unkept = true;
	sl_tls()->no_print = true;
	prctl(PR_SET_NAME, "sluice-copy");
	pthread_mutex_lock(&t->order);
	while (!sl_ended()) {
		struct sl_kept *k = g->first;

		if (!k) {
			close_up(t);
			sl_cond_wait(&g->work, &t->order, -1);
			continue;
		}
		g->first = k->next;
		if (!g->first)
			g->last = NULL;
		if (k->copy) {
			send_copy(t, &k->in);
		} else {
			g->frames -= k->n;
			sl_send_kept(t, k->data, k->n);
		}
		free(k);
		sl_cond_broadcast(&g->moved);
	}
	/* Threads that wait find that the session has ended. */
	for (struct sl_kept *k = g->first, *next; k; k = next) {
		next = k->next;
		free(k);
	}
	g->first = g->last = NULL;
	g->frames = g->copies = 0;
	__atomic_store_n(&g->sent, g->taken, __ATOMIC_RELAXED);
	g->running = false;
	close_up(t);
	pthread_mutex_unlock(&t->order);
	return NULL;
}

/* ---- the program's threads ---- */

bool sl_background_copy(const struct sl_copy_in *c)
{
	struct sl_peer *t = c->t;
	struct sl_background *g = &t->background;
	struct sl_kept *k = calloc(1, sizeof *k);
	bool taken = false;

	if (!k)
		return false;
	k->copy = true;
	k->in = *c;
	pthread_mutex_lock(&t->order);
	while (g->open && g->copies && g->copies + c->n > COPIES_MOST && !sl_ended())
		wait_moved(t);
	/* sl_background_stop waits for what has begun before. */
	if (!sl_ended() && !atomic_load(&stops) && !atomic_load(&sl_mirrors) && (g->running || (g->running = sl_thread_start(run, t))) && (g->open || sl_bulk_reserve(t))) {
		__atomic_store_n(&g->open, true, __ATOMIC_RELAXED);
		g->copies += c->n;
		__atomic_store_n(&g->taken, g->taken + 1, __ATOMIC_RELAXED);
		add(g, k);
		taken = true;
	}
	pthread_mutex_unlock(&t->order);
	if (!taken)
		free(k);
	return taken;
}

static bool reads(const struct sl_copy_in *c, const uint8_t *p, size_t n)
{
	return c && c->src < p + n && p < c->src + c->n;
}

static bool any_reads(const struct sl_background *g, const uint8_t *p, size_t n)
{
	if (reads(g->now, p, n))
		return true;
	for (const struct sl_kept *k = g->first; k; k = k->next)
		if (k->copy && reads(&k->in, p, n))
			return true;
	return false;
}

void sl_background_wait(const void *p, size_t n)
{
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &sl_peers[i];

		if (!__atomic_load_n(&t->background.open, __ATOMIC_ACQUIRE))
			continue;
		pthread_mutex_lock(&t->order);
		while (any_reads(&t->background, p, n))
			wait_moved(t);
		pthread_mutex_unlock(&t->order);
	}
}

void sl_background_sent(void)
{
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &sl_peers[i];
		uint64_t taken;

		if (!__atomic_load_n(&t->background.open, __ATOMIC_ACQUIRE))
			continue;
		pthread_mutex_lock(&t->order);
		taken = t->background.taken;
		while (t->background.sent < taken)
			wait_moved(t);
		pthread_mutex_unlock(&t->order);
	}
}

uint64_t sl_background_taken(void)
{
	const struct sl_background *g = &sl_peers[0].background;

	return sl_sessions == 1 && __atomic_load_n(&g->open, __ATOMIC_RELAXED) ? __atomic_load_n(&g->taken, __ATOMIC_RELAXED) : 0;
}

bool sl_background_unsent(uint64_t taken)
{
	return taken > __atomic_load_n(&sl_peers[0].background.sent, __ATOMIC_RELAXED);
}

void sl_background_go(void)
{
	atomic_fetch_sub(&stops, 1);
}

void sl_background_stop(void)
{
	atomic_fetch_add(&stops, 1);
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &sl_peers[i];

		pthread_mutex_lock(&t->order);
		while (t->background.open)
			wait_moved(t);
		pthread_mutex_unlock(&t->order);
	}
}

/* Room for a frame behind everything that is kept, or NULL. */
static uint8_t *room(struct sl_background *g, size_t n)
{
	struct sl_kept *k = g->last;

	if (g->frames > FRAMES_MOST)
		return NULL;
	if (!k || k->copy || k->n + n > k->room) {
		size_t size = n < CHUNK ? CHUNK : n;

		k = malloc(sizeof *k + size);
		if (!k)
			return NULL;
		*k = (struct sl_kept){ .room = size };
		add(g, k);
	}
	g->frames += n;
	k->n += n;
	return k->data + k->n - n;
}

static bool keep(struct sl_background *g, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	uint8_t *to = room(g, sizeof *h + na + nb);

	if (!to)
		return false;
	memcpy(to, h, sizeof *h);
	if (na)
		memcpy(to + sizeof *h, a, na);
	if (nb)
		memcpy(to + sizeof *h + na, b, nb);
	return true;
}

bool sl_background_keep(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	struct sl_background *g = &t->background;

	while (g->open) {
		if (keep(g, h, a, na, b, nb))
			return true;
		wait_moved(t);
	}
	return false;
}

bool sl_background_keep_soon(struct sl_peer *t, const struct wire_request *h, const void *p, size_t n)
{
	return keep(&t->background, h, p, n, NULL, 0);
}
