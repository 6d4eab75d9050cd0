/*
 * Readings of a device: memory, load, clocks, power, temperature. The worker reads
 * them; what it does not know is NOT_SUPPORTED, never a guess.
 */
#include "nvml_answer.h"

#include <time.h>

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *out);

/*
 * Memory of the grant. Free is what can be allocated now; memory that is neither
 * free nor used by a session is the unusable part of a granule.
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
	return nv_put(temp, r.temp_c);
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
	return nv_put(milliwatt, r.power_mw);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatt)
{
	READINGS(r, device, milliwatt);
	return nv_put(milliwatt, r.power_limit_mw);
}

NVML_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatt)
{
	READINGS(r, device, milliwatt);
	return nv_put(milliwatt, r.power_limit_mw);
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
		return nv_put(mhz, r.sm_mhz);
	case NVML_CLOCK_MEM:
		return nv_put(mhz, r.mem_mhz);
	case NVML_CLOCK_VIDEO:
		return nv_put_more(device, SL_READING_VIDEO_MHZ, mhz);
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
	if (type == NVML_CLOCK_VIDEO)
		return nv_put_more(device, SL_READING_MAX_VIDEO_MHZ, mhz);
	if (!nv_attr(d, type == NVML_CLOCK_MEM ? ATTR_MEMORY_CLOCK_RATE : ATTR_CLOCK_RATE, &khz) || khz <= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*mhz = (unsigned int)khz / 1000;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned int *pstate)
{
	READINGS(r, device, pstate);
	return nv_put(pstate, r.pstate);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, unsigned int *pstate)
{
	return nvmlDeviceGetPerformanceState(device, pstate);
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *percent)
{
	READINGS(r, device, percent);
	return nv_put(percent, r.fan);
}

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
	READINGS(r, device, mode);
	return nv_put(mode, r.persistence);
}

static nvmlReturn_t more_field(nvmlDevice_t device, nvmlFieldValue_t *v)
{
	switch (v->fieldId) {
	case NVML_FI_DEV_MEMORY_TEMP:
		return nv_put_more(device, SL_READING_TEMP_MEM, &v->value.uiVal);
	case NVML_FI_DEV_POWER_INSTANT:
		return nv_put_more(device, SL_READING_POWER_INSTANT, &v->value.uiVal);
	case NVML_FI_DEV_PCIE_REPLAY_COUNTER:
		return nv_put_more(device, SL_READING_PCIE_REPLAYS, &v->value.uiVal);
	case NVML_FI_DEV_NVLINK_GET_STATE:
		return nv_put_link_state(device, v->scopeId, &v->value.uiVal);
	case NVML_FI_DEV_NVLINK_LINK_COUNT:
		return nv_put_link_count(device, &v->value.uiVal);
	case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
		v->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
		return nvmlDeviceGetTotalEnergyConsumption(device, &v->value.ullVal);
	default:
		return NVML_ERROR_NOT_SUPPORTED;
	}
}

/* Each value has its own result; the call fails only as a whole. */
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
		case NVML_FI_DEV_POWER_AVERAGE: /* nvmlDeviceGetPowerUsage returns it since Ampere */
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
		v->nvmlReturn = is == NV_NA ? more_field(device, v) : nv_put(&v->value.uiVal, is);
	}
	return NVML_SUCCESS;
}
