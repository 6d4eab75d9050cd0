/* What copy.c and copy3d.c share. */
#ifndef SLUICE_COPY_H
#define SLUICE_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec.h"

/* True if the address is the device's. */
bool sl_ptr_device(uint64_t p);
/* True if n bytes from p are pinned host memory. */
bool sl_ptr_pinned(const void *p, size_t n);
/* Refuses what cannot be a node of a graph where the stream captures. */
CUresult sl_capture_check(CUstream s, const char *what);
/*
 * Makes each side of a copy memory of the host's or the device's, or an array, by its address, with the pitches that
 * it leaves out. *twin becomes true if the device's side is the host's memory too. graph: for a node.
 */
CUresult sl_copy3d_sides(CUDA_MEMCPY3D *c, bool graph, bool *twin);
/*
 * Before n bytes at p are read for a copy to the device: work of the program that
 * writes them (a copy from the device, a host function) may still be under way.
 */
CUresult sl_copy_source_ready(const void *p, size_t n);
/* Sends a copy from the device whose payload names the delivery; waits for its end if asked to. */
CUresult sl_copy_deliver(uint16_t op, sl_buf *b, uint32_t delivery, bool wait, CUstream s);

#endif
