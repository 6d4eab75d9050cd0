/*
 * The errors of the simulated GPUs themselves. SLUICE_SIM_ERRORS is a list of INDEX:NAME=NUMBER, as
 * "0:ecc=3,0:pending=1,1:temperature=95".
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

unsigned long long nvml_errors(nvmlDevice_t d, const char *name, unsigned long long none)
{
	const char *s = getenv("SLUICE_SIM_ERRORS");
	char want[64];
	size_t n = (size_t)snprintf(want, sizeof(want), "%d:%s=", d->index, name);

	for (; s && *s; s = strchr(s, ',')) {
		s += *s == ',';
		if (!strncmp(s, want, n))
			return strtoull(s + n, NULL, 0);
	}
	return none;
}

/* noecc: the memory has no ECC. */
API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, unsigned int type, unsigned int counter, unsigned long long *v)
{
	nvmlReturn_t r = nvml_check(d, type < 2 && counter < 2 ? v : NULL);

	if (r)
		return r;
	if (nvml_errors(d, "noecc", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*v = !type ? 0 : counter ? nvml_errors(d, "ecc_ever", nvml_errors(d, "ecc", 0)) : nvml_errors(d, "ecc", 0);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned int *corr, unsigned int *unc, unsigned int *pending, unsigned int *failed)
{
	nvmlReturn_t r = nvml_check(d, corr && unc && pending ? failed : NULL);

	if (r)
		return r;
	if (nvml_errors(d, "noecc", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*corr = 0;
	*unc = (unsigned int)nvml_errors(d, "rows", 0);
	*pending = nvml_errors(d, "pending", 0) != 0;
	*failed = nvml_errors(d, "failed", 0) != 0;
	return NVML_SUCCESS;
}

/* A GPU that remaps rows retires no pages; pages=1 makes one that does. */
API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t d, unsigned int *pending)
{
	nvmlReturn_t r = nvml_check(d, pending);

	if (r)
		return r;
	if (!nvml_errors(d, "pages", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*pending = 1;
	return NVML_SUCCESS;
}
