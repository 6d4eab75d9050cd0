/* The driver's interface, looked up at run time: the programs are not linked with it. */
#include "check.h"

#include <cuda.h>
#include <dlfcn.h>

#define EXPECT_DRIVER(call, want) \
	do { \
		CUresult driver_err = (call); \
		REQUIRE(driver_err == (want), "%s: %d", #call, (int)driver_err); \
	} while (0)

#define DRIVER(call) EXPECT_DRIVER(call, CUDA_SUCCESS)

template <typename F> static F driver(const char *name, F)
{
	static void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	void *f = lib ? dlsym(lib, name) : NULL;

	REQUIRE(f, "the driver lacks %s", name);
	return (F)f;
}

#define CU(f) driver(#f, (decltype(&f))NULL)
