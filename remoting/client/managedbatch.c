/*
 * Prefetches and discards of several pieces of managed memory at once. A discard leaves the contents undefined until
 * they are written again, so leaving them as they are is right.
 */
#include "gen.h"
#include "ranges.h"

static bool is_managed(uint64_t p, size_t n)
{
	struct sl_range r;

	return n && sl_range_find(p, &r) && r.managed && n <= r.size - (p - r.base);
}

/* What all of the functions refuse; they take no default stream. */
static CUresult check(const CUdeviceptr *ptrs, const size_t *sizes, size_t count, unsigned long long flags, CUstream s)
{
	if (!ptrs || !sizes || !count || flags || (uintptr_t)s <= 1)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++)
		if (!is_managed(ptrs[i], sizes[i]))
			return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

/* Prefetches piece i to the place whose index is the last one that is not beyond i. */
static CUresult prefetch(const CUdeviceptr *ptrs, const size_t *sizes, size_t count, const CUmemLocation *places, const size_t *from,
			 size_t nplaces, CUstream s)
{
	CUresult err = CUDA_SUCCESS;

	if (!places || !from || !nplaces || nplaces > count || from[0])
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t k = 1; k < nplaces; k++)
		if (from[k] <= from[k - 1] || from[k] >= count)
			return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0, k = 0; i < count && !err; i++) {
		if (k + 1 < nplaces && from[k + 1] == i)
			k++;
		err = sl_cuMemPrefetchAsync_v2(ptrs[i], sizes[i], places[k], 0, s);
	}
	return err;
}

CUresult sl_cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
				    size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)
{
	CUresult err = check(dptrs, sizes, count, flags, hStream);

	return err ? err : prefetch(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, hStream);
}

CUresult sl_cuMemDiscardBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream hStream)
{
	unsigned int f;
	CUresult err = check(dptrs, sizes, count, flags, hStream);

	return err ? err : sl_cuStreamGetFlags(hStream, &f);
}

CUresult sl_cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs,
					      size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)
{
	return sl_cuMemPrefetchBatchAsync(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}
