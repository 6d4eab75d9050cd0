/*
 * Copies and sets, reduced to one form: rows and slices between two plain addresses
 * (struct copy). The kind of memory on each side decides only whether the call
 * waits: a pageable source must not be used after the call returns, so such copies
 * wait or take a private copy.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define OWN_MAX (64U << 10)	/* pageable sources up to this size are copied first, as the driver does */

/*
 * With unified addressing a device address may be given for host memory, and page-locked host
 * memory for device memory.
 */
enum side { S_HOST, S_DEVICE };

static bool side_ok(enum side side, uint64_t p, size_t n)
{
	if (side == S_DEVICE || mem_device(p))
		return mem_ok(p, n);
	return p != 0;
}

static bool pageable(uint64_t p)
{
	return !mem_find(p);
}

/* Queues c in s. sync: the call returns when the copy is complete. */
static CUresult copy_put(struct stream *s, struct copy *c, const CUDA_MEMCPY3D *desc, bool sync)
{
	struct work w = { .kind = W_COPY };
	bool src_page = pageable((uintptr_t)c->src), dst_page = pageable((uintptr_t)c->dst);

	if (!c->width || !c->height || !c->depth)
		return sync && s->cap ? stream_sync_check(s) : CUDA_SUCCESS;
	w.copy.c = *c;
	if (desc)
		w.copy.desc = *desc;
	if (s->cap) {
		if (sync)
			return stream_sync_check(s);
		return stream_put(s, &w);
	}
	if (sync) {
		/* copies between device addresses do not wait */
		if (!src_page && !dst_page && mem_device((uintptr_t)c->src) && mem_device((uintptr_t)c->dst))
			return stream_put(s, &w);
		return stream_put_wait(s, &w);
	}
	if (dst_page)
		return stream_put_wait(s, &w);
	if (src_page) {
		if (c->height * c->depth != 1 || c->width > OWN_MAX)
			return stream_put_wait(s, &w);
		w.copy.c.own = xcalloc(1, c->width);
		memcpy(w.copy.c.own, c->src, c->width);
		w.copy.c.src = w.copy.c.own;
	}
	return stream_put(s, &w);
}

static CUresult linear(uint64_t dst, enum side ds, uint64_t src, enum side ss, size_t n, CUstream h, CUstream dflt,
		       bool sync)
{
	struct copy k = { .dst = (char *)(uintptr_t)dst, .src = (const char *)(uintptr_t)src, .width = n,
			  .height = 1, .depth = 1 };
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (r)
		return sim_leave(r);
	if (n && (!side_ok(ds, dst, n) || !side_ok(ss, src, n)))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	return sim_leave(copy_put(s, &k, NULL, sync));
}

#define PT CU_STREAM_PER_THREAD
#define PTR(p) ((uint64_t)(uintptr_t)(p))

#define COPIES(sync_name, ptds_name, async_name, ptsz_name, dt, ds, st, ss) \
	API CUresult sync_name(dt dst, st src, size_t n) { return linear(PTR(dst), ds, PTR(src), ss, n, NULL, NULL, true); } \
	API CUresult ptds_name(dt dst, st src, size_t n) { return linear(PTR(dst), ds, PTR(src), ss, n, NULL, PT, true); } \
	API CUresult async_name(dt dst, st src, size_t n, CUstream h) \
	{ return linear(PTR(dst), ds, PTR(src), ss, n, h, NULL, false); } \
	API CUresult ptsz_name(dt dst, st src, size_t n, CUstream h) \
	{ return linear(PTR(dst), ds, PTR(src), ss, n, h, PT, false); }

COPIES(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz, CUdeviceptr, S_DEVICE,
       const void *, S_HOST)
COPIES(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz, void *, S_HOST,
       CUdeviceptr, S_DEVICE)
COPIES(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz, CUdeviceptr, S_DEVICE,
       CUdeviceptr, S_DEVICE)
COPIES(cuMemcpy, cuMemcpy_ptds, cuMemcpyAsync, cuMemcpyAsync_ptsz, CUdeviceptr, S_HOST, CUdeviceptr, S_HOST)

static CUresult peer(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n, CUstream h, CUstream dflt,
		     bool sync)
{
	CUresult r = sim_enter();
	bool ok;

	if (r)
		return r;
	ok = obj_get(dc, K_CTX) && obj_get(sc, K_CTX);
	sim_leave(r);
	if (!ok)
		return CUDA_ERROR_INVALID_CONTEXT;
	return linear(dst, S_DEVICE, src, S_DEVICE, n, h, dflt, sync);
}

API CUresult cuMemcpyPeer(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n)
{
	return peer(d, dc, s, sc, n, NULL, NULL, true);
}

API CUresult cuMemcpyPeer_ptds(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n)
{
	return peer(d, dc, s, sc, n, NULL, PT, true);
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n, CUstream h)
{
	return peer(d, dc, s, sc, n, h, NULL, false);
}

API CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr d, CUcontext dc, CUdeviceptr s, CUcontext sc, size_t n, CUstream h)
{
	return peer(d, dc, s, sc, n, h, PT, false);
}

/* two and three dimensions */

struct end {
	CUmemorytype type;
	const void *host;
	CUdeviceptr dev;
	CUarray array;
	size_t x, y, z, pitch, height;
};

/* One side of a copy: the address of its first byte, and the distances between rows and slices. */
static CUresult end_place(const struct end *e, const CUDA_MEMCPY3D *d, uint64_t *p, size_t *pitch, size_t *slice)
{
	size_t rows, span;
	uint64_t base;

	if (e->type == CU_MEMORYTYPE_ARRAY) {
		struct array *a = obj_get(e->array, K_ARRAY);

		if (!a)
			return CUDA_ERROR_INVALID_HANDLE;
		if (e->x > a->pitch || d->WidthInBytes > a->pitch - e->x || e->z > a->depth ||
		    d->Depth > a->depth - e->z || e->y > a->slice / a->pitch ||
		    d->Height > a->slice / a->pitch - e->y)
			return CUDA_ERROR_INVALID_VALUE;
		*pitch = a->pitch;
		*slice = a->slice;
		*p = a->mem->base + e->z * a->slice + e->y * a->pitch + e->x;
		return CUDA_SUCCESS;
	}
	switch (e->type) {
	case CU_MEMORYTYPE_HOST: base = PTR(e->host); break;
	case CU_MEMORYTYPE_DEVICE: case CU_MEMORYTYPE_UNIFIED: base = e->dev; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	*pitch = e->pitch ? e->pitch : d->WidthInBytes + e->x;
	rows = e->height ? e->height : d->Height + e->y;
	if (!base || *pitch < d->WidthInBytes + e->x || (d->Depth > 1 && rows < d->Height + e->y) ||
	    *pitch > 1ULL << 40 || rows > 1ULL << 24 || e->z > 1ULL << 24 || e->y > 1ULL << 24)
		return CUDA_ERROR_INVALID_VALUE;
	*slice = *pitch * rows;
	*p = base + e->z * *slice + e->y * *pitch + e->x;
	if (!d->Depth || !d->Height || !d->WidthInBytes)
		return CUDA_SUCCESS;
	span = (d->Depth - 1) * *slice + (d->Height - 1) * *pitch + d->WidthInBytes;
	if (e->type == CU_MEMORYTYPE_DEVICE && !mem_ok(*p, span))
		return CUDA_ERROR_INVALID_VALUE;
	if (e->type == CU_MEMORYTYPE_UNIFIED && mem_device(*p) && !mem_ok(*p, span))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult copy3d_make(const CUDA_MEMCPY3D *d, struct copy *out)
{
	struct end src = { d->srcMemoryType, d->srcHost, d->srcDevice, d->srcArray, d->srcXInBytes, d->srcY, d->srcZ,
			   d->srcPitch, d->srcHeight };
	struct end dst = { d->dstMemoryType, d->dstHost, d->dstDevice, d->dstArray, d->dstXInBytes, d->dstY, d->dstZ,
			   d->dstPitch, d->dstHeight };
	uint64_t sp, dp;
	CUresult r;

	memset(out, 0, sizeof(*out));
	if (d->srcLOD || d->dstLOD || d->WidthInBytes > 1ULL << 40 || d->Height > 1ULL << 24 || d->Depth > 1ULL << 24)
		return CUDA_ERROR_INVALID_VALUE;
	r = end_place(&src, d, &sp, &out->src_pitch, &out->src_slice);
	if (!r)
		r = end_place(&dst, d, &dp, &out->dst_pitch, &out->dst_slice);
	if (r)
		return r;
	out->src = (const char *)(uintptr_t)sp;
	out->dst = (char *)(uintptr_t)dp;
	out->width = d->WidthInBytes;
	out->height = d->Height;
	out->depth = d->Depth;
	return CUDA_SUCCESS;
}

static CUresult copy3d(const CUDA_MEMCPY3D *d, CUstream h, CUstream dflt, bool sync)
{
	struct stream *s;
	struct copy k;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (!r)
		r = d ? copy3d_make(d, &k) : CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	return sim_leave(copy_put(s, &k, d, sync));
}

static CUresult copy2d(const CUDA_MEMCPY2D *p, CUstream h, CUstream dflt, bool sync)
{
	CUDA_MEMCPY3D d = { 0 };

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	d.srcXInBytes = p->srcXInBytes;
	d.srcY = p->srcY;
	d.srcMemoryType = p->srcMemoryType;
	d.srcHost = p->srcHost;
	d.srcDevice = p->srcDevice;
	d.srcArray = p->srcArray;
	d.srcPitch = p->srcPitch;
	d.dstXInBytes = p->dstXInBytes;
	d.dstY = p->dstY;
	d.dstMemoryType = p->dstMemoryType;
	d.dstHost = p->dstHost;
	d.dstDevice = p->dstDevice;
	d.dstArray = p->dstArray;
	d.dstPitch = p->dstPitch;
	d.WidthInBytes = p->WidthInBytes;
	d.Height = p->Height;
	d.Depth = 1;
	return copy3d(&d, h, dflt, sync);
}

API CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *p) { return copy2d(p, NULL, NULL, true); }
API CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *p) { return copy2d(p, NULL, PT, true); }
API CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) { return copy2d(p, NULL, NULL, true); }
API CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *p) { return copy2d(p, NULL, PT, true); }
API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream h) { return copy2d(p, h, NULL, false); }
API CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *p, CUstream h) { return copy2d(p, h, PT, false); }
API CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *p) { return copy3d(p, NULL, NULL, true); }
API CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *p) { return copy3d(p, NULL, PT, true); }
API CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream h) { return copy3d(p, h, NULL, false); }
API CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *p, CUstream h) { return copy3d(p, h, PT, false); }

static CUresult peer3d(const CUDA_MEMCPY3D_PEER *p, CUstream h, CUstream dflt, bool sync)
{
	CUDA_MEMCPY3D d = { 0 };

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&d, p, sizeof(d));	/* the same layout, with contexts in place of reserved words */
	d.reserved0 = d.reserved1 = NULL;
	return copy3d(&d, h, dflt, sync);
}

_Static_assert(sizeof(CUDA_MEMCPY3D_PEER) == sizeof(CUDA_MEMCPY3D), "layouts agree");
_Static_assert(offsetof(CUDA_MEMCPY3D_PEER, dstContext) == offsetof(CUDA_MEMCPY3D, reserved1), "layouts agree");

API CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *p) { return peer3d(p, NULL, NULL, true); }
API CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *p) { return peer3d(p, NULL, PT, true); }
API CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *p, CUstream h) { return peer3d(p, h, NULL, false); }
API CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *p, CUstream h) { return peer3d(p, h, PT, false); }

/* arrays as one side of a linear copy */

static CUresult array_copy(CUarray da, size_t dx, CUarray sa, size_t sx, uint64_t dp, CUmemorytype dt, uint64_t sp,
			   CUmemorytype st, size_t n, CUstream h, CUstream dflt, bool sync)
{
	CUDA_MEMCPY3D d = { 0 };

	d.dstMemoryType = da ? CU_MEMORYTYPE_ARRAY : dt;
	d.dstArray = da;
	d.dstXInBytes = dx;
	d.dstHost = (void *)(uintptr_t)dp;
	d.dstDevice = dp;
	d.srcMemoryType = sa ? CU_MEMORYTYPE_ARRAY : st;
	d.srcArray = sa;
	d.srcXInBytes = sx;
	d.srcHost = (const void *)(uintptr_t)sp;
	d.srcDevice = sp;
	d.WidthInBytes = n;
	d.Height = d.Depth = 1;
	return copy3d(&d, h, dflt, sync);
}

#define HOST CU_MEMORYTYPE_HOST
#define DEV CU_MEMORYTYPE_DEVICE
#define ARRAY_COPY(name, suffix, params, call) API CUresult name##suffix params { return call; }

ARRAY_COPY(cuMemcpyHtoA_v2,, (CUarray a, size_t x, const void *p, size_t n),
	   array_copy(a, x, NULL, 0, 0, 0, PTR(p), HOST, n, NULL, NULL, true))
ARRAY_COPY(cuMemcpyHtoA_v2, _ptds, (CUarray a, size_t x, const void *p, size_t n),
	   array_copy(a, x, NULL, 0, 0, 0, PTR(p), HOST, n, NULL, PT, true))
ARRAY_COPY(cuMemcpyAtoH_v2,, (void *p, CUarray a, size_t x, size_t n),
	   array_copy(NULL, 0, a, x, PTR(p), HOST, 0, 0, n, NULL, NULL, true))
ARRAY_COPY(cuMemcpyAtoH_v2, _ptds, (void *p, CUarray a, size_t x, size_t n),
	   array_copy(NULL, 0, a, x, PTR(p), HOST, 0, 0, n, NULL, PT, true))
ARRAY_COPY(cuMemcpyDtoA_v2,, (CUarray a, size_t x, CUdeviceptr p, size_t n),
	   array_copy(a, x, NULL, 0, 0, 0, p, DEV, n, NULL, NULL, true))
ARRAY_COPY(cuMemcpyDtoA_v2, _ptds, (CUarray a, size_t x, CUdeviceptr p, size_t n),
	   array_copy(a, x, NULL, 0, 0, 0, p, DEV, n, NULL, PT, true))
ARRAY_COPY(cuMemcpyAtoD_v2,, (CUdeviceptr p, CUarray a, size_t x, size_t n),
	   array_copy(NULL, 0, a, x, p, DEV, 0, 0, n, NULL, NULL, true))
ARRAY_COPY(cuMemcpyAtoD_v2, _ptds, (CUdeviceptr p, CUarray a, size_t x, size_t n),
	   array_copy(NULL, 0, a, x, p, DEV, 0, 0, n, NULL, PT, true))
ARRAY_COPY(cuMemcpyAtoA_v2,, (CUarray d, size_t dx, CUarray s, size_t sx, size_t n),
	   array_copy(d, dx, s, sx, 0, 0, 0, 0, n, NULL, NULL, true))
ARRAY_COPY(cuMemcpyAtoA_v2, _ptds, (CUarray d, size_t dx, CUarray s, size_t sx, size_t n),
	   array_copy(d, dx, s, sx, 0, 0, 0, 0, n, NULL, PT, true))
ARRAY_COPY(cuMemcpyHtoAAsync_v2,, (CUarray a, size_t x, const void *p, size_t n, CUstream h),
	   array_copy(a, x, NULL, 0, 0, 0, PTR(p), HOST, n, h, NULL, false))
ARRAY_COPY(cuMemcpyHtoAAsync_v2, _ptsz, (CUarray a, size_t x, const void *p, size_t n, CUstream h),
	   array_copy(a, x, NULL, 0, 0, 0, PTR(p), HOST, n, h, PT, false))
ARRAY_COPY(cuMemcpyAtoHAsync_v2,, (void *p, CUarray a, size_t x, size_t n, CUstream h),
	   array_copy(NULL, 0, a, x, PTR(p), HOST, 0, 0, n, h, NULL, false))
ARRAY_COPY(cuMemcpyAtoHAsync_v2, _ptsz, (void *p, CUarray a, size_t x, size_t n, CUstream h),
	   array_copy(NULL, 0, a, x, PTR(p), HOST, 0, 0, n, h, PT, false))

/* sets */

static CUresult set_form(const CUDA_MEMSET_NODE_PARAMS *p)
{
	size_t row;

	if (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4)
		return CUDA_ERROR_INVALID_VALUE;
	if (!p->width || !p->height)
		return CUDA_SUCCESS;
	if (p->dst & (p->elementSize - 1) || p->width > 1ULL << 44 || p->height > 1ULL << 24)
		return CUDA_ERROR_INVALID_VALUE;
	row = p->width * p->elementSize;
	if (p->height > 1 && (p->pitch < row || p->pitch > 1ULL << 40 || p->pitch & (p->elementSize - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult set_check(const CUDA_MEMSET_NODE_PARAMS *p)
{
	CUresult r = set_form(p);

	if (r || !p->width || !p->height)
		return r;
	return mem_ok(p->dst, (p->height - 1) * p->pitch + p->width * p->elementSize) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set(CUdeviceptr dst, size_t pitch, unsigned int v, unsigned int elem, size_t width, size_t height,
		    CUstream h, CUstream dflt, bool sync)
{
	struct work w = { .kind = W_SET, .set = { { dst, pitch, v, elem, width, height } } };
	struct alloc *a;
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (!r)
		r = s->cap ? set_form(&w.set.p) : set_check(&w.set.p); /* a capture takes any address */
	if (!r && sync)
		r = stream_sync_check(s);
	if (r || !width || !height)
		return sim_leave(r);
	a = mem_find(dst);
	if (sync && a && (a->akind == A_HOST || a->akind == A_REGISTERED))
		return sim_leave(stream_put_wait(s, &w));
	return sim_leave(stream_put(s, &w));
}

#define SETS(bits, type, elem) \
	API CUresult cuMemsetD##bits##_v2(CUdeviceptr p, type v, size_t n) { return set(p, 0, v, elem, n, 1, NULL, NULL, true); } \
	API CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr p, type v, size_t n) { return set(p, 0, v, elem, n, 1, NULL, PT, true); } \
	API CUresult cuMemsetD##bits##Async(CUdeviceptr p, type v, size_t n, CUstream h) \
	{ return set(p, 0, v, elem, n, 1, h, NULL, false); } \
	API CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr p, type v, size_t n, CUstream h) \
	{ return set(p, 0, v, elem, n, 1, h, PT, false); } \
	API CUresult cuMemsetD2D##bits##_v2(CUdeviceptr p, size_t pitch, type v, size_t w, size_t n) \
	{ return set(p, pitch, v, elem, w, n, NULL, NULL, true); } \
	API CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr p, size_t pitch, type v, size_t w, size_t n) \
	{ return set(p, pitch, v, elem, w, n, NULL, PT, true); } \
	API CUresult cuMemsetD2D##bits##Async(CUdeviceptr p, size_t pitch, type v, size_t w, size_t n, CUstream h) \
	{ return set(p, pitch, v, elem, w, n, h, NULL, false); } \
	API CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr p, size_t pitch, type v, size_t w, size_t n, CUstream h) \
	{ return set(p, pitch, v, elem, w, n, h, PT, false); }

SETS(8, unsigned char, 1)
SETS(16, unsigned short, 2)
SETS(32, unsigned int, 4)
