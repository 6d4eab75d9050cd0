/* Linking at run time. */
#include "driver.h"

int sl_link_create(uint64_t *link, uint32_t n, const uint32_t *opt, void **val)
{
	return CU(cuLinkCreate_v2, n, (CUjit_option *)opt, val, (CUlinkState *)link);
}

int sl_link_add(uint64_t link, uint32_t type, const void *data, uint64_t size, const char *name, uint32_t n, const uint32_t *opt, void **val)
{
	return CU(cuLinkAddData_v2, (CUlinkState)link, (CUjitInputType)type, (void *)data, size, name, n, (CUjit_option *)opt, val);
}

int sl_link_complete(uint64_t link, void **image, uint64_t *size)
{
	size_t n = 0;
	int rc = CU(cuLinkComplete, (CUlinkState)link, image, &n);

	*size = n;
	return rc;
}
