/*
 * Peer access: devices of one owner reach each other's memory as the owner's driver says, devices of
 * several owners do not. Copies between devices need no peer access (copy.c, route.c).
 */
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "route.h"
#include "session.h"

static bool same_owner(CUdevice a, CUdevice b)
{
	return sl_dev_session((uint32_t)sl_dev_place(a)) == sl_dev_session((uint32_t)sl_dev_place(b));
}

CUresult sl_cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
	if (!canAccessPeer)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev) || !sl_dev(peerDev))
		return CUDA_ERROR_INVALID_DEVICE;
	*canAccessPeer = 0;
	if (dev == peerDev || !same_owner(dev, peerDev))
		return CUDA_SUCCESS;
	return fw_cuDeviceCanAccessPeer(canAccessPeer, dev, peerDev);
}

CUresult sl_cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice src, CUdevice dst)
{
	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(src) || !sl_dev(dst) || src == dst)
		return CUDA_ERROR_INVALID_DEVICE;
	if (attrib < CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK || attrib > CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED)
		return CUDA_ERROR_INVALID_VALUE;
	*value = 0;
	return same_owner(src, dst) ? fw_cuDeviceGetP2PAttribute(value, attrib, src, dst) : CUDA_SUCCESS;
}

static CUresult exist(void *arg)
{
	struct sl_ctx *c;

	(void)arg;
	return sl_ctx_use(&c);
}

/* The peer's context exists in the worker, and the current one. */
static CUresult pair(CUcontext peer, struct sl_ctx **other)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	*other = sl_ctx_of(peer);
	if (!*other)
		return CUDA_ERROR_INVALID_CONTEXT;
	return sl_ctx_foreign(*other) ? CUDA_SUCCESS : sl_ctx_with(*other, exist, NULL);
}

CUresult sl_cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	static uint8_t once;
	struct sl_ctx *other;
	CUresult err = pair(peerContext, &other);

	if (err)
		return err;
	if (Flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_ctx_foreign(other))
		return fw_cuCtxEnablePeerAccess(peerContext, Flags);
	sl_refuse("cuCtxEnablePeerAccess for another owner's device", &once);
	return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult sl_cuCtxDisablePeerAccess(CUcontext peerContext)
{
	struct sl_ctx *other;
	CUresult err = pair(peerContext, &other);

	if (err)
		return err;
	return sl_ctx_foreign(other) ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : fw_cuCtxDisablePeerAccess(peerContext);
}
