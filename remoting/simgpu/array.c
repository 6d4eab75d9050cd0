/*
 * Arrays: linear memory with a description. Twins fetch textures by themselves;
 * here is what copies need.
 */
#include <stdlib.h>

#include "sim.h"

/* Bytes of one element; 0 if there is no such format. */
size_t array_elem(CUarray_format format, unsigned int channels)
{
	size_t n;

	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT8: case CU_AD_FORMAT_SIGNED_INT8: n = 1; break;
	case CU_AD_FORMAT_UNSIGNED_INT16: case CU_AD_FORMAT_SIGNED_INT16: case CU_AD_FORMAT_HALF: n = 2; break;
	case CU_AD_FORMAT_UNSIGNED_INT32: case CU_AD_FORMAT_SIGNED_INT32: case CU_AD_FORMAT_FLOAT: n = 4; break;
	default: return 0;
	}
	return channels == 1 || channels == 2 || channels == 4 ? n * channels : 0;
}

static CUresult array_new(struct ctx *c, const CUDA_ARRAY3D_DESCRIPTOR *d, struct array **out)
{
	size_t elem = array_elem(d->Format, d->NumChannels), rows, slices;
	struct array *a;
	CUresult r;

	if (!elem || !d->Width || d->Width > 1 << 18 || d->Height > 1 << 17 || d->Depth > 1 << 14)
		return CUDA_ERROR_INVALID_VALUE;
	rows = d->Height ? d->Height : 1;
	slices = d->Depth ? d->Depth : 1;
	a = obj_new(K_ARRAY, c, sizeof(*a));
	if (!a)
		return CUDA_ERROR_OUT_OF_MEMORY;
	a->desc = *d;
	a->elem = elem;
	a->pitch = d->Width * elem;
	a->slice = a->pitch * rows;
	a->depth = slices;
	if (slices > sim.cfg.mem / a->slice)
		r = CUDA_ERROR_OUT_OF_MEMORY;
	else
		r = mem_alloc(c, c->dev, A_DEVICE, NULL, a->slice * slices, &a->mem);
	if (r) {
		obj_del(a);
		return r;
	}
	*out = a;
	return CUDA_SUCCESS;
}

void array_free(struct array *a)
{
	mem_free(a->mem);
	obj_del(a);
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	struct array *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = capture_unsafe();
	if (!r)
		r = array_new(c, d, &a);
	if (!r)
		*out = HANDLE(CUarray, a);
	return sim_leave(r);
}

API CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	return d ? create(out, d) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
	CUDA_ARRAY3D_DESCRIPTOR d3 = { 0 };

	if (!d)
		return CUDA_ERROR_INVALID_VALUE;
	d3.Width = d->Width;
	d3.Height = d->Height;
	d3.Format = d->Format;
	d3.NumChannels = d->NumChannels;
	return create(out, &d3);
}

/* Enters with an array of a context that is alive. */
static CUresult enter(CUarray h, struct array **a)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*a = obj_get(h, K_ARRAY);
	return *a ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuArrayDestroy(CUarray h)
{
	struct array *a;
	CUresult r = enter(h, &a);

	if (r)
		return r;
	if (a->parent)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	ctx_wait(a->obj.ctx);
	if (obj_get(h, K_ARRAY) == a)
		array_free(a);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *d, CUarray h)
{
	struct array *a;
	CUresult r = enter(h, &a);

	if (r)
		return r;
	if (!d)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*d = a->desc;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *d, CUarray h)
{
	struct array *a;
	CUresult r = enter(h, &a);

	if (r)
		return r;
	if (!d)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	d->Width = a->desc.Width;
	d->Height = a->desc.Height;
	d->Format = a->desc.Format;
	d->NumChannels = a->desc.NumChannels;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *m, CUarray h, CUdevice dev)
{
	struct array *a;
	CUresult r = enter(h, &a);

	if (r)
		return r;
	r = dev_check(dev);
	if (!r && !m)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*m = (CUDA_ARRAY_MEMORY_REQUIREMENTS){ .size = ROUND_UP(a->mem->size, 65536), .alignment = 65536 };
	return sim_leave(r);
}

API CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
	CUDA_ARRAY3D_DESCRIPTOR at;
	struct mipmap *m;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out || !d || !levels || levels > 32)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	m = obj_new(K_MIPMAP, c, sizeof(*m));
	if (!m)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	at = *d;
	while (m->levels < levels && !r) {
		r = array_new(c, &at, &m->level[m->levels]);
		if (r)
			break;
		m->level[m->levels++]->parent = m;
		if (at.Width <= 1 && at.Height <= 1)
			break;
		at.Width = at.Width > 1 ? at.Width / 2 : 1;
		at.Height = at.Height > 1 ? at.Height / 2 : at.Height;
		if (!(at.Flags & CUDA_ARRAY3D_LAYERED))
			at.Depth = at.Depth > 1 ? at.Depth / 2 : at.Depth;
	}
	if (r) {
		for (unsigned int i = 0; i < m->levels; i++)
			array_free(m->level[i]);
		obj_del(m);
		return sim_leave(r);
	}
	*out = HANDLE(CUmipmappedArray, m);
	return sim_leave(CUDA_SUCCESS);
}

static CUresult enter_mipmap(CUmipmappedArray h, struct mipmap **m)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*m = obj_get(h, K_MIPMAP);
	return *m ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray h, unsigned int level)
{
	struct mipmap *m;
	CUresult r = enter_mipmap(h, &m);

	if (r)
		return r;
	if (!out || level >= m->levels)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUarray, m->level[level]);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMipmappedArrayDestroy(CUmipmappedArray h)
{
	struct mipmap *m;
	CUresult r = enter_mipmap(h, &m);

	if (r)
		return r;
	ctx_wait(m->obj.ctx);
	if (obj_get(h, K_MIPMAP) == m) {
		for (unsigned int i = 0; i < m->levels; i++)
			array_free(m->level[i]);
		obj_del(m);
	}
	return sim_leave(CUDA_SUCCESS);
}
