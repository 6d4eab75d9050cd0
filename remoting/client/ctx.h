/*
 * Contexts, and the calling thread's view of them (ctx.c says who locks what).
 */
#ifndef SLUICE_CTX_H
#define SLUICE_CTX_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "handles.h"
#include "stream.h"
#include "wire.h"

struct sl_green;
struct sl_local;

struct sl_ctx {
	void *link;		/* of the pool */
	_Atomic uint32_t id;	/* wire id; 0 when destroyed */
	int dev;
	bool primary;
	_Atomic bool active;	/* exists in the worker */
	uint32_t refs;		/* primary: retains not yet released; under ctx.c's lock */
	uint32_t flags;
	uint32_t api_version;
	uint64_t uid;		/* cuCtxGetId */
	pthread_mutex_t activate;
	_Atomic uint64_t limit[10]; /* value + 1; 0 unknown */
	_Atomic uint32_t cache_config, shared_config;
	_Atomic uint32_t cache_sent;
	struct sl_mark legacy;	/* the legacy default stream and all streams that it waits for */
	struct sl_mark direct;	/* the legacy default stream alone */
	_Atomic uint32_t epoch;	/* a reset keeps the id and starts a new epoch */
	_Atomic(struct sl_local *) locals; /* ctxlocal.c */
};

#define SL_THREAD_STREAMS 8

/* The calling thread. */
struct sl_thread {
	bool known;	 /* registered for clean-up at thread exit */
	bool no_ctx;	 /* control calls that belong to no context */
	bool here;	 /* calls go to the current context's session, whatever addresses they name */
	bool no_print;	 /* leaves what kernels printed to other threads: one that holds stdout may wait for this one */
	bool in_function; /* runs a host function of the program's, which may not call CUDA */
	bool unkept;	 /* what it sends is not kept behind copies (background.h) */
	bool in_errlog;	 /* within a callback of cuLogsRegisterCallback */
	bool errlog_pending; /* it has logged lines from errlog_from on that the callbacks have not been given */
	unsigned int errlog_from;
	bool no_mark;	 /* calls that name a stream but put no work into it */
	bool waited;	 /* since the last call returned: waits.h */
	uint64_t waited_ns, waited_trips;
	uint64_t tid;	 /* never 0, never reused */
	struct sl_ctx *cur;
	uint32_t cur_id; /* id cur had when it became current */
	struct sl_green *green; /* the green context that is current, whose primary context cur then is (green.c) */
	uint32_t green_id; /* id it had when it became current */
	struct { struct sl_ctx *ctx; uint32_t id; struct sl_green *green; uint32_t green_id; } *stack;
	unsigned depth, cap;
	CUstreamCaptureMode capture_mode;
	CUresult ctx_error; /* why the current context could not be activated */
	struct { uint32_t ctx_id, epoch; struct sl_stream *s; } streams[SL_THREAD_STREAMS];
	struct { const void *key; uint64_t gen; void *value; struct sl_ctx *ctx; } local[4];
};

/*
 * Not inlined on purpose: the thread-local descriptor code of older C libraries may
 * clobber vector registers, which a call may clobber anyway.
 */
struct sl_thread *sl_tls(void) __attribute__((noinline));

extern struct sl_ctx *sl_primary[SL_MAX_DEVICES];
void sl_ctx_setup(void);
/* The current context, which then exists in the worker; otherwise the reason why it does not. */
CUresult sl_ctx_use(struct sl_ctx **out);
/* The current context, which may not exist in the worker yet; NULL with INVALID_CONTEXT. */
CUresult sl_ctx_peek(struct sl_ctx **out);
/* The live context behind a handle; NULL if there is none. */
struct sl_ctx *sl_ctx_of(CUcontext h);
/* The same, where a handle that is NULL means the current context. */
CUresult sl_ctx_or_current(CUcontext h, struct sl_ctx **out);

static inline CUcontext sl_ctx_handle(const struct sl_ctx *c)
{
	return sl_handle_value(SL_CTX, atomic_load_explicit(&c->id, memory_order_relaxed));
}

/* The primary context of a device as a handle, without retaining it. */
CUcontext sl_ctx_primary_handle(CUdevice dev);
/* Runs f with c as the calling thread's current context. */
CUresult sl_ctx_with(struct sl_ctx *c, CUresult (*f)(void *), void *arg);
/* Waits for all work in c. */
CUresult sl_ctx_synchronize(struct sl_ctx *c);
uint64_t sl_next_uid(void);
/* The id of the calling thread's current context, whether or not it exists in the worker; 0: none. */
uint32_t sl_ctx_cur(void);
/*
 * The context id of a frame's header: the current context's, which is made to exist in the worker;
 * 0 if there is none.
 */
uint32_t sl_current_ctx_id(void);
/* Why that was 0 for a call that needs a context: CUDA_ERROR_INVALID_CONTEXT if there is none, or why it could not be made in the worker. */
CUresult sl_ctx_missing(void);
/* The session of a context's device. */
unsigned sl_ctx_session(uint32_t ctx_id);

#endif
