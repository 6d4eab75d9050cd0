/*
 * Areas: whole pages of this process's host memory that kernels reach because the worker
 * has their like (HOST_MAP), or because it shares them (HOST_SHARE). An area is at the same address there, or, where the
 * worker uses that for something else, at another.
 *
 * Two blocks of the program's may have parts of one page, so areas are counted: one ends
 * with its last user.
 */
#ifndef SLUICE_AREA_H
#define SLUICE_AREA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

/* What a user of an area keeps of it. */
struct sl_area_use {
	uint64_t base;		/* of the first page */
	size_t n;		/* whole pages */
	uint64_t delta;		/* the worker's address less this process's */
	bool fresh;		/* all of it holds zeroes there */
};

/*
 * Has kernels of the current context reach [p, p+n): with memfd, the file that is mapped there, the
 * memory itself; without one a copy of it in the worker. NOT_SUPPORTED, logged, if that cannot be: then nothing is held.
 * Waits for the worker: the caller holds no lock that a host function may need.
 */
CUresult sl_area_hold(uint64_t p, size_t n, int memfd, struct sl_area_use *u);
/* In the context that it was held in. */
void sl_area_release(const struct sl_area_use *u);

#endif
