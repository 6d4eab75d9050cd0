/*
 * Mapped memory: host memory that kernels address too.
 *
 * The device cannot reach this host. So the worker has a copy of such memory (area.h), and
 * the two copies are made equal where CUDA promises that one side sees what the other has
 * written: host to device before a launch, device to host when the program has waited for
 * the device. Kernels have the memory at the program's address. If the worker uses that
 * address for something else, they have it at another.
 *
 * There are two ways to keep the copies equal. The pages of large blocks are mirrors
 * (mirror.h): page protection shows which were written. Everything else is compared byte
 * by byte: small blocks, the ends of registered memory that share a page with other memory,
 * and memory that other processes may write to. The shim compares before each launch, and
 * every millisecond while the program works. The worker compares before it says that work
 * is complete, and every millisecond, too. So a program and a running kernel see each
 * other's changes to memory that is compared.
 *
 * If the worker is on this node, memory from cuMemHostAlloc is shared with it (shared.h):
 * both sides have the same pages, and nothing needs to be made equal. Copies then go
 * straight between the device and the program's memory.
 */
#ifndef SLUICE_MAPPED_H
#define SLUICE_MAPPED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "mirror.h"
#include "ranges.h"
#include "shared.h"

extern _Atomic unsigned sl_mapped_blocks;	/* blocks with two copies to keep equal */
extern _Atomic unsigned sl_mapped_shared;	/* blocks that the worker shares */
extern _Atomic unsigned sl_mapped_reached;	/* shared blocks whose address kernels were given */

/* Reports whether kernels reach any host memory. */
static inline bool sl_mapped_any(void)
{
	return __builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed) |
				atomic_load_explicit(&sl_mapped_reached, memory_order_relaxed) |
				atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0);
}

/* Sets *dptr to the device address of p, which lies in page-locked host memory r, and makes r reachable for kernels first if it is not. */
CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r);
/*
 * Makes page-locked memory r, which contains p, reachable for kernels, because its address was found in copied bytes (pointers.h).
 * Perhaps no kernel ever uses it. So a block of more than 4 KiB is mirrored rather than compared: that costs nothing while nobody touches it.
 */
CUresult sl_mapped_found(uint64_t p, const struct sl_range *r);
/* Drops the block of page-locked memory that is being freed or unregistered. Registered memory then holds what kernels have written. */
void sl_mapped_drop(const struct sl_range *r);
/* Drops the blocks of a context that is being destroyed. */
void sl_mapped_drop_ctx(uint32_t ctx_id);

bool sl_mapped_twin_slow(uint64_t *p);
bool sl_mapped_is_twin_slow(uint64_t p);
struct sl_ctx *sl_mapped_ctx_slow(uint64_t p);

/* Reports whether kernels reach the host memory at *p. *p then becomes the device address. */
static inline bool sl_mapped_twin(uint64_t *p)
{
	return sl_mapped_any() && sl_mapped_twin_slow(p);
}

/* Reports whether p is the device address of memory that the program sees too. */
static inline bool sl_mapped_is_twin(uint64_t p)
{
	return sl_mapped_any() && sl_mapped_is_twin_slow(p);
}

/*
 * Reports whether the worker shares the page-locked memory that [p, p+n) lies in; *there then becomes p's address in the worker. If make
 * is set, memory that can be shared and is not yet shared becomes so, which costs a round trip.
 */
bool sl_mapped_share_slow(uint64_t p, size_t n, bool make, uint64_t *there);

static inline bool sl_mapped_share(uint64_t p, size_t n, bool make, uint64_t *there)
{
	return sl_shared_can() && (make || atomic_load_explicit(&sl_mapped_shared, memory_order_relaxed)) &&
	       sl_mapped_share_slow(p, n, make, there);
}

/* Returns the context of the worker's copy of the page-locked memory at p, or NULL if there is no copy. */
static inline struct sl_ctx *sl_mapped_ctx(uint64_t p)
{
	return sl_mapped_any() || atomic_load_explicit(&sl_mapped_shared, memory_order_relaxed) ? sl_mapped_ctx_slow(p) : NULL;
}

void sl_mapped_send_slow(void);

/* Sends what the program has written to mapped memory. It is called before work that may read that memory. */
static inline void sl_mapped_send(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0))
		sl_mapped_send_slow();
	sl_mirror_send();
}

/* Applies changes by the GPU to n bytes at device address p: the bytes whose bits are set in mask have changed. The receiver calls it. */
void sl_mapped_changed(uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes);

#endif
