/*
 * Texture and surface references and objects: what was set is remembered and told. Nothing is fetched through
 * them; twins read the memory by themselves.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define READ_AS_INTEGER 1u		/* flags of a reference: CU_TRSF_* */
#define NORMALIZED_COORDINATES 2u
#define SRGB 16u
#define NO_TRILINEAR 32u
#define ALIGNMENT 512u			/* of memory that a reference is bound to without an offset */
#define OVERRIDE_FORMAT 1u		/* CU_TRSA_OVERRIDE_FORMAT */

struct texref {
	struct obj obj;
	struct module *module;
	bool surface;
	CUarray_format format;
	int channels, anisotropy;
	unsigned int flags;
	CUfilter_mode filter, mip_filter;
	CUaddress_mode address[3];
	uint64_t memory;		/* bound device memory, 0 if none */
	uint64_t array, mipmap;		/* bound handles */
	float bias, clamp[2], border[4];
};

/* A texture object or a surface object. */
struct texobj {
	struct obj obj;
	bool surface;
	CUDA_RESOURCE_DESC resource;
	CUDA_TEXTURE_DESC texture;
};

void texref_free(struct texref *t) { obj_del(t); }

struct module *texref_module(const struct texref *t) { return t->module; }

static struct texref *texref_new(struct ctx *c, bool surface)
{
	struct texref *t = obj_new(K_TEXREF, c, sizeof(*t));

	if (!t)
		return NULL;
	t->surface = surface;
	t->format = CU_AD_FORMAT_FLOAT;
	t->channels = 1;
	for (int i = 0; i < 3; i++)
		t->address[i] = 1;
	return t;
}

/* A reference of a module by its name. */
static CUresult find(void **out, CUmodule h, const char *name, bool surface)
{
	struct module *m;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	m = obj_get(h, K_MODULE);
	if (!m || !out || !name)
		return sim_leave(m ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
	for (size_t i = 0; i < m->image->ntexnames; i++) {
		if (m->image->texnames[i].surface != surface || strcmp(m->image->texnames[i].name, name))
			continue;
		if (!m->texrefs[i]) {
			m->texrefs[i] = texref_new(m->obj.ctx, surface);
			if (!m->texrefs[i])
				return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
			m->texrefs[i]->module = m;
		}
		*out = HANDLE(void *, m->texrefs[i]);
		return sim_leave(CUDA_SUCCESS);
	}
	return sim_leave(CUDA_ERROR_NOT_FOUND);
}

API CUresult cuModuleGetTexRef(CUtexref *out, CUmodule h, const char *name)
{
	return find((void **)out, h, name, false);
}

API CUresult cuModuleGetSurfRef(CUsurfref *out, CUmodule h, const char *name)
{
	return find((void **)out, h, name, true);
}

API CUresult cuTexRefCreate(CUtexref *out)
{
	struct texref *t;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	t = out ? texref_new(c, false) : NULL;
	if (!t)
		return sim_leave(out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUtexref, t);
	return sim_leave(CUDA_SUCCESS);
}

/* Enters with a live reference of the kind. */
static CUresult enter(const void *h, bool surface, struct texref **t)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*t = obj_get(h, K_TEXREF);
	return *t && (*t)->surface == surface ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuTexRefDestroy(CUtexref h)
{
	struct texref *t;
	CUresult r = enter(h, false, &t);

	if (r)
		return r;
	if (t->module)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	texref_free(t);
	return sim_leave(CUDA_SUCCESS);
}

/* Sets a field when the value is good. */
#define SET(good, assign) do { \
	struct texref *t; \
	CUresult r = enter(h, false, &t); \
	if (r) \
		return r; \
	if (!(good)) \
		return sim_leave(CUDA_ERROR_INVALID_VALUE); \
	assign; \
	return sim_leave(CUDA_SUCCESS); \
} while (0)

/* Tells a field where there is room for it. */
#define GET(good, assign) SET(good, assign)

API CUresult cuTexRefSetFormat(CUtexref h, CUarray_format format, int channels)
{
	SET(channels == 1 || channels == 2 || channels == 4, (t->format = format, t->channels = channels));
}

API CUresult cuTexRefSetFlags(CUtexref h, unsigned int flags)
{
	SET(!(flags & ~(READ_AS_INTEGER | NORMALIZED_COORDINATES | SRGB | NO_TRILINEAR)), t->flags = flags);
}

API CUresult cuTexRefSetFilterMode(CUtexref h, CUfilter_mode mode)
{
	SET(true, t->filter = mode);
}

API CUresult cuTexRefSetMipmapFilterMode(CUtexref h, CUfilter_mode mode)
{
	SET(true, t->mip_filter = mode);
}

API CUresult cuTexRefSetAddressMode(CUtexref h, int dim, CUaddress_mode mode)
{
	SET(dim >= 0 && dim < 3, t->address[dim] = mode);
}

API CUresult cuTexRefSetMaxAnisotropy(CUtexref h, unsigned int n)
{
	SET(n <= 16, t->anisotropy = (int)n);
}

API CUresult cuTexRefSetMipmapLevelBias(CUtexref h, float bias)
{
	SET(true, t->bias = bias);
}

API CUresult cuTexRefSetMipmapLevelClamp(CUtexref h, float least, float most)
{
	SET(true, (t->clamp[0] = least, t->clamp[1] = most));
}

API CUresult cuTexRefSetBorderColor(CUtexref h, float *c)
{
	SET(c, memcpy(t->border, c, sizeof(t->border)));
}

static void bind(struct texref *t, uint64_t memory, uint64_t array, uint64_t mipmap)
{
	t->memory = memory;
	t->array = array;
	t->mipmap = mipmap;
}

API CUresult cuTexRefSetAddress_v2(size_t *offset, CUtexref h, CUdeviceptr p, size_t n)
{
	(void)n;	/* a real driver takes any address */
	SET(offset || !(p % ALIGNMENT), (bind(t, p, 0, 0), offset ? (void)(*offset = p % ALIGNMENT) : (void)0));
}

API CUresult cuTexRefSetAddress2D_v3(CUtexref h, const CUDA_ARRAY_DESCRIPTOR *d, CUdeviceptr p, size_t pitch)
{
	SET(d && array_elem(d->Format, d->NumChannels) && pitch >= d->Width * array_elem(d->Format, d->NumChannels) &&
	    mem_ok(p, d->Height * pitch), (bind(t, p, 0, 0), t->format = d->Format, t->channels = (int)d->NumChannels));
}

API CUresult cuTexRefSetArray(CUtexref h, CUarray array, unsigned int flags)
{
	SET(obj_get(array, K_ARRAY) && !(flags & ~OVERRIDE_FORMAT), bind(t, 0, (uintptr_t)array, 0));
}

API CUresult cuTexRefSetMipmappedArray(CUtexref h, CUmipmappedArray mipmap, unsigned int flags)
{
	SET(obj_get(mipmap, K_MIPMAP) && !(flags & ~OVERRIDE_FORMAT), bind(t, 0, 0, (uintptr_t)mipmap));
}

API CUresult cuTexRefGetAddress_v2(CUdeviceptr *p, CUtexref h) { GET(p && t->memory, *p = t->memory); }
API CUresult cuTexRefGetArray(CUarray *a, CUtexref h) { GET(a && t->array, *a = (CUarray)(uintptr_t)t->array); }
API CUresult cuTexRefGetMipmappedArray(CUmipmappedArray *a, CUtexref h) { GET(a && t->mipmap, *a = (CUmipmappedArray)(uintptr_t)t->mipmap); }
API CUresult cuTexRefGetAddressMode(CUaddress_mode *m, CUtexref h, int dim) { GET(m && dim >= 0 && dim < 3, *m = t->address[dim]); }
API CUresult cuTexRefGetFilterMode(CUfilter_mode *m, CUtexref h) { GET(m, *m = t->filter); }
API CUresult cuTexRefGetMipmapFilterMode(CUfilter_mode *m, CUtexref h) { GET(m, *m = t->mip_filter); }
API CUresult cuTexRefGetFlags(unsigned int *flags, CUtexref h) { GET(flags, *flags = t->flags); }
API CUresult cuTexRefGetMaxAnisotropy(int *n, CUtexref h) { GET(n, *n = t->anisotropy); }
API CUresult cuTexRefGetMipmapLevelBias(float *b, CUtexref h) { GET(b, *b = t->bias); }
API CUresult cuTexRefGetBorderColor(float *c, CUtexref h) { GET(c, memcpy(c, t->border, sizeof(t->border))); }

API CUresult cuTexRefGetMipmapLevelClamp(float *least, float *most, CUtexref h)
{
	GET(least && most, (*least = t->clamp[0], *most = t->clamp[1]));
}

API CUresult cuTexRefGetFormat(CUarray_format *format, int *channels, CUtexref h)
{
	GET(true, (format ? (void)(*format = t->format) : (void)0, channels ? (void)(*channels = t->channels) : (void)0));
}

API CUresult cuSurfRefSetArray(CUsurfref h, CUarray array, unsigned int flags)
{
	struct texref *t;
	CUresult r = enter(h, true, &t);

	if (r)
		return r;
	if (flags || !obj_get(array, K_ARRAY))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	bind(t, 0, (uintptr_t)array, 0);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuSurfRefGetArray(CUarray *array, CUsurfref h)
{
	struct texref *t;
	CUresult r = enter(h, true, &t);

	if (r)
		return r;
	if (!array || !t->array)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*array = (CUarray)(uintptr_t)t->array;
	return sim_leave(CUDA_SUCCESS);
}

/* The reference of a parameter has been ignored for long. */
API CUresult cuParamSetTexRef(CUfunction f, int unit, CUtexref h)
{
	struct texref *t;
	struct func *fn;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	t = obj_get(h, K_TEXREF);
	if (!t || t->surface || unit != -1)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	return sim_leave(func_get(c, f, &fn));
}

/* objects */

static bool resource_ok(const CUDA_RESOURCE_DESC *d)
{
	switch (d->resType) {
	case CU_RESOURCE_TYPE_ARRAY:
		return obj_get(d->res.array.hArray, K_ARRAY);
	case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
		return obj_get(d->res.mipmap.hMipmappedArray, K_MIPMAP);
	case CU_RESOURCE_TYPE_LINEAR:
		return mem_ok(d->res.linear.devPtr, d->res.linear.sizeInBytes);
	default:
		return mem_ok(d->res.pitch2D.devPtr, d->res.pitch2D.pitchInBytes * d->res.pitch2D.height);
	}
}

static CUresult object(uint64_t *out, const CUDA_RESOURCE_DESC *res, const CUDA_TEXTURE_DESC *tex, bool surface)
{
	struct texobj *o;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out || !res || (!surface && !tex) || !resource_ok(res) || (surface && res->resType != CU_RESOURCE_TYPE_ARRAY))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	o = obj_new(K_TEXOBJ, c, sizeof(*o));
	if (!o)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	o->surface = surface;
	o->resource = *res;
	if (tex)
		o->texture = *tex;
	*out = o->obj.handle;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuTexObjectCreate(CUtexObject *out, const CUDA_RESOURCE_DESC *res, const CUDA_TEXTURE_DESC *tex, const CUDA_RESOURCE_VIEW_DESC *view)
{
	(void)view;
	return object((uint64_t *)out, res, tex, false);
}

API CUresult cuSurfObjectCreate(CUsurfObject *out, const CUDA_RESOURCE_DESC *res)
{
	return object((uint64_t *)out, res, NULL, true);
}

/* Enters with a live object of the kind. */
static CUresult enter_object(uint64_t h, bool surface, struct texobj **o)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*o = obj_get_id(h, K_TEXOBJ);
	return *o && (*o)->surface == surface ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult object_destroy(uint64_t h, bool surface)
{
	struct texobj *o;
	CUresult r = enter_object(h, surface, &o);

	if (r)
		return r;
	obj_del(o);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuTexObjectDestroy(CUtexObject h) { return object_destroy(h, false); }
API CUresult cuSurfObjectDestroy(CUsurfObject h) { return object_destroy(h, true); }

static CUresult object_resource(CUDA_RESOURCE_DESC *d, uint64_t h, bool surface)
{
	struct texobj *o;
	CUresult r = enter_object(h, surface, &o);

	if (r)
		return r;
	if (!d)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*d = o->resource;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *d, CUtexObject h) { return object_resource(d, h, false); }
API CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *d, CUsurfObject h) { return object_resource(d, h, true); }

API CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *d, CUtexObject h)
{
	struct texobj *o;
	CUresult r = enter_object(h, false, &o);

	if (r)
		return r;
	if (!d)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*d = o->texture;
	return sim_leave(CUDA_SUCCESS);
}
