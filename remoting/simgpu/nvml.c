/*
 * libnvidia-ml.so.1 for the simulated libcuda: what the worker asks for its
 * snapshot and for measuring overheads, and what tests check. It reads the same
 * shared state, so it shows every process on the simulated GPUs, including this
 * one, whether or not it uses CUDA.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "busy.h"
#include "engine.h"
#include "nvml.h"
#include "state.h"

static struct {
	pthread_mutex_t lock;
	int refs;
	struct sim_config cfg;
	struct dev dev[SIM_MAX_DEV];
} ml = { .lock = PTHREAD_MUTEX_INITIALIZER };

static nvmlReturn_t start(void)
{
	nvmlReturn_t r = NVML_SUCCESS;

	pthread_mutex_lock(&ml.lock);
	if (!ml.refs) {
		if (state_config(&ml.cfg) || engine_config() || state_open(&ml.cfg, false))
			r = NVML_ERROR_DRIVER_NOT_LOADED;
		for (int i = 0; i < SIM_MAX_DEV; i++)
			ml.dev[i].index = i;
	}
	if (!r)
		ml.refs++;
	pthread_mutex_unlock(&ml.lock);
	return r;
}

API nvmlReturn_t nvmlInit(void) { return start(); }
API nvmlReturn_t nvmlInit_v2(void) { return start(); }
API nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return flags > 3 ? NVML_ERROR_INVALID_ARGUMENT : start(); }

API nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t r = NVML_SUCCESS;

	pthread_mutex_lock(&ml.lock);
	if (ml.refs)
		ml.refs--;
	else
		r = NVML_ERROR_UNINITIALIZED;
	pthread_mutex_unlock(&ml.lock);
	return r;
}

API const char *nvmlErrorString(nvmlReturn_t r)
{
	switch (r) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
	default: return "Unknown Error";
	}
}

nvmlReturn_t nvml_up(void)
{
	nvmlReturn_t r;

	pthread_mutex_lock(&ml.lock);
	r = ml.refs ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
	pthread_mutex_unlock(&ml.lock);
	return r;
}

nvmlReturn_t nvml_check(nvmlDevice_t d, const void *out)
{
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	for (int i = 0; i < ml.cfg.ndev; i++)
		if (d == &ml.dev[i] && nvml_errors(d, "lost", 0))
			return NVML_ERROR_GPU_IS_LOST;
		else if (d == &ml.dev[i])
			return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
	return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvml_text(char *out, unsigned int n, const char *s)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(s) >= n)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, s, strlen(s) + 1);
	return NVML_SUCCESS;
}

/* the system */

API nvmlReturn_t nvmlSystemGetDriverVersion(char *v, unsigned int n)
{
	nvmlReturn_t r = nvml_up();

	return r ? r : nvml_text(v, n, SIM_DRIVER_STRING);
}

struct branch {
	unsigned int version;
	char branch[80];
};

API nvmlReturn_t nvmlSystemGetDriverBranch(struct branch *b, unsigned int n)
{
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	if (!b)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (b->version != ((unsigned int)sizeof *b | 1u << 24))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return nvml_text(b->branch, n, SIM_DRIVER_BRANCH);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *v, unsigned int n)
{
	return nvml_text(v, n, "13." SIM_DRIVER_STRING);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *v)
{
	struct sim_config cfg;

	if (!v || state_config(&cfg))
		return NVML_ERROR_INVALID_ARGUMENT;
	*v = cfg.driver;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *v) { return nvmlSystemGetCudaDriverVersion(v); }

API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int n)
{
	char path[40], buf[256];
	nvmlReturn_t r = nvml_up();
	FILE *f;
	size_t len;

	if (r)
		return r;
	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	f = fopen(path, "re");
	if (!f)
		return NVML_ERROR_NOT_FOUND;
	len = fread(buf, 1, sizeof(buf) - 1, f);
	fclose(f);
	buf[len] = 0;
	return nvml_text(name, n, buf);
}

/* devices */

static nvmlReturn_t count(unsigned int *n)
{
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	if (!n)
		return NVML_ERROR_INVALID_ARGUMENT;
	*n = (unsigned int)ml.cfg.ndev;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCount(unsigned int *n) { return count(n); }
API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *n) { return count(n); }

static nvmlReturn_t by_index(unsigned int i, nvmlDevice_t *d)
{
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	if (!d || i >= (unsigned int)ml.cfg.ndev)
		return NVML_ERROR_INVALID_ARGUMENT;
	*d = &ml.dev[i];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int i, nvmlDevice_t *d) { return by_index(i, d); }
API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int i, nvmlDevice_t *d) { return by_index(i, d); }

static void uuid_text(int dev, char *out, size_t n)
{
	unsigned char u[16];

	state_uuid(dev, u);
	snprintf(out, n, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
		 u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *d)
{
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	if (!uuid || !d)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < ml.cfg.ndev; i++) {
		char have[48];

		uuid_text(i, have, sizeof(have));
		if (!strcasecmp(uuid, have)) {
			*d = &ml.dev[i];
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t by_pci(const char *id, nvmlDevice_t *d)
{
	unsigned int domain = 0, bus = 0, slot = 0;
	nvmlReturn_t r = nvml_up();

	if (r)
		return r;
	if (!id || !d)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
		domain = 0;
		if (sscanf(id, "%x:%x", &bus, &slot) != 2)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	if (domain || slot || bus < SIM_PCI_BUS(0) || bus > (unsigned int)SIM_PCI_BUS(ml.cfg.ndev - 1))
		return NVML_ERROR_NOT_FOUND;
	*d = &ml.dev[bus - SIM_PCI_BUS(0)];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *d) { return by_pci(id, d); }
API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *d) { return by_pci(id, d); }

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned int n)
{
	nvmlReturn_t r = nvml_check(d, name);

	return r ? r : nvml_text(name, n, SIM_NAME);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned int n)
{
	nvmlReturn_t r = nvml_check(d, uuid);
	char have[48];

	if (r)
		return r;
	uuid_text(d->index, have, sizeof(have));
	return nvml_text(uuid, n, have);
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *i)
{
	nvmlReturn_t r = nvml_check(d, i);

	if (!r)
		*i = (unsigned int)d->index;
	return r;
}

API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned int *i) { return nvmlDeviceGetIndex(d, i); }

typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

static nvmlReturn_t pci(nvmlDevice_t d, nvmlPciInfo_t *p)
{
	nvmlReturn_t r = nvml_check(d, p);

	if (r)
		return r;
	memset(p, 0, sizeof(*p));
	p->bus = (unsigned int)SIM_PCI_BUS(d->index);
	p->pciDeviceId = 0x233510de;
	p->pciSubSystemId = 0x18be10de;
	snprintf(p->busIdLegacy, sizeof(p->busIdLegacy), "0000:%02X:00.0", p->bus & 255);
	snprintf(p->busId, sizeof(p->busId), "00000000:%02X:00.0", p->bus & 255);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t d, nvmlPciInfo_t *p) { return pci(d, p); }
API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *p) { return pci(d, p); }
API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) { return pci(d, p); }

/* memory and processes */

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m)
{
	nvmlReturn_t r = nvml_check(d, m);

	if (r)
		return r;
	m->used = state_used(d->index);
	m->total = ml.cfg.mem;
	m->free = m->total - m->used;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m)
{
	nvmlReturn_t r = nvml_check(d, m);

	if (r)
		return r;
	if (m->version != (sizeof(*m) | 2U << 24))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	m->used = state_used(d->index);
	m->reserved = 0;
	m->total = ml.cfg.mem;
	m->free = m->total - m->used;
	return NVML_SUCCESS;
}

typedef struct { unsigned int pid; unsigned long long used; } proc_v1;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } proc_v2;

static nvmlReturn_t procs(nvmlDevice_t d, unsigned int *n, void *out, bool v1)
{
	struct sim_proc p[SIM_MAX_PROC];
	nvmlReturn_t r = nvml_check(d, n);
	unsigned int k = 0, room;
	int live;

	if (r)
		return r;
	room = out ? *n : 0;
	live = state_procs(p, SIM_MAX_PROC);
	for (int i = 0; i < live; i++) {
		if (!p[i].contexts[d->index])
			continue;
		if (k < room && v1)
			((proc_v1 *)out)[k] = (proc_v1){ (unsigned int)p[i].pid, p[i].used[d->index] };
		else if (k < room)
			((proc_v2 *)out)[k] = (proc_v2){ (unsigned int)p[i].pid, p[i].used[d->index], ~0U, ~0U };
		k++;
	}
	*n = k;
	return k > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCS nvmlDevice_t d, unsigned int *n

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(PROCS, proc_v1 *p) { return procs(d, n, p, true); }
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(PROCS, proc_v2 *p) { return procs(d, n, p, false); }
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(PROCS, proc_v2 *p) { return procs(d, n, p, false); }

static nvmlReturn_t none(PROCS)
{
	nvmlReturn_t r = nvml_check(d, n);

	if (!r)
		*n = 0;
	return r;
}

API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(PROCS, proc_v1 *p) { (void)p; return none(d, n); }
API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(PROCS, proc_v2 *p) { (void)p; return none(d, n); }
API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(PROCS, proc_v2 *p) { (void)p; return none(d, n); }

/* what changes */

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;

typedef struct {
	unsigned int pid;
	unsigned long long timeStamp;
	unsigned int smUtil, memUtil, encUtil, decUtil;
} sample_t;

API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d, sample_t *out, unsigned int *n,
						 unsigned long long since)
{
	struct busy_sample s[SIM_MAX_PROC];
	nvmlReturn_t r = nvml_check(d, n);
	unsigned int room, k;

	if (r)
		return r;
	room = out ? *n : 0;
	*n = k = (unsigned int)busy_processes(d->index, since, s, SIM_MAX_PROC);
	if (!k)
		return NVML_ERROR_NOT_FOUND;
	if (k > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < k; i++)
		out[i] = (sample_t){ (unsigned int)s[i].pid, s[i].stamp, s[i].percent, s[i].percent / 4, 0, 0 };
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u)
{
	nvmlReturn_t r = nvml_check(d, u);

	if (r)
		return r;
	u->gpu = busy_device(d->index);
	u->memory = u->gpu / 4;
	return NVML_SUCCESS;
}

#define GET(name, value) \
	API nvmlReturn_t name(nvmlDevice_t d, unsigned int *v) \
	{ \
		nvmlReturn_t r = nvml_check(d, v); \
		if (!r) \
			*v = (unsigned int)(value); \
		return r; \
	}

GET(nvmlDeviceGetPowerUsage, 75000 + 6000 * busy_device(d->index))
GET(nvmlDeviceGetEnforcedPowerLimit, 700000)
GET(nvmlDeviceGetPowerManagementLimit, 700000)
GET(nvmlDeviceGetPowerManagementDefaultLimit, 700000)
GET(nvmlDeviceGetPowerManagementMode, 1)
GET(nvmlDeviceGetPerformanceState, 0)
GET(nvmlDeviceGetPowerState, 0)
GET(nvmlDeviceGetPersistenceMode, 1)
GET(nvmlDeviceGetComputeMode, 0)
GET(nvmlDeviceGetDisplayMode, 0)
GET(nvmlDeviceGetDisplayActive, 0)
GET(nvmlDeviceGetBrand, 14)
GET(nvmlDeviceGetArchitecture, 9)
GET(nvmlDeviceGetNumGpuCores, 16896)

GET(nvmlDeviceGetCurrPcieLinkGeneration, 5)
GET(nvmlDeviceGetCurrPcieLinkWidth, 16)
GET(nvmlDeviceGetMaxPcieLinkGeneration, 5)
GET(nvmlDeviceGetMaxPcieLinkWidth, 16)
GET(nvmlDeviceGetGpuMaxPcieLinkGeneration, 5)
GET(nvmlDeviceGetPcieSpeed, 32000)
GET(nvmlDeviceGetPcieReplayCounter, 3)

/* GPUs that reach each other by two NVLinks each to a switch; SLUICE_SIM_PEERS=off makes some that do not. */

#define SIM_NVLINKS 2

static bool peers(void)
{
	const char *e = getenv("SLUICE_SIM_PEERS");

	return !e || strcmp(e, "off");
}

API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t d, nvmlDevice_t other, unsigned int caps, unsigned int *v)
{
	nvmlReturn_t r = nvml_check(d, caps < 5 ? v : NULL);

	if (!r)
		r = nvml_check(other, v);
	if (!r)
		*v = peers() && caps != 4 ? 0 : 5;
	return r;
}

API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t d, nvmlDevice_t other, unsigned int *v)
{
	nvmlReturn_t r = nvml_check(d, v);

	if (!r)
		r = nvml_check(other, v);
	if (!r)
		*v = d == other ? 0 : 40;
	return r;
}

static nvmlReturn_t check_link(nvmlDevice_t d, unsigned int link, const void *out)
{
	nvmlReturn_t r = nvml_check(d, link < 18 ? out : NULL);

	return r || (link < SIM_NVLINKS && peers()) ? r : NVML_ERROR_NOT_SUPPORTED;
}

#define OF_LINK(name, value) \
	API nvmlReturn_t name(nvmlDevice_t d, unsigned int link, unsigned int *v) \
	{ \
		nvmlReturn_t r = check_link(d, link, v); \
		if (!r) \
			*v = (value); \
		return r; \
	}

OF_LINK(nvmlDeviceGetNvLinkState, 1)
OF_LINK(nvmlDeviceGetNvLinkVersion, 7)
OF_LINK(nvmlDeviceGetNvLinkRemoteDeviceType, 2)

API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t d, unsigned int link, unsigned int cap, unsigned int *v)
{
	nvmlReturn_t r = check_link(d, link, cap < 6 ? v : NULL);

	if (!r)
		*v = cap != 4;
	return r;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t d, unsigned int link, nvmlPciInfo_t *p)
{
	nvmlReturn_t r = check_link(d, link, p);

	if (r)
		return r;
	memset(p, 0, sizeof(*p));
	p->bus = 0xc0 + link;
	snprintf(p->busIdLegacy, sizeof(p->busIdLegacy), "0000:%02X:00.0", p->bus);
	snprintf(p->busId, sizeof(p->busId), "00000000:%02X:00.0", p->bus);
	return NVML_SUCCESS;
}

#define REFUSE(name) \
	API nvmlReturn_t name(nvmlDevice_t d, unsigned int *v) \
	{ nvmlReturn_t r = nvml_check(d, v); return r ? r : NVML_ERROR_NOT_SUPPORTED; }

REFUSE(nvmlDeviceGetFanSpeed)
REFUSE(nvmlDeviceGetBoardId)

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, unsigned int sensor, unsigned int *v)
{
	nvmlReturn_t r = nvml_check(d, v);

	if (r)
		return r;
	if (sensor)
		return NVML_ERROR_INVALID_ARGUMENT;
	*v = (unsigned int)nvml_errors(d, "temperature", 30 + busy_device(d->index) / 3);
	return NVML_SUCCESS;
}

static nvmlReturn_t clocks(nvmlDevice_t d, unsigned int type, unsigned int *v)
{
	static const unsigned int mhz[4] = { 1980, 1980, 3201, 1980 };	/* graphics, SM, memory, video */
	nvmlReturn_t r = nvml_check(d, v);

	if (r)
		return r;
	if (type > 3)
		return NVML_ERROR_INVALID_ARGUMENT;
	*v = mhz[type];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, unsigned int t, unsigned int *v) { return clocks(d, t, v); }
API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t d, unsigned int t, unsigned int *v) { return clocks(d, t, v); }

API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t d, unsigned int counter, unsigned int *v)
{
	nvmlReturn_t r = nvml_check(d, counter < 2 ? v : NULL);

	if (!r)
		*v = counter ? 2000 : 1000;
	return r;
}

API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t d, unsigned int type, unsigned int *v)
{
	static const unsigned int celsius[] = { 92, 89, 95, 87 };
	nvmlReturn_t r = nvml_check(d, v);

	if (r)
		return r;
	if (type >= sizeof(celsius) / sizeof(*celsius))
		return NVML_ERROR_NOT_SUPPORTED;
	*v = celsius[type];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t d, unsigned int *least, unsigned int *most)
{
	nvmlReturn_t r = nvml_check(d, least && most ? least : NULL);

	if (r)
		return r;
	*least = 200000;
	*most = 700000;
	return NVML_SUCCESS;
}

/* A GPU that has used more energy than 32 bits can tell, whose clocks are lower because it is idle. */
static nvmlReturn_t wide(nvmlDevice_t d, unsigned long long *v, unsigned long long is)
{
	nvmlReturn_t r = nvml_check(d, v);

	if (!r)
		*v = is;
	return r;
}

API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t d, unsigned long long *v) { return wide(d, v, 0x500000007ULL); }
API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t d, unsigned long long *v) { return wide(d, v, nvml_errors(d, "throttle", 1)); }
API nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t d, unsigned long long *v) { return wide(d, v, 0x1ff); }

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor)
{
	nvmlReturn_t r = nvml_check(d, major && minor ? major : NULL);

	if (r)
		return r;
	*major = ml.cfg.sm / 10;
	*minor = ml.cfg.sm % 10;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t d, unsigned int *now, unsigned int *pending)
{
	nvmlReturn_t r = nvml_check(d, now && pending ? now : NULL);

	if (!r)
		*now = *pending = 1;
	return r;
}

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *now, unsigned int *pending)
{
	nvmlReturn_t r = nvml_check(d, now && pending ? now : NULL);

	if (!r)
		*now = *pending = 0;
	return r;
}
