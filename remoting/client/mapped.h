/*
 * Host memory that kernels address too.
 *
 * The device cannot reach this host, so such memory has another side where the device
 * is (area.h), and the two are made equal where CUDA promises that one side sees what
 * the other wrote: host to device before a launch, device to host when the program has
 * waited for the device. Kernels have the memory at its own address, or, where the
 * worker uses that for something else, at another.
 *
 * There are two ways to keep the sides equal. Pages of large blocks are mirrors
 * (mirror.h), which page protection follows. Small blocks, the ends of registered memory
 * that share a page with other memory, and memory that other processes may write to are
 * compared as a whole: here before each launch, and every millisecond while the program
 * works; in the worker before it says that work is complete, and every millisecond, too.
 * So a program and a running kernel see each other's changes to them.
 *
 * Where the worker is on this node, memory that cuMemHostAlloc has made is shared with it
 * (shared.h): both sides are the same pages, and nothing is made equal. Copies then go
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

extern _Atomic unsigned sl_mapped_blocks;	/* that are to be made equal */
extern _Atomic unsigned sl_mapped_shared;	/* that the worker shares */
extern _Atomic unsigned sl_mapped_reached;	/* of those, that kernels were given */

/* Whether kernels reach any host memory. */
static inline bool sl_mapped_any(void)
{
	return __builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed) |
				atomic_load_explicit(&sl_mapped_reached, memory_order_relaxed) |
				atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0);
}

/* The device's address of p, which lies in page-locked host memory r. */
CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r);
/*
 * Makes page-locked memory r, which contains p, reachable for kernels, because its address was found in copied bytes (pointers.h).
 * Kernels may never use it, so it is followed by page protection where it is larger than 4 KiB, which costs nothing while nobody touches it.
 */
CUresult sl_mapped_found(uint64_t p, const struct sl_range *r);
/* Page-locked memory is freed or unregistered. What is registered then holds what kernels have written. */
void sl_mapped_drop(const struct sl_range *r);
/* The context is going, and its blocks with it. */
void sl_mapped_drop_ctx(uint32_t ctx_id);

bool sl_mapped_twin_slow(uint64_t *p);
bool sl_mapped_is_twin_slow(uint64_t p);
struct sl_ctx *sl_mapped_ctx_slow(uint64_t p);

/* Whether the device reaches host memory at *p, which becomes the device's address. */
static inline bool sl_mapped_twin(uint64_t *p)
{
	return sl_mapped_any() && sl_mapped_twin_slow(p);
}

/* Whether a device address is of memory that the program sees too. */
static inline bool sl_mapped_is_twin(uint64_t p)
{
	return sl_mapped_any() && sl_mapped_is_twin_slow(p);
}

/*
 * Makes the worker share the page-locked memory that [p, p+n) lies in, if that memory can be shared. *there becomes p's address in the
 * worker. make: also where it does not share the memory yet, which costs a round trip. False if it does not share it.
 */
bool sl_mapped_share_slow(uint64_t p, size_t n, bool make, uint64_t *there);

static inline bool sl_mapped_share(uint64_t p, size_t n, bool make, uint64_t *there)
{
	return sl_shared_can() && (make || atomic_load_explicit(&sl_mapped_shared, memory_order_relaxed)) &&
	       sl_mapped_share_slow(p, n, make, there);
}

/* The context that page-locked memory at p has its other side in; NULL if it has none. */
static inline struct sl_ctx *sl_mapped_ctx(uint64_t p)
{
	return sl_mapped_any() || atomic_load_explicit(&sl_mapped_shared, memory_order_relaxed) ? sl_mapped_ctx_slow(p) : NULL;
}

void sl_mapped_send_slow(void);

/* Before work that may read mapped memory. */
static inline void sl_mapped_send(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0))
		sl_mapped_send_slow();
	sl_mirror_send();
}

/* The receiver's: the worker tells that the GPU has changed those of n bytes at device address p whose bits are set in mask. */
void sl_mapped_changed(uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes);

#endif
