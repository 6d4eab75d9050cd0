/*
 * Copies of two and three dimensions. All are converted to one form (CUDA_MEMCPY3D),
 * in which each side is host memory, device memory or an array. A copy to the device
 * sends frames of packed rows. A copy from the device receives packed rows, which the
 * delivery scatters. Copies between device memory and arrays are forwarded.
 */
#include "bulk.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "delivery.h"
#include "entry.h"
#include "gen.h"
#include "graphhost.h"
#include "ipc.h"
#include "handles.h"
#include "hostfn.h"
#include "mapped.h"
#include "operand.h"
#include "peer.h"
#include "pointers.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stream.h"
#include "upload.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK (1u << 20)

/*
 * Determines whether a side of a copy is host or device memory: with unified addressing its address decides, and not the type that
 * the program names. The copy reaches span bytes from the base. *twin becomes true if the device's side is mapped host memory
 * (mapped.h). For a graph, host memory whose twin has another address stays host memory: host functions in the graph see it there.
 */
static CUresult resolve(CUmemorytype *type, const void **host, CUdeviceptr *dev, size_t span, bool graph, bool *twin)
{
	uint64_t p = *type == CU_MEMORYTYPE_HOST ? (uintptr_t)*host : *dev;
	struct sl_operand o;

	if (*type == CU_MEMORYTYPE_ARRAY)
		return CUDA_SUCCESS;
	if (!span || (*type != CU_MEMORYTYPE_HOST && *type != CU_MEMORYTYPE_DEVICE && *type != CU_MEMORYTYPE_UNIFIED))
		return CUDA_ERROR_INVALID_VALUE;
	o = sl_operand(p, span, *type == CU_MEMORYTYPE_DEVICE);
	if (o.place == SL_NULL || (*type == CU_MEMORYTYPE_DEVICE && o.place == SL_PAGEABLE) ||
	    (o.place == SL_DEVICE && span > o.room))
		return CUDA_ERROR_INVALID_VALUE;
	if (o.place == SL_DEVICE && !(graph && o.p != p)) {
		*type = CU_MEMORYTYPE_DEVICE;
		*dev = o.p;
		*twin |= o.twin;
	} else {
		*type = CU_MEMORYTYPE_HOST;
		*host = (const void *)(uintptr_t)p;
	}
	return CUDA_SUCCESS;
}

/* Returns the bytes from a side's base to the end of its box, or 0 if the sum overflows. */
static size_t span_of(size_t pitch, size_t height, size_t x, size_t y, size_t z, const CUDA_MEMCPY3D *c)
{
	size_t rows, last, n;

	if (__builtin_add_overflow(z, c->Depth - 1, &rows) || __builtin_mul_overflow(rows, height, &rows) ||
	    __builtin_add_overflow(y, c->Height - 1, &last) || __builtin_add_overflow(rows, last, &rows) ||
	    __builtin_mul_overflow(rows, pitch, &n) || __builtin_add_overflow(x, c->WidthInBytes, &last) ||
	    __builtin_add_overflow(n, last, &n))
		return 0;
	return n;
}

static CUresult check_side(CUmemorytype type, const void *host, CUdeviceptr dev, CUarray array, size_t *pitch, size_t *height,
			   size_t x, size_t y, const CUDA_MEMCPY3D *c)
{
	switch (type) {
	case CU_MEMORYTYPE_HOST:
		if (!host)
			return CUDA_ERROR_INVALID_VALUE;
		break;
	case CU_MEMORYTYPE_DEVICE:
	case CU_MEMORYTYPE_UNIFIED:
		if (!dev)
			return CUDA_ERROR_INVALID_VALUE;
		break;
	case CU_MEMORYTYPE_ARRAY:
		return sl_handle_state(SL_ARRAY, array) || sl_handle_bare(array) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (!*pitch && c->Height == 1 && c->Depth == 1)
		*pitch = x + c->WidthInBytes;
	if (!*height && c->Depth == 1)
		*height = y + c->Height;
	if (*pitch < x + c->WidthInBytes || *height < y + c->Height)
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

static uint64_t place(CUmemorytype type, CUdeviceptr dev, CUarray array, CUresult *err)
{
	return type == CU_MEMORYTYPE_ARRAY ? sl_handle_id(SL_ARRAY, array, err) : dev;
}

/* Sends a frame of a copy to the device, whose rows are at data; own: that is memory of the shim's. */
static CUresult send_rows(const sl_buf *b, uint64_t where, const uint8_t *data, size_t n, bool own)
{
	uint8_t *copied;
	CUresult err;
	uint32_t ctx;

	sl_upload_comes(sl_peer_route(b, &ctx), where, n);
	if (own)
		return sl_oneway_bulk(CTL_COPY_IN_3D, b, data, n);
	if (sl_upload_reads(data, n)) {
		err = sl_oneway_bulk(CTL_COPY_IN_3D, b, data, n);
		sl_upload_has_read();
		return err;
	}
	copied = malloc(n);
	if (!copied)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(copied, data, n);
	err = sl_oneway_bulk(CTL_COPY_IN_3D, b, copied, n);
	free(copied);
	return err;
}

/* Copies to the device. A frame has as many rows of one slice as fit; a row longer than a frame is sent in pieces. */
static CUresult in(const CUDA_MEMCPY3D *c, CUstream s)
{
	CUresult err = CUDA_SUCCESS;
	uint64_t where = place(c->dstMemoryType, c->dstDevice, c->dstArray, &err);
	uint32_t stream = sl_stream_id(s, &err);
	size_t width = c->WidthInBytes < CHUNK ? c->WidthInBytes : CHUNK;
	size_t rows = CHUNK / width ? CHUNK / width : 1;
	uint8_t *bounce = NULL;

	if (err)
		return err;
	err = sl_copy_source_ready(c->srcHost, span_of(c->srcPitch, c->srcHeight, c->srcXInBytes, c->srcY, c->srcZ, c));
	if (err)
		return err;
	for (size_t z = 0; z < c->Depth; z++) {
		for (size_t y = 0; y < c->Height; y += rows) {
			size_t nrows = c->Height - y < rows ? c->Height - y : rows;

			for (size_t x = 0; x < c->WidthInBytes; x += width) {
				size_t n = c->WidthInBytes - x < width ? c->WidthInBytes - x : width;
				const uint8_t *from = (const uint8_t *)c->srcHost +
						      ((c->srcZ + z) * c->srcHeight + c->srcY + y) * c->srcPitch + c->srcXInBytes + x;
				const uint8_t *data = from;
				sl_buf b;

				if (nrows > 1 && c->srcPitch != n) {
					if (!bounce && !(bounce = malloc(CHUNK)))
						return CUDA_ERROR_OUT_OF_MEMORY;
					for (size_t r = 0; r < nrows; r++)
						memcpy(bounce + r * n, from + r * c->srcPitch, n);
					data = bounce;
				}
				sl_pointers(data, n * nrows);
				sl_buf_init(&b);
				sl_route(&b, SL_STREAM, s);
				sl_put(&b, struct wire_box, .memtype = c->dstMemoryType, .stream = stream, .where = where,
				       .pitch = c->dstPitch, .height = c->dstHeight, .x = c->dstXInBytes + x, .y = c->dstY + y,
				       .z = c->dstZ + z, .lod = (uint32_t)c->dstLOD, .w = n, .h = nrows, .d = 1);
				err = send_rows(&b, where, data, n * nrows, data == bounce);
				sl_buf_free(&b);
				if (err) {
					free(bounce);
					return err;
				}
			}
		}
	}
	free(bounce);
	return CUDA_SUCCESS;
}

static CUresult out(const CUDA_MEMCPY3D *c, CUstream s, bool wait)
{
	CUresult err = CUDA_SUCCESS;
	uint64_t where = place(c->srcMemoryType, c->srcDevice, c->srcArray, &err);
	uint32_t stream = sl_stream_id(s, &err), delivery;
	size_t slice = c->dstPitch * c->dstHeight;
	uint8_t *to = (uint8_t *)c->dstHost + c->dstZ * slice + c->dstY * c->dstPitch + c->dstXInBytes;
	size_t span = (c->Depth - 1) * slice + (c->Height - 1) * c->dstPitch + c->WidthInBytes;
	sl_buf b;

	if (err)
		return err;
	delivery = sl_delivery_new_3d(to, c->dstPitch, slice, c->WidthInBytes, c->Height, c->Depth);
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, s);
	sl_bulk_download(&b, (uint64_t)c->WidthInBytes * c->Height * c->Depth);
	sl_put(&b, struct wire_copy_out_3d, .delivery = delivery,
	       .box = { .memtype = c->srcMemoryType, .stream = stream, .where = where, .pitch = c->srcPitch, .height = c->srcHeight,
			.x = c->srcXInBytes, .y = c->srcY, .z = c->srcZ, .lod = (uint32_t)c->srcLOD,
			.w = c->WidthInBytes, .h = c->Height, .d = c->Depth });
	err = sl_copy_deliver(CTL_COPY_OUT_3D, &b, delivery, wait || !sl_ptr_pinned(to, span), s);
	sl_buf_free(&b);
	return err;
}

static void copy_host(const CUDA_MEMCPY3D *c)
{
	for (size_t z = 0; z < c->Depth; z++)
		for (size_t y = 0; y < c->Height; y++)
			memmove((uint8_t *)c->dstHost + ((c->dstZ + z) * c->dstHeight + c->dstY + y) * c->dstPitch + c->dstXInBytes,
				(const uint8_t *)c->srcHost + ((c->srcZ + z) * c->srcHeight + c->srcY + y) * c->srcPitch + c->srcXInBytes,
				c->WidthInBytes);
}

static void copy_in_order(void *arg, CUresult failed)
{
	if (!failed)
		copy_host(arg);
	free(arg);
}

/* Copies from host memory to host memory in stream order, as in copy.c. */
static CUresult on_host(const CUDA_MEMCPY3D *c, CUstream s, bool wait)
{
	CUDA_MEMCPY3D *later;
	CUresult err;
	size_t dst = span_of(c->dstPitch, c->dstHeight, c->dstXInBytes, c->dstY, c->dstZ, c);
	size_t src = span_of(c->srcPitch, c->srcHeight, c->srcXInBytes, c->srcY, c->srcZ, c);

	if (wait || !sl_ptr_pinned(c->dstHost, dst) || !sl_ptr_pinned(c->srcHost, src)) {
		err = sl_cuStreamSynchronize(s);
		if (!err)
			copy_host(c);
		return err;
	}
	later = malloc(sizeof *later);
	if (!later)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*later = *c;
	err = sl_hostfn_inside(s, copy_in_order, later);
	if (err)
		free(later);
	return err;
}

static CUresult copy(const CUDA_MEMCPY3D *p, CUstream s, bool wait);

/* Returns the context that a side's memory belongs to, or NULL for host memory. It is called only if there are several sessions. */
static struct sl_ctx *side_ctx(CUmemorytype type, CUdeviceptr dev, CUarray array)
{
	if (type == CU_MEMORYTYPE_DEVICE)
		return sl_ptr_ctx_slow(dev);
	return type == CU_MEMORYTYPE_ARRAY ? sl_handle_state_by_id(SL_CTX, sl_handle_ctx(SL_ARRAY, array)) : NULL;
}

static CUresult copy_foreign(void *arg)
{
	return copy(arg, NULL, true);
}

/* Copies between sessions: from the source's device to packed rows in this process, and from there to the destination's. */
static CUresult across(const CUDA_MEMCPY3D *c, struct sl_ctx *dst, struct sl_ctx *src, CUstream s)
{
	CUDA_MEMCPY3D fetch = *c, store = *c;
	size_t slice;
	void *rows;
	CUresult err;

	if (__builtin_mul_overflow(c->WidthInBytes, c->Height, &slice) || __builtin_mul_overflow(slice, c->Depth, &slice))
		return CUDA_ERROR_INVALID_VALUE;
	rows = malloc(slice);
	if (!rows)
		return CUDA_ERROR_OUT_OF_MEMORY;
	fetch.dstMemoryType = store.srcMemoryType = CU_MEMORYTYPE_HOST;
	fetch.dstHost = rows;
	store.srcHost = rows;
	fetch.dstPitch = store.srcPitch = c->WidthInBytes;
	fetch.dstHeight = store.srcHeight = c->Height;
	fetch.dstXInBytes = fetch.dstY = fetch.dstZ = fetch.dstLOD = 0;
	store.srcXInBytes = store.srcY = store.srcZ = store.srcLOD = 0;
	err = sl_copy_elsewhere(src, copy_foreign, &fetch, s);
	if (!err)
		err = sl_copy_elsewhere(dst, copy_foreign, &store, s);
	free(rows);
	return err;
}

/* Handles copies with memory of another session. *done becomes true if this was one; it has then been made or refused. */
static CUresult foreign(CUDA_MEMCPY3D *c, CUstream s, bool *done)
{
	struct sl_ctx *dst = side_ctx(c->dstMemoryType, c->dstDevice, c->dstArray);
	struct sl_ctx *src = side_ctx(c->srcMemoryType, c->srcDevice, c->srcArray);

	*done = sl_ctx_foreign(dst) || sl_ctx_foreign(src);
	if (!*done)
		return CUDA_SUCCESS;
	if (dst && src && sl_ctx_foreign(dst) != sl_ctx_foreign(src))
		return across(c, dst, src, s);
	if (dst && src && sl_ctx_session(atomic_load(&dst->id)) != sl_ctx_session(atomic_load(&src->id)))
		return across(c, dst, src, s);
	return sl_copy_elsewhere(dst ? dst : src, copy_foreign, c, s);
}

CUresult sl_copy3d_sides(CUDA_MEMCPY3D *c, bool graph, bool *twin)
{
	CUresult err;

	if (c->srcMemoryType == CU_MEMORYTYPE_UNIFIED)
		c->srcHost = (const void *)(uintptr_t)c->srcDevice;
	if (c->dstMemoryType == CU_MEMORYTYPE_UNIFIED)
		c->dstHost = (void *)(uintptr_t)c->dstDevice;
	err = check_side(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, &c->srcPitch, &c->srcHeight, c->srcXInBytes, c->srcY, c);
	if (!err)
		err = check_side(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, &c->dstPitch, &c->dstHeight, c->dstXInBytes, c->dstY, c);
	if (!err)
		err = resolve(&c->srcMemoryType, &c->srcHost, &c->srcDevice, span_of(c->srcPitch, c->srcHeight, c->srcXInBytes, c->srcY, c->srcZ, c), graph, twin);
	if (!err)
		err = resolve(&c->dstMemoryType, (const void **)&c->dstHost, &c->dstDevice, span_of(c->dstPitch, c->dstHeight, c->dstXInBytes, c->dstY, c->dstZ, c), graph, twin);
	return err;
}

static CUresult copy(const CUDA_MEMCPY3D *p, CUstream s, bool wait)
{
	CUDA_MEMCPY3D c;
	struct sl_ctx *ctx;
	bool twin = false, captured;
	CUresult err = sl_ctx_use(&ctx);

	if (err)
		return err;
	c = *p;
	if (!c.WidthInBytes || !c.Height || !c.Depth)
		return CUDA_SUCCESS;
	err = sl_copy3d_sides(&c, false, &twin);
	if (err)
		return err;
	if (__builtin_expect(twin, 0))
		sl_mapped_send();
	if (__builtin_expect(sl_sessions > 1, 0)) {
		bool done;

		err = foreign(&c, s, &done);
		if (done)
			return err;
	}
	if (!sl_graph_copy_host(&c)) {
		err = fw_cuMemcpy3DAsync_v2(&c, s);
	} else {
		err = sl_graph_copy_capture(&c, s, &captured);
		if (err || captured)
			return err;
		if (c.srcMemoryType != CU_MEMORYTYPE_HOST)
			return out(&c, s, wait);
		if (c.dstMemoryType == CU_MEMORYTYPE_HOST) {
			err = on_host(&c, s, wait);
		} else {
			err = wait ? sl_copy_blocks(s) : CUDA_SUCCESS;
			err = err ? err : in(&c, s);
		}
	}
	/* The program may tell another process of the data as soon as this call returns. */
	twin = twin || (c.srcMemoryType == CU_MEMORYTYPE_HOST && sl_ipc_any());
	if (err || !wait)
		return err;
	return twin ? sl_cuStreamSynchronize(s) : c.srcMemoryType == CU_MEMORYTYPE_HOST ? sl_stream_arrived(s, false) : CUDA_SUCCESS;
}

static CUresult copy2d(const CUDA_MEMCPY2D *p, CUstream s, bool wait)
{
	CUDA_MEMCPY3D c = { 0 };

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	c.srcXInBytes = p->srcXInBytes;
	c.srcY = p->srcY;
	c.srcMemoryType = p->srcMemoryType;
	c.srcHost = p->srcHost;
	c.srcDevice = p->srcDevice;
	c.srcArray = p->srcArray;
	c.srcPitch = p->srcPitch;
	c.dstXInBytes = p->dstXInBytes;
	c.dstY = p->dstY;
	c.dstMemoryType = p->dstMemoryType;
	c.dstHost = p->dstHost;
	c.dstDevice = p->dstDevice;
	c.dstArray = p->dstArray;
	c.dstPitch = p->dstPitch;
	c.WidthInBytes = p->WidthInBytes;
	c.Height = p->Height;
	c.Depth = 1;
	return copy(&c, s, wait);
}

CUresult sl_cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy, CUstream ds)
{
	return copy2d(pCopy, ds, true);
}

CUresult sl_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy, CUstream ds)
{
	return copy2d(pCopy, ds, true);
}

CUresult sl_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
{
	return copy2d(pCopy, hStream, false);
}

CUresult sl_cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy, CUstream ds)
{
	return pCopy ? copy(pCopy, ds, true) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sl_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
{
	return pCopy ? copy(pCopy, hStream, false) : CUDA_ERROR_INVALID_VALUE;
}

/* Addresses are unified, so the pointers alone say which contexts take part. */
static CUresult peer(const CUDA_MEMCPY3D_PEER *p, CUstream s, bool wait)
{
	CUDA_MEMCPY3D c = { 0 };

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	c.srcXInBytes = p->srcXInBytes;
	c.srcY = p->srcY;
	c.srcZ = p->srcZ;
	c.srcLOD = p->srcLOD;
	c.srcMemoryType = p->srcMemoryType;
	c.srcHost = p->srcHost;
	c.srcDevice = p->srcDevice;
	c.srcArray = p->srcArray;
	c.srcPitch = p->srcPitch;
	c.srcHeight = p->srcHeight;
	c.dstXInBytes = p->dstXInBytes;
	c.dstY = p->dstY;
	c.dstZ = p->dstZ;
	c.dstLOD = p->dstLOD;
	c.dstMemoryType = p->dstMemoryType;
	c.dstHost = p->dstHost;
	c.dstDevice = p->dstDevice;
	c.dstArray = p->dstArray;
	c.dstPitch = p->dstPitch;
	c.dstHeight = p->dstHeight;
	c.WidthInBytes = p->WidthInBytes;
	c.Height = p->Height;
	c.Depth = p->Depth;
	return copy(&c, s, wait);
}

CUresult sl_cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *pCopy, CUstream ds)
{
	return peer(pCopy, ds, true);
}

CUresult sl_cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream)
{
	return peer(pCopy, hStream, false);
}

/* --- copies of one dimension from or to arrays: a single row --- */

struct row {
	CUmemorytype type;
	const void *host;
	CUdeviceptr dev;
	CUarray array;
	size_t offset;
};

static CUresult copy_row(struct row dst, struct row src, size_t n, CUstream s, bool wait)
{
	CUDA_MEMCPY3D c = { 0 };

	c.srcMemoryType = src.type;
	c.srcHost = src.host;
	c.srcDevice = src.dev;
	c.srcArray = src.array;
	c.srcXInBytes = src.offset;
	c.dstMemoryType = dst.type;
	c.dstHost = (void *)(uintptr_t)dst.host;
	c.dstDevice = dst.dev;
	c.dstArray = dst.array;
	c.dstXInBytes = dst.offset;
	c.WidthInBytes = n;
	c.Height = c.Depth = 1;
	return copy(&c, s, wait);
}

#define HOST(p) ((struct row){ .type = CU_MEMORYTYPE_HOST, .host = (p) })
#define DEV(p) ((struct row){ .type = CU_MEMORYTYPE_DEVICE, .dev = (p) })
#define ARRAY(a, o) ((struct row){ .type = CU_MEMORYTYPE_ARRAY, .array = (a), .offset = (o) })

CUresult sl_cuMemcpyHtoA_v2(CUarray dst, size_t dstOffset, const void *src, size_t n, CUstream ds)
{
	return copy_row(ARRAY(dst, dstOffset), HOST(src), n, ds, true);
}

CUresult sl_cuMemcpyHtoAAsync_v2(CUarray dst, size_t dstOffset, const void *src, size_t n, CUstream hStream)
{
	return copy_row(ARRAY(dst, dstOffset), HOST(src), n, hStream, false);
}

CUresult sl_cuMemcpyAtoH_v2(void *dst, CUarray src, size_t srcOffset, size_t n, CUstream ds)
{
	return copy_row(HOST(dst), ARRAY(src, srcOffset), n, ds, true);
}

CUresult sl_cuMemcpyAtoHAsync_v2(void *dst, CUarray src, size_t srcOffset, size_t n, CUstream hStream)
{
	return copy_row(HOST(dst), ARRAY(src, srcOffset), n, hStream, false);
}

CUresult sl_cuMemcpyDtoA_v2(CUarray dst, size_t dstOffset, CUdeviceptr src, size_t n, CUstream ds)
{
	return copy_row(ARRAY(dst, dstOffset), DEV(src), n, ds, true);
}

CUresult sl_cuMemcpyAtoD_v2(CUdeviceptr dst, CUarray src, size_t srcOffset, size_t n, CUstream ds)
{
	return copy_row(DEV(dst), ARRAY(src, srcOffset), n, ds, true);
}

CUresult sl_cuMemcpyAtoA_v2(CUarray dst, size_t dstOffset, CUarray src, size_t srcOffset, size_t n, CUstream ds)
{
	return copy_row(ARRAY(dst, dstOffset), ARRAY(src, srcOffset), n, ds, true);
}

/* --- batches of copies between pointers; arrays are refused --- */

static CUresult batch3d(size_t n, CUDA_MEMCPY3D_BATCH_OP *op, size_t *failIdx, CUstream s)
{
	static uint8_t once;

	if (!n || !op)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n; i++) {
		CUDA_MEMCPY3D c = { 0 };
		CUresult err;

		if (op[i].src.type != 1 || op[i].dst.type != 1) {
			err = sl_refuse("cuMemcpy3DBatchAsync with arrays", &once);
		} else {
			c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
			c.srcDevice = op[i].src.op.ptr.ptr;
			c.srcPitch = op[i].src.op.ptr.rowLength ? op[i].src.op.ptr.rowLength : op[i].extent.width;
			c.srcHeight = op[i].src.op.ptr.layerHeight ? op[i].src.op.ptr.layerHeight : op[i].extent.height;
			c.dstDevice = op[i].dst.op.ptr.ptr;
			c.dstPitch = op[i].dst.op.ptr.rowLength ? op[i].dst.op.ptr.rowLength : op[i].extent.width;
			c.dstHeight = op[i].dst.op.ptr.layerHeight ? op[i].dst.op.ptr.layerHeight : op[i].extent.height;
			c.WidthInBytes = op[i].extent.width;
			c.Height = op[i].extent.height;
			c.Depth = op[i].extent.depth;
			err = copy(&c, s, false);
		}
		if (err) {
			if (failIdx)
				*failIdx = i;
			return err;
		}
	}
	return CUDA_SUCCESS;
}

CUresult sl_cuMemcpy3DBatchAsync(size_t n, CUDA_MEMCPY3D_BATCH_OP *op, size_t *failIdx, unsigned long long flags, CUstream hStream)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : batch3d(n, op, failIdx, hStream);
}

CUresult sl_cuMemcpy3DBatchAsync_v2(size_t n, CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : batch3d(n, op, NULL, hStream);
}
