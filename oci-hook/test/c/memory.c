/* Loads the driver by name and prints the memory of its first device, in bytes. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	void *h = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned), (*total)(size_t *, int);
	size_t n = 0;
	int rc;

	if (!h) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	init = (int (*)(unsigned))dlsym(h, "cuInit");
	total = (int (*)(size_t *, int))dlsym(h, "cuDeviceTotalMem_v2");
	if ((rc = init(0)) || (rc = total(&n, 0))) {
		fprintf(stderr, "memory: CUDA error %d\n", rc);
		return 1;
	}
	printf("memory %zu\n", n);
	return 0;
}
