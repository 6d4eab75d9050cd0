/*
 * Copies. To the device: one-way frames of at most 1 MiB whose bytes leave the
 * program's buffer before the call returns, pinned or not (upload.h). From the device: a
 * delivery (session.h) names the program's memory, the worker's frames are
 * written straight into it. Into pinned memory the call returns at once and the
 * data is there before any wait that covers the copy succeeds; into pageable
 * memory it waits, as CUDA does. Between device addresses: forwarded. Between host
 * addresses: made here, in the stream's order.
 *
 * Memory that the worker shares (shared.h) needs none of that: a frame names it, and the
 * device's copy engine reads or writes the program's own pages. Other memory is copied once, from or to a block that
 * is shared (staged.h).
 *
 * Which side a pointer is on is the ranges' to say (operand.h), not the function's
 * name; memory nobody allocated through CUDA is the host's.
 */
#include "copy.h"
#include "codec.h"
#include "ctx.h"
#include "delivery.h"
#include "entry.h"
#include "gen.h"
#include "graphhost.h"
#include "hostfn.h"
#include "ipc.h"
#include "mapped.h"
#include "operand.h"
#include "pointers.h"
#include "ranges.h"
#include "route.h"
#include "send.h"
#include "staged.h"
#include "session.h"
#include "stream.h"
#include "upload.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>

#define SHARED_MIN (64u << 10)	/* bytes from which on a copy to the device names shared memory, rather than to bring its bytes along */

bool sl_ptr_device(uint64_t p)
{
	struct sl_range r;

	return sl_range_find(p, &r) && r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED;
}

bool sl_ptr_pinned(const void *p, size_t n)
{
	struct sl_range r;
	uint64_t a = (uint64_t)(uintptr_t)p;

	if (!sl_range_find(a, &r) || (r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED))
		return false;
	return n <= r.size - (a - r.base);
}

CUresult sl_capture_check(CUstream s, const char *what)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	if (sl_capturing_any() && !sl_cuStreamIsCapturing(s, &status) && status != CU_STREAM_CAPTURE_STATUS_NONE)
		return sl_refuse_with("a stream capture", what);
	return CUDA_SUCCESS;
}

CUresult sl_copy_source_ready(const void *p, size_t n)
{
	CUresult err = CUDA_SUCCESS;

	if (sl_hostfns_open() && sl_ptr_pinned(p, 1))
		err = sl_hostfns_wait();
	return err ? err : sl_delivery_wait_range(p, n);
}

struct linear {
	CUdeviceptr dev;
	void *host;
	size_t n;
};

static CUresult in_there(void *arg);
static CUresult out_there(void *arg);

/* *told: the worker knows by the last frame that it ends a blocking copy. */
static CUresult in(CUdeviceptr dst, const void *src, size_t n, CUstream s, bool wait, bool *told)
{
	struct sl_ctx *c, *there = sl_ptr_foreign(dst);
	CUresult err = sl_ctx_use(&c);
	uint32_t stream;
	bool done = false;

	*told = false;
	if (err)
		return err;
	if (__builtin_expect(there != NULL, 0))
		return sl_copy_elsewhere(there, in_there, &(struct linear){ dst, (void *)(uintptr_t)src, n }, s);
	err = sl_copy_source_ready(src, n);
	if (err)
		return err;
	sl_pointers(src, n);
	stream = sl_stream_id_copying(s, &err);
	if (!err)
		err = sl_staged_in(dst, src, n, stream, &done);
	if (err || done)
		return err;
	*told = wait && !sl_capturing_any() && sl_stream_alone(s);
	return sl_upload(dst, src, n, s, stream, *told);
}

CUresult sl_copy_deliver(uint16_t op, sl_buf *b, uint32_t delivery, bool wait, CUstream s)
{
	struct sl_covered w = { 0 };
	CUresult err = CUDA_SUCCESS;

	if (!delivery)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!wait) {
		err = sl_oneway(op, b);
		if (err)
			sl_delivery_drop(delivery);
		return err;
	}
	sl_cover(&w, s);
	err = sl_wait(op, b, NULL);
	if (err) {
		sl_delivery_drop(delivery);
		return err;
	}
	sl_mirror_stale();
	err = sl_delivery_wait(delivery);
	if (!err)
		sl_cover_done(&w);
	return err;
}

/* Waits for a copy that the worker answers when it is done. */
static CUresult wait_for_copy(uint16_t op, const sl_buf *b, CUstream s)
{
	struct sl_covered w = { 0 };
	CUresult err;

	sl_cover(&w, s);
	err = sl_wait(op, b, NULL);
	if (!err) {
		sl_mirror_stale();
		sl_cover_done(&w);
	}
	return err;
}

/* To the device from memory that the worker shares, where it is at src. */
static CUresult in_shared(CUdeviceptr dst, const void *here, uint64_t src, size_t n, CUstream s, bool wait)
{
	CUresult err = sl_copy_source_ready(here, n);
	uint32_t stream;
	sl_buf b;

	if (err)
		return err;
	stream = sl_stream_id(s, &err);
	if (err)
		return err;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_in_shared, .dst = dst, .src = src, .size = n, .stream = stream);
	err = wait ? wait_for_copy(CTL_COPY_IN_SHARED, &b, s) : sl_oneway(CTL_COPY_IN_SHARED, &b);
	sl_buf_free(&b);
	return err;
}

/* The other direction. A delivery without bytes is open until the copy is done. */
static CUresult out_shared(void *here, uint64_t dst, CUdeviceptr src, size_t n, CUstream s, bool wait)
{
	CUresult err = CUDA_SUCCESS;
	uint32_t stream = sl_stream_id(s, &err), delivery = 0;
	sl_buf b;

	if (err)
		return err;
	if (!wait && !(delivery = sl_delivery_new(here, n)))
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_out_shared, .src = src, .dst = dst, .size = n, .stream = stream, .delivery = delivery);
	err = wait ? wait_for_copy(CTL_COPY_OUT_SHARED, &b, s) : sl_oneway(CTL_COPY_OUT_SHARED, &b);
	sl_buf_free(&b);
	if (err && delivery)
		sl_delivery_drop(delivery);
	return err;
}

static CUresult out(void *dst, CUdeviceptr src, size_t n, CUstream s, bool wait)
{
	struct sl_ctx *c, *there = sl_ptr_foreign(src);
	CUresult err = sl_ctx_use(&c);
	uint32_t delivery, stream;
	bool done = false;
	sl_buf b;

	if (err)
		return err;
	if (__builtin_expect(there != NULL, 0))
		return sl_copy_elsewhere(there, out_there, &(struct linear){ src, dst, n }, s);
	if (wait)
		err = sl_staged_out(dst, src, n, s, &done);
	if (err || done)
		return err;
	stream = sl_stream_id(s, &err);
	if (err)
		return err;
	delivery = sl_delivery_new(dst, n);
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, s);
	sl_put(&b, struct wire_copy_out, .src = src, .size = n, .stream = stream, .delivery = delivery);
	err = sl_copy_deliver(CTL_COPY_OUT, &b, delivery, wait, s);
	sl_buf_free(&b);
	return err;
}

static CUresult in_there(void *arg)
{
	struct linear *l = arg;
	bool told;

	return in(l->dev, l->host, l->n, NULL, false, &told);
}

static CUresult out_there(void *arg)
{
	struct linear *l = arg;

	return out(l->host, l->dev, l->n, NULL, true);
}

static CUresult on_device(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	if (__builtin_expect(sl_sessions > 1, 0)) {
		struct sl_ctx *to = sl_ptr_ctx_slow(dst), *from = sl_ptr_ctx_slow(src);

		if (to && from && (sl_ctx_foreign(to) || sl_ctx_foreign(from)))
			return sl_copy_across(to, dst, from, src, n, s);
	}
	return fw_cuMemcpyDtoDAsync_v2(dst, src, n, s);
}

struct host_copy {
	void *dst;
	const void *src;
	size_t n;
};

static void copy_behind(void *arg, CUresult failed)
{
	struct host_copy *c = arg;

	if (!failed)
		memmove(c->dst, c->src, c->n);
	free(c);
}

/* Host to host. Where both sides are page-locked the call need not wait for what is in the stream. */
static CUresult on_host(void *dst, const void *src, size_t n, CUstream s, bool wait)
{
	struct host_copy *c;
	CUresult err;

	if (wait) {
		err = sl_cuStreamSynchronize(s);
		if (!err)
			memmove(dst, src, n);
		return err;
	}
	c = malloc(sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*c = (struct host_copy){ dst, src, n };
	err = sl_hostfn_inside(s, copy_behind, c);
	if (err)
		free(c);
	return err;
}

/* A copy with the host's memory as a node of the graph that the stream captures. */
static CUresult captured(const struct sl_operand *dst, const struct sl_operand *src, size_t n, CUstream s, bool *done)
{
	CUDA_MEMCPY3D c = { .srcMemoryType = CU_MEMORYTYPE_HOST, .dstMemoryType = CU_MEMORYTYPE_HOST, .srcPitch = n, .srcHeight = 1,
			    .dstPitch = n, .dstHeight = 1, .WidthInBytes = n, .Height = 1, .Depth = 1 };

	if (src->place == SL_DEVICE) {
		c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
		c.srcDevice = src->p;
	} else {
		c.srcHost = (const void *)(uintptr_t)src->p;
	}
	if (dst->place == SL_DEVICE) {
		c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
		c.dstDevice = dst->p;
	} else {
		c.dstHost = (void *)(uintptr_t)dst->p;
	}
	*done = false;
	if (sl_sessions > 1 && (sl_ptr_foreign(c.srcDevice) || sl_ptr_foreign(c.dstDevice)))
		return sl_capture_check(s, "memory of another owner");
	return sl_graph_copy_capture(&c, s, done);
}

/* What a function asks of its operands. */
enum { DST_DEVICE = 1, SRC_DEVICE = 2 };

/*
 * Which memory is meant at an address that the device and the program both have. A function that asks one of its operands to be the
 * device's has the other one from the host, or it would ask that of both; one that asks nothing of them is refused.
 */
static CUresult decide(struct sl_operand *o, bool asked, unsigned asks)
{
	if (!o->shadowed || asked)
		return CUDA_SUCCESS;
	if (!asks)
		return sl_refuse_with("a copy that does not say its direction", "memory at an address where the program has other memory");
	o->place = SL_PAGEABLE;
	o->room = SIZE_MAX;
	return CUDA_SUCCESS;
}

/*
 * A copy of whatever kind its addresses make it. wait: on return the bytes that go to the host are there.
 * An operand that has to be the device's may be page-locked host memory, and not pageable memory.
 */
static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s, bool wait, unsigned asks)
{
	struct sl_operand to, from;
	uint64_t there;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	bool seen; /* as soon as the call has returned, by the program, or by another process whose device memory it is */
	bool told = false;

	if (err || !n)
		return err;
	to = sl_operand(dst, n, asks & DST_DEVICE);
	from = sl_operand(src, n, asks & SRC_DEVICE);
	if (__builtin_expect(to.shadowed || from.shadowed, 0)) {
		err = decide(&to, asks & DST_DEVICE, asks);
		if (!err)
			err = decide(&from, asks & SRC_DEVICE, asks);
		if (err)
			return err;
	}
	if (to.place == SL_NOWHERE || from.place == SL_NOWHERE || (asks & DST_DEVICE && to.place == SL_PAGEABLE) ||
	    (asks & SRC_DEVICE && from.place == SL_PAGEABLE))
		return CUDA_ERROR_INVALID_VALUE;
	if ((to.place == SL_DEVICE && n > to.room) || (from.place == SL_DEVICE && n > from.room))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_expect(sl_capturing_any(), 0) && (to.place != SL_DEVICE || from.place != SL_DEVICE)) {
		bool done;

		err = captured(&to, &from, n, s, &done);
		if (err || done)
			return err;
	}
	if (__builtin_expect(to.twin || from.twin, 0))
		sl_mapped_send();
	if (from.place == SL_LOCKED && to.place == SL_DEVICE && n >= SHARED_MIN && sl_mapped_share(src, n, true, &there))
		return in_shared(to.p, (const void *)(uintptr_t)src, there, n, s, wait);
	if (to.place == SL_LOCKED && from.place == SL_DEVICE && sl_mapped_share(dst, n, n >= SHARED_MIN, &there))
		return out_shared((void *)(uintptr_t)dst, there, from.p, n, s, wait);
	if (to.place == SL_DEVICE) {
		err = from.place == SL_DEVICE ? on_device(to.p, from.p, n, s) : in(to.p, (const void *)(uintptr_t)src, n, s, wait, &told);
		seen = to.twin || from.twin || (from.place != SL_DEVICE && sl_ipc_any());
		if (err || !wait)
			return err;
		return seen ? sl_cuStreamSynchronize(s) : from.place != SL_DEVICE ? sl_stream_arrived(s, told) : CUDA_SUCCESS;
	}
	if (from.place == SL_DEVICE)
		return out((void *)(uintptr_t)dst, from.p, n, s, wait || to.place != SL_LOCKED || n > to.room);
	/* What runs past the end of a page-locked block is nobody's to wait for later. */
	wait = wait || to.place != SL_LOCKED || from.place != SL_LOCKED || n > to.room || n > from.room;
	return on_host((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, n, s, wait);
}

/* CUDA's blocking copy waits for the stream; that shows where the host has something to see. */
CUresult sl_cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n, CUstream ds)
{
	CUresult err = sl_deliveries_open() || sl_mapped_any() ? sl_cuStreamSynchronize(ds) : CUDA_SUCCESS;

	return err ? err : copy(dst, (uintptr_t)src, n, ds, true, DST_DEVICE);
}

CUresult sl_cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream hStream)
{
	return copy(dst, (uintptr_t)src, n, hStream, false, DST_DEVICE);
}

CUresult sl_cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return copy((uintptr_t)dst, src, n, ds, true, SRC_DEVICE);
}

CUresult sl_cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return copy((uintptr_t)dst, src, n, hStream, false, SRC_DEVICE);
}

CUresult sl_cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return copy(dst, src, n, ds, true, DST_DEVICE | SRC_DEVICE);
}

CUresult sl_cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return copy(dst, src, n, hStream, false, DST_DEVICE | SRC_DEVICE);
}

CUresult sl_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return copy(dst, src, n, ds, true, 0);
}

CUresult sl_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return copy(dst, src, n, hStream, false, 0);
}

/* Whether the contexts are of several owners is route.c's to see; what host memory is concerned, this side's. */
static CUresult peer(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t n, CUstream s, bool wait)
{
	struct sl_operand to = sl_operand(dst, n, true), from = sl_operand(src, n, true);
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err || !n)
		return err;
	if (!sl_ctx_of(dst_ctx) || !sl_ctx_of(src_ctx))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (to.place != SL_DEVICE || from.place != SL_DEVICE || to.twin || from.twin || n > to.room || n > from.room)
		return copy(dst, src, n, s, wait, DST_DEVICE | SRC_DEVICE);
	if (__builtin_expect(sl_sessions > 1, 0)) {
		bool done;

		err = sl_across_cuMemcpyPeerAsync(dst, dst_ctx, src, src_ctx, n, s, &done);
		if (done || err)
			return err;
	}
	return fw_cuMemcpyPeerAsync(dst, dst_ctx, src, src_ctx, n, s);
}

CUresult sl_cuMemcpyPeer(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t n, CUstream ds)
{
	return peer(dst, dstContext, src, srcContext, n, ds, true);
}

CUresult sl_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t n, CUstream s)
{
	return peer(dst, dstContext, src, srcContext, n, s, false);
}

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
		      size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)
{
	if (!dsts || !srcs || !sizes || !count || (numAttrs && (!attrs || !attrsIdxs)))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		CUresult err = copy(dsts[i], srcs[i], sizes[i], hStream, false, 0);

		if (err) {
			if (failIdx)
				*failIdx = i;
			return err;
		}
	}
	return CUDA_SUCCESS;
}

CUresult sl_cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
			       size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)
{
	return batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}

CUresult sl_cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
				  size_t *attrsIdxs, size_t numAttrs, CUstream hStream)
{
	return batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, NULL, hStream);
}
