/*
 * The library itself: opening and closing it, its errors and versions, and what no
 * lease has (HICs, units, events). nvml_find.c finds devices, nvml_device.c has
 * their fixed facts, nvml_texts.c what NVML has in words, nvml_readings.c their readings, nvml_processes.c the processes
 * on them. What the worker does not know is NOT_SUPPORTED, never a guess;
 * nvml_names.c refuses all other functions by name.
 */
#define _GNU_SOURCE
#include "nvml_answer.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "version.h"

/* ---- library ---- */

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags; /* both flags (no GPU needed, no attach) change nothing here */
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
	return nv_put_text(version, length, nv_facts()->driver_string);
}

NVML_API nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *info, unsigned int length)
{
	NEED_INIT();
	NEED_ARG(info);
	if (info->version != NVML_VERSION_OF(nvmlSystemDriverBranchInfo_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (!*nv_facts()->driver_branch)
		return NVML_ERROR_NOT_SUPPORTED;
	return nv_put_text(info->branch, length < sizeof info->branch ? length : (unsigned int)sizeof info->branch, nv_facts()->driver_branch);
}

/* The real library gives its CUDA generation, then the driver's version. */
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	char text[64];

	NEED_INIT();
	NEED_ARG(version);
	snprintf(text, sizeof text, "%u.%s", nv_facts()->driver_version / 1000, nv_facts()->driver_string);
	return nv_put_text(version, length, text);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	NEED_INIT();
	NEED_ARG(version);
	*version = nv_facts()->driver_version > SL_API_VERSION ? SL_API_VERSION : (int)nv_facts()->driver_version;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
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

/* ---- events ---- */

/*
 * Event sets exist because nvidia-smi makes one before it prints anything. A
 * lease's devices have no events to register, so a set is always empty: one handle
 * serves for all, and waiting on it lasts until the time-out.
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
