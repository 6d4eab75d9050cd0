/* Address ranges of this process that CUDA knows of: device memory, page-locked host memory, reservations (ranges.c). */
#ifndef SLUICE_RANGES_H
#define SLUICE_RANGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "nccl.h"

enum sl_range_type { SL_RANGE_DEVICE = 1, SL_RANGE_HOST, SL_RANGE_REGISTERED, SL_RANGE_VA, SL_RANGE_MAPPED, SL_RANGE_POOL, SL_RANGE_OPENED /* memory of another process (ipc.c) */ };
struct sl_range {
	uint64_t base, size;
	enum sl_range_type type;
	uint32_t ctx_id;
	uint32_t home;	  /* ctx_id, or a primary context, or the one that was current; several sessions only */
	int dev;
	unsigned flags;	  /* cuMemHostAlloc / Register flags */
	uint64_t buffer_id;
	uint64_t map_size;/* host: bytes mapped */
	enum sl_host_use use; /* host: NCCL's, if it is not any */
	int memfd;	  /* host: the file that it is, for a worker to share (shared.h); 0: none */
	CUmemoryPool pool;
	uint64_t handle;  /* of the memory that is mapped there; 0 if the program has none */
	bool sync_memops;
	bool managed;	  /* device memory that the program has too */
	bool shadowed;	  /* device memory at addresses where the program has other memory, see memory.c */
	bool graph;	  /* memory of a graph: the range stays when it is freed, until the driver reuses the addresses */
};

/*
 * A filter for addresses of page-locked host memory: a clear bit means that there is none. One bit stands
 * for all 2 MiB regions of the same hash; it may still be set when the memory is gone.
 */
extern _Atomic uint64_t sl_locked_filter[64];
/* The least such address, and how many bytes lie between it and the end of the last such memory; 0 if there is none. */
extern _Atomic uint64_t sl_locked_least, sl_locked_span;

static inline bool sl_locked_maybe(uint64_t p)
{
	uint64_t h = (p >> 21) * 0x9e3779b97f4a7c15u >> 52;

	return __builtin_expect(atomic_load_explicit(&sl_locked_filter[h >> 6], memory_order_relaxed) >> (h & 63) & 1, 0);
}

int sl_range_add(const struct sl_range *r); /* 0, or -1 when memory ran out */
/* Adds a range of the current context, whose device it takes. In memory.c. */
CUresult sl_range_here(struct sl_range r);
bool sl_range_find(uint64_t p, struct sl_range *out);
/* Whether any range has a byte of [p, p+n). */
bool sl_range_overlaps(uint64_t p, uint64_t n);
/* Whether any range of another session lies in [p, p+n). */
bool sl_range_clash(uint64_t p, uint64_t n, unsigned session);
/* Removes the range that starts at base (type 0: any); false if there is none. */
bool sl_range_remove(uint64_t base, enum sl_range_type type, struct sl_range *out);
bool sl_range_sync_memops(uint64_t p, bool on);
/* The mapping that holds p is of the memory of a handle. */
void sl_range_set_handle(uint64_t p, uint64_t handle);
/* The handle is no more. */
void sl_ranges_forget_handle(uint64_t handle);
void sl_ranges_drop(uint32_t ctx_id);
uint64_t sl_range_next_id(void);

#endif
