/*
 * Device addresses are the worker's process's, and kernels dereference them, so
 * they cannot be translated. guard.c keeps this process from using the same
 * addresses for memory of its own, so that an address is the device's or the
 * host's, never both.
 */
#ifndef SLUICE_GUARD_H
#define SLUICE_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Makes [p, p+n) inaccessible here for good. Where the program already has memory, that
 * stays; then false, as the granules that hold the range may be both.
 */
bool sl_guard_reserve(uint64_t p, size_t n);

#endif
