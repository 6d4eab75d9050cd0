/*
 * Host memory that kernels address too (cuMemHostGetDevicePointer).
 *
 * The device cannot reach this host, so such memory has a twin on the device,
 * and the two are made equal where CUDA promises that one side sees what the
 * other wrote: host to device before a launch, device to host when the program
 * has waited for the device. Only small blocks are served, which is what
 * libraries use it for (status words); what a kernel does to a word while the
 * host polls it is not seen until the kernel has ended and been waited for.
 */
#ifndef SLUICE_MAPPED_H
#define SLUICE_MAPPED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"

#define SL_MAPPED_MAX 4096	/* bytes of one block */
#define SL_MAPPED_BLOCKS 64

extern _Atomic unsigned sl_mapped_blocks;

struct sl_mapped_wait;

/* The device's address of host memory p, in a block of n bytes at base. */
CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, uint64_t base, uint64_t n);
/* The block is freed. */
void sl_mapped_drop(uint64_t base);
/* The context is gone, and its blocks with it. */
void sl_mapped_drop_ctx(uint32_t ctx_id);

bool sl_mapped_twin_slow(uint64_t *p);
bool sl_mapped_is_twin_slow(uint64_t p);

/* Replaces an address in host memory that has a twin by the twin's. */
static inline bool sl_mapped_twin(uint64_t *p)
{
	return __builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0) && sl_mapped_twin_slow(p);
}

/* Whether a device address lies in a twin. */
static inline bool sl_mapped_is_twin(uint64_t p)
{
	return __builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0) && sl_mapped_is_twin_slow(p);
}

void sl_mapped_send_slow(void);
struct sl_mapped_wait *sl_mapped_begin_slow(uint32_t stream);

/* Before work that may read mapped memory. */
static inline void sl_mapped_send(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mapped_blocks, memory_order_relaxed), 0))
		sl_mapped_send_slow();
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
