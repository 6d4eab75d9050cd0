/*
 * Fills (cuMemset*). Fills of device memory are forwarded. Fills of page-locked host memory are done here.
 * CUDA's synchronous functions wait for the stream and then fill; the asynchronous ones queue a host function
 * of the shim's own, which fills in stream order. For device memory the synchronous functions do not wait
 * either: they differ from the asynchronous ones only in their default stream.
 */
#include "copy.h"
#include "ctx.h"
#include "delivery.h"
#include "gen.h"
#include "hostfn.h"
#include "mapped.h"
#include "operand.h"

#include <stdlib.h>
#include <string.h>

/* A fill of h rows of w elements. An element has size bytes; a row begins pitch bytes after the row before. */
struct fill {
	CUdeviceptr dst;
	size_t pitch, w, h;
	unsigned size, value;
};

static void fill_host(const struct fill *f)
{
	for (size_t y = 0; y < f->h; y++) {
		uint8_t *row = (uint8_t *)(uintptr_t)f->dst + y * f->pitch;

		if (f->size == 1)
			memset(row, (int)f->value, f->w);
		else
			for (size_t i = 0; i < f->w; i++)
				memcpy(row + i * f->size, &f->value, f->size);
	}
}

static void fill_in_order(void *arg, CUresult failed)
{
	if (!failed)
		fill_host(arg);
	free(arg);
}

static CUresult on_host(const struct fill *f, size_t span, CUstream s, bool wait)
{
	CUresult err = sl_capture_check(s, "a fill of host memory");
	struct fill *later;

	if (!err && wait)
		err = sl_cuStreamSynchronize(s);
	if (!err && wait)
		err = sl_delivery_wait_range((void *)(uintptr_t)f->dst, span);
	if (err)
		return err;
	if (wait) {
		fill_host(f);
		return CUDA_SUCCESS;
	}
	later = malloc(sizeof *later);
	if (!later)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*later = *f;
	err = sl_hostfn_inside(s, fill_in_order, later);
	if (err)
		free(later);
	return err;
}

static CUresult forward(const struct fill *f, bool flat, CUstream s)
{
	switch (f->size) {
	case 1:
		return flat ? fw_cuMemsetD8Async(f->dst, (unsigned char)f->value, f->w, s) :
			      fw_cuMemsetD2D8Async(f->dst, f->pitch, (unsigned char)f->value, f->w, f->h, s);
	case 2:
		return flat ? fw_cuMemsetD16Async(f->dst, (unsigned short)f->value, f->w, s) :
			      fw_cuMemsetD2D16Async(f->dst, f->pitch, (unsigned short)f->value, f->w, f->h, s);
	default:
		return flat ? fw_cuMemsetD32Async(f->dst, f->value, f->w, s) :
			      fw_cuMemsetD2D32Async(f->dst, f->pitch, f->value, f->w, f->h, s);
	}
}

static CUresult fill(struct fill f, bool flat, CUstream s, bool wait)
{
	struct sl_operand to;
	struct sl_ctx *c;
	size_t row, span;
	CUresult err = sl_ctx_use(&c);

	if (err || !f.w || !f.h)
		return err;
	if (__builtin_mul_overflow(f.w, f.size, &row) || __builtin_mul_overflow(f.h - 1, f.pitch, &span) ||
	    __builtin_add_overflow(span, row, &span))
		return CUDA_ERROR_INVALID_VALUE;
	to = sl_operand(f.dst, span, true);
	if (f.dst % f.size)
		return CUDA_ERROR_INVALID_VALUE;
	/*
	 * A capture accepts a fill of memory that nobody has allocated; instantiating its graph then fails. Driver 580 was
	 * observed to do so. cuDNN captures such fills to find out which kernels it would run.
	 */
	if (to.place == SL_NULL || to.place == SL_PAGEABLE || to.room < span)
		return sl_stream_captures(s) ? forward(&f, flat, s) : CUDA_ERROR_INVALID_VALUE;
	if (f.h > 1 && (f.pitch % f.size || f.pitch < row))
		return CUDA_ERROR_INVALID_VALUE;
	if (to.place == SL_LOCKED)
		return on_host(&f, span, s, wait);
	f.dst = to.p;
	if (to.twin)
		sl_mapped_send();
	err = forward(&f, flat, s);
	return !err && to.twin && wait ? sl_cuStreamSynchronize(s) : err;
}

static CUresult fill1d(CUdeviceptr dst, unsigned size, unsigned value, size_t n, CUstream s, bool wait)
{
	return fill((struct fill){ .dst = dst, .w = n, .h = 1, .size = size, .value = value }, true, s, wait);
}

static CUresult fill2d(CUdeviceptr dst, size_t pitch, unsigned size, unsigned value, size_t w, size_t h, CUstream s, bool wait)
{
	return fill((struct fill){ .dst = dst, .pitch = pitch, .w = w, .h = h, .size = size, .value = value }, false, s, wait);
}

CUresult sl_cuMemsetD8_v2(CUdeviceptr dst, unsigned char v, size_t n, CUstream ds)
{
	return fill1d(dst, 1, v, n, ds, true);
}

CUresult sl_cuMemsetD16_v2(CUdeviceptr dst, unsigned short v, size_t n, CUstream ds)
{
	return fill1d(dst, 2, v, n, ds, true);
}

CUresult sl_cuMemsetD32_v2(CUdeviceptr dst, unsigned int v, size_t n, CUstream ds)
{
	return fill1d(dst, 4, v, n, ds, true);
}

CUresult sl_cuMemsetD8Async(CUdeviceptr dst, unsigned char v, size_t n, CUstream hStream)
{
	return fill1d(dst, 1, v, n, hStream, false);
}

CUresult sl_cuMemsetD16Async(CUdeviceptr dst, unsigned short v, size_t n, CUstream hStream)
{
	return fill1d(dst, 2, v, n, hStream, false);
}

CUresult sl_cuMemsetD32Async(CUdeviceptr dst, unsigned int v, size_t n, CUstream hStream)
{
	return fill1d(dst, 4, v, n, hStream, false);
}

CUresult sl_cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char v, size_t w, size_t h, CUstream ds)
{
	return fill2d(dst, pitch, 1, v, w, h, ds, true);
}

CUresult sl_cuMemsetD2D16_v2(CUdeviceptr dst, size_t pitch, unsigned short v, size_t w, size_t h, CUstream ds)
{
	return fill2d(dst, pitch, 2, v, w, h, ds, true);
}

CUresult sl_cuMemsetD2D32_v2(CUdeviceptr dst, size_t pitch, unsigned int v, size_t w, size_t h, CUstream ds)
{
	return fill2d(dst, pitch, 4, v, w, h, ds, true);
}

CUresult sl_cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char v, size_t w, size_t h, CUstream hStream)
{
	return fill2d(dst, pitch, 1, v, w, h, hStream, false);
}

CUresult sl_cuMemsetD2D16Async(CUdeviceptr dst, size_t pitch, unsigned short v, size_t w, size_t h, CUstream hStream)
{
	return fill2d(dst, pitch, 2, v, w, h, hStream, false);
}

CUresult sl_cuMemsetD2D32Async(CUdeviceptr dst, size_t pitch, unsigned int v, size_t w, size_t h, CUstream hStream)
{
	return fill2d(dst, pitch, 4, v, w, h, hStream, false);
}
