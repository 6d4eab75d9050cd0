/*
 * Device addresses are those of the worker's process, and kernels dereference them,
 * so they cannot be translated. guard.c keeps this process from using the same
 * addresses for its own memory, so that an address is the device's or the host's,
 * never both.
 */
#ifndef SLUICE_GUARD_H
#define SLUICE_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Makes [p, p+n) inaccessible in this process for good. Memory that the program already
 * has there stays; then the result is false, because the granules of the range may be
 * both.
 */
bool sl_guard_reserve(uint64_t p, size_t n);

/*
 * Maps n bytes for the program at an address that is likely to be free in a worker too: of the file fd or, if that is 0, of
 * new memory. NULL if memory ran out.
 */
void *sl_guard_place(size_t n, int fd);

/*
 * The kernel joins maps of anonymous memory that lie side by side and have the same protection, but only if they were one map when its first
 * page came to be. So that page at p, of memory whose pages get protections of their own, has to come to be before. Accessible: the program
 * has the memory already; else nobody has.
 */
void sl_guard_joins(uint64_t p, bool accessible);

/* Whether the program has memory of its own in [p, p+n). What it has only reserved is not counted, since reservations here look the same. */
bool sl_guard_taken(uint64_t p, size_t n);

#endif
