/*
 * Finding devices and their handles: by index, by UUID, by PCI bus id. The devices
 * are those of the lease, in the order of its owners. CUDA_VISIBLE_DEVICES changes
 * nothing here, as with the real library.
 */
#include "nvml_answer.h"

#include <string.h>

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
	*device = nv_handle(index);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
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

		nv_uuid_text(nv_facts()->dev[i].uuid, text);
		/* NVML knows it without the prefix too, as CUDA's UUIDs are written. */
		if (same_text(uuid, text) || same_text(uuid, text + sizeof "GPU-" - 1)) {
			*device = nv_handle(i);
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
		nv_uuid_text(uuid->value.bytes, text);
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
			*device = nv_handle(i);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(id, device);
}

/* The lease does not reveal serial numbers, so no device can be found by one. */
NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	NEED_INIT();
	NEED_ARG(serial && device);
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	unsigned int i;
	nvmlReturn_t rc = nv_device(device, &i);

	if (rc)
		return rc;
	NEED_ARG(index);
	*index = i;
	return NVML_SUCCESS;
}
