/*
 * What NVML has of a device in words, and the numbers that hardly ever change: the owner's NVML is asked. Serial numbers,
 * and whatever else tells one board from another of its kind, are not among them.
 *
 * Beside them the processors and memory near a device. All of the program's machine are equally near to a GPU that is in
 * another: a program that binds itself to them, as training scripts do, may use them all.
 */
#define _GNU_SOURCE
#include "nvml_answer.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- words ---- */

static nvmlReturn_t words(nvmlDevice_t device, unsigned int which, const void *out, struct nv_text *t)
{
	unsigned int index;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(out);
	rc = nv_read_text(index, which, t);
	return rc || *t->s ? rc : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t put_words(nvmlDevice_t device, unsigned int which, char *out, unsigned int length)
{
	struct nv_text t;
	nvmlReturn_t rc = words(device, which, out, &t);

	return rc ? rc : nv_put_text(out, length, t.s);
}

#define WORDS(name, which) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, char *out, unsigned int length) { return put_words(device, which, out, length); }

WORDS(nvmlDeviceGetVbiosVersion, SL_TEXT_VBIOS)
WORDS(nvmlDeviceGetBoardPartNumber, SL_TEXT_BOARD_PART)
WORDS(nvmlDeviceGetInforomImageVersion, SL_TEXT_INFOROM_IMAGE)

NVML_API nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, unsigned int object, char *out, unsigned int length)
{
	DEVICE(d, device, out);
	if (object > SL_TEXT_INFOROM_POWER - SL_TEXT_INFOROM_OEM)
		return NVML_ERROR_NOT_SUPPORTED;
	return put_words(device, SL_TEXT_INFOROM_OEM + object, out, length);
}

/* The caller's room is 64 bytes by NVML's documentation. */
NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
	return put_words(device, SL_TEXT_GSP, version, 64);
}

static nvmlReturn_t pairs(nvmlDevice_t device, unsigned int which, nvmlDeviceCurrentClockFreqs_v1_t *out)
{
	DEVICE(d, device, out);
	if (out->version != NVML_VERSION_OF(nvmlDeviceCurrentClockFreqs_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return put_words(device, which, out->str, sizeof out->str);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClockFreqs(nvmlDevice_t device, nvmlDeviceCurrentClockFreqs_v1_t *out)
{
	return pairs(device, SL_TEXT_CLOCK_FREQS, out);
}

NVML_API nvmlReturn_t nvmlDeviceGetPerformanceModes(nvmlDevice_t device, nvmlDeviceCurrentClockFreqs_v1_t *out)
{
	return pairs(device, SL_TEXT_PERFORMANCE_MODES, out);
}

/* ---- numbers ---- */

static nvmlReturn_t facts(nvmlDevice_t device, const void *out, struct nv_facts *f)
{
	unsigned int index;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(out);
	return nv_read_facts(index, f);
}

static nvmlReturn_t fact(nvmlDevice_t device, unsigned int which, unsigned int *out)
{
	struct nv_facts f;
	nvmlReturn_t rc = facts(device, out, &f);

	return rc ? rc : nv_put(out, f.value[which]);
}

NVML_API nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned int *id)
{
	return fact(device, SL_FACT_MODULE_ID, id);
}

NVML_API nvmlReturn_t nvmlDeviceGetInforomConfigurationChecksum(nvmlDevice_t device, unsigned int *sum)
{
	return fact(device, SL_FACT_INFOROM_CHECKSUM, sum);
}

NVML_API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *fans)
{
	return fact(device, SL_FACT_FANS, fans);
}

NVML_API nvmlReturn_t nvmlDeviceGetCapabilities(nvmlDevice_t device, nvmlDeviceCapabilities_v1_t *caps)
{
	DEVICE(d, device, caps);
	if (caps->version != NVML_VERSION_OF(nvmlDeviceCapabilities_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return fact(device, SL_FACT_CAPABILITIES, &caps->capMask);
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
						unsigned int *pending, unsigned int *failed)
{
	struct nv_facts f;
	nvmlReturn_t rc = facts(device, corrected && uncorrected && pending ? failed : NULL, &f);

	if (rc)
		return rc;
	if (f.value[SL_FACT_ROWS_CORRECTED] == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*corrected = f.value[SL_FACT_ROWS_CORRECTED];
	*uncorrected = f.value[SL_FACT_ROWS_UNCORRECTED];
	*pending = f.value[SL_FACT_ROWS_PENDING];
	*failed = f.value[SL_FACT_ROWS_FAILED];
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *enabled, unsigned int *by_default)
{
	struct nv_facts f;
	nvmlReturn_t rc = facts(device, enabled ? by_default : NULL, &f);

	if (rc)
		return rc;
	if (f.value[SL_FACT_GSP_ENABLED] == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*enabled = f.value[SL_FACT_GSP_ENABLED];
	*by_default = f.value[SL_FACT_GSP_DEFAULT];
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
	unsigned int valid;
	nvmlReturn_t rc = fact(device, SL_FACT_INFOROM_VALID, &valid);

	return rc || valid ? rc : NVML_ERROR_CORRUPTED_INFOROM;
}

/* The driver in the program's machine is not a guest's, nor is one needed there. */
NVML_API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned int *mode)
{
	DEVICE(d, device, mode);
	*mode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
	return NVML_SUCCESS;
}

/* ---- what is near ---- */

/* The bits of a list as "0-3,8"; INSUFFICIENT_SIZE if they need more than n words. */
static nvmlReturn_t put_list(const char *list, unsigned int n, unsigned long *set)
{
	const unsigned long bits = 8 * sizeof *set;
	char *end;

	memset(set, 0, n * sizeof *set);
	for (const char *s = list; *s >= '0' && *s <= '9'; s = *end == ',' ? end + 1 : end) {
		unsigned long first = strtoul(s, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		for (unsigned long i = first; i <= last; i++) {
			if (i / bits >= n)
				return NVML_ERROR_INSUFFICIENT_SIZE;
			set[i / bits] |= 1ul << i % bits;
		}
	}
	return NVML_SUCCESS;
}

/* The same of a file of the kernel's; a kernel without it has number 0 alone. */
static nvmlReturn_t near(const char *path, unsigned int n, unsigned long *set)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	char list[4096] = "0";
	ssize_t got;

	if (fd >= 0) {
		got = read(fd, list, sizeof list - 1);
		list[got > 0 ? got : 0] = 0;
		close(fd);
	}
	return put_list(list, n, set);
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int n, unsigned long *set, unsigned int scope)
{
	DEVICE(d, device, n && scope <= NVML_AFFINITY_SCOPE_SOCKET ? set : NULL);
	return near("/sys/devices/system/cpu/online", n, set);
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int n, unsigned long *set)
{
	return nvmlDeviceGetCpuAffinityWithinScope(device, n, set, NVML_AFFINITY_SCOPE_NODE);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int n, unsigned long *set, unsigned int scope)
{
	DEVICE(d, device, n && scope <= NVML_AFFINITY_SCOPE_SOCKET ? set : NULL);
	return near("/sys/devices/system/node/has_memory", n, set);
}
