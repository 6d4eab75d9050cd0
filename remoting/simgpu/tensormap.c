/*
 * Tensor maps. A map here has the address in its first word, as a real one has, and the rest of what it is made of
 * in a form of our own. No twin reads one.
 */
#define _GNU_SOURCE
#include <string.h>

#include "sim.h"

#define ALIGN 16	/* of the address */

/* Mixes values into the words behind the first, so that maps of other tensors differ. */
static void mix(CUtensorMap *m, const void *p, size_t n)
{
	const unsigned char *b = p;

	for (size_t i = 0; i < n; i++)
		for (int w = 1; w < 4; w++)
			m->opaque[w] = (m->opaque[w] ^ b[i] ^ (unsigned int)w) * 0x100000001b3ULL;
}

static CUresult encode(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, cuuint32_t least, void *address, const cuuint64_t *dim,
		       const cuuint64_t *stride, const cuuint32_t *step)
{
	const uint64_t at = (uint64_t)(uintptr_t)address;

	if (!m || rank < least || rank > 5 || !address || at % ALIGN || !dim || !stride || !step) /* strides also where there are none to read */
		return CUDA_ERROR_INVALID_VALUE;
	for (cuuint32_t i = 0; i < rank; i++)
		if (!dim[i] || !step[i] || (i && stride[i - 1] % ALIGN))
			return CUDA_ERROR_INVALID_VALUE;
	memset(m, 0, sizeof(*m));
	m->opaque[0] = at;
	mix(m, &type, sizeof(type));
	mix(m, dim, rank * sizeof(*dim));
	mix(m, stride, (rank - 1) * sizeof(*stride));
	mix(m, step, rank * sizeof(*step));
	return CUDA_SUCCESS;
}

API CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
				    const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *step, CUtensorMapInterleave interleave,
				    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill)
{
	const unsigned int modes[] = { 1, interleave, swizzle, l2, fill };
	CUresult r = box ? encode(m, type, rank, 1, address, dim, stride, step) : CUDA_ERROR_INVALID_VALUE;

	if (r)
		return r;
	mix(m, box, rank * sizeof(*box));
	mix(m, modes, sizeof(modes));
	return CUDA_SUCCESS;
}

API CUresult cuTensorMapEncodeIm2col(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
				     const cuuint64_t *stride, const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels,
				     const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
				     CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill)
{
	const unsigned int modes[] = { 2, channels, pixels, interleave, swizzle, l2, fill };
	CUresult r = lower && upper ? encode(m, type, rank, 3, address, dim, stride, step) : CUDA_ERROR_INVALID_VALUE;

	if (r)
		return r;
	mix(m, lower, (rank - 2) * sizeof(*lower));
	mix(m, upper, (rank - 2) * sizeof(*upper));
	mix(m, modes, sizeof(modes));
	return CUDA_SUCCESS;
}

API CUresult cuTensorMapEncodeIm2colWide(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
					 const cuuint64_t *stride, int lower, int upper, cuuint32_t channels, cuuint32_t pixels,
					 const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
					 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill)
{
	const unsigned int modes[] = { 3, (unsigned int)lower, (unsigned int)upper, channels, pixels, interleave, mode, swizzle, l2, fill };
	CUresult r = encode(m, type, rank, 3, address, dim, stride, step);

	if (!r)
		mix(m, modes, sizeof(modes));
	return r;
}

API CUresult cuTensorMapReplaceAddress(CUtensorMap *m, void *address)
{
	if (!m || !address || (uint64_t)(uintptr_t)address % ALIGN)
		return CUDA_ERROR_INVALID_VALUE;
	m->opaque[0] = (uint64_t)(uintptr_t)address;
	return CUDA_SUCCESS;
}
