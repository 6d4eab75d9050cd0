/*
 * See upload.h. A copy goes in frames of at most 1 MiB. They are compressed only where that makes the whole faster: where
 * the link is known to be slow (throughput.h), the compressor is much faster than it, and the bytes become fewer. A part
 * that does not is sent as it is, and after each of them in a row twice as many parts are not tried.
 * On a fast link nothing is scanned and nothing is copied; the socket is looked at once for every part of a large copy.
 *
 * While copies are compressed, a link that has become faster than the compressor cannot show its rate. So if it mostly has nothing
 * left to send when the next part is ready, its rate is measured again after some time.
 *
 * A large copy over a link that is not slow goes by bulk connections (bulk.h), where there are any.
 */
#include "upload.h"
#include "bulk.h"
#include "codec.h"
#include "compress.h"
#include "mirror.h"
#include "peer.h"
#include "route.h"
#include "send.h"
#include "stats.h"

#include <stdlib.h>
#include <time.h>

#define PART (1u << 20)		/* bytes in a frame */
#define LEAST (64u << 10)	/* bytes that are worth an attempt */
#define SLOW 320000000u		/* bytes a second: a link that is faster is left alone */
#define MISSES_MOST 6		/* so at most 64 parts are not tried */
#define MEASURE_AFTER 256u	/* compressed parts */

_Static_assert(PART <= SL_MAX_COMPRESSED && PART <= SL_MAX_COPY_IN, "a part is too long for its frame");

struct upload {
	struct sl_peer *t;
	struct sl_uploads *u;	/* NULL: nothing is compressed */
	struct sl_compressor *c;
	struct sl_look look;
	bool looks;		/* the copy is large enough to be looked at */
	bool bulk;		/* ... and to go by bulk connections */
};

static uint64_t processor_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void begin(struct upload *up, struct sl_peer *t, size_t n)
{
	*up = (struct upload){ .t = t, .bulk = t->bulk && n >= SL_BULK_LEAST };
	if (!t->uploads.compress)
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
	uint64_t link, begun, took;
	uint32_t rest;
	size_t size;

	if (__builtin_expect(!u || !(link = sl_throughput(&u->throughput)) || link > SLOW, 1) || n < LEAST)
		return 0;
	rest = __atomic_load_n(&u->rest, __ATOMIC_RELAXED);
	if (rest) {
		__atomic_store_n(&u->rest, rest - 1, __ATOMIC_RELAXED);
		return 0;
	}
	if (!up->c && !(up->c = __atomic_exchange_n(&u->spare, NULL, __ATOMIC_ACQ_REL)) && !(up->c = sl_compressor_new(PART)))
		return 0;
	begun = processor_ns();
	size = sl_compress(up->c, p, n, out);
	took = processor_ns() - begun;
	/* The link would have taken n / link seconds. */
	judge(u, size && (double)took * 2 * (double)link < (double)n * 1e9);
	if (size && up->looks)
		note_wait(up);
	return size;
}

static CUresult send_part(struct upload *up, sl_buf *b, CUdeviceptr dst, const uint8_t *p, size_t n, uint32_t stream, bool last)
{
	const uint8_t *out;
	size_t size = compress(up, p, n, &out);
	CUresult err;

	if (size) {
		sl_put(b, struct wire_copy_in_compressed, .dst = dst, .stream = stream, .last = last, .size = (uint32_t)n);
		err = sl_oneway_bulk(CTL_COPY_IN_COMPRESSED, b, out, size);
		__atomic_fetch_add(&sl_stats.compressed, n, __ATOMIC_RELAXED);
		__atomic_fetch_add(&sl_stats.compressed_to, size, __ATOMIC_RELAXED);
	} else {
		sl_put(b, struct wire_copy_in, .dst = dst, .stream = stream, .last = last);
		err = sl_oneway_bulk(CTL_COPY_IN, b, p, n);
	}
	if (up->looks)
		sl_look_again(&up->look, up->t);
	return err;
}

/*
 * Whether the rest of a copy can go by bulk connections. A link that is slow is not for them. Where what it takes is not known yet, the
 * copy goes on being looked at, unless SLUICE_BULK says that connections are to be used.
 */
static bool may_bulk(const struct upload *up, const sl_buf *head, uint64_t p, size_t n)
{
	uint64_t link = up->u ? sl_throughput(&up->u->throughput) : 0;

	if (up->u && (link ? link <= SLOW : !up->t->bulk->told))
		return false;
	/* Threads of connections must not touch memory that is protected. */
	if (sl_mirror_has(p) || sl_mirror_has(p + n - 1))
		return false;
	/* Until a connection is there, and beside another thread's copy, the bytes go in frames. */
	return sl_bulk_ready(up->t, head, SL_BULK_TO_WORKER) && sl_bulk_idle(up->t);
}

/* A part of a copy that goes by bulk connections otherwise. */
static CUresult send_plain(void *arg, const struct sl_bulk_copy *c, size_t at, size_t n, bool last)
{
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, c->s);
	err = send_part(arg, &b, c->dst + at, c->src + at, n, c->stream, last);
	sl_buf_free(&b);
	return err;
}

CUresult sl_upload(CUdeviceptr dst, const void *src, size_t n, CUstream s, uint32_t stream, bool blocking)
{
	const uint8_t *p = src;
	CUresult err = CUDA_SUCCESS;
	struct upload up = { 0 };

	while (n && !err) {
		size_t m = n < PART ? n : PART;
		uint32_t ctx;
		sl_buf b;

		sl_buf_init(&b);
		sl_route(&b, SL_STREAM, s);
		if (!up.t)
			begin(&up, sl_peer_route(&b, &ctx), n);
		if (__builtin_expect(up.bulk, 0) && m < n && may_bulk(&up, &b, (uintptr_t)p, n)) {
			sl_buf_free(&b);
			err = sl_bulk_upload(up.t, &(struct sl_bulk_copy){ .dst = dst, .src = p, .n = n, .s = s, .stream = stream,
									   .blocking = blocking, .plain = send_plain, .arg = &up });
			break;
		}
		err = send_part(&up, &b, dst, p, m, stream, blocking && m == n);
		sl_buf_free(&b);
		dst += m;
		p += m;
		n -= m;
	}
	end(&up);
	return err;
}
