/* Tensor maps. A map is aligned to 64 bytes for the driver, which a message's are not. */
#include "driver.h"

#include <string.h>

int sl_tensor_map(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride,
		  const uint32_t *box, const uint32_t *elem, uint32_t interleave, uint32_t swizzle, uint32_t l2, uint32_t fill)
{
	CUtensorMap m __attribute__((aligned(64)));
	int rc;

	memset(&m, 0, sizeof m);
	rc = CU(cuTensorMapEncodeTiled, &m, type, rank, (void *)addr, dim, stride, box, elem, interleave, swizzle, l2,
		fill);
	memcpy(map, &m, sizeof m);
	return rc;
}

int sl_tensor_map_im2col(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride,
			 const int *lower, const int *upper, uint32_t channels, uint32_t pixels, const uint32_t *elem, uint32_t interleave,
			 uint32_t swizzle, uint32_t l2, uint32_t fill)
{
	CUtensorMap m __attribute__((aligned(64)));
	int rc;

	memset(&m, 0, sizeof m);
	rc = CU(cuTensorMapEncodeIm2col, &m, type, rank, (void *)addr, dim, stride, lower, upper, channels, pixels, elem, interleave,
		swizzle, l2, fill);
	memcpy(map, &m, sizeof m);
	return rc;
}

int sl_tensor_map_wide(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride, int lower,
		       int upper, uint32_t channels, uint32_t pixels, const uint32_t *elem, uint32_t interleave, uint32_t mode,
		       uint32_t swizzle, uint32_t l2, uint32_t fill)
{
	CUtensorMap m __attribute__((aligned(64)));
	int rc;

	memset(&m, 0, sizeof m);
	rc = CU(cuTensorMapEncodeIm2colWide, &m, type, rank, (void *)addr, dim, stride, lower, upper, channels, pixels, elem, interleave,
		mode, swizzle, l2, fill);
	memcpy(map, &m, sizeof m);
	return rc;
}

int sl_tensor_map_replace(void *map, const void *old, uint64_t addr)
{
	CUtensorMap m __attribute__((aligned(64)));
	int rc;

	memcpy(&m, old, sizeof m);
	rc = CU(cuTensorMapReplaceAddress, &m, (void *)addr);
	memcpy(map, &m, sizeof m);
	return rc;
}
