#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

#include "verbs.h"

static struct vb_library lib;
static bool whole;

static void open_library(void)
{
	void *so = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!so)
		return;
	whole = true;
#define VB_FIND(result, name, parameters) whole = (lib.name = (result(*) parameters)dlsym(so, "ibv_" #name)) && whole;
	VB_FUNCTIONS(VB_FIND)
#undef VB_FIND
	/*
	 * Before Linux 5.12 a fork gives the process copies of pages that a device knows. The library can keep its own and ours from that, if
	 * it is told before it has any; on later kernels this does nothing.
	 */
	whole = whole && !lib.fork_init();
}

const struct vb_library *vb_library(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, open_library);
	return whole ? &lib : NULL;
}
