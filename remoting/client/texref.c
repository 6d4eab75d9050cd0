/*
 * What textures and surfaces need beside the generated calls: colours, and resources that name arrays. Texture
 * and surface references are the worker's handles; each call waits, since only programs of CUDA 11 and older use
 * them. Nothing is kept here.
 */
#include "ctx.h"
#include "gen.h"
#include "handles.h"

CUresult sl_cuTexRefGetBorderColor(float *c, CUtexref hTexRef)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTexRefGetBorderColor(&c[0], &c[1], &c[2], &c[3], hTexRef);
}

CUresult sl_cuTexRefSetBorderColor(CUtexref hTexRef, float *c)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTexRefSetBorderColor(hTexRef, c[0], c[1], c[2], c[3]);
}

/* The worker puts an id where the handle of an array stands. */
static CUresult named(CUDA_RESOURCE_DESC *d, CUresult err)
{
	unsigned session = sl_ctx_session(sl_ctx_cur());

	if (err)
		return err;
	if (d->resType == CU_RESOURCE_TYPE_ARRAY)
		d->res.array.hArray = sl_handle_from_id(SL_ARRAY, sl_handle_bare(d->res.array.hArray), session);
	if (d->resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY)
		d->res.mipmap.hMipmappedArray = sl_handle_from_id(SL_MIPMAP, sl_handle_bare(d->res.mipmap.hMipmappedArray), session);
	return CUDA_SUCCESS;
}

CUresult sl_cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *d, CUtexObject texObject)
{
	return named(d, fw_cuTexObjectGetResourceDesc(d, texObject));
}

CUresult sl_cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *d, CUsurfObject surfObject)
{
	return named(d, fw_cuSurfObjectGetResourceDesc(d, surfObject));
}
