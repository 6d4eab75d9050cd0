/*
 * Initialisation and everything about devices, answered from the snapshot that
 * connecting brought. CUDA_VISIBLE_DEVICES decides which devices a program sees,
 * and in which order, as with a local driver. None of it changes after cuInit, so
 * nothing here locks.
 */
#include "device.h"
#include "ctx.h"
#include "gen.h"
#include "session.h"
#include "snapshot.h"
#include "version.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t setup_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool initialized;
static int count;
static int place_of[SL_MAX_DEVICES];

/* Ordinal in the snapshot of one entry of CUDA_VISIBLE_DEVICES, -1 if it names none. */
static int match_device(const struct sl_snapshot *s, const char *e, size_t n)
{
	uint8_t want[16];
	size_t nibbles = 0;
	int found = -1;

	if (!n)
		return -1;
	if (isdigit((unsigned char)e[0])) {
		char *end;
		long v = strtol(e, &end, 10);

		return end == e + n && v >= 0 && (uint32_t)v < s->ndev ? (int)v : -1;
	}
	/* GPU-<uuid>, or a prefix of one that only one device has. */
	if (n < 4 || strncmp(e, "GPU-", 4))
		return -1;
	memset(want, 0, sizeof want);
	for (size_t i = 4; i < n; i++) {
		int c = tolower((unsigned char)e[i]), v;

		if (c == '-')
			continue;
		if (!isxdigit(c) || nibbles == 32)
			return -1;
		v = c <= '9' ? c - '0' : c - 'a' + 10;
		want[nibbles / 2] |= (uint8_t)(v << (nibbles % 2 ? 0 : 4));
		nibbles++;
	}
	for (uint32_t d = 0; d < s->ndev; d++) {
		const uint8_t *u = s->dev[d].uuid;

		if (memcmp(u, want, nibbles / 2))
			continue;
		if (nibbles % 2 && (u[nibbles / 2] & 0xf0) != want[nibbles / 2])
			continue;
		if (found >= 0)
			return -1;
		found = (int)d;
	}
	return found;
}

/* The list ends at its first entry that names no device; a repeated one empties it. */
static int select_devices(const struct sl_snapshot *s, const char *list, int *out)
{
	int n = 0;

	if (!list) {
		for (uint32_t d = 0; d < s->ndev && d < SL_MAX_DEVICES; d++)
			out[n++] = (int)d;
		return n;
	}
	while (n < SL_MAX_DEVICES) {
		size_t len;
		int d;

		while (*list == ' ')
			list++;
		len = strcspn(list, ",");
		while (len && list[len - 1] == ' ')
			len--;
		d = match_device(s, list, len);
		if (d < 0)
			break;
		for (int i = 0; i < n; i++)
			if (out[i] == d)
				return 0;
		out[n++] = d;
		list += strcspn(list, ",");
		if (!*list)
			break;
		list++;
	}
	return n;
}

void sl_dev_setup(void)
{
	const struct sl_snapshot *s = sl_snapshot();

	pthread_mutex_lock(&setup_lock);
	if (!atomic_load(&initialized) && s) {
		count = select_devices(s, getenv("CUDA_VISIBLE_DEVICES"), place_of);
		sl_ctx_setup();
		atomic_store(&initialized, true);
	}
	pthread_mutex_unlock(&setup_lock);
}

bool sl_initialized(void)
{
	return atomic_load_explicit(&initialized, memory_order_acquire);
}

int sl_dev_count(void)
{
	return count;
}

const struct sl_device *sl_dev(CUdevice dev)
{
	if (!sl_initialized() || dev < 0 || dev >= count)
		return NULL;
	return &sl_snapshot()->dev[place_of[dev]];
}

int sl_dev_wire(int dev)
{
	int place = sl_dev_place(dev);

	return dev >= 0 && dev < count ? place - (int)sl_session_first(sl_dev_session((uint32_t)place)) : dev;
}

int sl_dev_of(unsigned session, int dev)
{
	for (int i = 0; i < count; i++)
		if (sl_dev_session((uint32_t)place_of[i]) == session && place_of[i] - (int)sl_session_first(session) == dev)
			return i;
	return CU_DEVICE_INVALID;
}

int sl_dev_place(int dev)
{
	return dev >= 0 && dev < count ? place_of[dev] : dev;
}

/*
 * Attributes of what a remote device cannot have, such as memory shared with this host.
 * Programs query them before use, so the answer here is that there is none.
 */
static bool attribute_denied(unsigned a)
{
	switch (a) {
	case CU_DEVICE_ATTRIBUTE_INTEGRATED:
	case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
	case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
	case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES:
	case CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST:
	case CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
	case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH:
	case CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS:
	case CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_NUMA_CONFIG:
	case CU_DEVICE_ATTRIBUTE_D3D12_CIG_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK:
	case CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH:
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED:
		return true;
	default:
		return false;
	}
}

CUresult sl_cuInit(unsigned int Flags)
{
	CUresult err;

	if (Flags)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_session_start();
	if (err)
		return err;
	sl_dev_setup();
	return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

/*
 * The lower of the worker's driver version and the shim's. It may be asked before
 * cuInit, so it connects; without a worker it returns the shim's own version, as a
 * driver library does on a machine without a GPU.
 */
CUresult sl_cuDriverGetVersion(int *driverVersion)
{
	const struct sl_snapshot *s;

	if (!driverVersion)
		return CUDA_ERROR_INVALID_VALUE;
	*driverVersion = SL_API_VERSION;
	if (!sl_forked() && !sl_exiting() && sl_session_start() == CUDA_SUCCESS)
		sl_dev_setup();
	s = sl_snapshot();
	if (s && s->driver_version < SL_API_VERSION)
		*driverVersion = (int)s->driver_version;
	return CUDA_SUCCESS;
}

static CUresult device_or_error(CUdevice dev, const struct sl_device **d)
{
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	*d = sl_dev(dev);
	return *d ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult sl_cuDeviceGet(CUdevice *device, int ordinal)
{
	const struct sl_device *d;
	CUresult err = device_or_error(ordinal, &d);

	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*device = ordinal;
	return err;
}

CUresult sl_cuDeviceGetCount(int *n)
{
	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	*n = count;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetName(char *name, int len, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!name || len <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)len, "%s", d->name);
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!uuid)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(uuid->bytes, d->uuid, 16);
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	return sl_cuDeviceGetUuid_v2(uuid, dev);
}

CUresult sl_cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	*bytes = d->total_mem;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!pi)
		return CUDA_ERROR_INVALID_VALUE;
	if (attribute_denied(attrib)) {
		*pi = 0;
		return CUDA_SUCCESS;
	}
	if (attrib == CU_DEVICE_ATTRIBUTE_NUMA_ID || attrib == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) {
		*pi = -1;
		return CUDA_SUCCESS;
	}
	if (attrib >= d->nattr || !d->attr_ok[attrib])
		return CUDA_ERROR_INVALID_VALUE;
	*pi = d->attr[attrib];
	if (attrib == CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
		*pi &= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	else if (attrib == CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED)
		*pi = 1; /* they are this process's, see hostpool.h */
	return CUDA_SUCCESS;
}

int sl_dev_attr(CUdevice dev, unsigned attr)
{
	int v = 0;

	return sl_cuDeviceGetAttribute(&v, attr, dev) ? 0 : v;
}

static unsigned element_bytes(CUarray_format format)
{
	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8:
		return 1;
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_HALF:
		return 2;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT:
		return 4;
	default:
		return 0;
	}
}

/*
 * The snapshot has the width in elements of one byte. Elements of up to four bytes
 * have the same width; for wider ones the number of bytes is the limit (measured).
 */
CUresult sl_cuDeviceGetTexture1DLinearMaxWidth(size_t *width, CUarray_format format, unsigned channels, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);
	unsigned bytes = element_bytes(format) * channels;

	if (err)
		return err;
	if (!width || !bytes || (channels != 1 && channels != 2 && channels != 4))
		return CUDA_ERROR_INVALID_VALUE;
	*width = d->tex1d_max_width;
	if (!*width)
		*width = (size_t)sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH);
	if (bytes > 4)
		*width = *width * 4 / bytes;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!pi || type != 0)
		return CUDA_ERROR_INVALID_VALUE;
	*pi = 0;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetProperties(CUdevprop *p, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	p->maxThreadsPerBlock = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
	for (unsigned i = 0; i < 3; i++) {
		p->maxThreadsDim[i] = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i);
		p->maxGridSize[i] = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i);
	}
	p->sharedMemPerBlock = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
	p->totalConstantMemory = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
	p->SIMDWidth = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
	p->memPitch = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
	p->regsPerBlock = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
	p->clockRate = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
	p->textureAlign = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	if (!major || !minor)
		return CUDA_ERROR_INVALID_VALUE;
	*major = d->cc_major;
	*minor = d->cc_minor;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	if (err)
		return err;
	/* "0000:01:00.0" and its NUL. */
	if (!pciBusId || len < 13)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(pciBusId, (size_t)len, "%s", d->pci_bus_id);
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
	unsigned domain = 0, bus, device, fn = 0;

	if (!dev || !pciBusId)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	/* [domain]:[bus]:[device].[function], the domain and the function optional. */
	if (sscanf(pciBusId, "%x:%x:%x.%x", &domain, &bus, &device, &fn) < 3) {
		domain = 0;
		if (sscanf(pciBusId, "%x:%x.%x", &bus, &device, &fn) < 2)
			return CUDA_ERROR_INVALID_VALUE;
	}
	for (int i = 0; i < count; i++) {
		const struct sl_device *d = sl_dev(i);

		if ((unsigned)d->pci_domain == domain && (unsigned)d->pci_bus == bus && (unsigned)d->pci_device == device) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

/* No device operation reaches this host's memory or another device's. */
static CUresult no_atomics(unsigned int *capabilities, const CUatomicOperation *operations, unsigned int n)
{
	if (!capabilities || !operations || !n)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n; i++)
		capabilities[i] = 0;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceGetHostAtomicCapabilities(unsigned int *capabilities, const CUatomicOperation *operations, unsigned int n, CUdevice dev)
{
	const struct sl_device *d;
	CUresult err = device_or_error(dev, &d);

	return err ? err : no_atomics(capabilities, operations, n);
}

CUresult sl_cuDeviceGetP2PAtomicCapabilities(unsigned int *capabilities, const CUatomicOperation *operations, unsigned int n,
					     CUdevice src, CUdevice dst)
{
	const struct sl_device *d;
	CUresult err = device_or_error(src, &d);

	if (!err)
		err = device_or_error(dst, &d);
	return err ? err : no_atomics(capabilities, operations, n);
}
