/*
 * Moving bytes between memory of this process that kernels reach and its other side in the
 * worker, which is host memory (HOST_MAP) or device memory.
 */
#ifndef SLUICE_TRANSFER_H
#define SLUICE_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

struct sl_ctx;

/* Where the other side is. */
struct sl_other {
	struct sl_ctx *ctx;
	uint32_t ctx_id;
	uint64_t delta;	/* its address less this process's */
};

/* The other side of the current context's. Makes what transfers need of the context. */
CUresult sl_transfer_begin(struct sl_other *o, uint64_t delta);
/* The context goes. */
void sl_transfer_end(uint32_t ctx_id);

/* One-way: [p, p+n) is there for what is sent behind it. */
CUresult sl_transfer_send(const struct sl_other *o, uint64_t p, size_t n);
/*
 * The same for those bytes of p on whose bits are set in mask. n is a multiple of 8 and at most SL_MAX_MERGE. Host memory only.
 * was: what both sides held before, if work may have changed the other side since: a byte that both have changed, to different
 * values, is then an error that the next wait returns. Else NULL.
 */
CUresult sl_transfer_merge(const struct sl_other *o, uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes, const uint8_t *was);
/* One round trip: what [p, p+n) holds. From host memory: at most SL_MAX_COPY_IN bytes. From device memory: behind no stream. */
CUresult sl_transfer_read(const struct sl_other *o, uint64_t p, void *to, size_t n);
CUresult sl_transfer_copy(const struct sl_other *o, uint64_t p, void *to, size_t n);
/* Fills device memory with zeroes, before anything that follows. */
void sl_transfer_zero(const struct sl_other *o, uint64_t p, size_t n);

#endif
