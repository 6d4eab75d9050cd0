/*
 * Devices that reach each other's memory. A kernel reaches memory of another device by what its
 * context has enabled, by the access that was set for mapped memory, or by that of a pool. Copies need none of it.
 * SLUICE_SIM_PEERS=off makes devices that do not reach each other.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static bool peers(void)
{
	const char *e = getenv("SLUICE_SIM_PEERS");

	return !e || strcmp(e, "off");
}

static CUresult enter_pair(CUdevice a, CUdevice b, const void *out)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	return dev_check(a) || dev_check(b) ? sim_leave(CUDA_ERROR_INVALID_DEVICE) : CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
	CUresult r = enter_pair(dev, peer, can);

	if (r)
		return r;
	*can = dev != peer && peers();
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attr, CUdevice src, CUdevice dst)
{
	CUresult r = enter_pair(src, dst, value);

	if (r)
		return r;
	if (src == dst)
		return sim_leave(CUDA_ERROR_INVALID_DEVICE);
	switch (attr) {
	case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = 0; break;
	case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
	case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
	case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = peers(); break;
	case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: *value = 0; break;
	default: return sim_leave(CUDA_ERROR_INVALID_VALUE);
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	struct ctx *c, *p;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	p = obj_get(peer, K_CTX);
	if (!p || !p->active)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (flags)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (p->dev == c->dev || !peers())
		return sim_leave(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
	if (c->peers & 1U << p->dev)
		return sim_leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
	c->peers |= 1U << p->dev;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	struct ctx *c, *p;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	p = obj_get(peer, K_CTX);
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!(c->peers & 1U << p->dev))
		return sim_leave(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
	c->peers &= ~(1U << p->dev);
	return sim_leave(CUDA_SUCCESS);
}

/* Access by device: four bits each, of CUmemAccess_flags. */

#define ACCESS_BITS 4
_Static_assert(SIM_MAX_DEV * ACCESS_BITS <= 32, "access in 32 bits");

uint32_t access_own(int dev)
{
	return (uint32_t)CU_MEM_ACCESS_FLAGS_PROT_READWRITE << dev * ACCESS_BITS;
}

CUmemAccess_flags access_of(uint32_t access, int dev)
{
	return access >> dev * ACCESS_BITS & ((1U << ACCESS_BITS) - 1);
}

CUresult access_set(uint32_t *access, int home, const CUmemAccessDesc *desc, size_t n)
{
	uint32_t to = *access;

	for (size_t i = 0; i < n; i++) {
		CUmemAccess_flags f = desc[i].flags;
		int dev = desc[i].location.id;

		if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
			return CUDA_ERROR_INVALID_VALUE;
		if (dev_check(dev))
			return CUDA_ERROR_INVALID_DEVICE;
		if (f != CU_MEM_ACCESS_FLAGS_PROT_NONE && f != CU_MEM_ACCESS_FLAGS_PROT_READ && f != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_VALUE;
		if (f && dev != home && !peers())
			return CUDA_ERROR_INVALID_DEVICE;
		to &= ~(((1U << ACCESS_BITS) - 1) << dev * ACCESS_BITS);
		to |= (uint32_t)f << dev * ACCESS_BITS;
	}
	*access = to;
	return CUDA_SUCCESS;
}

bool mem_reached(const struct ctx *c, uint64_t p, size_t n)
{
	while (n) {
		const struct alloc *a = mem_find(p);
		size_t left;

		if (!a)
			return true;	/* whose it is is for others to say */
		switch (a->akind) {
		case A_DEVICE:
			if (a->dev != c->dev && !(c->peers >> a->dev & 1))
				return false;
			break;
		case A_POOL:
			if (!access_of(a->pool ? a->pool->access : access_own(a->dev), c->dev))
				return false;
			break;
		case A_MAPPED:
			if (!access_of(a->access, c->dev))
				return false;
			break;
		default:
			break;
		}
		left = a->base + a->size - p;
		if (left >= n)
			return true;
		p += left;
		n -= left;
	}
	return true;
}
