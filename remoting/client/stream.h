/*
 * Streams, and whether one has work that no completed wait has covered (stream.c).
 */
#ifndef SLUICE_STREAM_H
#define SLUICE_STREAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"

struct sl_ctx;
struct sl_green;
struct sl_thread;

/*
 * Whether a stream has work that its last completed wait did not cover. Marking the
 * stream and sending the frame are two steps, so only a stream that a single thread
 * uses can be known idle; a stream that two threads have used never can.
 */
struct sl_mark {
	_Atomic uint64_t owner;	 /* thread that enqueues, 0 none yet */
	_Atomic bool shared;	 /* more than one did */
	_Atomic uint64_t seq;	 /* work enqueued; written by the owner only */
	_Atomic uint64_t other;	 /* of it, up to the last that was not a copy whose bytes have left this process; written by the owner only */
	_Atomic uint64_t behind; /* copies in the background that the last work stands behind: sl_background_taken() before it was sent */
	_Atomic uint64_t synced; /* work known to be complete, or, of such copies alone, that the worker sees to */
};

struct sl_stream {
	void *link;
	uint32_t id;
	uint32_t at;		/* the worker's stream: id, or another one's that stands for it */
	struct sl_ctx *ctx;
	uint32_t ctx_id;
	unsigned flags;
	int priority;
	uint64_t uid;
	bool per_thread;
	struct sl_green *green;	/* the green context it belongs to, or NULL */
	uint32_t green_id;
	struct sl_mark mark;
	CUgraphNode *cap_nodes;	/* what cuStreamGetCaptureInfo has told of, kept until it is asked again */
	CUgraphEdgeData *cap_edges;
	size_t cap_room;
	bool cap_into;		/* it captures into a graph of the program's */
};

/* A stream of the current context, or of a green context of it. */
CUresult sl_stream_create(CUstream *out, unsigned flags, int priority, struct sl_green *green);
/* Forgets a stream that the worker has destroyed. */
void sl_stream_forget(CUstream s);
uint32_t sl_stream_id(CUstream s, CUresult *err); /* marks the stream as having work */
/* The same for a copy to the device, linear and from memory that the program may change once its bytes have been sent. */
uint32_t sl_stream_id_copying(CUstream s, CUresult *err);
uint32_t sl_stream_id_only(CUstream s, CUresult *err);
/* The mark of a stream; NULL if unknown. The stream's own ctx in *ctx if not NULL. */
struct sl_mark *sl_stream_mark(CUstream s, struct sl_ctx **ctx);
/* What this thread has enqueued so far, for a later sl_mark_synced; false if it cannot be known complete. */
bool sl_mark_begin(struct sl_mark *m, uint64_t *seq);
void sl_mark_synced(struct sl_mark *m, uint64_t seq);
void sl_mark_reset(struct sl_mark *m);
/* Around a wait for a stream: what the wait covers, noted before it; and that it has succeeded. */
struct sl_covered {
	struct sl_mark *m, *direct;
	uint64_t seq, direct_seq;
	bool track;
};
void sl_cover(struct sl_covered *w, CUstream s);
void sl_cover_done(const struct sl_covered *w);
/* How often this process has learned that work is complete: what was not complete before may be now. */
extern _Atomic uint64_t sl_waited;
void sl_streams_drop(uint32_t ctx_id);
void sl_thread_streams_drop(struct sl_thread *t);
/* A stream that is not the legacy one; NULL for that one, and, with *err set, for one that is unknown. */
struct sl_stream *sl_stream_of(CUstream s, CUresult *err);
/* Forwards a call that puts nothing into the stream. */
#define SL_UNMARKED(call) ({ \
	struct sl_thread *t_ = sl_tls(); \
	CUresult r_; \
	sl_error_collect(); \
	t_->no_mark = true; \
	r_ = (call); \
	t_->no_mark = false; \
	r_; \
})
/*
 * Whether every stream that the process has so far is ordered behind a copy in stream s. A blocking copy there need not wait. The worker
 * orders streams that are created later behind it; the copy's last frame or sl_stream_arrived asks it to.
 */
bool sl_stream_alone(CUstream s);
/* Ends a blocking copy to the device in stream s, which in CUDA is complete when the call returns. marked: the copy's last frame told the worker that it is a blocking one. */
CUresult sl_stream_arrived(CUstream s, bool marked);
/* Before a context comes to exist in the worker: the streams of two contexts are not ordered with each other. */
void sl_stream_new_ctx(unsigned session);
/* Before all streams of a context are made to wait for an event. */
void sl_stream_ctx_waits(void);
/* Captures begun and not yet ended in this process. capture.c begins and ends them. */
bool sl_capturing_any(void);
/* Whether stream s is part of a capture that has not been invalidated. */
bool sl_stream_captures(CUstream s);
void sl_capturing_add(int n);

#endif
