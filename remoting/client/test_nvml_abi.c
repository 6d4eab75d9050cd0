/*
 * Prints sizes, offsets and numbers of NVML's interface: built once with our
 * nvml.h and once, with THEIRS, with NVIDIA's of any version. Every line that
 * theirs prints, ours must print too (make nvml-abi).
 */
#include <stddef.h>
#include <stdio.h>

#ifdef THEIRS
#include <nvml.h>
/* Structures with a version macro came one by one; the macro tells which are there. */
#else
#include "nvml.h"
#define nvmlMemory_v2 NVML_VERSION_OF(nvmlMemory_v2_t, 2)
#define nvmlSystemDriverBranchInfo_v1 NVML_VERSION_OF(nvmlSystemDriverBranchInfo_v1_t, 1)
#define nvmlDeviceCurrentClockFreqs_v1 NVML_VERSION_OF(nvmlDeviceCurrentClockFreqs_v1_t, 1)
#define nvmlDeviceCapabilities_v1 NVML_VERSION_OF(nvmlDeviceCapabilities_v1_t, 1)
#define nvmlPciInfoExt_v1 NVML_VERSION_OF(nvmlPciInfoExt_v1_t, 1)
#define nvmlUUID_v1 NVML_VERSION_OF(nvmlUUID_v1_t, 1)
#define nvmlTemperature_v1 NVML_VERSION_OF(nvmlTemperature_v1_t, 1)
#define nvmlProcessDetailList_v1 NVML_VERSION_OF(nvmlProcessDetailList_v1_t, 1)
#define NVML_FI_DEV_POWER_AVERAGE NVML_FI_DEV_POWER_AVERAGE
#define NVML_FI_DEV_GPU_TEMP NVML_FI_DEV_GPU_TEMP
#endif

#define SIZE(t) printf("sizeof(" #t ") %zu\n", sizeof(t))
#define AT(t, f) printf(#t "." #f " %zu\n", offsetof(t, f))
#define IS(v) printf(#v " %llu\n", (unsigned long long)(v))

int main(void)
{
	SIZE(nvmlPciInfo_t);
	AT(nvmlPciInfo_t, domain);
	AT(nvmlPciInfo_t, pciSubSystemId);
	AT(nvmlPciInfo_t, busId);
	SIZE(nvmlMemory_t);
	AT(nvmlMemory_t, free);
	AT(nvmlMemory_t, used);
	SIZE(nvmlUtilization_t);
	AT(nvmlUtilization_t, memory);
	SIZE(nvmlProcessInfo_v1_t);
	SIZE(nvmlProcessInfo_v2_t);
	AT(nvmlProcessInfo_v2_t, usedGpuMemory);
	AT(nvmlProcessInfo_v2_t, computeInstanceId);
	SIZE(nvmlFieldValue_t);
	AT(nvmlFieldValue_t, valueType);
	AT(nvmlFieldValue_t, nvmlReturn);
	AT(nvmlFieldValue_t, value);
#ifdef nvmlMemory_v2
	IS(nvmlMemory_v2);
	AT(nvmlMemory_v2_t, reserved);
	AT(nvmlMemory_v2_t, used);
#endif
#ifdef nvmlSystemDriverBranchInfo_v1
	IS(nvmlSystemDriverBranchInfo_v1);
	AT(nvmlSystemDriverBranchInfo_v1_t, branch);
#endif
#ifdef nvmlDeviceCurrentClockFreqs_v1
	IS(nvmlDeviceCurrentClockFreqs_v1);
	AT(nvmlDeviceCurrentClockFreqs_v1_t, str);
#endif
#ifdef nvmlDeviceCapabilities_v1
	IS(nvmlDeviceCapabilities_v1);
	AT(nvmlDeviceCapabilities_v1_t, capMask);
#endif
#ifdef nvmlPciInfoExt_v1
	IS(nvmlPciInfoExt_v1);
	AT(nvmlPciInfoExt_v1_t, busId);
	AT(nvmlPciInfoExt_v1_t, baseClass);
#endif
#ifdef nvmlUUID_v1
	IS(nvmlUUID_v1);
	AT(nvmlUUID_v1_t, value);
	IS(NVML_UUID_TYPE_BINARY);
#endif
#ifdef nvmlTemperature_v1
	IS(nvmlTemperature_v1);
	AT(nvmlTemperature_v1_t, temperature);
#endif
#ifdef nvmlProcessDetailList_v1
	IS(nvmlProcessDetailList_v1);
	SIZE(nvmlProcessDetail_v1_t);
	AT(nvmlProcessDetail_v1_t, usedGpuCcProtectedMemory);
	IS(NVML_PROCESS_MODE_MPS);
#endif
#ifdef NVML_FI_DEV_POWER_AVERAGE
	IS(NVML_FI_DEV_POWER_AVERAGE);
	IS(NVML_FI_DEV_POWER_CURRENT_LIMIT);
#endif
#ifdef NVML_FI_DEV_GPU_TEMP
	IS(NVML_FI_DEV_GPU_TEMP);
#endif
	IS(NVML_ERROR_NO_PERMISSION);
	IS(NVML_ERROR_INSUFFICIENT_SIZE);
	IS(NVML_ERROR_DRIVER_NOT_LOADED);
	IS(NVML_ERROR_GPU_IS_LOST);
	IS(NVML_ERROR_LIB_RM_VERSION_MISMATCH);
	IS(NVML_ERROR_MEMORY);
	IS(NVML_ERROR_UNKNOWN);
	IS(NVML_CLOCK_VIDEO);
	IS(NVML_VALUE_TYPE_UNSIGNED_INT);
	IS(NVML_BRAND_NVIDIA);
	IS(NVML_BRAND_GEFORCE_RTX);
	IS(NVML_BRAND_TITAN_RTX);
	IS(NVML_BRAND_QUADRO_RTX);
	IS(NVML_DEVICE_ARCH_HOPPER);
	IS(NVML_DEVICE_ARCH_UNKNOWN);
	return 0;
}
