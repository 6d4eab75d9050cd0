/*
 * Green contexts: parts of a device's multiprocessors (green.c).
 */
#ifndef SLUICE_GREEN_H
#define SLUICE_GREEN_H

#include <stdatomic.h>
#include <stdint.h>

#include "cuabi.h"

struct sl_ctx;
struct sl_thread;

struct sl_green {
	void *link;		/* of the pool */
	_Atomic uint32_t id;	/* wire id; 0 when destroyed */
	struct sl_ctx *ctx;	/* its device's primary context */
	CUstream stream;	/* what the default stream means while it is current */
	CUcontext as_ctx;	/* it as a context; its state is the primary context */
	uint64_t uid;
};

/* The green context that h stands for; NULL if h is a handle of c itself, which sl_ctx_of has given for h. */
struct sl_green *sl_green_of(CUcontext h, const struct sl_ctx *c);
/* The same, where a handle that is NULL means the calling thread's current context. */
struct sl_green *sl_green_or_current(CUcontext h, const struct sl_ctx *c);
/* The handle of the green context that h stands for, or NULL. */
CUgreenCtx sl_green_handle(CUcontext h);
/* The default stream of the thread's current green context; no stream's handle if that was destroyed. */
CUstream sl_green_stream(const struct sl_thread *t);
/* A stream of the current context, green or not. */
CUresult sl_green_or_plain(CUstream *out, unsigned flags, int priority);
/* Forgets the green contexts of a primary context. */
void sl_greens_drop(struct sl_ctx *c);

#endif
