/*
 * NVML as the job sees it: the lease's devices, with the memory that was
 * granted and the sessions that use it. Every number comes from the worker
 * (nvml_conn.c) or from the same device attributes that CUDA answers from, so
 * the two libraries cannot disagree. What the worker does not know is
 * NOT_SUPPORTED, never a guess.
 *
 * CUDA_VISIBLE_DEVICES changes nothing here, as with the real library.
 */
#define _GNU_SOURCE
#include "nvml.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Device attributes of CUDA that NVML has questions about. */
enum {
	ATTR_CLOCK_RATE = 13,
	ATTR_SM_COUNT = 16,
	ATTR_COMPUTE_MODE = 20,
	ATTR_ECC_ENABLED = 32,
	ATTR_MEMORY_CLOCK_RATE = 36,
	ATTR_MEMORY_BUS_WIDTH = 37,
	ATTR_MULTI_GPU_BOARD = 84,
	ATTR_GPU_PCI_DEVICE_ID = 139,
	ATTR_GPU_PCI_SUBSYSTEM_ID = 140,
};

/* The CUDA version whose surface the shim has: what its cuDriverGetVersion never exceeds. */
#define SHIM_CUDA_VERSION 13000

/* No MIG instance, in the process lists. */
#define NO_INSTANCE 0xffffffffu

#define NEED_INIT() \
	do { \
		if (!nv_opened()) \
			return NVML_ERROR_UNINITIALIZED; \
	} while (0)

#define NEED_ARG(p) \
	do { \
		if (!(p)) \
			return NVML_ERROR_INVALID_ARGUMENT; \
	} while (0)

/* ---- devices ---- */

/* Handles are numbers that no program can mistake for memory. */
#define HANDLE_BASE ((uintptr_t)0x51ce0000)

static nvmlDevice_t handle_of(unsigned int index)
{
	return (nvmlDevice_t)(HANDLE_BASE + index + 1);
}

static nvmlReturn_t device_of(nvmlDevice_t h, unsigned int *index)
{
	uintptr_t n = (uintptr_t)h - HANDLE_BASE - 1;

	NEED_INIT();
	if (!h || n >= nv_facts()->ndev)
		return NVML_ERROR_INVALID_ARGUMENT;
	*index = (unsigned int)n;
	return NVML_SUCCESS;
}

/* Opens every function about a device: checks the library, the handle and the place for the answer. */
#define DEVICE(d, h, out) \
	const struct sl_device *d; \
	do { \
		unsigned int index_; \
		nvmlReturn_t rc_ = device_of(h, &index_); \
		if (rc_) \
			return rc_; \
		NEED_ARG(out); \
		d = &nv_facts()->dev[index_]; \
		(void)d; \
	} while (0)

/* The same for functions that answer from the worker's readings. */
#define READINGS(r, h, out) READINGS_(r, h, out, false)
#define READINGS_NOW(r, h, out) READINGS_(r, h, out, true)
#define READINGS_(r, h, out, now) \
	struct nv_readings r; \
	do { \
		unsigned int index_; \
		nvmlReturn_t rc_ = device_of(h, &index_); \
		if (rc_) \
			return rc_; \
		NEED_ARG(out); \
		rc_ = nv_read(index_, now, &r); \
		if (rc_) \
			return rc_; \
	} while (0)

static nvmlReturn_t put(unsigned int *out, uint32_t v)
{
	if (v == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = v;
	return NVML_SUCCESS;
}

static nvmlReturn_t put_text(char *dst, unsigned int cap, const char *s)
{
	size_t n = strlen(s) + 1;

	if (n > cap)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(dst, s, n);
	return NVML_SUCCESS;
}

static bool attr(const struct sl_device *d, int a, int32_t *v)
{
	if (a < 0 || a >= SL_MAX_ATTRS || !d->attr_ok[a])
		return false;
	*v = d->attr[a];
	return true;
}

/* ---- library ---- */

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags; /* no GPU and no attach: both are fine as they are */
	return nv_open();
}

NVML_API nvmlReturn_t nvmlInit_v2(void)
{
	return nv_open();
}

NVML_API nvmlReturn_t nvmlInit(void)
{
	return nv_open();
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
	return nv_close();
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
	switch ((int)result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_ALREADY_INITIALIZED: return "Already Initialized";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_INSUFFICIENT_POWER: return "Insufficient External Power";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
	case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
	case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
	case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
	case NVML_ERROR_OPERATING_SYSTEM: return "GPU access blocked by the operating system";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	case NVML_ERROR_IN_USE: return "In use by another client";
	case NVML_ERROR_MEMORY: return "Insufficient Memory";
	case NVML_ERROR_NO_DATA: return "No data";
	case NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: return "vGPU does not support ECC";
	case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
	case NVML_ERROR_FREQ_NOT_SUPPORTED: return "Frequency Not Supported";
	case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
	case NVML_ERROR_DEPRECATED: return "Deprecated";
	case NVML_ERROR_NOT_READY: return "Not Ready";
	case NVML_ERROR_GPU_NOT_FOUND: return "GPU Not Found";
	case NVML_ERROR_INVALID_STATE: return "Invalid State";
	case NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: return "Reset Type Not Supported";
	default: return "Unknown Error";
	}
}

/* ---- system ---- */

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	NEED_INIT();
	NEED_ARG(version);
	return put_text(version, length, nv_facts()->driver_string);
}

/* The real library says its CUDA generation, then the driver's version. */
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	char text[64];

	NEED_INIT();
	NEED_ARG(version);
	snprintf(text, sizeof text, "%u.%s", nv_facts()->driver_version / 1000, nv_facts()->driver_string);
	return put_text(version, length, text);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	NEED_INIT();
	NEED_ARG(version);
	*version = nv_facts()->driver_version > SHIM_CUDA_VERSION ? SHIM_CUDA_VERSION : (int)nv_facts()->driver_version;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* Only of processes that compute on the lease: their names came with their sessions. */
NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	nvmlReturn_t rc = NVML_ERROR_NOT_FOUND;

	NEED_INIT();
	NEED_ARG(name && length);
	for (unsigned int i = 0; i < nv_facts()->ndev && rc == NVML_ERROR_NOT_FOUND; i++) {
		struct nv_process *list;
		unsigned int n;

		if (nv_processes(i, &list, &n))
			continue;
		for (unsigned int k = 0; k < n; k++)
			if (list[k].pid == pid) {
				rc = put_text(name, length, list[k].name);
				break;
			}
		free(list);
	}
	return rc;
}

static nvmlReturn_t none(unsigned int *count)
{
	NEED_INIT();
	NEED_ARG(count);
	*count = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *count, void *entries)
{
	(void)entries;
	return none(count);
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
	return none(count);
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count)
{
	return none(count);
}

NVML_API nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *count)
{
	return none(count);
}

/* ---- finding devices ---- */

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	NEED_INIT();
	NEED_ARG(count);
	*count = nv_facts()->ndev;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	NEED_INIT();
	NEED_ARG(device);
	if (index >= nv_facts()->ndev)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = handle_of(index);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* "GPU-" and the UUID's usual form: 41 bytes with the NUL. */
static void uuid_text(const uint8_t u[16], char text[41])
{
	snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		 u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7],
		 u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static bool same_text(const char *a, const char *b)
{
	for (; *a && *b; a++, b++) {
		int x = *a, y = *b;

		if (x >= 'A' && x <= 'Z')
			x |= 0x20;
		if (y >= 'A' && y <= 'Z')
			y |= 0x20;
		if (x != y)
			return false;
	}
	return *a == *b;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	NEED_INIT();
	NEED_ARG(uuid && device);
	for (unsigned int i = 0; i < nv_facts()->ndev; i++) {
		char text[41];

		uuid_text(nv_facts()->dev[i].uuid, text);
		if (same_text(uuid, text)) {
			*device = handle_of(i);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_v1_t *uuid, nvmlDevice_t *device)
{
	char text[sizeof uuid->value.str + 1] = "";

	NEED_INIT();
	NEED_ARG(uuid && device);
	if (uuid->version != NVML_VERSION_OF(nvmlUUID_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	switch (uuid->type) {
	case NVML_UUID_TYPE_ASCII:
		memcpy(text, uuid->value.str, sizeof uuid->value.str);
		return nvmlDeviceGetHandleByUUID(text, device);
	case NVML_UUID_TYPE_BINARY:
		uuid_text(uuid->value.bytes, text);
		return nvmlDeviceGetHandleByUUID(text, device);
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

/* [DOMAIN:]BUS:DEVICE[.FUNCTION], hexadecimal; the whole string must be that. */
static bool parse_bus_id(const char *s, uint32_t *domain, uint32_t *bus, uint32_t *device)
{
	uint32_t v[3] = { 0 }, function = 0;
	int n = 0, digits = 0;

	for (;; s++) {
		int c = *s, x = c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;

		if (x >= 0) {
			if (++digits > 8)
				return false;
			v[n] = v[n] << 4 | (uint32_t)x;
			continue;
		}
		if (!digits)
			return false;
		if (c != ':')
			break;
		if (++n == 3)
			return false;
		digits = 0;
	}
	if (*s == '.') {
		if (s[1] < '0' || s[1] > '7')
			return false;
		function = (uint32_t)(s[1] - '0');
		s += 2;
	}
	if (*s || n == 0 || function)
		return false;
	*domain = n == 2 ? v[0] : 0;
	*bus = v[n - 1];
	*device = v[n];
	return true;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
	uint32_t domain, bus, dev;

	NEED_INIT();
	NEED_ARG(id && device);
	if (!parse_bus_id(id, &domain, &bus, &dev))
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < nv_facts()->ndev; i++) {
		const struct sl_device *d = &nv_facts()->dev[i];

		if ((unsigned int)d->pci_domain == domain && (unsigned int)d->pci_bus == bus && (unsigned int)d->pci_device == dev) {
			*device = handle_of(i);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(id, device);
}

/* Serial numbers stay on the server, so none can be found by one. */
NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	NEED_INIT();
	NEED_ARG(serial && device);
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	unsigned int i;
	nvmlReturn_t rc = device_of(device, &i);

	if (rc)
		return rc;
	NEED_ARG(index);
	*index = i;
	return NVML_SUCCESS;
}

/* ---- what a device is ---- */

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	DEVICE(d, device, name);
	return put_text(name, length, d->name);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	char text[41];

	DEVICE(d, device, uuid);
	uuid_text(d->uuid, text);
	return put_text(uuid, length, text);
}

/* Drivers before 12.8 do not tell CUDA the PCI ids; 0 is no vendor's number. */
static void pci_ids(const struct sl_device *d, unsigned int *id, unsigned int *sub)
{
	int32_t v;

	*id = attr(d, ATTR_GPU_PCI_DEVICE_ID, &v) ? (unsigned int)v : 0;
	*sub = attr(d, ATTR_GPU_PCI_SUBSYSTEM_ID, &v) ? (unsigned int)v : 0;
}

static void bus_id(const struct sl_device *d, char text[32])
{
	snprintf(text, 32, "%08X:%02X:%02X.0", (unsigned int)d->pci_domain, d->pci_bus & 0xff, d->pci_device & 0xff);
}

static void bus_id_legacy(const struct sl_device *d, char text[16])
{
	snprintf(text, 16, "%04X:%02X:%02X.0", d->pci_domain & 0xffff, d->pci_bus & 0xff, d->pci_device & 0xff);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	DEVICE(d, device, pci);
	memset(pci, 0, sizeof *pci);
	bus_id_legacy(d, pci->busIdLegacy);
	bus_id(d, pci->busId);
	pci->domain = (unsigned int)d->pci_domain;
	pci->bus = (unsigned int)d->pci_bus;
	pci->device = (unsigned int)d->pci_device;
	pci_ids(d, &pci->pciDeviceId, &pci->pciSubSystemId);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
	DEVICE(d, device, pci);
	memset(pci, 0, sizeof *pci);
	bus_id_legacy(d, pci->busId);
	pci->domain = (unsigned int)d->pci_domain;
	pci->bus = (unsigned int)d->pci_bus;
	pci->device = (unsigned int)d->pci_device;
	pci_ids(d, &pci->pciDeviceId, &pci->pciSubSystemId);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v1_t *pci)
{
	unsigned int sub;

	DEVICE(d, device, pci);
	memset(pci, 0, sizeof *pci);
	bus_id_legacy(d, pci->busId);
	pci->domain = (unsigned int)d->pci_domain;
	pci->bus = (unsigned int)d->pci_bus;
	pci->device = (unsigned int)d->pci_device;
	pci_ids(d, &pci->pciDeviceId, &sub);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
	DEVICE(d, device, pci);
	if (pci->version != NVML_VERSION_OF(nvmlPciInfoExt_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	pci->domain = (unsigned int)d->pci_domain;
	pci->bus = (unsigned int)d->pci_bus;
	pci->device = (unsigned int)d->pci_device;
	pci_ids(d, &pci->pciDeviceId, &pci->pciSubSystemId);
	pci->baseClass = 0x03; /* display controller */
	pci->subClass = 0x02;  /* 3D */
	memset(pci->busId, 0, sizeof pci->busId);
	bus_id(d, pci->busId);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	DEVICE(d, device, major && minor);
	*major = d->cc_major;
	*minor = d->cc_minor;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *arch)
{
	static const unsigned int by_major[] = {
		[3] = NVML_DEVICE_ARCH_KEPLER, [5] = NVML_DEVICE_ARCH_MAXWELL, [6] = NVML_DEVICE_ARCH_PASCAL,
		[7] = NVML_DEVICE_ARCH_VOLTA, [8] = NVML_DEVICE_ARCH_AMPERE, [9] = NVML_DEVICE_ARCH_HOPPER,
		[10] = NVML_DEVICE_ARCH_BLACKWELL, [11] = NVML_DEVICE_ARCH_BLACKWELL, [12] = NVML_DEVICE_ARCH_BLACKWELL,
	};

	DEVICE(d, device, arch);
	*arch = NVML_DEVICE_ARCH_UNKNOWN;
	if (d->cc_major == 7 && d->cc_minor >= 5)
		*arch = NVML_DEVICE_ARCH_TURING;
	else if (d->cc_major == 8 && d->cc_minor == 9)
		*arch = NVML_DEVICE_ARCH_ADA;
	else if (d->cc_major > 0 && d->cc_major < (int)(sizeof by_major / sizeof *by_major) && by_major[d->cc_major])
		*arch = by_major[d->cc_major];
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand)
{
	static const struct {
		const char *prefix;
		unsigned int brand;
	} brands[] = { /* the longer prefix first */
		{ "NVIDIA GeForce RTX", NVML_BRAND_GEFORCE_RTX }, { "GeForce RTX", NVML_BRAND_GEFORCE_RTX },
		{ "NVIDIA GeForce", NVML_BRAND_GEFORCE }, { "GeForce", NVML_BRAND_GEFORCE },
		{ "NVIDIA TITAN RTX", NVML_BRAND_TITAN_RTX }, { "TITAN RTX", NVML_BRAND_TITAN_RTX },
		{ "NVIDIA TITAN", NVML_BRAND_TITAN }, { "TITAN", NVML_BRAND_TITAN },
		{ "Quadro RTX", NVML_BRAND_QUADRO_RTX }, { "Quadro", NVML_BRAND_QUADRO },
		{ "NVIDIA RTX", NVML_BRAND_NVIDIA_RTX }, { "Tesla", NVML_BRAND_TESLA },
		{ "NVIDIA", NVML_BRAND_NVIDIA },
	};

	DEVICE(d, device, brand);
	*brand = NVML_BRAND_UNKNOWN;
	for (size_t i = 0; i < sizeof brands / sizeof *brands; i++)
		if (!strncmp(d->name, brands[i].prefix, strlen(brands[i].prefix))) {
			*brand = brands[i].brand;
			break;
		}
	return NVML_SUCCESS;
}

/* CUDA cores: SMs by the number each has in that generation. */
NVML_API nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *cores)
{
	static const struct {
		int cc;
		unsigned int per_sm;
	} known[] = {
		{ 50, 128 }, { 52, 128 }, { 60, 64 }, { 61, 128 }, { 70, 64 }, { 75, 64 }, { 80, 64 }, { 86, 128 },
		{ 89, 128 }, { 90, 128 }, { 100, 128 }, { 103, 128 }, { 120, 128 },
	};
	int32_t sms;

	DEVICE(d, device, cores);
	if (!attr(d, ATTR_SM_COUNT, &sms) || sms <= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].cc / 10 == d->cc_major && known[i].cc % 10 == d->cc_minor) {
			*cores = (unsigned int)sms * known[i].per_sm;
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t put_attr(const struct sl_device *d, int a, unsigned int *out)
{
	int32_t v;

	if (!attr(d, a, &v) || v < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned int)v;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned int *bits)
{
	DEVICE(d, device, bits);
	return put_attr(d, ATTR_MEMORY_BUS_WIDTH, bits);
}

NVML_API nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned int *multi)
{
	DEVICE(d, device, multi);
	return put_attr(d, ATTR_MULTI_GPU_BOARD, multi);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned int *mode)
{
	DEVICE(d, device, mode);
	return put_attr(d, ATTR_COMPUTE_MODE, mode);
}

/* On or off, as CUDA says it; the counters are the server's business. */
NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	nvmlReturn_t rc;

	DEVICE(d, device, current && pending);
	rc = put_attr(d, ATTR_ECC_ENABLED, current);
	if (!rc)
		*pending = *current;
	return rc;
}

/* What a lease has is a share of a whole GPU: there is nothing to partition by MIG. */
NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	DEVICE(d, device, current && pending);
	*current = *pending = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	DEVICE(d, device, count);
	*count = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
	DEVICE(d, device, mig);
	(void)index;
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
	DEVICE(d, device, is_mig);
	*is_mig = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, unsigned int *display)
{
	DEVICE(d, device, display);
	*display = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, unsigned int *active)
{
	DEVICE(d, device, active);
	*active = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	DEVICE(d, device, types);
	*types = 0;
	return NVML_SUCCESS;
}

/*
 * Event sets exist, since nvidia-smi makes one before it prints anything, but
 * a lease's devices have no events to register, so a set has nothing to hold:
 * one handle serves for all, and waiting on it is waiting for the time-out.
 */
#define EVENT_SET ((void *)(uintptr_t)0x51ce1001)

NVML_API nvmlReturn_t nvmlEventSetCreate(void **set)
{
	NEED_INIT();
	NEED_ARG(set);
	*set = EVENT_SET;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetFree(void *set)
{
	NEED_INIT();
	NEED_ARG(set == EVENT_SET);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set)
{
	DEVICE(d, device, set == EVENT_SET);
	return types ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(void *set, void *data, unsigned int timeout_ms)
{
	struct timespec t = { timeout_ms / 1000, timeout_ms % 1000 * 1000000l };

	NEED_INIT();
	NEED_ARG(set == EVENT_SET && data);
	while (nanosleep(&t, &t) && errno == EINTR)
		;
	return NVML_ERROR_TIMEOUT;
}

NVML_API nvmlReturn_t nvmlEventSetWait(void *set, void *data, unsigned int timeout_ms)
{
	return nvmlEventSetWait_v2(set, data, timeout_ms);
}

/* ---- how a device is ---- */

/*
 * Memory: of the grant. Free is what can be allocated now; what is neither
 * free nor used by a session is the part of a granule that nobody can have.
 */
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	READINGS_NOW(r, device, memory);
	memory->total = r.mem_total;
	memory->free = r.mem_free;
	memory->used = r.mem_total - r.mem_free;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	READINGS_NOW(r, device, memory);
	if (memory->version != NVML_VERSION_OF(nvmlMemory_v2_t, 2))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	memory->total = r.mem_total;
	memory->free = r.mem_free;
	memory->used = r.mem_used;
	memory->reserved = r.mem_total - r.mem_free - r.mem_used;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	READINGS(r, device, utilization);
	if (r.util_gpu == NV_NA || r.util_mem == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	utilization->gpu = r.util_gpu;
	utilization->memory = r.util_mem;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *temp)
{
	READINGS(r, device, temp);
	if (sensor != NVML_TEMPERATURE_GPU)
		return NVML_ERROR_INVALID_ARGUMENT;
	return put(temp, r.temp_c);
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temp)
{
	READINGS(r, device, temp);
	if (temp->version != NVML_VERSION_OF(nvmlTemperature_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (temp->sensorType != NVML_TEMPERATURE_GPU)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (r.temp_c == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	temp->temperature = (int)r.temp_c;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatt)
{
	READINGS(r, device, milliwatt);
	return put(milliwatt, r.power_mw);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatt)
{
	READINGS(r, device, milliwatt);
	return put(milliwatt, r.power_limit_mw);
}

NVML_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatt)
{
	READINGS(r, device, milliwatt);
	return put(milliwatt, r.power_limit_mw);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, unsigned int *mode)
{
	READINGS(r, device, mode);
	if (r.power_limit_mw == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*mode = 1; /* a power limit is in force */
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
	READINGS(r, device, mhz);
	switch (type) {
	case NVML_CLOCK_GRAPHICS: /* one domain with the SMs since Kepler */
	case NVML_CLOCK_SM:
		return put(mhz, r.sm_mhz);
	case NVML_CLOCK_MEM:
		return put(mhz, r.mem_mhz);
	case NVML_CLOCK_VIDEO:
		return NVML_ERROR_NOT_SUPPORTED;
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned int type, unsigned int id, unsigned int *mhz)
{
	DEVICE(d, device, mhz);
	return id == NVML_CLOCK_ID_CURRENT ? nvmlDeviceGetClockInfo(device, type, mhz) : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
	int32_t khz;

	DEVICE(d, device, mhz);
	if (type > NVML_CLOCK_VIDEO)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (type == NVML_CLOCK_VIDEO || !attr(d, type == NVML_CLOCK_MEM ? ATTR_MEMORY_CLOCK_RATE : ATTR_CLOCK_RATE, &khz) || khz <= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*mhz = (unsigned int)khz / 1000;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned int *pstate)
{
	READINGS(r, device, pstate);
	return put(pstate, r.pstate);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, unsigned int *pstate)
{
	return nvmlDeviceGetPerformanceState(device, pstate);
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *percent)
{
	READINGS(r, device, percent);
	return put(percent, r.fan);
}

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
	READINGS(r, device, mode);
	return put(mode, r.persistence);
}

/* Each value has its own verdict; the call fails only as a whole. */
NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	struct timespec t;

	READINGS(r, device, values);
	if (count < 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	clock_gettime(CLOCK_REALTIME, &t);
	for (int i = 0; i < count; i++) {
		nvmlFieldValue_t *v = &values[i];
		uint32_t is = NV_NA;

		switch (v->fieldId) {
		case NVML_FI_DEV_POWER_AVERAGE: /* what nvmlDeviceGetPowerUsage says since Ampere */
			is = r.power_mw;
			break;
		case NVML_FI_DEV_POWER_CURRENT_LIMIT:
			is = r.power_limit_mw;
			break;
		case NVML_FI_DEV_GPU_TEMP:
			is = r.temp_c;
			break;
		}
		v->timestamp = (long long)t.tv_sec * 1000000 + t.tv_nsec / 1000;
		v->latencyUsec = 0;
		v->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
		v->value.ullVal = 0;
		v->nvmlReturn = put(&v->value.uiVal, is);
	}
	return NVML_SUCCESS;
}

/* ---- processes ---- */

/*
 * The sessions of the lease, under the numbers that their processes have in
 * the job. *count is room on the way in, processes on the way out. write puts
 * one of them at its place.
 */
static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned int *count, void *infos,
				   void (*write)(void *infos, unsigned int i, const struct nv_process *p))
{
	struct nv_process *list;
	unsigned int index, n, room;
	nvmlReturn_t rc = device_of(device, &index);

	if (rc)
		return rc;
	NEED_ARG(count);
	room = *count;
	if (room && !infos)
		return NVML_ERROR_INVALID_ARGUMENT;
	rc = nv_processes(index, &list, &n);
	if (rc)
		return rc;
	*count = n;
	if (n > room)
		rc = NVML_ERROR_INSUFFICIENT_SIZE;
	else
		for (unsigned int i = 0; i < n; i++)
			write(infos, i, &list[i]);
	free(list);
	return rc;
}

static void write_v1(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessInfo_v1_t *)infos)[i] = (nvmlProcessInfo_v1_t){ .pid = p->pid, .usedGpuMemory = p->used };
}

static void write_v2(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessInfo_v2_t *)infos)[i] = (nvmlProcessInfo_v2_t){
		.pid = p->pid, .usedGpuMemory = p->used,
		.gpuInstanceId = NO_INSTANCE, .computeInstanceId = NO_INSTANCE,
	};
}

static void write_detail(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessDetail_v1_t *)infos)[i] = (nvmlProcessDetail_v1_t){
		.pid = p->pid, .usedGpuMemory = p->used,
		.gpuInstanceId = NO_INSTANCE, .computeInstanceId = NO_INSTANCE,
	};
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos)
{
	return list_processes(device, count, infos, write_v1);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
	return list_processes(device, count, infos, write_v2);
}

/* The third version has the second's layout. */
NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
	return list_processes(device, count, infos, write_v2);
}

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
	DEVICE(d, device, list);
	if (list->version != NVML_VERSION_OF(nvmlProcessDetailList_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	switch (list->mode) {
	case NVML_PROCESS_MODE_COMPUTE:
	case NVML_PROCESS_MODE_ALL:
		return list_processes(device, &list->numProcArrayEntries, list->procArray, write_detail);
	case NVML_PROCESS_MODE_GRAPHICS:
	case NVML_PROCESS_MODE_MPS:
		list->numProcArrayEntries = 0;
		return NVML_SUCCESS;
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

/* Nobody draws on a lease, and MPS has no part in it. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned int *count)
{
	DEVICE(d, device, count);
	*count = 0;
	return NVML_SUCCESS;
}

#define NO_PROCESSES(name) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, void *infos) \
	{ \
		(void)infos; \
		return no_processes(device, count); \
	}

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* ---- what nvidia-smi wants besides ---- */

/*
 * nvidia-smi asks for a private table of functions, will not run without it,
 * and takes its process list from there. It treats a table as its size in
 * bytes and then function pointers, and an empty place as "not supported", so
 * ours is empty but for: the lists of compute, graphics and MPS processes, each
 * (device, count, entries) with the entry below; and the question whether a
 * device can be monitored (device, answer), without which dmon and pmon refuse.
 * Seen alike in 535, 550 and 555; since nothing promises that a later
 * nvidia-smi means the same by these places, a call whose first argument is
 * none of our handles touches nothing.
 */
#define TABLE_PLACES 1024
#define PLACE_MONITORED (0x240 / sizeof(void *))
#define PLACE_COMPUTE (0x6a8 / sizeof(void *))
#define PLACE_GRAPHICS (0x6b0 / sizeof(void *))
#define PLACE_MPS (0x6b8 / sizeof(void *))

struct smi_process {
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu_instance, compute_instance;
	unsigned long long used_protected;
	char name[4096];
};

_Static_assert(sizeof(struct smi_process) == 0x1020, "nvidia-smi's process entry");

static void write_smi(void *infos, unsigned int i, const struct nv_process *p)
{
	struct smi_process *e = (struct smi_process *)infos + i;

	e->pid = p->pid;
	e->used = p->used;
	e->gpu_instance = e->compute_instance = NO_INSTANCE;
	e->used_protected = 0;
	memcpy(e->name, p->name, sizeof p->name);
}

static nvmlReturn_t smi_compute(nvmlDevice_t device, unsigned int *count, void *infos)
{
	return list_processes(device, count, infos, write_smi);
}

static nvmlReturn_t smi_none(nvmlDevice_t device, unsigned int *count, void *infos)
{
	(void)infos;
	return no_processes(device, count);
}

static nvmlReturn_t smi_monitored(nvmlDevice_t device, unsigned int *yes)
{
	DEVICE(d, device, yes);
	*yes = 1;
	return NVML_SUCCESS;
}

static const union {
	size_t size;
	nvmlReturn_t (*list)(nvmlDevice_t device, unsigned int *count, void *infos);
	nvmlReturn_t (*ask)(nvmlDevice_t device, unsigned int *answer);
} smi_table[TABLE_PLACES] = {
	[0] = { .size = sizeof smi_table },
	[PLACE_MONITORED] = { .ask = smi_monitored },
	[PLACE_COMPUTE] = { .list = smi_compute },
	[PLACE_GRAPHICS] = { .list = smi_none },
	[PLACE_MPS] = { .list = smi_none },
};

NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
	static const uint8_t smi[16] = {
		0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
	};

	NEED_ARG(table && id);
	*table = NULL;
	if (memcmp(id, smi, sizeof smi))
		return NVML_ERROR_NOT_FOUND;
	*table = smi_table;
	return NVML_SUCCESS;
}
