/*
 * Which owner's session a call goes to, where the lease has several owners. With one
 * session all of it does nothing.
 */
#ifndef SLUICE_ROUTE_H
#define SLUICE_ROUTE_H

#include <stdbool.h>

#include "codec.h"
#include "session.h"

struct sl_ctx;

/* Directs the frame to the owner of a handle, of an address, of a device. */
void sl_route_slow(sl_buf *b, int kind, const void *h);
void sl_route_ptr_slow(sl_buf *b, uint64_t p);
void sl_route_dev_slow(sl_buf *b, int dev);
void sl_route_current_slow(sl_buf *b);

static inline void sl_route(sl_buf *b, int kind, const void *h)
{
	if (__builtin_expect(sl_sessions > 1, 0))
		sl_route_slow(b, kind, h);
}

static inline void sl_route_ptr(sl_buf *b, uint64_t p)
{
	if (__builtin_expect(sl_sessions > 1, 0))
		sl_route_ptr_slow(b, p);
}

static inline void sl_route_dev(sl_buf *b, int dev)
{
	if (__builtin_expect(sl_sessions > 1, 0))
		sl_route_dev_slow(b, dev);
}

/* Directs the frame to the session of the current context, if there is one. */
static inline void sl_route_current(sl_buf *b)
{
	if (__builtin_expect(sl_sessions > 1, 0))
		sl_route_current_slow(b);
}

/*
 * The context an address belongs to, if that is in another session than the current
 * context; NULL otherwise, and always with one session.
 */
struct sl_ctx *sl_ptr_ctx_slow(uint64_t p);
bool sl_ctx_foreign(const struct sl_ctx *c);

static inline struct sl_ctx *sl_ptr_foreign(uint64_t p)
{
	struct sl_ctx *c;

	if (__builtin_expect(sl_sessions == 1, 1))
		return NULL;
	c = sl_ptr_ctx_slow(p);
	return sl_ctx_foreign(c) ? c : NULL;
}

/* A copy between contexts of different sessions; complete on return. */
CUresult sl_copy_across(struct sl_ctx *dst_ctx, uint64_t dst, struct sl_ctx *src_ctx, uint64_t src, size_t n, CUstream s);
/* Waits for the work in s, then runs f in the default stream of c, a context of another session, and waits for it. */
CUresult sl_copy_elsewhere(struct sl_ctx *c, CUresult (*f)(void *), void *arg, CUstream s);
/* Generated stubs call these first when there are several sessions; *done: the call is complete. */
CUresult sl_across_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t n, CUstream s, bool *done);
CUresult sl_across_cuStreamWaitEvent(CUstream s, CUevent event, unsigned flags, bool *done);

#endif
