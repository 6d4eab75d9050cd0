/* See bulk.h. This file: whether there are bulk connections, and how each begins and ends. */
#include "bulk.h"
#include "attention.h"
#include "conf.h"
#include "ctx.h"
#include "deadline.h"
#include "forms.h"
#include "log.h"
#include "peer.h"
#include "session.h"
#include "stream.h"
#include "wait.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define MOST 6			/* connections for each direction, unless SLUICE_BULK says so */
#define PROCESSORS_LEAST 4	/* with fewer processors there are none, unless SLUICE_BULK says so */
#define TRIP_NS 1000000		/* a worker that takes longer to answer is far away, or busy */
#define ASK_TIMES 2		/* the first time the worker may have to lock memory before it answers */
#define ASK_AGAIN_MS 5000
#define ASK_AGAIN_MOST_MS 60000
#define CONNECT_MS 5000		/* patience, for each step */
#define END_MS 100		/* the end of the process takes no longer for this */
#define AGAIN_LEAST_MS 1000
#define AGAIN_MOST_MS 60000
#define REFUSED 6		/* a refusal counts as this many failures, so the pause is AGAIN_MOST_MS */

enum { UNASKED, ASKING, OPEN, NONE };

/* How many connections each direction may have. */
static unsigned wanted(bool *told)
{
	const char *v = sl_config("SLUICE_BULK");
	int processors = sl_processors();
	char *end;
	long n;

	*told = false;
	if (v && *v) {
		n = strtol(v, &end, 10);
		*told = !*end && n >= 0;
		if (*told)
			return n < SL_MAX_BULK ? (unsigned)n : SL_MAX_BULK;
	}
	if (processors < PROCESSORS_LEAST)
		return 0;
	return processors / 2 < MOST ? (unsigned)processors / 2 : MOST;
}

static bool lacks(const struct sl_peer *t)
{
	return t->lacks && (sl_forms_lack(t->lacks, CTL_BULK_OPEN) || sl_forms_lack(t->lacks, CTL_COPY_IN_BULK) || sl_forms_lack(t->lacks, CTL_BULK_DROP));
}

struct sl_bulk *sl_bulk_new(struct sl_peer *t)
{
	struct sl_bulk *b;
	unsigned n;
	bool told;

	if (t->shm || t->rdma || lacks(t) || !(n = wanted(&told)) || !(b = calloc(1, sizeof *b)))
		return NULL;
	b->wants = n;
	b->told = told;
	pthread_mutex_init(&b->lock, NULL);
	for (unsigned d = 0; d < 2; d++)
		for (unsigned i = 0; i < SL_MAX_BULK; i++)
			b->line[d][i] = (struct sl_bulk_line){ .t = t, .direction = d, .c = { .fd = -1, .shm = -1 } };
	return b;
}

void sl_bulk_free(struct sl_bulk *b)
{
	free(b);
}

/* ---- one connection ---- */

static bool join(struct sl_bulk_line *l)
{
	struct sl_peer *t = l->t;
	struct sl_bulk *b = t->bulk;
	const struct sl_ask ask = { .kind = SL_SESSION_BULK, .owner = t->index, .patience_ms = CONNECT_MS, .quiet = true };
	struct wire_bulk_key key = { .direction = l->direction };
	enum sl_connected rc;
	char reason[512];

	memcpy(key.key, b->key, sizeof key.key);
	rc = sl_connect_bulk(&ask, b->session, &key, t->keepalive_ms, &l->c, reason, sizeof reason);
	if (rc) {
		if (rc == SL_DENIED || rc == SL_MISMATCH)
			l->failed = REFUSED;
		sl_log(SL_DEBUG, "no bulk connection: %s", *reason ? reason : "the worker is not there, or does not answer");
		return false;
	}
	pthread_mutex_lock(&b->lock);
	/* The thread that ends the session first marks it ended, and then shuts down the lines that are up. */
	l->up = !sl_ended();
	b->up[l->direction] += l->up;
	sl_cond_broadcast(&b->change);
	pthread_mutex_unlock(&b->lock);
	return l->up;
}

void sl_bulk_down(struct sl_bulk_line *l)
{
	struct sl_bulk *b = l->t->bulk;

	if (!l->up)
		return;
	l->up = false;
	b->up[l->direction]--;
	sl_cond_broadcast(&b->change);
}

static void leave(struct sl_bulk_line *l, bool failed)
{
	struct sl_bulk *b = l->t->bulk;
	int64_t nap = AGAIN_LEAST_MS;
	int fd;

	pthread_mutex_lock(&b->lock);
	sl_bulk_down(l);
	fd = l->c.fd;
	l->c.fd = -1;
	pthread_mutex_unlock(&b->lock);
	if (fd >= 0) {
		shutdown(fd, SHUT_RDWR); /* a forked child may have a copy */
		close(fd);
	}
	pthread_mutex_lock(&b->lock);
	for (unsigned i = 0; i < l->failed && nap < AGAIN_MOST_MS; i++)
		nap *= 2;
	l->again = failed ? sl_now_ms() + (nap < AGAIN_MOST_MS ? nap : AGAIN_MOST_MS) : 0;
	l->failed = failed ? l->failed + 1 : 0;
	l->running = false;
	pthread_mutex_unlock(&b->lock);
}

static void *run(void *arg)
{
	struct sl_bulk_line *l = arg;
	bool good;

	prctl(PR_SET_NAME, "sluice-bulk");
	good = join(l) && (l->direction == SL_BULK_TO_WORKER ? sl_bulk_send(l) : sl_bulk_receive(l));
	leave(l, !good);
	return NULL;
}

/* Starts the connections that are missing. False if there is none, and none is being made. Called with the lock held. */
static bool start(struct sl_bulk *b, uint32_t direction)
{
	int64_t now = sl_now_ms();
	bool any = false;

	for (unsigned i = 0; i < b->lines; i++) {
		struct sl_bulk_line *l = &b->line[direction][i];

		if (!l->running && now >= l->again) {
			l->running = sl_thread_start(run, l);
			if (!l->running)
				l->again = now + AGAIN_LEAST_MS;
		}
		any |= l->running;
	}
	return any;
}

/* ---- all of them ---- */

/* One question. *near: the answer came soon. */
static CUresult ask_once(const struct sl_peer *t, struct wire_bulk_open_reply *a, bool *near)
{
	int64_t began = sl_now_ns();
	CUresult err;
	sl_reply r;
	sl_buf q;

	sl_buf_init(&q);
	q.to = (uint8_t)(t->index + 1);
	err = sl_wait(CTL_BULK_OPEN, &q, &r);
	*near = sl_now_ns() - began <= TRIP_NS;
	sl_get_bytes(&r, a, sizeof *a);
	if (!err && r.bad)
		err = CUDA_ERROR_UNKNOWN;
	sl_reply_free(&r);
	sl_buf_free(&q);
	return err;
}

/* Asks the worker. Called with the lock held, which it gives up meanwhile. */
static void ask(const struct sl_peer *t)
{
	struct sl_bulk *b = t->bulk;
	struct wire_bulk_open_reply a;
	bool near = false;
	CUresult err = CUDA_SUCCESS;

	b->state = ASKING;
	pthread_mutex_unlock(&b->lock);
	for (int i = 0; i < ASK_TIMES && !err && !near; i++) {
		err = ask_once(t, &a, &near);
		near |= b->told;
	}
	pthread_mutex_lock(&b->lock);
	if (err == CUDA_ERROR_NOT_SUPPORTED || (!err && !a.most)) {
		b->state = NONE;
	} else if (!err && near) {
		memcpy(b->key, a.key, sizeof b->key);
		b->session = a.session;
		b->lines = b->wants < a.most ? b->wants : a.most;
		b->state = OPEN;
	} else {
		b->ask_nap = !b->ask_nap ? ASK_AGAIN_MS : b->ask_nap < ASK_AGAIN_MOST_MS / 2 ? 2 * b->ask_nap : ASK_AGAIN_MOST_MS;
		b->ask_again = sl_now_ms() + b->ask_nap;
		b->state = UNASKED;
	}
}

bool sl_bulk_ready(struct sl_peer *t, uint32_t direction)
{
	struct sl_bulk *b = t->bulk;
	bool ready;

	/* A capture must not see what the worker does when it is asked. */
	if (!b || sl_capturing_any())
		return false;
	pthread_mutex_lock(&b->lock);
	/* A question that is kept behind copies says nothing of how near the worker is. */
	if (b->state == UNASKED && (!__atomic_load_n(&t->background.open, __ATOMIC_RELAXED) || sl_tls()->unkept) && sl_now_ms() >= b->ask_again)
		ask(t);
	ready = b->state == OPEN && start(b, direction);
	pthread_mutex_unlock(&b->lock);
	return ready;
}

void sl_bulk_download(const sl_buf *head, uint64_t n)
{
	uint32_t ctx;

	if (n >= SL_BULK_ASK_LEAST)
		sl_bulk_ready(sl_peer_route(head, &ctx), SL_BULK_TO_CLIENT);
}

void sl_bulk_end(struct sl_peer *t)
{
	struct sl_bulk *b = t->bulk;
	int64_t until = sl_now_ms() + END_MS;

	if (!b)
		return;
	/* A process may end in a signal handler, which has interrupted the thread that holds the lock. */
	while (pthread_mutex_trylock(&b->lock)) {
		if (sl_exiting() && sl_now_ms() >= until)
			return;
		sched_yield();
	}
	for (unsigned d = 0; d < 2; d++)
		for (unsigned i = 0; i < SL_MAX_BULK; i++)
			if (b->line[d][i].up)
				shutdown(b->line[d][i].c.fd, SHUT_RDWR);
	sl_cond_broadcast(&b->work);
	sl_cond_broadcast(&b->change);
	pthread_mutex_unlock(&b->lock);
}

void sl_bulk_forked(struct sl_peer *t)
{
	for (unsigned d = 0; t->bulk && d < 2; d++)
		for (unsigned i = 0; i < SL_MAX_BULK; i++)
			if (t->bulk->line[d][i].c.fd >= 0)
				close(t->bulk->line[d][i].c.fd);
}
