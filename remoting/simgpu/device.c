/*
 * The attributes of the simulated devices: those of an H200-like GPU of the
 * architecture asked for (SLUICE_SIM_SM), with 132 multiprocessors.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const struct { int attr, value; } attrs[] = {
	{ 1, 1024 }, { 2, 1024 }, { 3, 1024 }, { 4, 64 }, { 5, 0x7fffffff }, { 6, 65535 }, { 7, 65535 },
	{ 8, 49152 }, { 9, 65536 }, { 10, 32 }, { 11, 0x7fffffff }, { 12, 65536 }, { 13, 1980000 }, { 14, 512 },
	{ 15, 1 }, { 16, 132 }, { 17, 0 }, { 18, 0 }, { 19, 1 }, { 20, 0 }, { 21, 131072 }, { 22, 131072 },
	{ 23, 65536 }, { 24, 16384 }, { 25, 16384 }, { 26, 16384 }, { 27, 32768 }, { 28, 32768 }, { 29, 2048 },
	{ 30, 512 }, { 31, 1 }, { 32, 1 }, { 34, 0 }, { 35, 0 }, { 36, 3201000 }, { 37, 6144 }, { 38, 62914560 },
	{ 39, 2048 }, { 40, 3 }, { 41, 1 }, { 42, 32768 }, { 43, 2048 }, { 44, 1 }, { 45, 32768 }, { 46, 32768 },
	{ 47, 8192 }, { 48, 8192 }, { 49, 32768 }, { 50, 0 }, { 51, 32 }, { 52, 32768 }, { 53, 32768 },
	{ 54, 2046 }, { 55, 32768 }, { 56, 131072 }, { 57, 65536 }, { 58, 16384 }, { 59, 16384 }, { 60, 16384 },
	{ 61, 32768 }, { 62, 2048 }, { 63, 32768 }, { 64, 32768 }, { 65, 2048 }, { 66, 32768 }, { 67, 32768 },
	{ 68, 2046 }, { 69, 268435456 }, { 70, 131072 }, { 71, 65000 }, { 72, 2097120 }, { 73, 32768 },
	{ 74, 32768 }, { 77, 32768 }, { 78, 1 }, { 79, 1 }, { 80, 1 }, { 81, 233472 }, { 82, 65536 }, { 83, 1 },
	{ 84, 0 }, { 86, 1 }, { 87, 2 }, { 89, 1 }, { 90, 1 }, { 91, 1 }, { 92, 0 }, { 93, 0 },
	{ 94, 0 }, { 95, 1 }, { 96, 1 }, { 97, 232448 }, { 98, 0 }, { 99, 1 }, { 100, 0 }, { 101, 0 }, { 102, 1 },
	{ 103, 1 }, { 104, 0 }, { 105, 0 }, { 106, 32 }, { 107, 0 }, { 108, 39321600 }, { 109, 134213632 },
	{ 110, 0 }, { 111, 1024 }, { 112, 0 }, { 113, 1 }, { 114, 0 }, { 115, 1 }, { 116, 0 }, { 117, 0 },
	{ 118, 0 }, { 119, 1 }, { 120, 1 }, { 121, 0 }, { 122, 1 }, { 123, 1 }, { 124, 0 }, { 125, 1 }, { 126, 4 },
	{ 127, 0 }, { 128, 0 }, { 129, 1 }, { 130, 0 }, { 131, -1 }, { 132, 0 }, { 133, 0 }, { 134, 0 }, { 135, 0 },
	{ 136, 0 }, { 137, 0 }, { 138, 0 }, { 139, 0x233510de }, { 140, 0x18be10de }, { 141, 0 }, { 142, 0 },
	{ 143, 0 }, { 144, 0 }, { 145, 0 }, { 146, 0 }, { 147, 0 },
};

/* An attribute that is newer than the driver is invalid to it. */
static int attr_max(void)
{
	if (sim.cfg.driver >= 13000)
		return 147;
	if (sim.cfg.driver >= 12080)
		return 140;
	if (sim.cfg.driver >= 12040)
		return 134;
	return sim.cfg.driver >= 12010 ? 132 : sim.cfg.driver >= 12000 ? 131 : 125;
}

/* Whether the driver says that kernels use any address of their process, as with HMM. */
static bool pageable(void)
{
	const char *s = getenv("SLUICE_SIM_PAGEABLE");

	return s && !strcmp(s, "1");
}

int dev_attr(CUdevice dev, int attr, int *value)
{
	int major = sim.cfg.sm / 10, minor = sim.cfg.sm % 10;

	if (attr < 1 || attr > attr_max())
		return -1;
	switch (attr) {
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = SIM_PCI_BUS(state_phys(dev)); return 0;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; return 0;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; return 0;
	case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID: *value = dev; return 0;
	case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = major >= 9; return 0;
	case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: *value = pageable(); return 0;
	default: break;
	}
	for (size_t i = 0; i < sizeof(attrs) / sizeof(attrs[0]); i++) {
		if (attrs[i].attr == attr) {
			*value = attrs[i].value;
			return 0;
		}
	}
	return -1;
}

/* Every call here begins with a device number. */
static CUresult enter_dev(CUdevice dev, const void *out)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	r = dev_check(dev);
	if (!r && !out)
		r = CUDA_ERROR_INVALID_VALUE;
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *dev, int ordinal)
{
	CUresult r = enter_dev(ordinal, dev);

	if (r)
		return r;
	*dev = ordinal;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetCount(int *n)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*n = sim.cfg.ndev;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
	CUresult r = enter_dev(dev, name);

	if (r)
		return r;
	if (len <= 0)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	snprintf(name, (size_t)len, "%s", SIM_NAME);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	CUresult r = enter_dev(dev, uuid);

	if (r)
		return r;
	state_uuid(dev, (unsigned char *)uuid->bytes);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) { return cuDeviceGetUuid_v2(uuid, dev); }

API CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice dev)
{
	CUresult r = enter_dev(dev, n);

	if (r)
		return r;
	*n = sim.cfg.mem;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attr, CUdevice dev)
{
	CUresult r = enter_dev(dev, value);

	if (r)
		return r;
	return sim_leave(attr > 1000 || dev_attr(dev, (int)attr, value) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	CUresult r = enter_dev(dev, major && minor ? major : NULL);

	if (r)
		return r;
	*major = sim.cfg.sm / 10;
	*minor = sim.cfg.sm % 10;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetProperties(CUdevprop *p, CUdevice dev)
{
	CUresult r = enter_dev(dev, p);

	if (r)
		return r;
	*p = (CUdevprop){ .maxThreadsPerBlock = 1024, .maxThreadsDim = { 1024, 1024, 64 },
			  .maxGridSize = { 0x7fffffff, 65535, 65535 }, .sharedMemPerBlock = 49152,
			  .totalConstantMemory = 65536, .SIMDWidth = 32, .memPitch = 0x7fffffff,
			  .regsPerBlock = 65536, .clockRate = 1980000, .textureAlign = 512 };
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice dev)
{
	CUresult r = enter_dev(dev, id);

	if (r)
		return r;
	if (len < 13)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	snprintf(id, (size_t)len, "%04x:%02x:%02x.0", 0, SIM_PCI_BUS(state_phys(dev)), 0);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
	unsigned int domain = 0, bus = 0, slot = 0;
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!dev || !id)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
		domain = 0;
		if (sscanf(id, "%x:%x", &bus, &slot) != 2)
			return sim_leave(CUDA_ERROR_INVALID_VALUE);
	}
	for (int i = 0; i < sim.cfg.ndev && !domain && !slot; i++) {
		if (bus == (unsigned int)SIM_PCI_BUS(state_phys(i))) {
			*dev = i;
			return sim_leave(CUDA_SUCCESS);
		}
	}
	return sim_leave(CUDA_ERROR_INVALID_DEVICE);
}

API CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *n, CUarray_format format, unsigned int channels, CUdevice dev)
{
	CUresult r = enter_dev(dev, n);

	if (r)
		return r;
	if (!array_elem(format, channels))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*n = 268435456;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetExecAffinitySupport(int *ok, CUexecAffinityType type, CUdevice dev)
{
	CUresult r = enter_dev(dev, ok);

	if (r)
		return r;
	*ok = 0;
	return sim_leave(type ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

/* There is no profiler; the calls exist because programs make them. */
API CUresult cuProfilerStart(void)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	return r ? r : sim_leave(CUDA_SUCCESS);
}

API CUresult cuProfilerStop(void) { return cuProfilerStart(); }
