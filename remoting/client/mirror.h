/*
 * Mirrors: memory of this process that kernels reach, whole pages of it.
 *
 * The worker has the other side: host memory of the owner's for page-locked memory
 * (HOST_MAP), device memory for managed memory. A page here is in one of three states:
 *
 *	stale	the GPU may have written to the other side; the program cannot touch it
 *	same	both sides are equal; the program can read it
 *	written	the program has written to it since; it can do what it likes
 *
 * Before work that may read it, what was written is sent (sl_mirror_send). After a wait
 * for work, every page is stale (sl_mirror_stale). What the program touches in between
 * is fetched, or noted as written, by a fault (trap.h). So a program pays for what it
 * touches, and for nothing where it has no mirrors.
 *
 * Of page-locked memory only the bytes that were changed are sent, for the GPU may write
 * to their neighbours at the same time. Managed memory is sent in whole pages, but for those
 * that the program writes to while work may run, which CUDA forbids where
 * CONCURRENT_MANAGED_ACCESS is 0 and programs do all the same.
 *
 * A byte that both sides have changed between two waits, to different values, is an error
 * that a wait returns: the worker finds it in page-locked memory, this side in managed memory.
 */
#ifndef SLUICE_MIRROR_H
#define SLUICE_MIRROR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "ranges.h"
#include "transfer.h"

#define SL_MIRROR_PAGE ((size_t)4096)

extern _Atomic unsigned sl_mirrors;

enum {
	SL_MIRROR_MANAGED = 1,
	SL_MIRROR_FRESH = 2,		/* the other side holds zeroes */
	SL_MIRROR_REGISTERED = 4,	/* the program's own memory, which it may unmap */
	SL_MIRROR_READ_ONLY = 8,	/* kernels do not write to it */
	SL_MIRROR_FIXED = 16,		/* the program cannot write to it: what it holds is sent once */
};

/*
 * Page-locked memory of n bytes at base, whole pages (the last may be less than one), whose other side is o: it has
 * an area (area.h). NOT_SUPPORTED, logged, if faults cannot be served.
 */
CUresult sl_mirror_pinned(const struct sl_other *o, uint64_t base, size_t n, unsigned kind);

/* Makes device memory [base, base+n) of the current context, whole pages, the program's too. It holds zeroes on both sides. */
CUresult sl_mirror_managed(uint64_t base, size_t n);

/*
 * Makes a managed variable of the current context, [p, p+n), the program's too, whose address the device chose and
 * sl_guard_reserve has. It may share pages with others.
 */
CUresult sl_mirror_variable(uint64_t p, size_t n);
void sl_mirror_variable_end(uint64_t p, size_t n);

/* The mirror at base ends; its memory here may be read and written. keep: it holds what the other side held. */
void sl_mirror_drop(uint64_t base, bool keep);
/* The context goes, and its mirrors with it. */
void sl_mirror_drop_ctx(uint32_t ctx_id);

/* managed.c: frees managed memory whose range is no more; forgets that of a context that is going. */
CUresult sl_managed_free(const struct sl_range *r);
void sl_managed_drop_ctx(uint32_t ctx_id);
/* Device memory of n bytes, without a range. memory.c */
CUresult sl_device_alloc(CUdeviceptr *p, size_t n);

bool sl_mirror_has_slow(uint64_t p, size_t n);
void sl_mirror_send_slow(void);
void sl_mirror_stale_slow(void);

/* Whether any of [p, p+n) lies in a mirror. */
static inline bool sl_mirror_has(uint64_t p, size_t n)
{
	return __builtin_expect(atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0) && sl_mirror_has_slow(p, n);
}

/* Before work that may read what the program has written. */
static inline void sl_mirror_send(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0))
		sl_mirror_send_slow();
}

/* Logs, once, that both sides have changed the same bytes. */
void sl_mirror_clashed(void);
CUresult sl_mirror_clash_slow(void);

/* After that: CUDA_ERROR_NOT_SUPPORTED, once, if both sides have changed the same bytes of managed memory. */
static inline CUresult sl_mirror_clash(void)
{
	return __builtin_expect(atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0) ? sl_mirror_clash_slow() : CUDA_SUCCESS;
}

/* After a wait for work that may have written what the program reads. */
static inline void sl_mirror_stale(void)
{
	if (__builtin_expect(atomic_load_explicit(&sl_mirrors, memory_order_relaxed), 0))
		sl_mirror_stale_slow();
}

#endif
