/*
 * Flow: a block is the program's memory, its twin's address, and the bytes both
 * had when they were last made equal. A side has written where it differs from
 * those. The lock guards the blocks; it is not held while anything is awaited,
 * so what arrives lands in memory of the wait's own first.
 */
#include "mapped.h"

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
		uint8_t *bytes;
	} at[SL_MAPPED_BLOCKS];
};

_Atomic unsigned sl_mapped_blocks;

static struct block blocks[SL_MAPPED_BLOCKS];
static uint32_t serials;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult copy_in(const struct block *b, uint32_t stream)
{
	sl_buf buf;
	CUresult err;

	sl_buf_init(&buf);
	sl_put_u64(&buf, b->dev);
	sl_put_u32(&buf, stream);
	sl_put_u32(&buf, 0);
	sl_put_bytes(&buf, b->equal, b->n);
	err = sl_oneway(CTL_COPY_IN, &buf);
	sl_buf_free(&buf);
	return err;
}

static CUresult add(struct block *b, uint64_t base, uint64_t n)
{
	struct sl_ctx *c;
	void *h;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	*b = (struct block){ .n = (uint32_t)n, .ctx_id = atomic_load(&c->id), .serial = ++serials };
	b->equal = malloc(n);
	b->stream = sl_handle_new(SL_STREAM, NULL, &h);
	if (!b->equal || !b->stream)
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (!err)
		err = fw_cuStreamCreate(b->stream, CU_STREAM_NON_BLOCKING);
	if (!err)
		err = fw_cuMemAlloc_v2(&b->dev, n);
	if (!err) {
		memcpy(b->equal, (void *)(uintptr_t)base, n);
		err = copy_in(b, 0);
	}
	if (err) {
		free(b->equal);
		return err;
	}
	b->host = base;
	atomic_fetch_add(&sl_mapped_blocks, 1);
	return CUDA_SUCCESS;
}

CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, uint64_t base, uint64_t n)
{
	struct block *b, *free_one = NULL;
	CUresult err = CUDA_SUCCESS;

	if (n > SL_MAPPED_MAX) {
		sl_log(SL_WARN, "mapped host memory of %llu bytes is not supported, %d is the most", (unsigned long long)n, SL_MAPPED_MAX);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	pthread_mutex_lock(&lock);
	for (b = blocks; b < blocks + SL_MAPPED_BLOCKS && b->host != base; b++)
		if (!b->host && !free_one)
			free_one = b;
	if (b == blocks + SL_MAPPED_BLOCKS) {
		b = free_one;
		err = b ? add(b, base, n) : CUDA_ERROR_NOT_SUPPORTED;
	}
	if (!err)
		*dptr = b->dev + (p - base);
	pthread_mutex_unlock(&lock);
	return err;
}

void sl_mapped_drop(uint64_t base)
{
	if (!atomic_load(&sl_mapped_blocks))
		return;
	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS; b++) {
		if (b->host != base)
			continue;
		fw_cuMemFree_v2(b->dev);
		fw_cuStreamDestroy_v2(sl_handle_value(SL_STREAM, b->stream));
		free(b->equal);
		b->host = 0;
		atomic_fetch_sub(&sl_mapped_blocks, 1);
	}
	pthread_mutex_unlock(&lock);
}

void sl_mapped_send_slow(uint32_t stream)
{
	uint32_t ctx = sl_current_ctx_id();

	if (sl_capturing_any())
		return;
	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b < blocks + SL_MAPPED_BLOCKS; b++) {
		if (!b->host || b->ctx_id != ctx || !memcmp((void *)(uintptr_t)b->host, b->equal, b->n))
			continue;
		memcpy(b->equal, (void *)(uintptr_t)b->host, b->n);
		copy_in(b, stream);
	}
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

		if (!b->host || b->ctx_id != ctx || !(bytes = malloc(b->n)))
			continue;
		sl_buf_init(&buf);
		sl_put_u64(&buf, b->dev);
		sl_put_u64(&buf, b->n);
		sl_put_u32(&buf, stream == ~0u ? b->stream : stream);
		w->at[w->n].bytes = bytes;
		w->at[w->n].block = i;
		w->at[w->n].serial = b->serial;
		w->at[w->n].delivery = sl_delivery_new(bytes, b->n);
		sl_put_u32(&buf, w->at[w->n].delivery);
		if (sl_oneway(CTL_COPY_OUT, &buf))
			sl_delivery_drop(w->at[w->n].delivery);
		w->n++;
		sl_buf_free(&buf);
	}
	pthread_mutex_unlock(&lock);
	return w;
}

void sl_mapped_end(struct sl_mapped_wait *w, bool ok)
{
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
		if (b->host && b->serial == w->at[i].serial && memcmp(w->at[i].bytes, b->equal, b->n)) {
			memcpy((void *)(uintptr_t)b->host, w->at[i].bytes, b->n);
			memcpy(b->equal, w->at[i].bytes, b->n);
		}
		pthread_mutex_unlock(&lock);
		free(w->at[i].bytes);
	}
	free(w);
}

void sl_mapped_fetch(void)
{
	sl_mapped_end(sl_mapped_begin(~0u), true);
}
