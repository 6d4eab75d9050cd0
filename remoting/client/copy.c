/*
 * Copies of one dimension.
 *
 * To the device: one-way frames of at most 1 MiB. The bytes leave the program's buffer
 * before the call returns, unless they are many and the buffer is page-locked: then
 * they leave it in the background (background.h).
 *
 * From the device: a delivery (delivery.h) names the program's memory, and the receiver
 * writes the worker's frames straight into it. A copy into page-locked memory returns at
 * once; its data is there before any wait that covers the copy succeeds. A copy into
 * pageable memory waits, as CUDA's does.
 *
 * Copies between device addresses are forwarded. Copies between host addresses are done
 * here, in stream order.
 *
 * Memory that the worker shares (shared.h) takes a shorter way: a frame names it, and the
 * device's copy engine reads or writes the program's own pages. Where the worker shares
 * memory with this process, pageable memory is copied through a shared block (staged.h).
 *
 * The ranges (operand.h) decide which side a pointer is on; the function's name does not.
 * Memory that was not allocated through CUDA is host memory.
 */
#include "copy.h"
#include "bulk.h"
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

#define SRC_DURING_API_CALL 2u	/* CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL */
#define SHARED_MIN (64u << 10)	/* a copy to the device of at least this many bytes names shared memory; a smaller one sends its bytes */

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

CUresult sl_copy_blocks(CUstream s)
{
	return sl_deliveries_open() || sl_hostfns_open() || sl_mapped_any() ? sl_cuStreamSynchronize(s) : CUDA_SUCCESS;
}

struct linear {
	CUdeviceptr dev;
	void *host;
	size_t n;
};

static CUresult in_foreign(void *arg);
static CUresult out_foreign(void *arg);

/* Copies to the device; later: src may be read after the return. *marked becomes true if the last frame tells the worker that a blocking copy ends with it. */
static CUresult in(CUdeviceptr dst, const void *src, size_t n, CUstream s, bool later, bool wait, bool *marked)
{
	struct sl_ctx *c, *there = sl_ptr_foreign(dst);
	CUresult err = sl_ctx_use(&c);
	uint32_t stream;
	bool done = false;

	*marked = false;
	if (err)
		return err;
	if (__builtin_expect(there != NULL, 0))
		return sl_copy_elsewhere(there, in_foreign, &(struct linear){ dst, (void *)(uintptr_t)src, n }, s);
	err = sl_copy_source_ready(src, n);
	if (err)
		return err;
	sl_pointers(src, n);
	/* What goes to host memory that kernels reach is not there for the program once it has left. */
	stream = __builtin_expect(sl_mapped_is_twin(dst), 0) ? sl_stream_id(s, &err) : sl_stream_id_copying(s, &err);
	if (!err)
		err = sl_staged_in(dst, src, n, stream, &done);
	if (err || done)
		return err;
	*marked = wait && !sl_capturing_any() && sl_stream_alone(s);
	return sl_upload(dst, src, n, s, stream, *marked, later);
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

/* Sends a copy and waits for the worker's answer, which comes when the copy is done. */
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

/* Copies to the device from memory that the worker shares. The memory is at here in this process, and at src in the worker. */
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

/* Copies from the device to memory that the worker shares. The delivery brings no bytes; it stays open until the copy is done. */
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
		return sl_copy_elsewhere(there, out_foreign, &(struct linear){ src, dst, n }, s);
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
	sl_bulk_download(&b, n);
	sl_put(&b, struct wire_copy_out, .src = src, .size = n, .stream = stream, .delivery = delivery);
	err = sl_copy_deliver(CTL_COPY_OUT, &b, delivery, wait, s);
	sl_buf_free(&b);
	return err;
}

static CUresult in_foreign(void *arg)
{
	struct linear *l = arg;
	bool marked;

	return in(l->dev, l->host, l->n, NULL, false, false, &marked);
}

static CUresult out_foreign(void *arg)
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

static void copy_in_order(void *arg, CUresult failed)
{
	struct host_copy *c = arg;

	if (!failed)
		memmove(c->dst, c->src, c->n);
	free(c);
}

/* Copies from host memory to host memory. If both sides are page-locked, the call need not wait for the work in the stream. */
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
	err = sl_hostfn_inside(s, copy_in_order, c);
	if (err)
		free(c);
	return err;
}

/* Adds a copy from or to host memory to the graph that the stream captures. *done is false if the stream captures none. */
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

/* Which operands a function requires to be device memory. */
enum { DST_DEVICE = 1, SRC_DEVICE = 2 };

/*
 * Decides which memory is meant where both the device and the program have memory at the address. If the function requires one operand to
 * be device memory, the other one is host memory: a function between devices requires both. A function that requires neither is refused.
 */
static CUresult decide(struct sl_operand *o, bool asked, unsigned wants)
{
	if (!o->shadowed || asked)
		return CUDA_SUCCESS;
	if (!wants)
		return sl_refuse_with("a copy that does not say its direction", "memory at an address where the program has other memory");
	o->place = SL_PAGEABLE;
	o->room = SIZE_MAX;
	return CUDA_SUCCESS;
}

/*
 * Makes a copy; its addresses decide which kind it is. If wait is set, bytes that go to the host are there on return. If read is set,
 * as it is with wait, the program may change the source then. An operand that must be device memory may also be page-locked host memory,
 * but not pageable memory.
 */
static CUresult copy_read(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s, bool wait, bool read, unsigned wants)
{
	struct sl_operand to, from;
	uint64_t there;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	bool visible; /* the program, or another process that has the device memory too, may look at the result as soon as the call returns */
	bool later, marked = false;

	if (err || !n)
		return err;
	to = sl_operand(dst, n, wants & DST_DEVICE);
	from = sl_operand(src, n, wants & SRC_DEVICE);
	if (__builtin_expect(to.shadowed || from.shadowed, 0)) {
		err = decide(&to, wants & DST_DEVICE, wants);
		if (!err)
			err = decide(&from, wants & SRC_DEVICE, wants);
		if (err)
			return err;
	}
	if (to.place == SL_NULL || from.place == SL_NULL || (wants & DST_DEVICE && to.place == SL_PAGEABLE) ||
	    (wants & SRC_DEVICE && from.place == SL_PAGEABLE))
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
	if (from.place == SL_LOCKED && to.place == SL_DEVICE && n >= SHARED_MIN && (wait || !read) && sl_mapped_share(src, n, true, &there))
		return in_shared(to.p, (const void *)(uintptr_t)src, there, n, s, wait);
	if (to.place == SL_LOCKED && from.place == SL_DEVICE && sl_mapped_share(dst, n, n >= SHARED_MIN || atomic_load(&sl_mapped_reached), &there))
		return out_shared((void *)(uintptr_t)dst, there, from.p, n, s, wait);
	if (to.place == SL_DEVICE) {
		err = wait && from.place != SL_DEVICE ? sl_copy_blocks(s) : CUDA_SUCCESS;
		if (err)
			return err;
		later = !read && from.place == SL_LOCKED && n <= from.room;
		err = from.place == SL_DEVICE ? on_device(to.p, from.p, n, s) :
						in(to.p, (const void *)(uintptr_t)src, n, s, later, wait, &marked);
		visible = to.twin || from.twin || (from.place != SL_DEVICE && sl_ipc_any());
		if (err || !(wait || (read && from.twin)))
			return err;
		return visible ? sl_cuStreamSynchronize(s) : from.place != SL_DEVICE ? sl_stream_arrived(s, marked) : CUDA_SUCCESS;
	}
	if (from.place == SL_DEVICE)
		return out((void *)(uintptr_t)dst, from.p, n, s, wait || to.place != SL_LOCKED || n > to.room);
	/* No later wait covers bytes beyond the end of a page-locked block, so such a copy waits now. */
	wait = wait || read || to.place != SL_LOCKED || from.place != SL_LOCKED || n > to.room || n > from.room;
	return on_host((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, n, s, wait);
}

static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s, bool wait, unsigned wants)
{
	return copy_read(dst, src, n, s, wait, wait, wants);
}

CUresult sl_cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n, CUstream ds)
{
	return copy(dst, (uintptr_t)src, n, ds, true, DST_DEVICE);
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

/* Around a copy that CUDA orders with all work of both contexts and of the current one. */
static CUresult wait_for_all(CUcontext dst, CUcontext src)
{
	CUresult err = sl_cuCtxSynchronize();

	if (!err)
		err = sl_cuCtxSynchronize_v2(src);
	return err ? err : sl_cuCtxSynchronize_v2(dst);
}

/* Copies between contexts. Host memory as an operand is handled here; route.c handles contexts of different owners. */
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
	err = wait && dst_ctx != src_ctx ? wait_for_all(dst_ctx, src_ctx) : CUDA_SUCCESS;
	if (!err)
		err = fw_cuMemcpyPeerAsync(dst, dst_ctx, src, src_ctx, n, s);
	/* Later work of other contexts comes after it. */
	return err || !wait || dst_ctx == src_ctx ? err : sl_cuStreamSynchronize(s);
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
	for (size_t i = 0, k = 0; i < count; i++) {
		CUresult err;

		while (k + 1 < numAttrs && attrsIdxs[k + 1] <= i)
			k++;
		err = copy_read(dsts[i], srcs[i], sizes[i], hStream, false, numAttrs && attrs[k].srcAccessOrder == SRC_DURING_API_CALL, 0);

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
