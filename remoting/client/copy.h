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
CUresult sl_copy_capture_check(CUstream s);
/*
 * Before n bytes at p are read for a copy to the device: work of the program that
 * writes them (a copy from the device, a host function) may still be under way.
 */
CUresult sl_copy_source_ready(const void *p, size_t n);
/* Sends a copy from the device whose payload names the delivery; waits for its end if asked to. */
CUresult sl_copy_deliver(uint16_t op, sl_buf *b, uint32_t delivery, bool wait, CUstream s);

#endif
