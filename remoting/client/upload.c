/*
 * See upload.h. A copy goes in frames of at most 1 MiB. They are compressed only where that makes the whole faster: where
 * the link is known to be slow (throughput.h), the compressor is much faster than it, and the bytes become fewer. A part
 * that does not is sent as it is, and after each of them in a row twice as many parts are not tried.
 * On a fast link nothing is scanned and nothing is copied; the socket is looked at once for every part of a large copy.
 *
 * While copies are compressed, a link that has become faster than the compressor cannot show its rate. So if it mostly has nothing
 * left to send when the next part is ready, its rate is measured again after some time.
 *
 * Over a slow link pieces of a large copy that the worker has in its store are not sent at all (content.h).
 *
 * A large copy over a link that is not slow goes by bulk connections (bulk.h), where there are any. One that the program does not wait for
 * is sent by a thread of the session's (background.h).
 *
 * The bytes are written to the socket with locks held, and other threads read them too. So memory must not become protected meanwhile
 * (mirror.h). A thread that protects memory first waits for the copies that have begun (sl_upload_stop). Copies that begin later, and copies of
 * memory that is protected already, go through a buffer of the shim's.
 */
#include "upload.h"
#include "background.h"
#include "bulk.h"
#include "codec.h"
#include "compress.h"
#include "content.h"
#include "ctx.h"
#include "deadline.h"
#include "futex.h"
#include "gen.h"
#include "hostfn.h"
#include "mapped.h"
#include "mirror.h"
#include "peer.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stats.h"
#include "stream.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PART (1u << 20)		/* bytes in a frame */
#define LEAST (64u << 10)	/* bytes that are worth an attempt */
#define SLOW 320000000u		/* bytes a second: a link that is faster is left alone */
#define PROMPT 4000000000u	/* bytes a second: copies that are sent faster are not made in the background */
#define MISSES_MOST 6		/* so at most 64 parts are not tried */
#define MEASURE_AFTER 256u	/* compressed parts */
#define AHEAD (96u << 20)	/* bytes that the worker may have to read to come to the end of a host function: less than maxAhead (wire/conn.go) by what else is sent */

_Static_assert(PART <= SL_MAX_COMPRESSED && PART <= SL_MAX_COPY_IN, "a part is too long for its frame");

struct upload {
	struct sl_peer *t;
	struct sl_uploads *u;	/* NULL: nothing is done against a slow link */
	struct sl_compressor *c;
	struct sl_look look;
	bool looks;		/* the copy is large enough to be looked at */
	bool bulk;		/* ... and to go by bulk connections */
	struct sl_content_way content;
};

/* Whether it matters how fast the link is. */
static bool measured(const struct sl_peer *t)
{
	return t->uploads.compress || t->content;
}

static void begin(struct upload *up, struct sl_peer *t, size_t n)
{
	*up = (struct upload){ .t = t, .bulk = t->bulk && n >= SL_BULK_ASK_LEAST && !(t->content && t->content->told) };
	if (!measured(t))
		return;
	up->u = &t->uploads;
	up->looks = n > PART;
	if (up->looks)
		sl_look_begin(&up->look, t);
}

static void end(struct upload *up)
{
	if (up->c)
		free(__atomic_exchange_n(&up->u->spare, up->c, __ATOMIC_ACQ_REL));
}

/* Notes whether an attempt was worth it. */
static void judge(struct sl_uploads *u, bool good)
{
	uint32_t misses = good ? 0 : __atomic_load_n(&u->misses, __ATOMIC_RELAXED) + 1;

	if (misses > MISSES_MOST)
		misses = MISSES_MOST;
	__atomic_store_n(&u->misses, misses, __ATOMIC_RELAXED);
	__atomic_store_n(&u->rest, good ? 0 : 1u << misses, __ATOMIC_RELAXED);
}

/* Notes whether the link has something left to send, now that the next part is ready. */
static void note_wait(struct upload *up)
{
	struct sl_uploads *u = up->u;
	uint32_t waited, idle;

	sl_look_again(&up->look, up->t);
	if (!up->look.good)
		return;
	waited = __atomic_add_fetch(&u->waited, up->look.queued, __ATOMIC_RELAXED);
	idle = __atomic_add_fetch(&u->idle, !up->look.queued, __ATOMIC_RELAXED);
	if (waited + idle < MEASURE_AFTER)
		return;
	__atomic_store_n(&u->waited, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&u->idle, 0, __ATOMIC_RELAXED);
	if (idle > waited)
		sl_throughput_forget(&u->throughput);
}

/* Compresses a part, if that is likely to be worth it: the number of bytes at *out, or 0. */
static size_t compress(struct upload *up, const uint8_t *p, size_t n, const uint8_t **out)
{
	struct sl_uploads *u = up->u;
	uint64_t link;
	int64_t begun, took;
	uint32_t rest;
	size_t size;

	if (__builtin_expect(!u || !(link = sl_throughput(&u->throughput)) || link > SLOW, 1) || n < LEAST || !u->compress)
		return 0;
	rest = __atomic_load_n(&u->rest, __ATOMIC_RELAXED);
	if (rest) {
		__atomic_store_n(&u->rest, rest - 1, __ATOMIC_RELAXED);
		return 0;
	}
	if (!up->c && !(up->c = __atomic_exchange_n(&u->spare, NULL, __ATOMIC_ACQ_REL)) && !(up->c = sl_compressor_new(PART)))
		return 0;
	begun = sl_processor_ns();
	size = sl_compress(up->c, p, n, out);
	took = sl_processor_ns() - begun;
	/* The link would have taken n / link seconds. */
	judge(u, size && (double)took * 2 * (double)link < (double)n * 1e9);
	if (size && up->looks)
		note_wait(up);
	return size;
}

/* Sends n bytes of a copy from at on; last: they are the last ones of a blocking copy. */
static CUresult send_part(void *arg, const struct sl_copy_in *c, size_t at, size_t n, bool last)
{
	struct upload *up = arg;
	const uint8_t *p = c->src + at, *out;
	size_t size = compress(up, p, n, &out);
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	if (size) {
		sl_put(&b, struct wire_copy_in_compressed, .dst = c->dst + at, .stream = c->stream, .last = last, .size = (uint32_t)n);
		err = sl_oneway_copy(c, CTL_COPY_IN_COMPRESSED, &b, out, size);
		__atomic_fetch_add(&sl_stats.compressed, n, __ATOMIC_RELAXED);
		__atomic_fetch_add(&sl_stats.compressed_to, size, __ATOMIC_RELAXED);
	} else {
		sl_put(&b, struct wire_copy_in, .dst = c->dst + at, .stream = c->stream, .last = last);
		err = sl_oneway_copy(c, CTL_COPY_IN, &b, p, n);
	}
	sl_buf_free(&b);
	if (up->looks)
		sl_look_again(&up->look, up->t);
	return err;
}

/*
 * Whether bulk connections are worth it. A link that is slow is not for them. Where what it takes is not known yet, copies go on
 * being looked at, unless SLUICE_BULK says that connections are to be used.
 */
static bool fast(const struct sl_peer *t)
{
	uint64_t link = t->uploads.compress || (t->content && t->content->found) ? sl_throughput(&t->uploads.throughput) : UINT64_MAX;

	return link ? link > SLOW : t->bulk->told;
}

void sl_upload_comes(struct sl_peer *t, uint64_t dst, size_t n)
{
	struct sl_uploads *u = &t->uploads;
	uint64_t given, before, type;

	if (__builtin_expect(!sl_hostfns_open() && !sl_hostfns_in_graphs(), 1))
		return;
	given = __atomic_add_fetch(&u->given, n, __ATOMIC_RELAXED) - n;
	before = __atomic_load_n(&u->carried_out, __ATOMIC_RELAXED);
	if (given < before + AHEAD)
		return;
	/* Any question will do: it is answered in the order of the frames. */
	fw_cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, dst);
	while (before < given && !__atomic_compare_exchange_n(&u->carried_out, &before, given, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

static uint32_t reading;	/* copies that read the program's memory; a futex */
static _Atomic unsigned stops;

bool sl_upload_reads(const void *p, size_t n)
{
	/* First this, then the look, and sl_upload_stop the other way round: one of both sees the other. */
	__atomic_fetch_add(&reading, 1, __ATOMIC_SEQ_CST);
	if (__builtin_expect(!atomic_load(&stops) && !sl_mirror_has((uintptr_t)p, n), 1))
		return true;
	sl_upload_has_read();
	return false;
}

void sl_upload_has_read(void)
{
	__atomic_fetch_sub(&reading, 1, __ATOMIC_SEQ_CST);
	if (__builtin_expect(atomic_load(&stops), 0))
		sl_futex_wake(&reading);
}

void sl_upload_stop(void)
{
	uint32_t n;

	sl_background_stop();
	atomic_fetch_add(&stops, 1);
	while ((n = __atomic_load_n(&reading, __ATOMIC_SEQ_CST)))
		sl_futex_wait(&reading, n, NULL);
}

void sl_upload_go(void)
{
	atomic_fetch_sub(&stops, 1);
	sl_background_go();
}

/* Whether the rest of a copy can go by bulk connections. Until one is there, and beside another copy that has them all, the bytes go in frames. */
static bool may_bulk(const struct sl_copy_in *c)
{
	return fast(c->t) && sl_bulk_ready(c->t, SL_BULK_TO_WORKER);
}

/* Bytes of a copy from at on that the worker has, and has been told to copy. */
static size_t stored(struct upload *up, size_t at, CUresult *err)
{
	uint64_t link = sl_throughput(&up->t->uploads.throughput);

	if (__builtin_expect(!up->content.k, 1) || at % SL_CONTENT_PIECE || (!up->t->content->told && (!link || link > SLOW)) || sl_capturing_any())
		return 0;
	return sl_content_copy(&up->content, at, link, err);
}

/* Whether this thread's frames are sent and not kept behind copies. */
static bool at_once(const struct sl_peer *t)
{
	return sl_tls()->unkept || !__atomic_load_n(&t->background.open, __ATOMIC_RELAXED);
}

CUresult sl_upload_now(const struct sl_copy_in *c)
{
	bool rated = c->n >= SL_BACKGROUND_LEAST && at_once(c->t);
	int64_t began = rated ? sl_now_ns() : 0;
	CUresult err = CUDA_SUCCESS;
	struct upload up;
	size_t had = 0;

	begin(&up, c->t, c->n);
	if (__builtin_expect(c->t->content && c->n >= SL_CONTENT_LEAST, 0))
		sl_content_begin(&up.content, c, true);
	for (size_t at = 0, m; at < c->n && !err; at += m) {
		size_t left = c->n - at;

		m = stored(&up, at, &err);
		if (up.content.k && at % SL_CONTENT_PIECE == 0)
			up.look.queued = false; /* the time of a question, and of what is not sent, is not the link's */
		had += m;
		if (m || err)
			continue;
		m = left < PART ? left : PART;
		if (__builtin_expect(up.bulk, 0) && m < left && may_bulk(c)) {
			struct sl_copy_in rest = *c;

			rest.dst += at;
			rest.src += at;
			rest.n = left;
			if (sl_bulk_upload(&rest, send_part, &up, &err))
				break;
		}
		sl_upload_comes(c->t, c->dst + at, m);
		err = send_part(&up, c, at, m, c->blocking && m == left);
	}
	sl_content_end(&up.content);
	end(&up);
	/* What the worker had took no time to speak of, and what was kept none at all. */
	if (rated && c->n - had >= SL_BACKGROUND_LEAST && at_once(c->t))
		__atomic_store_n(&up.t->uploads.rate, (uint64_t)((double)(c->n - had) * 1e9 / (double)(sl_now_ns() - began + 1)), __ATOMIC_RELAXED);
	return err;
}

/* Whether a copy that may be made in the background is worth that. With a worker of another release it might fail when nobody asks any more. */
static bool may_wait(const struct sl_copy_in *c)
{
	uint64_t rate = __atomic_load_n(&c->t->uploads.rate, __ATOMIC_RELAXED);

	return c->n >= SL_BACKGROUND_LEAST && rate && rate < PROMPT && !c->t->shm && !c->t->lacks && !sl_mirror_has((uintptr_t)c->src, c->n) && !sl_capturing_any();
}

/* Sends a copy of memory that may be protected. */
static CUresult upload_copied(const struct sl_copy_in *c)
{
	uint8_t *own = malloc(PART);
	CUresult err = own ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	for (size_t at = 0, m; at < c->n && !err; at += m) {
		struct sl_copy_in part = *c;

		m = c->n - at < PART ? c->n - at : PART;
		memcpy(own, c->src + at, m);
		part.dst += at;
		part.src = own;
		part.n = m;
		part.blocking = c->blocking && at + m == c->n;
		err = sl_upload_now(&part);
	}
	free(own);
	return err;
}

CUresult sl_upload(CUdeviceptr dst, const void *src, size_t n, CUstream s, uint32_t stream, bool blocking, bool later)
{
	struct sl_copy_in c = { .dst = dst, .src = src, .n = n, .stream = stream, .blocking = blocking };
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, s);
	c.t = sl_peer_route(&b, &c.ctx);
	if (later && may_wait(&c) && sl_background_copy(&c))
		return sl_dead();
	if (!sl_upload_reads(src, n))
		return upload_copied(&c);
	err = sl_upload_now(&c);
	sl_upload_has_read();
	return err;
}
