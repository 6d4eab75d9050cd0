/*
 * cuGetProcAddress. The build makes the table from remoting/api/cuda.tbl and from
 * what is exported here; a driver does not know a name that is newer than its
 * version.
 */
#include <string.h>

#include "sim.h"

struct proc {
	const char *name;
	int since;
	void (*fn)(void), (*pt)(void);	/* pt: where the default stream is the thread's */
};

static const struct proc procs[] = {
#define X(name, since, symbol) { name, since, (void (*)(void))symbol, (void (*)(void))symbol },
#define P(name, since, symbol, pt) { name, since, (void (*)(void))symbol, (void (*)(void))pt },
#include "exports.inc"
};

static CUresult lookup(const char *name, void **pfn, int version, cuuint64_t flags,
		       CUdriverProcAddressQueryResult *status)
{
	const struct proc *best = NULL;
	struct sim_config cfg;
	bool known = false;

	if (pfn)
		*pfn = NULL;
	if (status)
		*status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	if (!name || !pfn || flags > 2 || state_config(&cfg))
		return name && !*name ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < sizeof(procs) / sizeof(procs[0]); i++) {
		const struct proc *p = &procs[i];

		if (p->since > cfg.driver || strcmp(p->name, name))
			continue;
		known = true;
		if (p->since <= version && (!best || p->since > best->since))
			best = p;
	}
	if (!best) {
		if (status && known)
			*status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
		return CUDA_ERROR_NOT_FOUND;
	}
	if (status)
		*status = CU_GET_PROC_ADDRESS_SUCCESS;
	*pfn = (void *)(uintptr_t)(flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? best->pt : best->fn);
	return CUDA_SUCCESS;
}

static bool self(const char *name, void **pfn, int version)
{
	if (!name || !pfn || strcmp(name, "cuGetProcAddress") || version < 11030)
		return false;
	*pfn = version >= 12000 ? (void *)(uintptr_t)cuGetProcAddress_v2 : (void *)(uintptr_t)cuGetProcAddress;
	return true;
}

API CUresult cuGetProcAddress_v2(const char *name, void **pfn, int version, cuuint64_t flags,
				 CUdriverProcAddressQueryResult *status)
{
	if (self(name, pfn, version)) {
		if (status)
			*status = CU_GET_PROC_ADDRESS_SUCCESS;
		return CUDA_SUCCESS;
	}
	return lookup(name, pfn, version, flags, status);
}

API CUresult cuGetProcAddress(const char *name, void **pfn, int version, cuuint64_t flags)
{
	return self(name, pfn, version) ? CUDA_SUCCESS : lookup(name, pfn, version, flags, NULL);
}
