/* Border colours of texture references, which the wire carries as four numbers. */
#include "driver.h"

int sl_texref_border(uint64_t ref, float *c, int set)
{
	return set ? CU(cuTexRefSetBorderColor, (CUtexref)ref, c) : CU(cuTexRefGetBorderColor, c, (CUtexref)ref);
}
