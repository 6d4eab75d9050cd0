/*
 * Readings that nvidia-smi -q, nvitop and their like ask for beyond those of nvml_readings.c: the PCIe link, limits of
 * temperature and power, clocks, why these are lower, energy. They are those of the whole GPU. The worker reads all of
 * them at once; what it does not know is NOT_SUPPORTED.
 */
#include "nvml_answer.h"

nvmlReturn_t nv_put_more(nvmlDevice_t device, unsigned int which, unsigned int *out)
{
	struct nv_more m;
	unsigned int index;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(out);
	rc = nv_read_more(index, which == SL_READING_PCIE_SENT || which == SL_READING_PCIE_RECEIVED, FRESH_MS, &m);
	return rc ? rc : nv_put(out, m.value[which]);
}

static nvmlReturn_t two(nvmlDevice_t device, unsigned int which, unsigned int *a, unsigned int *b)
{
	unsigned int first;
	nvmlReturn_t rc;

	NEED_INIT();
	NEED_ARG(a && b);
	rc = nv_put_more(device, which, &first);
	if (!rc)
		rc = nv_put_more(device, which + 1, b);
	if (!rc)
		*a = first;
	return rc;
}

static nvmlReturn_t both_halves(nvmlDevice_t device, unsigned int which, unsigned long long *out)
{
	struct nv_more m;
	unsigned int index;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(out);
	rc = nv_read_more(index, false, which == SL_READING_ENERGY ? COUNTER_MS : FRESH_MS, &m);
	if (rc)
		return rc;
	if (m.value[which] == NV_NA && m.value[which + 1] == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = m.value[which] | (unsigned long long)m.value[which + 1] << 32;
	return NVML_SUCCESS;
}

#define ONE(name, which) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *out) { return nv_put_more(device, which, out); }
#define TWO(name, which) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *a, unsigned int *b) { return two(device, which, a, b); }
#define LONG(name, which) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned long long *out) { return both_halves(device, which, out); }

ONE(nvmlDeviceGetCurrPcieLinkGeneration, SL_READING_PCIE_GENERATION)
ONE(nvmlDeviceGetCurrPcieLinkWidth, SL_READING_PCIE_WIDTH)
ONE(nvmlDeviceGetMaxPcieLinkGeneration, SL_READING_PCIE_MAX_GENERATION)
ONE(nvmlDeviceGetMaxPcieLinkWidth, SL_READING_PCIE_MAX_WIDTH)
ONE(nvmlDeviceGetGpuMaxPcieLinkGeneration, SL_READING_PCIE_GPU_MAX_GENERATION)
ONE(nvmlDeviceGetPcieSpeed, SL_READING_PCIE_SPEED)
ONE(nvmlDeviceGetPcieLinkMaxSpeed, SL_READING_PCIE_MAX_SPEED)
ONE(nvmlDeviceGetPcieReplayCounter, SL_READING_PCIE_REPLAYS)
ONE(nvmlDeviceGetPowerManagementDefaultLimit, SL_READING_POWER_DEFAULT)
TWO(nvmlDeviceGetPowerManagementLimitConstraints, SL_READING_POWER_MIN)
TWO(nvmlDeviceGetEncoderUtilization, SL_READING_ENCODER)
TWO(nvmlDeviceGetDecoderUtilization, SL_READING_DECODER)
LONG(nvmlDeviceGetCurrentClocksThrottleReasons, SL_READING_THROTTLED)
LONG(nvmlDeviceGetCurrentClocksEventReasons, SL_READING_THROTTLED)
LONG(nvmlDeviceGetSupportedClocksThrottleReasons, SL_READING_THROTTLES)
LONG(nvmlDeviceGetSupportedClocksEventReasons, SL_READING_THROTTLES)
LONG(nvmlDeviceGetTotalEnergyConsumption, SL_READING_ENERGY)

NVML_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned int counter, unsigned int *kbps)
{
	DEVICE(d, device, kbps && counter <= NVML_PCIE_UTIL_RX_BYTES);
	return nv_put_more(device, counter == NVML_PCIE_UTIL_TX_BYTES ? SL_READING_PCIE_SENT : SL_READING_PCIE_RECEIVED, kbps);
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned int type, unsigned int *temp)
{
	static const unsigned int which[] = { SL_READING_TEMP_SHUTDOWN, SL_READING_TEMP_SLOWDOWN, SL_READING_TEMP_MEM_MAX, SL_READING_TEMP_GPU_MAX };

	DEVICE(d, device, temp);
	return type < sizeof which / sizeof *which ? nv_put_more(device, which[type], temp) : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned int type, unsigned int graphics, unsigned int memory, unsigned int *mhz)
{
	DEVICE(d, device, mhz && type <= NVML_CLOCK_VIDEO);
	if (type == NVML_CLOCK_VIDEO)
		return NVML_ERROR_NOT_SUPPORTED;
	return nv_put_more(device, type == NVML_CLOCK_MEM ? memory : graphics, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
	return clock_of(device, type, SL_READING_APP_GRAPHICS_MHZ, SL_READING_APP_MEM_MHZ, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
	return clock_of(device, type, SL_READING_APP_DEFAULT_GRAPHICS_MHZ, SL_READING_APP_DEFAULT_MEM_MHZ, mhz);
}
