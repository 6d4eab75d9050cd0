/*
 * The part of NVML's binary interface that the shim answers. Names, layouts and
 * numbers are NVML's, so that code reads like NVML; test_nvml_abi.c checks them
 * against any nvml.h at hand.
 */
#ifndef SLUICE_NVML_H
#define SLUICE_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NVML_API __attribute__((visibility("default")))

typedef enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_ALREADY_INITIALIZED = 5,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_INSUFFICIENT_POWER = 8,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_IRQ_ISSUE = 11,
	NVML_ERROR_LIBRARY_NOT_FOUND = 12,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
	NVML_ERROR_CORRUPTED_INFOROM = 14,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_RESET_REQUIRED = 16,
	NVML_ERROR_OPERATING_SYSTEM = 17,
	NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
	NVML_ERROR_IN_USE = 19,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_NO_DATA = 21,
	NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
	NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
	NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_DEPRECATED = 26,
	NVML_ERROR_NOT_READY = 27,
	NVML_ERROR_GPU_NOT_FOUND = 28,
	NVML_ERROR_INVALID_STATE = 29,
	NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30,
	NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct nvmlDevice_st *nvmlDevice_t;

typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device;
	unsigned int pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

/* What _v2 callers pass: the same first fields, then four reserved words. */
typedef struct {
	char busId[16];
	unsigned int domain, bus, device;
	unsigned int pciDeviceId, pciSubSystemId;
	unsigned int reserved[4];
} nvmlPciInfo_v2_t;

/* What callers of the first version pass. */
typedef struct {
	char busId[16];
	unsigned int domain, bus, device;
	unsigned int pciDeviceId;
} nvmlPciInfo_v1_t;

typedef struct {
	unsigned int version;
	unsigned int domain, bus, device;
	unsigned int pciDeviceId, pciSubSystemId;
	unsigned int baseClass, subClass;
	char busId[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
	unsigned int version;
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
	unsigned int version;
	char branch[80];
} nvmlSystemDriverBranchInfo_v1_t;

typedef struct {
	unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
	unsigned int version;
	unsigned int mode;
	unsigned int numProcArrayEntries;
	nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_v1_t;

typedef struct {
	unsigned int version;
	unsigned int sensorType;
	int temperature;
} nvmlTemperature_v1_t;

typedef union {
	double dVal;
	int siVal;
	unsigned int uiVal;
	unsigned long ulVal;
	unsigned long long ullVal;
	long long sllVal;
	unsigned short usVal;
} nvmlValue_t;

typedef struct {
	unsigned int fieldId;
	unsigned int scopeId;
	long long timestamp;	/* microseconds since 1970 */
	long long latencyUsec;
	unsigned int valueType;
	unsigned int nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
	unsigned int version;
	unsigned int type;
	union {
		char str[41];
		unsigned char bytes[16];
	} value;
} nvmlUUID_v1_t;

/* nvmlDeviceCurrentClockFreqs_t and nvmlDevicePerfModes_t. */
typedef struct {
	unsigned int version;
	char str[2048];
} nvmlDeviceCurrentClockFreqs_v1_t;

typedef struct {
	unsigned int version;
	unsigned int capMask;
} nvmlDeviceCapabilities_v1_t;

/* Structures that carry their size and version in their first word. */
#define NVML_VERSION_OF(type, v) ((unsigned int)sizeof(type) | (unsigned int)(v) << 24)

enum { NVML_CLOCK_GRAPHICS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_VIDEO };
enum { NVML_CLOCK_ID_CURRENT };
enum { NVML_AFFINITY_SCOPE_NODE, NVML_AFFINITY_SCOPE_SOCKET };
enum { NVML_GPU_VIRTUALIZATION_MODE_NONE };
enum { NVML_TEMPERATURE_GPU };
enum { NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES };
enum { NVML_UUID_TYPE_ASCII = 1, NVML_UUID_TYPE_BINARY = 2 };
enum { NVML_VALUE_TYPE_UNSIGNED_INT = 1, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3 };
enum { NVML_PROCESS_MODE_COMPUTE, NVML_PROCESS_MODE_GRAPHICS, NVML_PROCESS_MODE_MPS, NVML_PROCESS_MODE_ALL };
enum {
	NVML_BRAND_UNKNOWN = 0, NVML_BRAND_QUADRO = 1, NVML_BRAND_TESLA = 2,
	NVML_BRAND_GEFORCE = 5, NVML_BRAND_TITAN = 6, NVML_BRAND_QUADRO_RTX = 12,
	NVML_BRAND_NVIDIA_RTX = 13, NVML_BRAND_NVIDIA = 14, NVML_BRAND_GEFORCE_RTX = 15,
	NVML_BRAND_TITAN_RTX = 16,
};
enum {
	NVML_DEVICE_ARCH_KEPLER = 2, NVML_DEVICE_ARCH_MAXWELL = 3, NVML_DEVICE_ARCH_PASCAL = 4,
	NVML_DEVICE_ARCH_VOLTA = 5, NVML_DEVICE_ARCH_TURING = 6, NVML_DEVICE_ARCH_AMPERE = 7,
	NVML_DEVICE_ARCH_ADA = 8, NVML_DEVICE_ARCH_HOPPER = 9, NVML_DEVICE_ARCH_BLACKWELL = 10,
};
#define NVML_P2P_CAPS_INDEX_UNKNOWN 5
#define NVML_P2P_STATUS_OK 0
#define NVML_P2P_STATUS_NOT_SUPPORTED 5
#define NVML_DEVICE_ARCH_UNKNOWN 0xffffffffu
#define NVML_TOPOLOGY_SYSTEM 50
#define NVML_NVLINK_CAP_COUNT 6
enum {
	NVML_FI_DEV_MEMORY_TEMP = 82, NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION = 83, NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94,
	NVML_FI_DEV_NVLINK_LINK_COUNT = 91, NVML_FI_DEV_NVLINK_GET_STATE = 165,
	NVML_FI_DEV_POWER_AVERAGE = 185, NVML_FI_DEV_POWER_INSTANT = 186,
	NVML_FI_DEV_POWER_CURRENT_LIMIT = 190, NVML_FI_DEV_GPU_TEMP = 308,
};

#endif
