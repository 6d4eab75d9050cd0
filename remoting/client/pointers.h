/*
 * Addresses of page-locked host memory that reach kernels in what is copied to the device: in a table of pointers in
 * device memory, or in a list. CUDA lets a kernel follow them without any call that names the memory; NCCL does so.
 */
#ifndef SLUICE_POINTERS_H
#define SLUICE_POINTERS_H

#include <stddef.h>
#include <stdint.h>

#include "ranges.h"

#define SL_POINTERS_MOST (64u << 10)	/* bytes of a copy that are looked at: tables are small, and looking takes time */

void sl_pointers_slow(const uint8_t *p, size_t n);

/*
 * Called for n bytes at p that are about to be written to the device. The page-locked memory that has its address among
 * them, in whole words from p on, and what that memory points to in turn, is mapped (mapped.h). That costs a round trip
 * for each block at first, and nothing that counts in programs that have no page-locked memory.
 */
static inline void sl_pointers(const void *p, size_t n)
{
	if (__builtin_expect(atomic_load_explicit(&sl_locked_span, memory_order_relaxed) && n <= SL_POINTERS_MOST, 0))
		sl_pointers_slow(p, n);
}

#endif
