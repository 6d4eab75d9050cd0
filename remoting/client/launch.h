/* Kernel launches (launch.c). */
#ifndef SLUICE_LAUNCH_H
#define SLUICE_LAUNCH_H

#include "codec.h"

/* Checks a launch as cuLaunchKernel does and appends its parameters to b as they lie in a LAUNCH frame, *n bytes. */
CUresult sl_launch_pack(sl_buf *b, CUfunction f, const unsigned grid[3], const unsigned block[3], unsigned shared, void **params, void **extra,
			uint32_t *n);
/* Behind a launch into s: waits for it, and returns its error, if CUDA_LAUNCH_BLOCKING is set and s is not being captured. */
CUresult sl_launch_end(CUstream s);

#endif
