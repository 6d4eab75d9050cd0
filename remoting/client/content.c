/*
 * See content.h.
 *
 *	sl_content_copy		of a piece: what is known of it? else ask
 *	ask			is it time? has the last question an answer?
 *	probe			asks about one piece, and sends it meanwhile
 *	question, collect	once something was found: asks about many that are hashed, and waits for the answer
 *	run			threads that hash the pieces that come next
 *	send_stored		COPY_IN_STORED in place of the bytes
 *	keep			CONTENT_KEEP before the bytes
 *
 * After each question in a row that finds nothing twice as many pieces are sent without one. So a program whose content is always new pays
 * nothing that can be measured: its link is never idle for it.
 */
#include "content.h"
#include "attention.h"
#include "codec.h"
#include "conf.h"
#include "ctx.h"
#include "deadline.h"
#include "forms.h"
#include "log.h"
#include "peer.h"
#include "send.h"
#include "session.h"
#include "sha256.h"
#include "stats.h"
#include "upload.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define PIECE_LEAST (SL_CONTENT_PIECE / 16)	/* bytes: the end of a copy that is shorter is sent */
#define THREADS_MOST 6
#define MISSES_MOST 5			/* so at most 31 pieces go without a question */
#define MISSES_ALLOWED 2		/* after answers that said yes: some of a program's content may have changed */
#define SLOW_HASH 2			/* hashing that is not so many times as fast as the link is not worth it */
#define SLOW_TIMES 3			/* in a row: one piece may have been hashed while the machine was busy */
#define IDLE_MS 10000			/* a thread without work for so long ends */

enum { WORKS, NONE };

static bool lacks(const struct sl_peer *t)
{
	return t->lacks && (sl_forms_lack(t->lacks, CTL_CONTENT_FIND) || sl_forms_lack(t->lacks, CTL_COPY_IN_STORED) || sl_forms_lack(t->lacks, CTL_CONTENT_KEEP));
}

struct sl_content *sl_content_new(struct sl_peer *t)
{
	const char *v = sl_config("SLUICE_CONTENT");
	bool told = v && !strcmp(v, "1");
	struct sl_content *k;
	int most = sl_processors() / 2;

	if (t->shm || t->rdma || lacks(t) || (v && !strcmp(v, "0")) || !(told || sl_link_matters(t->fd)))
		return NULL;
	k = calloc(1, sizeof *k);
	if (k && !(k->ranges = malloc(SL_CONTENT_RANGES * sizeof *k->ranges))) {
		free(k);
		k = NULL;
	}
	if (!k)
		return NULL;
	k->t = t;
	k->told = told;
	k->most = most < THREADS_MOST ? (unsigned)most : THREADS_MOST;
	pthread_mutex_init(&k->lock, NULL);
	return k;
}

void sl_content_free(struct sl_content *k)
{
	if (k)
		free(k->ranges);
	free(k);
}

/* ---- where copies went to ---- */

/* Adds a range, and says whether all of it is new. Called with the lock held. */
static bool add_range(struct sl_content *k, uint64_t from, uint64_t to)
{
	struct sl_content_range *r = k->ranges;
	unsigned lo = 0, hi = k->nranges, past;
	bool fresh = true;

	/* The first that ends at from or behind it, and the first that begins behind to. */
	while (lo < hi) {
		unsigned mid = (lo + hi) / 2;

		if (r[mid].to < from)
			lo = mid + 1;
		else
			hi = mid;
	}
	for (past = lo; past < k->nranges && r[past].from <= to; past++) {
		fresh = fresh && (r[past].to == from || r[past].from == to);
		from = r[past].from < from ? r[past].from : from;
		to = r[past].to > to ? r[past].to : to;
	}
	if (past == lo && k->nranges == SL_CONTENT_RANGES)
		return false; /* it will not be known when it is written again */
	memmove(r + lo + 1, r + past, (k->nranges - past) * sizeof *r);
	k->nranges -= past - lo;
	k->nranges++;
	r[lo] = (struct sl_content_range){ from, to };
	return fresh;
}

/* ---- hashing ---- */

static size_t piece_size(size_t n, size_t i)
{
	size_t left = n - i * SL_CONTENT_PIECE;

	return left < SL_CONTENT_PIECE ? left : SL_CONTENT_PIECE;
}

static void hash(struct wire_content_piece *to, const uint8_t *p, size_t n)
{
	struct sl_sha256 s;

	sl_sha256_init(&s);
	sl_sha256_add(&s, p, n);
	sl_sha256_end(&s, to->sum);
	to->size = (uint32_t)n;
}

/* Hashes the next piece that waits for it. Called with the lock held, which it gives up meanwhile. */
static void hash_next(struct sl_content *k)
{
	size_t i = k->next++;
	const uint8_t *p = k->src + i * SL_CONTENT_PIECE;
	size_t n = piece_size(k->n, i);
	struct wire_content_piece piece = { 0 };

	k->hashing++;
	pthread_mutex_unlock(&k->lock);
	hash(&piece, p, n);
	pthread_mutex_lock(&k->lock);
	k->hashing--;
	k->piece[i % SL_CONTENT_AHEAD] = piece;
	k->done[i % SL_CONTENT_AHEAD] = true;
	sl_cond_broadcast(&k->change);
}

static void *run(void *arg)
{
	struct sl_content *k = ((struct sl_peer *)arg)->content;
	int64_t until = sl_now_ms() + IDLE_MS;

	prctl(PR_SET_NAME, "sluice-hash");
	pthread_mutex_lock(&k->lock);
	while (!sl_ended() && (k->next < k->end || sl_now_ms() < until)) {
		if (k->next < k->end) {
			hash_next(k);
			until = sl_now_ms() + IDLE_MS;
		} else {
			sl_cond_wait(&k->work, &k->lock, IDLE_MS);
		}
	}
	k->threads--;
	pthread_mutex_unlock(&k->lock);
	return NULL;
}

/* Has the pieces from i on hashed, as far as there is room. Called with the lock held. */
static void hash_ahead(struct sl_content_way *w, size_t i)
{
	struct sl_content *k = w->k;
	size_t all = (k->n + SL_CONTENT_PIECE - 1) / SL_CONTENT_PIECE, to = i + SL_CONTENT_AHEAD;

	if (all && piece_size(k->n, all - 1) < PIECE_LEAST)
		all--;
	if (to > all)
		to = all;
	if (k->end < i)
		k->next = k->end = i;
	for (; k->end < to; k->end++)
		k->done[k->end % SL_CONTENT_AHEAD] = false;
	if (!w->shared)
		return;
	while (k->threads < k->most && k->threads < k->end - k->next) {
		if (!sl_thread_start(run, k->t))
			break;
		k->threads++;
	}
	sl_cond_broadcast(&k->work);
}

/* Notes in asked what piece i and those behind it are, as far as they have been hashed, and returns how many these are. Waits for the first. */
static unsigned collect(struct sl_content_way *w, size_t i)
{
	struct sl_content *k = w->k;
	unsigned n = 0;

	pthread_mutex_lock(&k->lock);
	hash_ahead(w, i);
	while (!k->done[i % SL_CONTENT_AHEAD]) {
		if (k->next < k->end)
			hash_next(k);
		else
			sl_cond_wait(&k->change, &k->lock, -1);
	}
	for (; n < SL_MAX_CONTENT_FIND && i + n < k->end && k->done[(i + n) % SL_CONTENT_AHEAD]; n++)
		k->asked[n] = k->piece[(i + n) % SL_CONTENT_AHEAD];
	pthread_mutex_unlock(&k->lock);
	return n;
}

/* Waits until no thread reads the program's memory. Called with the lock held. */
static void stop_hashing(struct sl_content *k)
{
	k->next = k->end = 0;
	while (k->hashing)
		sl_cond_wait(&k->change, &k->lock, -1);
}

/* Hashes piece i here. False: that is slower than to send it. */
static bool hash_one(struct sl_content_way *w, size_t i, uint64_t link)
{
	size_t n = piece_size(w->c->n, i);
	int64_t begun = sl_processor_ns(), took;

	hash(&w->k->asked[0], w->c->src + i * SL_CONTENT_PIECE, n);
	took = sl_processor_ns() - begun;
	return (double)took * SLOW_HASH * (double)link < (double)n * 1e9;
}

/* ---- asking ---- */

/* Writes a question about the first n pieces of asked; hold: those that are there are to be copied. */
static void put_question(struct sl_content_way *w, sl_buf *b, unsigned n, bool hold)
{
	struct sl_content *k = w->k;

	sl_buf_init(b);
	b->to = (uint8_t)(k->t->index + 1);
	b->to_ctx = w->c->ctx;
	sl_put(b, struct wire_content_find, .npieces = n, .hold = hold);
	sl_put_bytes(b, k->asked, n * sizeof *k->asked);
}

/* Takes the answer to a question about n pieces, and says which of them are there. */
static uint32_t take_answer(struct sl_content *k, CUresult err, sl_reply *r, unsigned n)
{
	struct wire_content_find_reply m = { 0 };

	if (!err)
		sl_get_bytes(r, &m, sizeof m);
	else if (err == CUDA_ERROR_NOT_SUPPORTED)
		k->state = NONE;
	sl_reply_free(r);
	m.found &= n < 32 ? (1u << n) - 1 : UINT32_MAX;
	k->misses = m.found ? 0 : k->misses < MISSES_MOST ? k->misses + 1 : MISSES_MOST;
	k->found = m.found || (k->found && k->misses < MISSES_ALLOWED);
	k->rest = k->found ? 0 : (1u << k->misses) - 1;
	return m.found;
}

/* Asks whether the worker has piece i, while it is sent. */
static void probe(struct sl_content_way *w, size_t i, uint64_t link)
{
	struct sl_content *k = w->k;
	sl_buf b;

	if (!hash_one(w, i, link)) {
		if (++k->slow == SLOW_TIMES)
			k->state = NONE;
		return;
	}
	k->slow = 0;
	put_question(w, &b, 1, false);
	k->asking = !sl_ask(CTL_CONTENT_FIND, &b, &k->question);
	sl_buf_free(&b);
}

/* Asks which of the pieces from i on the worker has, as far as they have been hashed. */
static void question(struct sl_content_way *w, size_t i)
{
	struct sl_content *k = w->k;
	sl_reply r = { 0 };
	CUresult err;
	unsigned n;
	sl_buf b;

	if (i != w->known) { /* pieces were passed over: what has been hashed ahead is not what comes next */
		pthread_mutex_lock(&k->lock);
		stop_hashing(k);
		pthread_mutex_unlock(&k->lock);
	}
	n = collect(w, i);
	if (n > SL_MAX_CONTENT_FOUND - k->held) /* more is refused as a whole */
		n = SL_MAX_CONTENT_FOUND - k->held;
	put_question(w, &b, n, true);
	err = sl_wait(CTL_CONTENT_FIND, &b, &r);
	sl_buf_free(&b);
	w->first = i;
	w->known = i + n;
	w->found = take_answer(k, err, &r, n);
	for (uint32_t f = w->found; f; f &= f - 1)
		k->held++;
	if (!k->found) {
		pthread_mutex_lock(&k->lock);
		stop_hashing(k);
		pthread_mutex_unlock(&k->lock);
	}
}

/* Finds out whether the worker has piece i, if it is time to ask. */
static void ask(struct sl_content_way *w, size_t i, uint64_t link)
{
	struct sl_content *k = w->k;

	if (k->asking) {
		if (!sl_has_answer(&k->question))
			return;
		k->asking = false;
		take_answer(k, k->question.reply.result, &k->question.reply, 1);
	}
	if (k->rest)
		k->rest--;
	else if (k->held == SL_MAX_CONTENT_FOUND) /* pieces that were passed over; nothing more can be found */
		k->state = NONE;
	else if (k->found)
		question(w, i);
	else
		probe(w, i, link);
}

/* ---- a copy ---- */

void sl_content_begin(struct sl_content_way *w, const struct sl_copy_in *c, bool shared)
{
	*w = (struct sl_content_way){ .k = c->t->content, .c = c, .shared = shared };
}

/* Makes this copy the owner for what it has from at on, unless another one is. */
static bool claim(struct sl_content_way *w, size_t at)
{
	struct sl_content *k = w->k;

	if (w->mine)
		return true;
	pthread_mutex_lock(&k->lock);
	w->mine = !k->busy;
	if (w->mine) {
		k->busy = true;
		k->src = w->c->src;
		k->n = w->c->n;
		w->fresh = add_range(k, w->c->dst + at, w->c->dst + w->c->n);
	}
	pthread_mutex_unlock(&k->lock);
	return w->mine;
}

static CUresult send_stored(struct sl_content_way *w, size_t at, size_t n)
{
	const struct sl_copy_in *c = w->c;
	struct wire_copy_in_stored head = { .dst = c->dst + at, .stream = c->stream, .last = c->blocking && at + n == c->n, .size = (uint32_t)n };
	CUresult err;
	sl_buf b;

	memcpy(head.sum, w->k->asked[at / SL_CONTENT_PIECE - w->first].sum, sizeof head.sum);
	sl_buf_init(&b);
	sl_put_bytes(&b, &head, sizeof head);
	err = sl_oneway_copy(c, CTL_COPY_IN_STORED, &b, NULL, 0);
	sl_buf_free(&b);
	w->k->held--;
	__atomic_fetch_add(&sl_stats.stored, n, __ATOMIC_RELAXED);
	return err;
}

static CUresult keep(const struct sl_copy_in *c, size_t at, size_t n)
{
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_put(&b, struct wire_content_keep, .dst = c->dst + at, .size = (uint32_t)n);
	err = sl_oneway_copy(c, CTL_CONTENT_KEEP, &b, NULL, 0);
	sl_buf_free(&b);
	return err;
}

size_t sl_content_copy(struct sl_content_way *w, size_t at, uint64_t link, CUresult *err)
{
	size_t i = at / SL_CONTENT_PIECE, n = w->k ? piece_size(w->c->n, i) : 0;

	if (n < PIECE_LEAST || !claim(w, at) || w->k->state == NONE)
		return 0;
	if (i >= w->known)
		ask(w, i, link);
	if (w->k->state == NONE || w->k->slow)
		return 0;
	if (i < w->known && w->found >> (i - w->first) & 1) {
		*err = send_stored(w, at, n);
		return n;
	}
	if (w->fresh)
		*err = keep(w->c, at, n);
	return 0;
}

void sl_content_end(struct sl_content_way *w)
{
	struct sl_content *k = w->k;

	if (!k || !w->mine)
		return;
	pthread_mutex_lock(&k->lock);
	stop_hashing(k);
	k->busy = false;
	pthread_mutex_unlock(&k->lock);
}
