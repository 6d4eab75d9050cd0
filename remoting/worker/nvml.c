#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* NVML's layouts, as its documentation describes them. */
struct nvml_branch {
	unsigned int version;
	char branch[80];
};

struct nvml_memory { unsigned long long total, free, used; };
struct nvml_util { unsigned int gpu, memory; };
struct nvml_process_v1 { unsigned int pid; unsigned long long used; };
struct nvml_process { unsigned int pid; unsigned long long used; unsigned int gi, ci; };

struct nvml_field {
	unsigned int id, scope;
	long long at, latency;
	unsigned int type, result;
	union { unsigned int value; unsigned long long room; };
};

enum { FIELD_TEMP_MEM = 82, FIELD_POWER_INSTANT = 186, FIELD_UNSIGNED = 1 };

#define NVML_SUCCESS 0
#define NVML_INSUFFICIENT_SIZE 7

static struct {
	int (*init)(void);
	int (*driver)(char *, unsigned int);
	int (*branch)(struct nvml_branch *, unsigned int);
	int (*find)(const char *, void **);
	int (*memory)(void *, struct nvml_memory *);
	int (*procs_v3)(void *, unsigned int *, struct nvml_process *);
	int (*procs_v2)(void *, unsigned int *, struct nvml_process *);
	int (*procs_v1)(void *, unsigned int *, struct nvml_process_v1 *);
	int (*util)(void *, struct nvml_util *);
	int (*temp)(void *, unsigned int, unsigned int *);
	int (*power)(void *, unsigned int *);
	int (*limit)(void *, unsigned int *);
	int (*clock)(void *, unsigned int, unsigned int *);
	int (*pstate)(void *, unsigned int *);
	int (*fan)(void *, unsigned int *);
	int (*persistence)(void *, unsigned int *);
	int (*fields)(void *, int, struct nvml_field *);
} nv;

/* --- more readings --- */

/* How a function gives its readings: one, one for an argument, two, or one of 64 bits as two. */
enum form { ONE, OF, TWO, LONG };

struct reading {
	const char *name;
	enum form form;
	unsigned int arg;
	unsigned int at;	/* SL_READING_ of the first */
	int (*f)(void *, ...);
};

static struct reading more[] = {
	{ "nvmlDeviceGetCurrPcieLinkGeneration", ONE, 0, SL_READING_PCIE_GENERATION, NULL },
	{ "nvmlDeviceGetCurrPcieLinkWidth", ONE, 0, SL_READING_PCIE_WIDTH, NULL },
	{ "nvmlDeviceGetMaxPcieLinkGeneration", ONE, 0, SL_READING_PCIE_MAX_GENERATION, NULL },
	{ "nvmlDeviceGetMaxPcieLinkWidth", ONE, 0, SL_READING_PCIE_MAX_WIDTH, NULL },
	{ "nvmlDeviceGetGpuMaxPcieLinkGeneration", ONE, 0, SL_READING_PCIE_GPU_MAX_GENERATION, NULL },
	{ "nvmlDeviceGetPcieSpeed", ONE, 0, SL_READING_PCIE_SPEED, NULL },
	{ "nvmlDeviceGetPcieLinkMaxSpeed", ONE, 0, SL_READING_PCIE_MAX_SPEED, NULL },
	{ "nvmlDeviceGetPcieReplayCounter", ONE, 0, SL_READING_PCIE_REPLAYS, NULL },
	{ "nvmlDeviceGetClockInfo", OF, 3, SL_READING_VIDEO_MHZ, NULL },
	{ "nvmlDeviceGetMaxClockInfo", OF, 3, SL_READING_MAX_VIDEO_MHZ, NULL },
	{ "nvmlDeviceGetTemperatureThreshold", OF, 0, SL_READING_TEMP_SHUTDOWN, NULL },
	{ "nvmlDeviceGetTemperatureThreshold", OF, 1, SL_READING_TEMP_SLOWDOWN, NULL },
	{ "nvmlDeviceGetTemperatureThreshold", OF, 2, SL_READING_TEMP_MEM_MAX, NULL },
	{ "nvmlDeviceGetTemperatureThreshold", OF, 3, SL_READING_TEMP_GPU_MAX, NULL },
	{ "nvmlDeviceGetPowerManagementDefaultLimit", ONE, 0, SL_READING_POWER_DEFAULT, NULL },
	{ "nvmlDeviceGetPowerManagementLimitConstraints", TWO, 0, SL_READING_POWER_MIN, NULL },
	{ "nvmlDeviceGetEncoderUtilization", TWO, 0, SL_READING_ENCODER, NULL },
	{ "nvmlDeviceGetDecoderUtilization", TWO, 0, SL_READING_DECODER, NULL },
	{ "nvmlDeviceGetApplicationsClock", OF, 0, SL_READING_APP_GRAPHICS_MHZ, NULL },
	{ "nvmlDeviceGetApplicationsClock", OF, 2, SL_READING_APP_MEM_MHZ, NULL },
	{ "nvmlDeviceGetDefaultApplicationsClock", OF, 0, SL_READING_APP_DEFAULT_GRAPHICS_MHZ, NULL },
	{ "nvmlDeviceGetDefaultApplicationsClock", OF, 2, SL_READING_APP_DEFAULT_MEM_MHZ, NULL },
	{ "nvmlDeviceGetCurrentClocksThrottleReasons", LONG, 0, SL_READING_THROTTLED, NULL },
	{ "nvmlDeviceGetSupportedClocksThrottleReasons", LONG, 0, SL_READING_THROTTLES, NULL },
	{ "nvmlDeviceGetTotalEnergyConsumption", LONG, 0, SL_READING_ENERGY, NULL },
};

/* Measured over 20 ms each. */
static struct reading traffics[] = {
	{ "nvmlDeviceGetPcieThroughput", OF, 0, SL_READING_PCIE_SENT, NULL },
	{ "nvmlDeviceGetPcieThroughput", OF, 1, SL_READING_PCIE_RECEIVED, NULL },
};

static void find(void *library, struct reading *r, size_t n)
{
	while (n--)
		*(void **)&r[n].f = dlsym(library, r[n].name);
}

static void take(void *dev, const struct reading *r, uint32_t value[SL_READING_COUNT])
{
	unsigned long long both = 0;
	unsigned int a = 0, b = 0;
	int rc = -1;

	if (!r->f)
		return;
	switch (r->form) {
	case ONE:
		rc = ((int (*)(void *, unsigned int *))r->f)(dev, &a);
		break;
	case OF:
		rc = ((int (*)(void *, unsigned int, unsigned int *))r->f)(dev, r->arg, &a);
		break;
	case TWO:
		rc = ((int (*)(void *, unsigned int *, unsigned int *))r->f)(dev, &a, &b);
		break;
	case LONG:
		rc = ((int (*)(void *, unsigned long long *))r->f)(dev, &both);
		a = (unsigned int)both;
		b = (unsigned int)(both >> 32);
		break;
	}
	if (rc)
		return;
	value[r->at] = a;
	if (r->form == TWO || r->form == LONG)
		value[r->at + 1] = b;
}

/* Field values that are numbers of 32 bits. */
static void take_fields(void *dev, uint32_t value[SL_READING_COUNT])
{
	struct nvml_field f[] = { { .id = FIELD_TEMP_MEM }, { .id = FIELD_POWER_INSTANT } };

	if (!nv.fields || nv.fields(dev, 2, f))
		return;
	if (!f[0].result && f[0].type == FIELD_UNSIGNED)
		value[SL_READING_TEMP_MEM] = f[0].value;
	if (!f[1].result && f[1].type == FIELD_UNSIGNED)
		value[SL_READING_POWER_INSTANT] = f[1].value;
}

void sl_nvml_readings(void *dev, uint32_t traffic, uint32_t value[SL_READING_COUNT])
{
	for (size_t i = 0; i < sizeof more / sizeof *more; i++)
		take(dev, &more[i], value);
	for (size_t i = 0; traffic && i < sizeof traffics / sizeof *traffics; i++)
		take(dev, &traffics[i], value);
	take_fields(dev, value);
}

/* --- */

int sl_nvml_open(const char *path, char *err, size_t errlen)
{
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	int rc;

	if (!h) {
		snprintf(err, errlen, "%s", dlerror());
		return -1;
	}
#define LOAD(field, name) *(void **)&nv.field = dlsym(h, name)
	LOAD(init, "nvmlInit_v2");
	LOAD(driver, "nvmlSystemGetDriverVersion");
	LOAD(branch, "nvmlSystemGetDriverBranch"); /* since 555 */
	LOAD(find, "nvmlDeviceGetHandleByPciBusId_v2");
	LOAD(memory, "nvmlDeviceGetMemoryInfo");
	LOAD(procs_v3, "nvmlDeviceGetComputeRunningProcesses_v3");
	LOAD(procs_v2, "nvmlDeviceGetComputeRunningProcesses_v2");
	LOAD(procs_v1, "nvmlDeviceGetComputeRunningProcesses");
	LOAD(util, "nvmlDeviceGetUtilizationRates");
	LOAD(temp, "nvmlDeviceGetTemperature");
	LOAD(power, "nvmlDeviceGetPowerUsage");
	LOAD(limit, "nvmlDeviceGetEnforcedPowerLimit");
	LOAD(clock, "nvmlDeviceGetClockInfo");
	LOAD(pstate, "nvmlDeviceGetPerformanceState");
	LOAD(fan, "nvmlDeviceGetFanSpeed");
	LOAD(persistence, "nvmlDeviceGetPersistenceMode");
	LOAD(fields, "nvmlDeviceGetFieldValues");
	sl_nvml_find_links(h);
	sl_nvml_find_texts(h);
#undef LOAD
	find(h, more, sizeof more / sizeof *more);
	find(h, traffics, sizeof traffics / sizeof *traffics);
	if (!nv.init) {
		snprintf(err, errlen, "%s has no nvmlInit_v2", path);
		return -1;
	}
	rc = nv.init();
	if (rc) {
		snprintf(err, errlen, "nvmlInit_v2 returned %d", rc);
		return -1;
	}
	return 0;
}

int sl_nvml_driver(char *s, uint32_t n)
{
	return nv.driver ? nv.driver(s, n) : -1;
}

int sl_nvml_branch(char *s, uint32_t n)
{
	struct nvml_branch b = { .version = (unsigned int)sizeof b | 1u << 24 };
	int rc = nv.branch ? nv.branch(&b, sizeof b.branch) : -1;

	if (!rc)
		snprintf(s, n, "%.*s", (int)sizeof b.branch, b.branch);
	return rc;
}

int sl_nvml_find(const char *busid, void **dev)
{
	return nv.find ? nv.find(busid, dev) : -1;
}

int sl_nvml_memory(void *dev, uint64_t *total, uint64_t *used, uint64_t *free_)
{
	struct nvml_memory m = { 0, 0, 0 };
	int rc = nv.memory ? nv.memory(dev, &m) : -1;

	*total = m.total;
	*used = m.used;
	*free_ = m.free;
	return rc;
}

#define NA 0xffffffffu

void sl_nvml_dynamic(void *dev, struct sl_nvml_device *d)
{
	struct nvml_util u = { NA, NA };

	memset(d, 0xff, sizeof *d);
	if (sl_nvml_memory(dev, &d->mem_total, &d->mem_used, &d->mem_free))
		d->mem_total = d->mem_used = d->mem_free = 0;
	if (nv.util && !nv.util(dev, &u)) {
		d->util_gpu = u.gpu;
		d->util_mem = u.memory;
	}
#define GET(field, call) do { unsigned int v = NA; if (!(call)) d->field = v; } while (0)
	GET(temp, !nv.temp || nv.temp(dev, 0, &v));
	GET(power_mw, !nv.power || nv.power(dev, &v));
	GET(power_limit_mw, !nv.limit || nv.limit(dev, &v));
	GET(sm_mhz, !nv.clock || nv.clock(dev, 1, &v));
	GET(mem_mhz, !nv.clock || nv.clock(dev, 2, &v));
	GET(pstate, !nv.pstate || nv.pstate(dev, &v));
	GET(fan, !nv.fan || nv.fan(dev, &v));
	GET(persistence, !nv.persistence || nv.persistence(dev, &v));
#undef GET
}

int sl_nvml_process(void *dev, uint32_t pid, uint64_t *used)
{
	int (*get)(void *, unsigned int *, struct nvml_process *) = nv.procs_v3 ? nv.procs_v3 : nv.procs_v2;
	struct nvml_process few[64], *p = few;
	struct nvml_process_v1 old[64];
	unsigned int n = 64, i;
	int rc, found = -1;

	if (!get) {
		if (!nv.procs_v1 || nv.procs_v1(dev, &n, old))
			return -1;
		for (i = 0; i < n; i++) {
			if (old[i].pid == pid && old[i].used != ~0ull) {
				*used = old[i].used;
				return 0;
			}
		}
		return -1;
	}
	rc = get(dev, &n, p);
	if (rc == NVML_INSUFFICIENT_SIZE && n < 65536) {
		n += 64;
		p = calloc(n, sizeof *p);
		if (!p)
			return -1;
		rc = get(dev, &n, p);
	}
	for (i = 0; !rc && i < n; i++) {
		/* All ones: the driver does not know (WDDM, some containers). */
		if (p[i].pid == pid && p[i].used != ~0ull) {
			*used = p[i].used;
			found = 0;
			break;
		}
	}
	if (p != few)
		free(p);
	return found;
}
