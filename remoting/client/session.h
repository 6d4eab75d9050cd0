/*
 * The session: one ordered command stream from this process to one worker.
 *
 * Flow out: a call is encoded into an sl_buf on its thread's stack and appended
 * to the session's ring under the order lock, which is what gives all calls of
 * all threads one order. A sender thread drains the ring; a waiting call and a
 * bulk transfer drain it themselves, so that nothing waits for that thread.
 * Flow in: a receiver thread reads frames. A REPLY wakes its caller, DATA goes
 * straight from the socket to the program's memory, everything else is handed
 * to the part it belongs to (the sl_on_* functions).
 *
 * A lease over several owners has a session with each (sl_sessions of them, and as
 * many rings, sockets and threads). A call goes to the owner of the current
 * context's device, unless what it names belongs to another (sl_route). With one
 * owner all of this is one test of a constant.
 *
 * The wire is described in docs/protocol.md.
 */
#ifndef SLUICE_SESSION_H
#define SLUICE_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "log.h"
#include "snapshot.h"
#include "wire.h"

/* A growing byte buffer for one outgoing frame; small ones stay on the stack. */
typedef struct sl_buf {
	uint8_t *p;
	size_t n, cap;
	bool failed;	/* out of memory while encoding */
	bool mixed;	/* it names things of several owners */
	uint8_t to;	/* session it goes to, + 1; 0: the current context's */
	uint32_t to_ctx;/* the context it then goes with */
	uint8_t inl[1024];
} sl_buf;

static inline void sl_buf_init(sl_buf *b)
{
	b->p = b->inl;
	b->n = 0;
	b->cap = sizeof b->inl;
	b->failed = b->mixed = false;
	b->to = 0;
	b->to_ctx = 0;
}

void sl_buf_free(sl_buf *b);
/* Room for n more bytes, or NULL when memory ran out (then failed is set). */
uint8_t *sl_buf_grow(sl_buf *b, size_t n);

static inline uint8_t *sl_buf_room(sl_buf *b, size_t n)
{
	if (__builtin_expect(b->n + n <= b->cap, 1)) {
		uint8_t *p = b->p + b->n;

		b->n += n;
		return p;
	}
	return sl_buf_grow(b, n);
}

static inline void sl_put_bytes(sl_buf *b, const void *p, size_t n)
{
	uint8_t *d = sl_buf_room(b, n);

	if (d && n)
		__builtin_memcpy(d, p, n);
}

static inline void sl_put_u8(sl_buf *b, uint8_t v) { sl_put_bytes(b, &v, 1); }
static inline void sl_put_u16(sl_buf *b, uint16_t v) { sl_put_bytes(b, &v, 2); }
static inline void sl_put_u32(sl_buf *b, uint32_t v) { sl_put_bytes(b, &v, 4); }
static inline void sl_put_u64(sl_buf *b, uint64_t v) { sl_put_bytes(b, &v, 8); }
static inline void sl_put_f32(sl_buf *b, float v) { sl_put_bytes(b, &v, 4); }
/* A message of wire.h: sl_put(&b, struct wire_copy_out, .src = src, .size = n). */
#define sl_put(b, type, ...) sl_put_bytes(b, &(type){ __VA_ARGS__ }, sizeof(type))
/* u32 length and bytes; NULL is length SL_NULL_STRING. */
void sl_put_str(sl_buf *b, const char *s);

/* A reply's payload, read front to back; reading past its end sets bad. */
typedef struct sl_reply {
	uint8_t *data;
	size_t n, off;
	CUresult result;
	bool bad;
	uint8_t session; /* that answered */
	uint8_t inl[512];
} sl_reply;

void sl_reply_free(sl_reply *r);
void sl_get_bytes(sl_reply *r, void *p, size_t n);
/* The next n bytes in place, or NULL when there are fewer. */
const uint8_t *sl_get_ref(sl_reply *r, size_t n);

static inline uint16_t sl_get_u16(sl_reply *r) { uint16_t v = 0; sl_get_bytes(r, &v, 2); return v; }
static inline uint32_t sl_get_u32(sl_reply *r) { uint32_t v = 0; sl_get_bytes(r, &v, 4); return v; }
static inline uint64_t sl_get_u64(sl_reply *r) { uint64_t v = 0; sl_get_bytes(r, &v, 8); return v; }

/*
 * Connects on first use; later calls return the first outcome. NOT_FOUND-like
 * conditions map to CUDA's own codes: no SLUICE_WORKER is CUDA_ERROR_NO_DEVICE,
 * an unreachable worker CUDA_ERROR_SYSTEM_NOT_READY, a version or table
 * mismatch CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
 */
CUresult sl_session_start(void);
/* The devices as described at connect; NULL before sl_session_start succeeded. */
const struct sl_snapshot *sl_snapshot(void);
/* 0 while the session lives, else the error every call now returns. */
CUresult sl_dead(void);
/* How many calls have been sent. */
uint64_t sl_calls(void);
/* So many threads more, or fewer, wait for word of a session's. */
void sl_expect(unsigned session, int threads);
/* True when no frame will come any more; a sticky error of CUDA's is no such end. */
bool sl_ended(void);
/* True in a child forked after the session started. */
bool sl_forked(void);
/* True once exit handlers run: no call may block on the network any more. */
bool sl_exiting(void);

/* Send and go on. Returns an error only if the session is dead. */
CUresult sl_oneway(uint16_t op, const sl_buf *b);
/*
 * Send, and wait for the reply. The return value is the reply's result (CUresult,
 * or a negative number that some control operations define), or the session's
 * error. r may be NULL; else sl_reply_free it, whatever was returned.
 */
CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r);
/*
 * One-way frame whose payload is head followed by n bytes at data, sent from
 * there without a copy when large; the caller may reuse data on return.
 */
CUresult sl_oneway_bulk(uint16_t op, const sl_buf *head, const void *data, size_t n);

/*
 * Deliveries: memory of the program that DATA frames may be written to.
 * A delivery ends (its id is free) when its last frame came or it was dropped.
 */
uint32_t sl_delivery_new(void *dst, size_t n);
/* Packed rows of width bytes, h rows a slice, d slices, scattered by pitch and slice bytes. */
uint32_t sl_delivery_new_3d(void *dst, size_t pitch, size_t slice, size_t width, size_t h, size_t d);
/* Waits until it ended; 0 or the session's error. */
CUresult sl_delivery_wait(uint32_t id);
void sl_delivery_drop(uint32_t id);
/* Waits until no open delivery writes to [p, p+n); 0 or the session's error. */
CUresult sl_delivery_wait_range(const void *p, size_t n);
/* Deliveries not yet ended. */
unsigned sl_deliveries_open(void);

/* Provided by the rest of the shim, called on the receiver thread: must not block or wait. */
void sl_on_event(uint32_t id, uint32_t generation);
/* Waiting for the event failed: whoever asks next must ask the worker. */
void sl_on_event_error(uint32_t id);
/* failed: the function is not to be called, because of this error before it in its stream. */
void sl_on_hostfn(uint32_t id, CUresult failed);
/* How many owners this process has sessions with. */
extern unsigned sl_sessions;
/* The session of a device by its place in the snapshot, and a session's first place. */
unsigned sl_dev_session(uint32_t place);
uint32_t sl_session_first(unsigned session);
/* The session of a context's device. */
unsigned sl_ctx_session(uint32_t ctx_id);

/* Context id for frame headers: the calling thread's current context, 0 if none. */
uint32_t sl_current_ctx_id(void);

/* Logs once per function name that it is not supported; returns NOT_SUPPORTED. */
CUresult sl_refuse(const char *function, uint8_t *once);

/* Name of an API or control operation, for logs and statistics. */
const char *sl_op_name(uint16_t op);

#endif
