/* Functions that copy.c and copy3d.c share. */
#ifndef SLUICE_COPY_H
#define SLUICE_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec.h"

/* Reports whether the n bytes from p on are page-locked host memory. */
bool sl_ptr_pinned(const void *p, size_t n);
/* Returns an error if the stream captures; what names the operation that cannot be a node of a graph. */
CUresult sl_capture_check(CUstream s, const char *what);
/*
 * Determines from the addresses whether each side of a copy is host memory, device memory or an array, and fills in the
 * pitches that the program left out. *twin becomes true if the device's side is host memory that kernels reach. graph says
 * that the copy is for a node of a graph.
 */
CUresult sl_copy3d_sides(CUDA_MEMCPY3D *c, bool graph, bool *twin);
/*
 * Waits until the n bytes at p may be read for a copy to the device: a copy from the
 * device or a host function may still be writing them.
 */
CUresult sl_copy_source_ready(const void *p, size_t n);
/* Waits for the stream before a blocking copy to the device, as CUDA does. A program can observe that only if work in the stream may change host memory, or is a host function. */
CUresult sl_copy_blocks(CUstream s);
/* Sends a copy from the device whose payload names the delivery. If wait is set, it returns when the copy has ended. */
CUresult sl_copy_deliver(uint16_t op, sl_buf *b, uint32_t delivery, bool wait, CUstream s);

#endif
