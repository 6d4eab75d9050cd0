/*
 * Facts about a device that do not change, from the snapshot in WELCOME. CUDA
 * answers from the same attributes, so the two libraries cannot disagree.
 */
#include "nvml_answer.h"

#include <stdio.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	DEVICE(d, device, name);
	return nv_put_text(name, length, d->name);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	char text[41];

	DEVICE(d, device, uuid);
	nv_uuid_text(d->uuid, text);
	return nv_put_text(uuid, length, text);
}

/* Drivers before 12.8 do not give CUDA the PCI ids; 0 is no vendor's number. */
static void pci_ids(const struct sl_device *d, unsigned int *id, unsigned int *sub)
{
	int32_t v;

	*id = nv_attr(d, ATTR_GPU_PCI_DEVICE_ID, &v) ? (unsigned int)v : 0;
	*sub = nv_attr(d, ATTR_GPU_PCI_SUBSYSTEM_ID, &v) ? (unsigned int)v : 0;
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

/* CUDA cores: the number of SMs times the cores that an SM of that generation has. */
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
	if (!nv_attr(d, ATTR_SM_COUNT, &sms) || sms <= 0)
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

	if (!nv_attr(d, a, &v) || v < 0)
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

/* On or off, as CUDA says; error counters are not for users of a lease. */
NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	nvmlReturn_t rc;

	DEVICE(d, device, current && pending);
	rc = put_attr(d, ATTR_ECC_ENABLED, current);
	if (!rc)
		*pending = *current;
	return rc;
}

/* A lease has a share of a whole GPU, so there is nothing that MIG could partition. */
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
