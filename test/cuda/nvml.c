/*
 * nvml: what NVML says of the devices, beside what CUDA says of them: count, name, UUID, driver
 * version, memory. Both libraries are found by name at run time, as nvidia-smi and PyTorch do.
 * Prints "nvml: ..." and PASS, like the CUDA programs. Types are declared here, as far as used.
 *
 * nvml used: only print, for each device, the bytes in use and the number of processes.
 * nvml attributes NUMBER...: only print these attributes of the first device, as CUDA gives them.
 * nvml peers: only print how the first device reaches the second: NVML's status for reading, the
 * NVLinks that are up and have another end, and what both have in common.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct memory { unsigned long long total, free, used; };
struct memory2 { unsigned int version; unsigned long long total, reserved, free, used; };
struct process { unsigned int pid; unsigned long long used; unsigned int gi, ci; };

static void *lib(const char *name)
{
	void *l = dlopen(name, RTLD_NOW);

	if (!l) {
		fprintf(stderr, "nvml: %s\n", dlerror());
		exit(1);
	}
	return l;
}

static void *entry(void *l, const char *name)
{
	void *f = dlsym(l, name);

	if (!f) {
		fprintf(stderr, "nvml: %s\n", dlerror());
		exit(1);
	}
	return f;
}

#define CALL(l, name, types, ...) \
	do { \
		int (*call_) types = (int (*) types)entry(l, #name); \
		int rc_ = call_(__VA_ARGS__); \
		if (rc_) { \
			fprintf(stderr, "nvml.c:%d: " #name " returned %d\n", __LINE__, rc_); \
			exit(1); \
		} \
	} while (0)

#define REQUIRE(condition, ...) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "nvml.c:%d: " #condition ": ", __LINE__); \
			fprintf(stderr, __VA_ARGS__); \
			fputc('\n', stderr); \
			exit(1); \
		} \
	} while (0)

static int used(void)
{
	void *ml = lib("libnvidia-ml.so.1"), *dev;
	struct process procs[256];
	unsigned int count = 0;
	struct memory m;

	CALL(ml, nvmlInit_v2, (void));
	CALL(ml, nvmlDeviceGetCount_v2, (unsigned int *), &count);
	for (unsigned int i = 0; i < count; i++) {
		unsigned int nproc = 256;

		CALL(ml, nvmlDeviceGetHandleByIndex_v2, (unsigned int, void **), i, &dev);
		CALL(ml, nvmlDeviceGetMemoryInfo, (void *, struct memory *), dev, &m);
		CALL(ml, nvmlDeviceGetComputeRunningProcesses_v3, (void *, unsigned int *, struct process *), dev, &nproc, procs);
		printf("%llu %u\n", m.used, nproc);
	}
	return 0;
}

static int attributes(int n, char **which)
{
	void *cu = lib("libcuda.so.1");
	int value;

	CALL(cu, cuInit, (unsigned int), 0);
	for (int i = 0; i < n; i++) {
		CALL(cu, cuDeviceGetAttribute, (int *, int, int), &value, atoi(which[i]), 0);
		printf("%d\n", value);
	}
	return 0;
}

/* What nvidia-smi -q shows of the link, the limits and the energy: each is within its bounds. */
static void link_and_limits(void *ml, void *dev)
{
	unsigned int now = 0, most = 0, gpu = 0, width = 0, mostWidth = 0, sent = 0, limit = 0, hot = 0, low = 0, high = 0;
	unsigned long long energy = 0, later = 0, why = 0;

	CALL(ml, nvmlDeviceGetCurrPcieLinkGeneration, (void *, unsigned int *), dev, &now);
	CALL(ml, nvmlDeviceGetMaxPcieLinkGeneration, (void *, unsigned int *), dev, &most);
	CALL(ml, nvmlDeviceGetGpuMaxPcieLinkGeneration, (void *, unsigned int *), dev, &gpu);
	CALL(ml, nvmlDeviceGetCurrPcieLinkWidth, (void *, unsigned int *), dev, &width);
	CALL(ml, nvmlDeviceGetMaxPcieLinkWidth, (void *, unsigned int *), dev, &mostWidth);
	REQUIRE(now && now <= most && most <= gpu && width && width <= mostWidth, "link: generation %u of %u of %u, width %u of %u", now, most, gpu, width, mostWidth);
	CALL(ml, nvmlDeviceGetPcieThroughput, (void *, unsigned int, unsigned int *), dev, 0, &sent);
	CALL(ml, nvmlDeviceGetTemperatureThreshold, (void *, unsigned int, unsigned int *), dev, 0, &hot);
	CALL(ml, nvmlDeviceGetPowerManagementDefaultLimit, (void *, unsigned int *), dev, &limit);
	CALL(ml, nvmlDeviceGetPowerManagementLimitConstraints, (void *, unsigned int *, unsigned int *), dev, &low, &high);
	REQUIRE(hot > 50 && low <= limit && limit <= high, "too hot from %u on, power %u of %u to %u", hot, limit, low, high);
	CALL(ml, nvmlDeviceGetCurrentClocksThrottleReasons, (void *, unsigned long long *), dev, &why);
	CALL(ml, nvmlDeviceGetTotalEnergyConsumption, (void *, unsigned long long *), dev, &energy);
	CALL(ml, nvmlDeviceGetTotalEnergyConsumption, (void *, unsigned long long *), dev, &later);
	REQUIRE(energy && energy <= later, "energy was %llu and is %llu", energy, later);
}

/* What cuda-python and nvidia-smi -q show of the board, and the processors near it. */
static void board(void *ml, void *dev)
{
	unsigned long cpus[128] = { 0 };
	char vbios[32] = "";
	int any = 0;

	CALL(ml, nvmlDeviceGetVbiosVersion, (void *, char *, unsigned int), dev, vbios, sizeof(vbios));
	REQUIRE(strchr(vbios, '.'), "the VBIOS has version %s", vbios);
	CALL(ml, nvmlDeviceGetCpuAffinity, (void *, unsigned int, unsigned long *), dev, 128, cpus);
	for (int i = 0; i < 128; i++)
		any |= cpus[i] != 0;
	REQUIRE(any, "no processor is near");
}

static int peers(void)
{
	void *ml = lib("libnvidia-ml.so.1"), *a, *b;
	int (*cap)(void *, unsigned int, unsigned int, unsigned int *) = (int (*)(void *, unsigned int, unsigned int, unsigned int *))entry(ml, "nvmlDeviceGetNvLinkCapability");
	int (*state)(void *, unsigned int, unsigned int *) = (int (*)(void *, unsigned int, unsigned int *))entry(ml, "nvmlDeviceGetNvLinkState");
	int (*pci)(void *, unsigned int, void *) = (int (*)(void *, unsigned int, void *))entry(ml, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
	unsigned int status = 77, level = 77, links = 0, on;
	char info[128];

	CALL(ml, nvmlInit_v2, (void));
	CALL(ml, nvmlDeviceGetHandleByIndex_v2, (unsigned int, void **), 0, &a);
	CALL(ml, nvmlDeviceGetHandleByIndex_v2, (unsigned int, void **), 1, &b);
	CALL(ml, nvmlDeviceGetP2PStatus, (void *, void *, unsigned int, unsigned int *), a, b, 0, &status);
	CALL(ml, nvmlDeviceGetTopologyCommonAncestor, (void *, void *, unsigned int *), a, b, &level);
	for (unsigned int i = 0; i < 18; i++)
		links += !cap(a, i, 0, &on) && on && !state(a, i, &on) && on && !pci(a, i, info);
	printf("nvml: peers %u, %u links, ancestor %u\n", status, links, level);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "peers"))
		return peers();
	if (argc > 1 && !strcmp(argv[1], "used"))
		return used();
	if (argc > 1 && !strcmp(argv[1], "attributes"))
		return attributes(argc - 2, argv + 2);

	void *ml = lib("libnvidia-ml.so.1"), *cu = lib("libcuda.so.1"), *dev, *ctx;
	unsigned int count = 0, nproc = 16;
	int cudaCount = 0, version = 0;
	char name[96] = "", cudaName[96] = "", uuid[96] = "", driver[80] = "";
	struct memory before, after;
	struct memory2 two = { .version = sizeof(two) | 2 << 24 };
	struct branch { unsigned int version; char branch[80]; } branch = { .version = sizeof(struct branch) | 1 << 24 };
	struct process procs[16];
	size_t total = 0, cudaFree = 0, cudaTotal = 0, got = 64 << 20;
	unsigned long long d;

	CALL(ml, nvmlInit_v2, (void));
	CALL(ml, nvmlDeviceGetCount_v2, (unsigned int *), &count);
	CALL(ml, nvmlSystemGetDriverVersion, (char *, unsigned int), driver, sizeof(driver));
	if (dlsym(ml, "nvmlSystemGetDriverBranch")) { /* since 555 */
		CALL(ml, nvmlSystemGetDriverBranch, (struct branch *, unsigned int), &branch, sizeof(branch.branch));
		REQUIRE(*branch.branch, "the driver has no branch");
	}
	CALL(cu, cuInit, (unsigned int), 0);
	CALL(cu, cuDeviceGetCount, (int *), &cudaCount);
	CALL(cu, cuDriverGetVersion, (int *), &version);
	REQUIRE(count == (unsigned int)cudaCount, "NVML counts %u devices, CUDA %d", count, cudaCount);
	CALL(ml, nvmlDeviceGetHandleByIndex_v2, (unsigned int, void **), 0, &dev);
	CALL(ml, nvmlDeviceGetName, (void *, char *, unsigned int), dev, name, sizeof(name));
	CALL(ml, nvmlDeviceGetUUID, (void *, char *, unsigned int), dev, uuid, sizeof(uuid));
	CALL(cu, cuDeviceGetName, (char *, int, int), cudaName, sizeof(cudaName), 0);
	REQUIRE(!strcmp(name, cudaName), "NVML calls it %s, CUDA %s", name, cudaName);
	REQUIRE(!strncmp(uuid, "GPU-", 4) && strlen(uuid) == 40, "the UUID is %s", uuid);

	CALL(cu, cuDeviceTotalMem_v2, (size_t *, int), &total, 0);
	CALL(cu, cuDevicePrimaryCtxRetain, (void **, int), &ctx, 0);
	CALL(cu, cuCtxSetCurrent, (void *), ctx);
	CALL(cu, cuMemGetInfo_v2, (size_t *, size_t *), &cudaFree, &cudaTotal);
	CALL(ml, nvmlDeviceGetMemoryInfo, (void *, struct memory *), dev, &before);
	REQUIRE(cudaTotal == total, "cuMemGetInfo's total is %zu, the device's %zu", cudaTotal, total);
	CALL(cu, cuMemAlloc_v2, (unsigned long long *, size_t), &d, got);
	CALL(ml, nvmlDeviceGetMemoryInfo, (void *, struct memory *), dev, &after);
	CALL(ml, nvmlDeviceGetMemoryInfo_v2, (void *, struct memory2 *), dev, &two);
	REQUIRE(after.used >= before.used + got, "used was %llu and is %llu after %zu more", before.used, after.used, got);
	REQUIRE(after.used <= after.total && after.free <= after.total, "used %llu, free %llu of %llu", after.used, after.free, after.total);
	REQUIRE(two.total == after.total && two.used == after.used, "v2 says %llu used of %llu, v1 %llu of %llu", two.used, two.total, after.used, after.total);
	CALL(ml, nvmlDeviceGetComputeRunningProcesses_v3, (void *, unsigned int *, struct process *), dev, &nproc, procs);
	if (getenv("NVML_TOTAL_MIB")) {
		/* under a cap the two stories are one */
		unsigned long long want = strtoull(getenv("NVML_TOTAL_MIB"), NULL, 10) << 20;
		int mine = 0;

		REQUIRE(after.total == want && total == want, "NVML says %llu bytes, CUDA %zu, granted are %llu", after.total, total, want);
		REQUIRE(before.free == cudaFree, "NVML says %llu free, CUDA %zu", before.free, cudaFree);
		for (unsigned int i = 0; i < nproc; i++)
			if (procs[i].pid == (unsigned int)getpid()) {
				mine++;
				REQUIRE(procs[i].used >= got, "this process is said to use %llu bytes", procs[i].used);
			}
		REQUIRE(mine == 1, "this process is listed %d times among %u", mine, nproc);
	}
	link_and_limits(ml, dev);
	board(ml, dev);
	CALL(cu, cuMemFree_v2, (unsigned long long), d);
	CALL(ml, nvmlShutdown, (void));
	printf("nvml: %u device, NVML and CUDA agree\nPASS\n", count);
	return 0;
}
