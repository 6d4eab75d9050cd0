/*
 * Copies. To the device: one-way frames of at most 1 MiB whose bytes leave the
 * program's buffer before the call returns, pinned or not. From the device: a
 * delivery (session.h) names the program's memory, the worker's frames are
 * written straight into it. Into pinned memory the call returns at once and the
 * data is there before any wait that covers the copy succeeds; into pageable
 * memory it waits, as CUDA does. Between device addresses: forwarded.
 *
 * Which side a pointer is on is the ranges' to say (ranges.c); memory nobody
 * allocated through CUDA is the host's.
 */
#include "copy.h"
#include "mapped.h"

#include <string.h>

#define CHUNK (1u << 20)

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

/* False if the range is known and n bytes from p leave it. */
static bool fits(uint64_t p, size_t n)
{
	struct sl_range r;

	if (!p)
		return false;
	if (!sl_range_find(p, &r) || r.type == SL_RANGE_VA || r.type == SL_RANGE_MAPPED)
		return true;
	return n <= r.size - (p - r.base);
}

CUresult sl_copy_capture_check(CUstream s)
{
	static uint8_t once;
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	/* A captured copy would read or write this process whenever the graph runs. */
	if (sl_capturing_any() && !sl_cuStreamIsCapturing(s, &status) && status != CU_STREAM_CAPTURE_STATUS_NONE)
		return sl_refuse("a copy between host and device in a stream capture", &once);
	return CUDA_SUCCESS;
}

CUresult sl_copy_source_ready(const void *p, size_t n)
{
	CUresult err = CUDA_SUCCESS;

	if (sl_hostfns_open() && sl_ptr_pinned(p, n))
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

static CUresult in(CUdeviceptr dst, const void *src, size_t n, CUstream s)
{
	const uint8_t *p = src;
	struct sl_ctx *c, *there = sl_ptr_foreign(dst);
	CUresult err = sl_ctx_use(&c);
	uint32_t stream;

	if (err || !n)
		return err;
	if (!src || !fits(dst, n))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_expect(there != NULL, 0))
		return sl_copy_elsewhere(there, in_there, &(struct linear){ dst, (void *)(uintptr_t)src, n }, s);
	err = sl_copy_capture_check(s);
	if (err)
		return err;
	err = sl_copy_source_ready(src, n);
	if (err)
		return err;
	stream = sl_stream_id(s, &err);
	while (n && !err) {
		size_t m = n < CHUNK ? n : CHUNK;
		sl_buf b;

		sl_buf_init(&b);
		sl_route(&b, SL_STREAM, s);
		sl_put_u64(&b, dst);
		sl_put_u32(&b, stream);
		sl_put_u32(&b, 0);
		err = sl_oneway_bulk(CTL_COPY_IN, &b, p, m);
		sl_buf_free(&b);
		dst += m;
		p += m;
		n -= m;
	}
	return err;
}

CUresult sl_copy_deliver(uint16_t op, sl_buf *b, uint32_t delivery, bool wait, CUstream s)
{
	struct sl_covered w = { 0 };
	struct sl_mapped_wait *mapped;
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
	mapped = sl_mapped_begin(sl_stream_id_only(s, &err));
	err = sl_wait(op, b, NULL);
	sl_mapped_end(mapped, !err);
	if (err) {
		sl_delivery_drop(delivery);
		return err;
	}
	err = sl_delivery_wait(delivery);
	if (!err)
		sl_cover_done(&w);
	return err;
}

static CUresult out(void *dst, CUdeviceptr src, size_t n, CUstream s, bool wait)
{
	struct sl_ctx *c, *there = sl_ptr_foreign(src);
	CUresult err = sl_ctx_use(&c);
	uint32_t delivery, stream;
	sl_buf b;

	if (err || !n)
		return err;
	if (!dst || !fits(src, n))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_expect(there != NULL, 0))
		return sl_copy_elsewhere(there, out_there, &(struct linear){ src, dst, n }, s);
	err = sl_copy_capture_check(s);
	if (err)
		return err;
	stream = sl_stream_id(s, &err);
	if (err)
		return err;
	delivery = sl_delivery_new(dst, n);
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, s);
	sl_put_u64(&b, src);
	sl_put_u64(&b, n);
	sl_put_u32(&b, stream);
	sl_put_u32(&b, delivery);
	err = sl_copy_deliver(CTL_COPY_OUT, &b, delivery, wait, s);
	sl_buf_free(&b);
	return err;
}

static CUresult in_there(void *arg)
{
	struct linear *l = arg;

	return in(l->dev, l->host, l->n, NULL);
}

static CUresult out_there(void *arg)
{
	struct linear *l = arg;

	return out(l->host, l->dev, l->n, NULL, true);
}

static CUresult on_device(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err || !n)
		return err;
	if (!fits(dst, n) || !fits(src, n))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_expect(sl_sessions > 1, 0)) {
		struct sl_ctx *to = sl_ptr_ctx_slow(dst), *from = sl_ptr_ctx_slow(src);

		if (to && from && (sl_ctx_foreign(to) || sl_ctx_foreign(from)))
			return sl_copy_across(to, dst, from, src, n, s);
	}
	return fw_cuMemcpyDtoDAsync_v2(dst, src, n, s);
}

/* Host to host, in the stream's order. */
static CUresult on_host(void *dst, const void *src, size_t n, CUstream s)
{
	CUresult err = sl_copy_capture_check(s);

	if (!err)
		err = sl_cuStreamSynchronize(s);
	if (!err && n)
		memmove(dst, src, n);
	return err;
}

static CUresult any(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s, bool wait)
{
	void *hd = (void *)(uintptr_t)dst;
	const void *hs = (const void *)(uintptr_t)src;

	if (sl_ptr_device(dst))
		return sl_ptr_device(src) ? on_device(dst, src, n, s) : in(dst, hs, n, s);
	if (sl_ptr_device(src))
		return out(hd, src, n, s, wait || !sl_ptr_pinned(hd, n));
	if (n && (!hd || !hs))
		return CUDA_ERROR_INVALID_VALUE;
	return on_host(hd, hs, n, s);
}

/* CUDA's blocking copy waits for the stream; that shows where the host has something to see. */
CUresult sl_cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n, CUstream ds)
{
	CUresult err = sl_deliveries_open() || atomic_load(&sl_mapped_blocks) ? sl_cuStreamSynchronize(ds) : CUDA_SUCCESS;

	return err ? err : in(dst, src, n, ds);
}

CUresult sl_cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream hStream)
{
	return in(dst, src, n, hStream);
}

CUresult sl_cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return out(dst, src, n, ds, true);
}

CUresult sl_cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return out(dst, src, n, hStream, !sl_ptr_pinned(dst, n));
}

CUresult sl_cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return on_device(dst, src, n, ds);
}

CUresult sl_cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return on_device(dst, src, n, hStream);
}

CUresult sl_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream ds)
{
	return any(dst, src, n, ds, true);
}

CUresult sl_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream hStream)
{
	return any(dst, src, n, hStream, false);
}

CUresult sl_cuMemcpyPeer(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t n, CUstream ds)
{
	return sl_cuMemcpyPeerAsync(dst, dstContext, src, srcContext, n, ds);
}

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
		      size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)
{
	if (!dsts || !srcs || !sizes || !count || (numAttrs && (!attrs || !attrsIdxs)))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		CUresult err = any(dsts[i], srcs[i], sizes[i], hStream, false);

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

/* --- fills: the synchronous forms do not wait either, they only name another default stream --- */

CUresult sl_cuMemsetD8_v2(CUdeviceptr dst, unsigned char v, size_t n, CUstream ds)
{
	return sl_cuMemsetD8Async(dst, v, n, ds);
}

CUresult sl_cuMemsetD16_v2(CUdeviceptr dst, unsigned short v, size_t n, CUstream ds)
{
	return sl_cuMemsetD16Async(dst, v, n, ds);
}

CUresult sl_cuMemsetD32_v2(CUdeviceptr dst, unsigned int v, size_t n, CUstream ds)
{
	return sl_cuMemsetD32Async(dst, v, n, ds);
}

CUresult sl_cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char v, size_t w, size_t h, CUstream ds)
{
	return sl_cuMemsetD2D8Async(dst, pitch, v, w, h, ds);
}

CUresult sl_cuMemsetD2D16_v2(CUdeviceptr dst, size_t pitch, unsigned short v, size_t w, size_t h, CUstream ds)
{
	return sl_cuMemsetD2D16Async(dst, pitch, v, w, h, ds);
}

CUresult sl_cuMemsetD2D32_v2(CUdeviceptr dst, size_t pitch, unsigned int v, size_t w, size_t h, CUstream ds)
{
	return sl_cuMemsetD2D32Async(dst, pitch, v, w, h, ds);
}
