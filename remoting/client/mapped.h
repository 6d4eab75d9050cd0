/*
 * Host memory that kernels address too (cuMemHostGetDevicePointer).
 *
 * The device cannot reach this host, so such memory has another side where the device
 * is, and the two are made equal where CUDA promises that one side sees what the other
 * wrote: host to device before a launch, device to host when the program has waited for
 * the device. What a kernel does to a word while the host polls it is not seen until the
 * kernel has ended and been waited for.
 *
 * Large blocks that cuMemHostAlloc gave are mirrors (mirror.h), at the same address on
 * both sides. Small blocks, which libraries use as status words, and registered ones
 * have a twin at an address of the device's: they are compared and sent as a whole.
 */
#ifndef SLUICE_MAPPED_H
#define SLUICE_MAPPED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "mirror.h"
#include "ranges.h"

#define SL_MAPPED_MAX 4096	/* bytes of one block */
#define SL_MAPPED_BLOCKS 64

extern _Atomic unsigned sl_mapped_blocks;

struct sl_mapped_wait;

/* Whether there is anything to make equal. */
static inline bool sl_mapped_any(void)
{
	return __builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed) |
				atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0);
}

/* The device's address of p, which lies in page-locked host memory r. */
CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r);
/* The block is freed. */
void sl_mapped_drop(uint64_t base);
/* The context is gone, and its blocks with it. */
void sl_mapped_drop_ctx(uint32_t ctx_id);

bool sl_mapped_twin_slow(uint64_t *p);
bool sl_mapped_is_twin_slow(uint64_t p);

/* Whether the device reaches host memory at *p, which becomes the device's address. */
static inline bool sl_mapped_twin(uint64_t *p)
{
	return sl_mapped_any() && (sl_mapped_twin_slow(p) || sl_mirror_has(*p));
}

/* Whether a device address lies in a twin, or in memory that the program sees too. */
static inline bool sl_mapped_is_twin(uint64_t p)
{
	return sl_mapped_any() && (sl_mapped_is_twin_slow(p) || sl_mirror_has(p));
}

void sl_mapped_send_slow(void);
struct sl_mapped_wait *sl_mapped_begin_slow(uint32_t stream);

/* Before work that may read mapped memory. */
static inline void sl_mapped_send(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0))
		sl_mapped_send_slow();
	sl_mirror_send();
}

/*
 * Around a wait for a stream: begin asks for the blocks behind what the stream
 * holds, end writes what the device changed once the wait has succeeded.
 */
static inline struct sl_mapped_wait *sl_mapped_begin(uint32_t stream)
{
	if (!__builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0))
		return NULL;
	return sl_mapped_begin_slow(stream);
}

void sl_mapped_end(struct sl_mapped_wait *w, bool ok);
/* After a wait that was for no one stream. One round trip if there are blocks. */
void sl_mapped_fetch(void);

#endif
