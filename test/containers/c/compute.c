/*
 * What a program that loads the driver by name does in a container: finds libcuda.so.1 and NVML, has the device
 * fill memory, reads it back, and says who it is and what it was given. Exit status 0 is success.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { WORDS = 1 << 20 };

struct memory { unsigned long long total, free, used; };

static void *lib(const char *name)
{
	void *h = dlopen(name, RTLD_NOW);

	if (!h) {
		fprintf(stderr, "compute: %s\n", dlerror());
		exit(1);
	}
	return h;
}

static void *entry(void *h, const char *name)
{
	void *f = dlsym(h, name);

	if (!f) {
		fprintf(stderr, "compute: %s\n", dlerror());
		exit(1);
	}
	return f;
}

#define CALL(lib, name, types, ...) do { \
	int rc = ((int (*) types)entry(lib, #name))(__VA_ARGS__); \
	if (rc) { \
		fprintf(stderr, "compute: " #name ": error %d\n", rc); \
		exit(1); \
	} \
} while (0)

int main(void)
{
	static uint32_t back[WORDS];
	void *cuda = lib("libcuda.so.1"), *nvml = lib("libnvidia-ml.so.1"), *ctx, *device;
	unsigned long long at;
	struct memory m = {0};
	size_t total = 0;
	int dev = 0;

	CALL(cuda, cuInit, (unsigned), 0);
	CALL(cuda, cuDeviceGet, (int *, int), &dev, 0);
	CALL(cuda, cuDeviceTotalMem_v2, (size_t *, int), &total, dev);
	CALL(cuda, cuCtxCreate_v2, (void **, unsigned, int), &ctx, 0, dev);
	CALL(cuda, cuMemAlloc_v2, (unsigned long long *, size_t), &at, sizeof back);
	CALL(cuda, cuMemsetD32_v2, (unsigned long long, unsigned, size_t), at, 0xc0ffee, WORDS);
	CALL(cuda, cuMemcpyDtoH_v2, (void *, unsigned long long, size_t), back, at, sizeof back);
	for (int i = 0; i < WORDS; i++) {
		if (back[i] != 0xc0ffee) {
			fprintf(stderr, "compute: word %d is %#x\n", i, back[i]);
			return 1;
		}
	}
	CALL(nvml, nvmlInit_v2, (void), );
	CALL(nvml, nvmlDeviceGetHandleByIndex_v2, (unsigned, void **), 0, &device);
	CALL(nvml, nvmlDeviceGetMemoryInfo, (void *, struct memory *), device, &m);
	printf("compute uid=%d memory=%zu nvml=%llu\n", (int)getuid(), total, m.total);
	return 0;
}
