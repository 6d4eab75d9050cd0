/*
 * Memory pools of the host (hostpool.c): page-locked memory of the program, allocated and freed in the order of
 * streams. Pools of devices are the worker's, and have no state here.
 */
#ifndef SLUICE_HOSTPOOL_H
#define SLUICE_HOSTPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

struct sl_hostpool;

/* The pool of the host that a handle stands for; NULL if it is a device's, or no pool. */
struct sl_hostpool *sl_hostpool_of(CUmemoryPool pool);
/* The host's default pool, or its current one, which cuMemAllocFromPoolAsync does not use by itself. */
CUresult sl_hostpool_default(CUmemoryPool *pool, bool current);
CUresult sl_hostpool_set_current(struct sl_hostpool *p);
CUresult sl_hostpool_create(CUmemoryPool *pool, const CUmemPoolProps *props);
CUresult sl_hostpool_destroy(struct sl_hostpool *p);
CUresult sl_hostpool_trim(struct sl_hostpool *p);
/* Attributes are 8 bytes here, whatever they are in the program's memory. */
CUresult sl_hostpool_get(struct sl_hostpool *p, CUmemPool_attribute attr, uint64_t *value);
CUresult sl_hostpool_set(struct sl_hostpool *p, CUmemPool_attribute attr, uint64_t value);
CUresult sl_hostpool_set_access(struct sl_hostpool *p, const CUmemAccessDesc *map, size_t count);
CUresult sl_hostpool_access(struct sl_hostpool *p, CUmemAccess_flags *flags, const CUmemLocation *at);
CUresult sl_hostpool_alloc(struct sl_hostpool *p, CUdeviceptr *ptr, size_t n, CUstream s);
/* Frees memory of a pool that starts at p: once stream s has got there, or at once, where all work with it is done. */
CUresult sl_hostpool_free(CUdeviceptr p, CUstream s, bool in_order);

#endif
