/*
 * What the parts of the shim share: contexts, streams, events, and the calling
 * thread's view of them. Each part says in its own file who locks what.
 */
#ifndef SLUICE_CORE_H
#define SLUICE_CORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "errstate.h"
#include "gen.h"
#include "handles.h"
#include "session.h"

/*
 * Whether a stream has work that its last completed wait did not cover. A mark
 * and the frame it announces are two steps, so only a stream used by a single
 * thread can be known to be idle; one that two threads touched never is again.
 */
struct sl_mark {
	_Atomic uint64_t owner;	 /* thread that enqueues, 0 none yet */
	_Atomic bool shared;	 /* more than one did */
	_Atomic uint64_t seq;	 /* work announced; written by the owner only */
	_Atomic uint64_t synced; /* work known to be complete */
};

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
	struct sl_mark legacy;	/* the legacy default stream, and all that it waits for */
	_Atomic uint32_t epoch;	/* a reset starts a new life of the same id */
	_Atomic(struct sl_local *) locals; /* ctxlocal.c */
};

struct sl_stream {
	void *link;
	uint32_t id;
	struct sl_ctx *ctx;
	uint32_t ctx_id;
	unsigned flags;
	int priority;
	uint64_t uid;
	bool per_thread;
	struct sl_mark mark;
};

struct sl_event {
	void *link;
	uint32_t id;
	uint32_t ctx_id;
	unsigned flags;
	_Atomic uint32_t recorded;  /* generation of the last record */
	_Atomic uint32_t completed; /* highest generation known complete */
	_Atomic uint32_t watched;   /* generation the worker was asked to report, 0 none */
	_Atomic uint64_t asked;	    /* sl_waited by then */
	_Atomic uint32_t stream;    /* id it was last recorded on (0 legacy), and .. */
	_Atomic uint64_t stream_seq;/* .. what was announced there by then; 0 unknown */
	_Atomic bool external;	    /* recorded by graphs or launches too: always ask */
	_Atomic uint32_t fetched;   /* generation after which mapped memory was fetched */
	_Atomic bool forward;	    /* recorded where the shim cannot count it (captures): always ask */
	_Atomic bool follow;	    /* ask with every record that the worker reports it */
	_Atomic bool wanted;	    /* somebody has asked for it since its last record */
	_Atomic uint32_t followed;  /* generation that was asked for, 0 none */
	_Atomic uint64_t calls;	    /* how many calls had been made by then */
	_Atomic uint32_t sleepers;  /* threads asleep until `completed` changes */
};

#define SL_THREAD_STREAMS 8

/* The calling thread. */
struct sl_thread {
	bool known;	 /* registered for clean-up at thread exit */
	bool no_ctx;	 /* control calls that belong to no context */
	bool here;	 /* calls go to the current context's session, whatever addresses they name */
	bool no_mark;	 /* calls on a stream that put nothing into it */
	uint64_t tid;	 /* never 0, never reused */
	struct sl_ctx *cur;
	uint32_t cur_id; /* id cur had when it became current */
	struct { struct sl_ctx *ctx; uint32_t id; } *stack;
	unsigned depth, cap;
	CUstreamCaptureMode capture_mode;
	CUresult ctx_error; /* why the current context could not be activated */
	struct { uint32_t ctx_id, epoch; struct sl_stream *s; } streams[SL_THREAD_STREAMS];
	struct { const void *key; uint64_t gen; void *value; struct sl_ctx *ctx; } local[4];
};

/*
 * Not inlined on purpose: older C libraries' thread-local descriptor code may
 * lose vector registers, which a call may lose anyway.
 */
struct sl_thread *sl_tls(void) __attribute__((noinline));

/* ctx.c */
extern struct sl_ctx *sl_primary[SL_MAX_DEVICES];
void sl_ctx_setup(void);
/* The current context, known to exist in the worker; else why not. */
CUresult sl_ctx_use(struct sl_ctx **out);
/* The current context, maybe not yet made; NULL with INVALID_CONTEXT. */
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
uint64_t sl_next_uid(void);

/* device.c */
const struct sl_device *sl_dev(CUdevice dev); /* by the program's ordinal, NULL if none */
int sl_dev_count(void);
bool sl_initialized(void);
int sl_dev_attr(CUdevice dev, unsigned attr); /* 0 if unknown */
void sl_dev_setup(void);		/* after the session started */

/* stream.c */
uint32_t sl_stream_id(CUstream s, CUresult *err); /* marks the stream as having work */
uint32_t sl_stream_id_only(CUstream s, CUresult *err);
/* The mark of a stream; NULL if unknown. The stream's own ctx in *ctx if not NULL. */
struct sl_mark *sl_stream_mark(CUstream s, struct sl_ctx **ctx);
/* Everything enqueued so far by this thread; later sl_mark_synced makes it known complete. */
bool sl_mark_begin(struct sl_mark *m, uint64_t *seq);
void sl_mark_synced(struct sl_mark *m, uint64_t seq);
/* A wait for a stream: what it will have covered, noted before, and that it has. */
struct sl_covered {
	struct sl_mark *m;
	uint64_t seq;
	bool track;
};
void sl_cover(struct sl_covered *w, CUstream s);
void sl_cover_done(const struct sl_covered *w);
/* How often this process has been told that work is complete: what was not by then may be now. */
extern _Atomic uint64_t sl_waited;
void sl_streams_drop(uint32_t ctx_id);
void sl_thread_streams_drop(struct sl_thread *t);
bool sl_capturing_any(void);
void sl_capturing_add(int n);

/* event.c */
void sl_events_drop(uint32_t ctx_id);
/* An event will be recorded by something other than cuEventRecord. */
void sl_event_external(CUevent e);
/* hostfn.c: host functions launched and not yet done, and the wait for all of them */
unsigned sl_hostfns_open(void);
CUresult sl_hostfns_wait(void);
/* Waits for the copies and fills of host memory that the shim itself has in streams. */
CUresult sl_hostfns_wait_inside(void);
/*
 * Runs f(arg, 0) in the order of the stream, on a thread of the shim's, beside those of the program's. When
 * work before it in the stream has failed, f(arg, error) is called instead. f must not call CUDA. If an error
 * is returned f is not called.
 */
CUresult sl_hostfn_inside(CUstream s, void (*f)(void *arg, CUresult failed), void *arg);

/* ctxlocal.c */
CUresult sl_local_put(CUcontext ctx, void *key, void *value, void (*dtor)(CUcontext, void *, void *));
CUresult sl_local_delete(CUcontext ctx, void *key);
CUresult sl_local_get(void **value, CUcontext ctx, void *key);
/* Runs the destructors of a dying context. */
void sl_local_drop(struct sl_ctx *c);

/* ranges.c */
enum sl_range_type { SL_RANGE_DEVICE = 1, SL_RANGE_HOST, SL_RANGE_REGISTERED, SL_RANGE_VA, SL_RANGE_MAPPED, SL_RANGE_POOL };
struct sl_range {
	uint64_t base, size;
	enum sl_range_type type;
	uint32_t ctx_id;
	uint32_t home;	  /* ctx_id, or the context that was current; several sessions only */
	int dev;
	unsigned flags;	  /* cuMemHostAlloc / Register flags */
	uint64_t buffer_id;
	uint64_t map_size;/* host: bytes mapped */
	CUmemoryPool pool;
	bool sync_memops;
};
/*
 * A filter for addresses of page-locked host memory: where a bit is clear there is none. One bit stands for
 * all 2 MiB regions of the same hash; it may be set although the memory is gone.
 */
extern _Atomic uint64_t sl_locked_filter[64];
static inline bool sl_locked_maybe(uint64_t p)
{
	uint64_t h = (p >> 21) * 0x9e3779b97f4a7c15u >> 52;

	return __builtin_expect(atomic_load_explicit(&sl_locked_filter[h >> 6], memory_order_relaxed) >> (h & 63) & 1, 0);
}
int sl_range_add(const struct sl_range *r); /* 0, or -1 when memory ran out */
bool sl_range_find(uint64_t p, struct sl_range *out);
/* Whether any range of another session lies in [p, p+n). */
bool sl_range_clash(uint64_t p, uint64_t n, unsigned session);
/* Removes the range that starts at base (type 0: any); false if there is none. */
bool sl_range_remove(uint64_t base, enum sl_range_type type, struct sl_range *out);
bool sl_range_sync_memops(uint64_t p, bool on);
void sl_ranges_drop(uint32_t ctx_id);
uint64_t sl_range_next_id(void);

/* module.c */
void sl_modules_drop(uint32_t ctx_id);

/* kernel.c */
struct sl_kernel;
struct sl_launch_info {
	uint32_t id;
	uint32_t nparams;
	uint32_t param_bytes;
	const uint32_t *offset, *size;
	int max_threads, shared_static, max_dynamic;
	bool cluster_required;
};
/* The layout of a kernel for launching on dev, fetched once. */
CUresult sl_kernel_layout(CUfunction f, int dev, struct sl_launch_info *out);

/* launch.c */
/* Checks a launch as cuLaunchKernel does and appends its parameters to b as they lie in a LAUNCH frame, *n bytes. */
CUresult sl_launch_pack(sl_buf *b, CUfunction f, const unsigned grid[3], const unsigned block[3], unsigned shared, void **params, void **extra,
			uint32_t *n);
CUresult sl_check_exit(void); /* DEINITIALIZED once the process is ending */

/*
 * route.c. Several sessions only: the context an address belongs to, if it is not of
 * the current context's session; NULL else, and always with one session.
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
/* Behind s: runs f in the default stream of c, a context of another session, and waits for it. */
CUresult sl_copy_elsewhere(struct sl_ctx *c, CUresult (*f)(void *), void *arg, CUstream s);
/* Generated stubs ask these first when there are several sessions; *done: that was all. */
CUresult sl_across_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t n, CUstream s, bool *done);
CUresult sl_across_cuStreamWaitEvent(CUstream s, CUevent event, unsigned flags, bool *done);
CUresult sl_across_cuCtxEnablePeerAccess(CUcontext peer, unsigned flags, bool *done);
CUresult sl_across_cuCtxDisablePeerAccess(CUcontext peer, bool *done);

/* export_tables.c */
struct sl_fatbin_wrapper;

#endif
