/* The checks and the answers that all NVML functions share; see nvml_answer.h. */
#include "nvml_answer.h"

#include <stdio.h>
#include <string.h>

/* Handles are numbers that no program can mistake for memory. */
#define HANDLE_BASE ((uintptr_t)0x51ce0000)

nvmlDevice_t nv_handle(unsigned int index)
{
	return (nvmlDevice_t)(HANDLE_BASE + index + 1);
}

nvmlReturn_t nv_device(nvmlDevice_t h, unsigned int *index)
{
	uintptr_t n = (uintptr_t)h - HANDLE_BASE - 1;

	NEED_INIT();
	if (!h || n >= nv_facts()->ndev)
		return NVML_ERROR_INVALID_ARGUMENT;
	*index = (unsigned int)n;
	return NVML_SUCCESS;
}

nvmlReturn_t nv_put(unsigned int *out, uint32_t v)
{
	if (v == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = v;
	return NVML_SUCCESS;
}

nvmlReturn_t nv_put_text(char *dst, unsigned int cap, const char *s)
{
	size_t n = strlen(s) + 1;

	if (n > cap)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(dst, s, n);
	return NVML_SUCCESS;
}

bool nv_attr(const struct sl_device *d, int a, int32_t *v)
{
	if (a < 0 || a >= SL_MAX_ATTRS || !d->attr_ok[a])
		return false;
	*v = d->attr[a];
	return true;
}

void nv_uuid_text(const uint8_t u[16], char text[41])
{
	snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		 u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7],
		 u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
