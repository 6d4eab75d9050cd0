/*
 * Flow: a block is the program's memory, its twin's address, and the bytes both
 * had when they were last made equal. A side has written where it differs from
 * those. The lock guards the blocks; it is not held while anything is awaited,
 * so what arrives lands in memory of the wait's own first.
 */
#include "mapped.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "delivery.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "log.h"
#include "ranges.h"
#include "route.h"
#include "send.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>

struct block {
	uint64_t host;	/* 0: free */
	uint32_t n;
	uint32_t serial;
	uint32_t ctx_id;
	uint32_t stream;	/* blocks with no other, for sl_mapped_fetch */
	CUdeviceptr dev;
	uint8_t *equal;
};

struct sl_mapped_wait {
	unsigned n;
	struct {
		uint32_t serial, delivery;
		unsigned block;
		uint8_t *bytes;		/* what arrives, and behind it what both sides had */
	} at[SL_MAPPED_BLOCKS];
};

_Atomic unsigned sl_mapped_blocks;

static struct block blocks[SL_MAPPED_BLOCKS];
static uint32_t serials;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/*
 * Copies to the twin at once, not behind the work of any stream: what the host has
 * written is there for every kernel launched from now on. Costs a round trip, and
 * only when the host has written.
 */
static CUresult copy_in(const struct block *b, uint32_t at, uint32_t n)
{
	sl_buf buf;
	CUresult err;

	sl_buf_init(&buf);
	sl_route_ptr(&buf, b->dev);
	sl_put(&buf, struct wire_copy_in, .dst = b->dev + at, .stream = b->stream);
	sl_put_bytes(&buf, b->equal + at, n);
	err = sl_oneway(CTL_COPY_IN, &buf);
	sl_buf_free(&buf);
	return err ? err : fw_cuStreamSynchronize(sl_handle_value(SL_STREAM, b->stream));
}

/* Gives up what a block holds here and in the worker. */
static void clear(struct block *b)
{
	if (b->dev) {
		fw_cuMemFree_v2(b->dev);
		sl_range_remove(b->dev, SL_RANGE_DEVICE, NULL);
	}
	if (b->stream)
		sl_cuStreamDestroy_v2(sl_handle_value(SL_STREAM, b->stream));
	free(b->equal);
	*b = (struct block){ 0 };
}

static CUresult add(struct block *b, uint64_t base, uint64_t n)
{
	struct sl_range r = { .type = SL_RANGE_DEVICE, .size = n };
	struct sl_ctx *c;
	CUstream stream;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	*b = (struct block){ .n = (uint32_t)n, .ctx_id = atomic_load(&c->id), .serial = ++serials };
	b->equal = malloc(n);
	if (!b->equal)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
	if (!err) {
		b->stream = sl_handle_bare(stream);
		err = fw_cuMemAlloc_v2(&b->dev, n);
	}
	if (!err) {
		r.base = b->dev;
		r.ctx_id = b->ctx_id;
		r.dev = c->dev;
		r.buffer_id = sl_range_next_id();
		sl_guard_reserve(b->dev, n);
		err = sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
	}
	if (!err) {
		memcpy(b->equal, (void *)(uintptr_t)base, n);
		err = copy_in(b, 0, b->n);
	}
	if (err) {
		clear(b);
		return err;
	}
	b->host = base;
	atomic_fetch_add(&sl_mapped_blocks, 1);
	return CUDA_SUCCESS;
}

/* The twin of a block of at most SL_MAPPED_MAX bytes, made if need be. */
static CUresult twin(CUdeviceptr *dptr, uint64_t p, uint64_t base, uint64_t n)
{
	struct block *b, *free_one = NULL;
	CUresult err = CUDA_SUCCESS;
	static uint8_t once, full;

	pthread_mutex_lock(&lock);
	for (b = blocks; b < blocks + SL_MAPPED_BLOCKS && b->host != base; b++)
		if (!b->host && !free_one)
			free_one = b;
	if (b == blocks + SL_MAPPED_BLOCKS) {
		b = free_one;
		err = b ? add(b, base, n) : sl_refuse("mapped host memory in more than 64 blocks", &full);
	} else if (sl_ptr_foreign(b->dev)) {
		/* Its twin is in one owner's device and nowhere else. */
		err = sl_refuse("mapped host memory used by devices of several owners", &once);
	}
	if (!err)
		*dptr = b->dev + (p - base);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r)
{
	uint64_t there = p;
	CUresult err;

	if (sl_mapped_twin(&there) && sl_sessions == 1) {
		*dptr = there;
		return CUDA_SUCCESS;
	}
	*dptr = p;
	/* What streams are still to do to the memory must be in it before the other side is made from it. */
	err = sl_copy_source_ready((void *)(uintptr_t)r->base, r->size);
	if (err)
		return err;
	if (r->size <= SL_MAPPED_MAX)
		return twin(dptr, p, r->base, r->size);
	if (r->type == SL_RANGE_HOST)
		return sl_mirror_pinned(r->base, r->size);
	sl_log(SL_WARN, "a kernel cannot reach registered host memory of %llu bytes, %d is the most; see docs/limits.md",
	       (unsigned long long)r->size, SL_MAPPED_MAX);
	return CUDA_ERROR_NOT_SUPPORTED;
}

bool sl_mapped_twin_slow(uint64_t *p)
{
	bool found = false;

	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS && !found; b++) {
		if (!b->host || *p - b->host >= b->n)
			continue;
		*p = b->dev + (*p - b->host);
		found = true;
	}
	pthread_mutex_unlock(&lock);
	return found;
}

bool sl_mapped_is_twin_slow(uint64_t p)
{
	bool found = false;

	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS && !found; b++)
		found = b->host && p - b->dev < b->n;
	pthread_mutex_unlock(&lock);
	return found;
}

static void drop(bool (*which)(const struct block *, uint64_t), uint64_t key)
{
	if (!atomic_load(&sl_mapped_blocks))
		return;
	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS; b++) {
		if (!b->host || !which(b, key))
			continue;
		clear(b);
		atomic_fetch_sub(&sl_mapped_blocks, 1);
	}
	pthread_mutex_unlock(&lock);
}

static bool at_base(const struct block *b, uint64_t base)
{
	return b->host == base;
}

static bool in_ctx(const struct block *b, uint64_t ctx_id)
{
	return b->ctx_id == ctx_id;
}

void sl_mapped_drop(uint64_t base)
{
	sl_mirror_drop(base);
	drop(at_base, base);
}

void sl_mapped_drop_ctx(uint32_t ctx_id)
{
	sl_mirror_drop_ctx(ctx_id);
	sl_managed_drop_ctx(ctx_id);
	drop(in_ctx, ctx_id);
}

/* Sends what the host has written, and only that. */
static void send_changes(struct block *b)
{
	const uint8_t *host = (const uint8_t *)(uintptr_t)b->host;

	for (uint32_t i = 0, from; i < b->n;) {
		if (host[i] == b->equal[i]) {
			i++;
			continue;
		}
		for (from = i; i < b->n && host[i] != b->equal[i]; i++)
			b->equal[i] = host[i];
		copy_in(b, from, i - from);
	}
}

void sl_mapped_send_slow(void)
{
	uint32_t ctx = sl_current_ctx_id();

	if (sl_capturing_any())
		return;
	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS; b++)
		if (b->host && b->ctx_id == ctx)
			send_changes(b);
	pthread_mutex_unlock(&lock);
}

struct sl_mapped_wait *sl_mapped_begin_slow(uint32_t stream)
{
	uint32_t ctx = sl_current_ctx_id();
	struct sl_mapped_wait *w;

	if (sl_capturing_any() || !(w = calloc(1, sizeof *w)))
		return NULL;
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < SL_MAPPED_BLOCKS; i++) {
		struct block *b = &blocks[i];
		uint8_t *bytes;
		sl_buf buf;

		if (!b->host || b->ctx_id != ctx || !(bytes = malloc(2 * (size_t)b->n)))
			continue;
		memcpy(bytes, b->equal, b->n);
		memcpy(bytes + b->n, b->equal, b->n);
		sl_buf_init(&buf);
		sl_route_ptr(&buf, b->dev);
		w->at[w->n].bytes = bytes;
		w->at[w->n].block = i;
		w->at[w->n].serial = b->serial;
		w->at[w->n].delivery = sl_delivery_new(bytes, b->n);
		sl_put(&buf, struct wire_copy_out, .src = b->dev, .size = b->n, .stream = stream == ~0u ? b->stream : stream,
		       .delivery = w->at[w->n].delivery);
		if (sl_oneway(CTL_COPY_OUT, &buf))
			sl_delivery_drop(w->at[w->n].delivery);
		w->n++;
		sl_buf_free(&buf);
	}
	pthread_mutex_unlock(&lock);
	return w;
}

/* Takes over what the device has written, and only that. */
static void take_changes(struct block *b, const uint8_t *arrived)
{
	const uint8_t *before = arrived + b->n;
	uint8_t *host = (uint8_t *)(uintptr_t)b->host;

	for (uint32_t i = 0; i < b->n; i++)
		if (arrived[i] != before[i])
			host[i] = b->equal[i] = arrived[i];
}

void sl_mapped_end(struct sl_mapped_wait *w, bool ok)
{
	if (ok)
		sl_mirror_stale();
	if (!w)
		return;
	for (unsigned i = 0; i < w->n; i++) {
		struct block *b = &blocks[w->at[i].block];

		/* After a failed wait the bytes may still come: their memory is given up. */
		if (!ok || sl_delivery_wait(w->at[i].delivery)) {
			sl_delivery_drop(w->at[i].delivery);
			continue;
		}
		pthread_mutex_lock(&lock);
		if (b->host && b->serial == w->at[i].serial)
			take_changes(b, w->at[i].bytes);
		pthread_mutex_unlock(&lock);
		free(w->at[i].bytes);
	}
	free(w);
}

void sl_mapped_fetch(void)
{
	sl_mapped_end(sl_mapped_begin(~0u), true);
}
