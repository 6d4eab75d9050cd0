/*
 * Copies between the device and pageable memory where the worker shares memory with this
 * process (shared.h). The bytes pass through a block of page-locked memory that both have:
 * this process copies them once, and the device's copy engine does the rest.
 */
#ifndef SLUICE_STAGED_H
#define SLUICE_STAGED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

/*
 * To the device in a stream that is marked already; on return the bytes have left src. *done is false if nothing was
 * begun: the copy is small, another thread has the block, or nothing can be shared.
 */
CUresult sl_staged_in(CUdeviceptr dst, const void *src, size_t n, uint32_t stream, bool *done);
/* From the device; on return the bytes are there. */
CUresult sl_staged_out(void *dst, CUdeviceptr src, size_t n, CUstream s, bool *done);

#endif
