/* What the simulated libnvidia-ml says of a board in words, and numbers that do not change. */
#include <stddef.h>

#include "nvml.h"
#include "state.h"

API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t d, char *out, unsigned int n)
{
	nvmlReturn_t r = nvml_check(d, out);

	return r ? r : nvml_text(out, n, "96.00.99.00.01");
}

API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t d, char *out, unsigned int n)
{
	nvmlReturn_t r = nvml_check(d, out);

	return r ? r : nvml_text(out, n, "692-00000-0000-000");
}

API nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t d, char *out, unsigned int n)
{
	nvmlReturn_t r = nvml_check(d, out);

	return r ? r : nvml_text(out, n, "G500.0000.00.01");
}

API nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t d, unsigned int object, char *out, unsigned int n)
{
	static const char *const versions[] = { "2.1", "7.16" };
	nvmlReturn_t r = nvml_check(d, out);

	if (r)
		return r;
	return object < 2 ? nvml_text(out, n, versions[object]) : NVML_ERROR_NOT_SUPPORTED; /* no POWER object since Volta */
}

API nvmlReturn_t nvmlDeviceGetInforomConfigurationChecksum(nvmlDevice_t d, unsigned int *sum)
{
	nvmlReturn_t r = nvml_check(d, sum);

	if (!r)
		*sum = 0x51ce;
	return r;
}

API nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t d) { return nvml_check(d, d); }

API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t d, char *out)
{
	nvmlReturn_t r = nvml_check(d, out);

	return r ? r : nvml_text(out, 64, SIM_DRIVER_STRING);
}

API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t d, unsigned int *enabled, unsigned int *by_default)
{
	nvmlReturn_t r = nvml_check(d, enabled ? by_default : NULL);

	if (!r)
		*enabled = *by_default = 1;
	return r;
}

API nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t d, unsigned int *id)
{
	nvmlReturn_t r = nvml_check(d, id);

	if (!r)
		*id = (unsigned int)d->index + 1;
	return r;
}

API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t d, unsigned int *n)
{
	nvmlReturn_t r = nvml_check(d, n);

	if (!r)
		*n = 0;
	return r;
}

typedef struct { unsigned int version, mask; } nvmlDeviceCapabilities_t;

API nvmlReturn_t nvmlDeviceGetCapabilities(nvmlDevice_t d, nvmlDeviceCapabilities_t *c)
{
	nvmlReturn_t r = nvml_check(d, c);

	if (r)
		return r;
	if (c->version != (sizeof *c | 1U << 24))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	c->mask = 0;
	return NVML_SUCCESS;
}

typedef struct { unsigned int version; char str[2048]; } nvmlDeviceCurrentClockFreqs_t;

static nvmlReturn_t clocks(nvmlDevice_t d, nvmlDeviceCurrentClockFreqs_t *c, const char *s)
{
	nvmlReturn_t r = nvml_check(d, c);

	if (r)
		return r;
	if (c->version != (sizeof *c | 1U << 24))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return nvml_text(c->str, sizeof c->str, s);
}

API nvmlReturn_t nvmlDeviceGetCurrentClockFreqs(nvmlDevice_t d, nvmlDeviceCurrentClockFreqs_t *c)
{
	return clocks(d, c, "perf=0, nvclock=1980, nvclockmin=345, nvclockmax=1980, memTransferRate=6402");
}

API nvmlReturn_t nvmlDeviceGetPerformanceModes(nvmlDevice_t d, nvmlDeviceCurrentClockFreqs_t *c)
{
	return clocks(d, c, "perf=0, nvclockmin=345, nvclockmax=1980, memclock=3201");
}
