/*
 * cuGetProcAddress: the newest version of a function that is not newer than the
 * version the caller asks for. The names come from the API table, sorted by name
 * and then by version.
 */
#include "gen.h"
#include "log.h"

#include <string.h>

/* Index of the first entry of a name, or sl_nnames. */
static size_t first(const char *name)
{
	size_t lo = 0, hi = sl_nnames;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (strcmp(sl_names[mid].base, name) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo < sl_nnames && !strcmp(sl_names[lo].base, name) ? lo : sl_nnames;
}

static CUresult lookup(const char *symbol, void **pfn, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	const struct sl_name *best = NULL;
	size_t i;

	if (pfn)
		*pfn = NULL;
	if (status)
		*status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	/* Libraries probe with an empty name and nowhere to put the answer. */
	if (symbol && !*symbol)
		return CUDA_ERROR_NOT_FOUND;
	if (!symbol || !pfn || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	i = first(symbol);
	if (i == sl_nnames) {
		sl_log(SL_DEBUG, "%s is asked for, which is not in the API table", symbol);
		return CUDA_ERROR_NOT_FOUND;
	}
	for (; i < sl_nnames && !strcmp(sl_names[i].base, symbol); i++)
		if (sl_names[i].version <= version)
			best = &sl_names[i];
	if (!best) {
		if (status)
			*status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
		return CUDA_ERROR_NOT_FOUND;
	}
	*pfn = flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM && best->fn_ptsz ? best->fn_ptsz : best->fn;
	if (status)
		*status = CU_GET_PROC_ADDRESS_SUCCESS;
	return CUDA_SUCCESS;
}

CUresult sl_cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	return lookup(symbol, pfn, cudaVersion, flags, status);
}

CUresult sl_cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	return lookup(symbol, pfn, cudaVersion, flags, NULL);
}
