/*
 * See staged.h. The block has slots that are used in turn. A slot has a delivery without
 * bytes while the device uses it, whose end says that the slot may be used again. One thread
 * has the block at a time; others copy through the connection meanwhile rather than wait,
 * since what they wait for might be for them to do.
 */
#include "staged.h"
#include "codec.h"
#include "delivery.h"
#include "gen.h"
#include "mapped.h"
#include "send.h"
#include "session.h"
#include "stream.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

enum {
	MIN_IN = 1 << 20,	/* bytes of a copy that is worth it */
	MIN_OUT = 4 << 20,	/* its last slot costs one more round trip */
	SLOT = 1 << 20,
	SLOTS = 16,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *block;
static uint64_t there;		/* its address in the worker */
static uint32_t busy[SLOTS];	/* deliveries; 0: the slot is free */
static unsigned next;

/* Takes the block, which is made if need be. It is a context's, and ends with that. */
static bool take(void)
{
	void *p;

	if (!sl_shared_can() || pthread_mutex_trylock(&lock))
		return false;
	if (block && sl_mapped_share((uintptr_t)block, SLOT * SLOTS, false, &there))
		return true;
	if (block)
		munmap(block, SLOT * SLOTS);
	block = NULL;
	if (!sl_cuMemHostAlloc(&p, SLOT * SLOTS, 0, NULL)) {
		if (sl_mapped_share((uintptr_t)p, SLOT * SLOTS, true, &there)) {
			block = p;
			return true;
		}
		sl_cuMemFreeHost(p);
	}
	pthread_mutex_unlock(&lock);
	return false;
}

/* Waits until a slot may be used. */
static CUresult wait_slot(unsigned i)
{
	uint32_t d = busy[i];

	busy[i] = 0;
	return d ? sl_delivery_wait(d) : CUDA_SUCCESS;
}

/* Sends a frame that ends the slot's delivery when the stream gets there. */
static CUresult send_busy(unsigned i, uint16_t op, const sl_buf *b)
{
	CUresult err = sl_oneway(op, b);

	if (err) {
		sl_delivery_drop(busy[i]);
		busy[i] = 0;
	}
	return err;
}

static CUresult slot_in(CUdeviceptr dst, const void *src, size_t n, uint32_t stream)
{
	unsigned i = next++ % SLOTS;
	CUresult err = wait_slot(i);
	sl_buf b;

	if (err)
		return err;
	memcpy(block + i * (size_t)SLOT, src, n);
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_in_shared, .dst = dst, .src = there + i * (size_t)SLOT, .size = n, .stream = stream);
	err = sl_oneway(CTL_COPY_IN_SHARED, &b);
	sl_buf_free(&b);
	if (err)
		return err;
	busy[i] = sl_delivery_new(NULL, 0);
	if (!busy[i])
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_out, .stream = stream, .delivery = busy[i]); /* of no bytes */
	err = send_busy(i, CTL_COPY_OUT, &b);
	sl_buf_free(&b);
	return err;
}

CUresult sl_staged_in(CUdeviceptr dst, const void *src, size_t n, uint32_t stream, bool *done)
{
	CUresult err = CUDA_SUCCESS;

	*done = n >= MIN_IN && take();
	for (size_t at = 0; *done && at < n && !err; at += SLOT)
		err = slot_in(dst + at, (const char *)src + at, n - at < SLOT ? n - at : SLOT, stream);
	if (*done)
		pthread_mutex_unlock(&lock);
	return err;
}

static CUresult begin_out(unsigned i, CUdeviceptr src, size_t n, uint32_t stream)
{
	CUresult err = wait_slot(i);
	sl_buf b;

	if (err)
		return err;
	busy[i] = sl_delivery_new(NULL, 0);
	if (!busy[i])
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_out_shared, .src = src, .dst = there + i * (size_t)SLOT, .size = n, .stream = stream, .delivery = busy[i]);
	err = send_busy(i, CTL_COPY_OUT_SHARED, &b);
	sl_buf_free(&b);
	return err;
}

/* Bytes of the part of n that begins at at. */
static size_t part(size_t at, size_t n)
{
	return n - at < SLOT ? n - at : SLOT;
}

CUresult sl_staged_out(void *dst, CUdeviceptr src, size_t n, CUstream s, bool *done)
{
	CUresult err = CUDA_SUCCESS, told;
	uint32_t stream = sl_stream_id(s, &err);
	size_t begun = 0, at = 0;
	unsigned first;

	*done = !err && n >= MIN_OUT && take();
	if (!*done)
		return err;
	first = next;
	while (at < n && !err) {
		unsigned i = (unsigned)(first + at / SLOT) % SLOTS;

		for (; begun < n && begun - at < (size_t)SLOT * SLOTS && !err; begun += SLOT)
			err = begin_out((unsigned)(first + begun / SLOT) % SLOTS, src + begun, part(begun, n), stream);
		if (!err)
			err = wait_slot(i);
		if (!err)
			memcpy((char *)dst + at, block + i * (size_t)SLOT, part(at, n));
		at += SLOT;
	}
	next = (unsigned)(first + begun / SLOT) % SLOTS;
	pthread_mutex_unlock(&lock);
	/* A delivery ends whether its copy has failed or not. */
	told = sl_cuStreamSynchronize(s);
	return err ? err : told;
}
