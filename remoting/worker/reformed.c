/* Calls whose arguments the wire carries in another form: border colours as four numbers, and a split of multiprocessors. */
#include "driver.h"

int sl_texref_border(uint64_t ref, float *c, int set)
{
	return set ? CU(cuTexRefSetBorderColor, (CUtexref)ref, c) : CU(cuTexRefGetBorderColor, c, (CUtexref)ref);
}

int sl_split(CUdevResource *out, unsigned int *n, const CUdevResource *in, CUdevResource *rest, uint32_t flags, uint32_t least)
{
	return CU(cuDevSmResourceSplitByCount, out, n, in, rest, flags, least);
}
