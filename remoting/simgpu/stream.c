/*
 * Streams. Flow: stream_put() -> stream_queue() appends an op with the ops it must
 * wait for -> the stream's thread, started with its first op, takes them in order,
 * sleeps until what they depend on is done, runs them without the lock and wakes
 * all waiters. The default stream's blocking rules are expressed as dependencies:
 * its op depends on the last op of every blocking stream of the context, and theirs
 * on its.
 *
 * If an op's stream is idle and the caller waits for the op anyway, the caller runs
 * it (stream_put_wait), which saves two thread switches.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

struct op *op_ref(struct op *op)
{
	if (op)
		op->refs++;
	return op;
}

void op_unref(struct op *op)
{
	if (op && !--op->refs)
		free(op);
}

void op_wait(struct op *op)
{
	op_ref(op);
	while (op && !op->done)
		pthread_cond_wait(&sim.progress, &sim.lock);
	op_unref(op);
}

static void stream_unref(struct stream *s)
{
	if (--s->refs)
		return;
	op_unref(s->last);
	pthread_cond_destroy(&s->wake);
	free(s->attrs);
	free(s);
}

struct stream *stream_new(struct ctx *c, unsigned int flags, int priority)
{
	struct stream *s = obj_new(K_STREAM, c, sizeof(*s));

	if (!s)
		return NULL;
	s->flags = flags;
	s->priority = priority;
	s->id = ++sim.serial;
	s->refs = 1;
	pthread_cond_init(&s->wake, NULL);
	s->next = c->streams;
	if (s->next)
		s->next->prev = s;
	c->streams = s;
	return s;
}

static void stream_unlink(struct stream *s)
{
	struct ctx *c = s->obj.ctx;

	if (s->prev)
		s->prev->next = s->next;
	else
		c->streams = s->next;
	if (s->next)
		s->next->prev = s->prev;
	stream_unref(s);
}

static bool op_ready(struct op *op)
{
	for (size_t i = 0; i < op->ndeps; i++)
		if (!op->deps[i]->done)
			return false;
	return true;
}

/* Runs op, whose turn has come in its stream and whose dependencies are done. */
static void op_run(struct op *op)
{
	struct ctx *c = op->ctx;
	CUresult r = CUDA_SUCCESS;

	if (op->work.kind == W_CALLBACK)
		op->work.callback.status = c->sticky;
	if (op->work.kind == W_CALLBACK || (!c->sticky && op->work.kind != W_EMPTY)) {
		pthread_mutex_unlock(&sim.lock);
		r = work_run(&op->work, c);
		pthread_mutex_lock(&sim.lock);
	}
	if (r && !c->sticky)
		c->sticky = r;
	work_drop(&op->work);
	for (size_t i = 0; i < op->ndeps; i++)
		op_unref(op->deps[i]);
	free(op->deps);
	op->deps = NULL;
	op->ndeps = 0;
	op->t = sim_time(c->dev);
	op->done = true;
	pthread_cond_broadcast(&sim.progress);
}

static void *stream_main(void *arg)
{
	struct stream *s = arg;

	pthread_mutex_lock(&sim.lock);
	for (;;) {
		struct op *op;

		while (!s->head && !s->stop && !s->gone)
			pthread_cond_wait(&s->wake, &sim.lock);
		op = s->head;
		if (!op)
			break;
		while (!op_ready(op))
			pthread_cond_wait(&sim.progress, &sim.lock);
		op_run(op);
		s->head = op->next;
		op_unref(op);
	}
	s->thread = false;
	if (s->gone)
		stream_unlink(s);
	pthread_cond_broadcast(&sim.progress);
	stream_unref(s);
	pthread_mutex_unlock(&sim.lock);
	return NULL;
}

/* Streams' threads block all signals: those belong to the program. */
static CUresult stream_start(struct stream *s)
{
	pthread_attr_t a;
	sigset_t all, old;
	pthread_t t;
	int rc;

	if (s->thread)
		return CUDA_SUCCESS;
	sigfillset(&all);
	pthread_attr_init(&a);
	pthread_attr_setstacksize(&a, 1 << 20);
	pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	s->refs++;
	s->thread = true;
	rc = pthread_create(&t, &a, stream_main, s);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&a);
	if (rc) {
		s->thread = false;
		s->refs--;
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return CUDA_SUCCESS;
}

static void add_dep(struct op *op, struct op *dep, size_t *cap)
{
	if (!dep || dep->done)
		return;
	op->deps = xgrow(op->deps, op->ndeps + 1, cap, sizeof(*op->deps));
	op->deps[op->ndeps++] = op_ref(dep);
}

static struct op *op_make(struct stream *s, struct work *w, struct op *dep)
{
	struct ctx *c = s->obj.ctx;
	struct op *op = xcalloc(1, sizeof(*op));
	size_t cap = 0;

	op->refs = 2;		/* one for the queue, one for stream->last */
	op->ctx = c;
	op->work = *w;
	add_dep(op, dep, &cap);
	if (!s->head)
		add_dep(op, s->last, &cap);	/* which a caller may be running itself */
	if (s == c->legacy) {
		for (struct stream *o = c->streams; o; o = o->next)
			if (o != s && !(o->flags & CU_STREAM_NON_BLOCKING))
				add_dep(op, o->last, &cap);
	} else if (!(s->flags & CU_STREAM_NON_BLOCKING)) {
		add_dep(op, c->legacy->last, &cap);
	}
	return op;
}

/* Appends w to s, after dep too. Takes over what w owns, even if it fails. */
CUresult stream_queue(struct stream *s, struct work *w, struct op *dep, struct op **out)
{
	CUresult r = s->obj.ctx->dying ? CUDA_ERROR_CONTEXT_IS_DESTROYED : stream_start(s);
	struct op *op, *at;

	if (r) {
		work_drop(w);
		return r;
	}
	engine_stir(s->obj.ctx->dev);
	op = op_make(s, w, dep);
	if (s->head) {
		at = s->last;	/* the tail, since it is queued until it is done */
		at->next = op;
	} else {
		s->head = op;
	}
	op_unref(s->last);
	s->last = op;
	if (out)
		*out = op_ref(op);
	pthread_cond_signal(&s->wake);
	return CUDA_SUCCESS;
}

CUresult stream_put(struct stream *s, struct work *w)
{
	if (s->cap)
		return capture_put(s, w);
	return stream_queue(s, w, NULL, NULL);
}

/* Calls that block may not be captured. */
CUresult stream_sync_check(struct stream *s)
{
	if (s->cap) {
		capture_break(s);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return CUDA_SUCCESS;
}

CUresult stream_put_wait(struct stream *s, struct work *w)
{
	struct ctx *c = s->obj.ctx;
	CUresult r = stream_sync_check(s);
	struct op *op;

	if (r) {
		work_drop(w);
		return r;
	}
	if (!s->head && !c->dying) {
		op = op_make(s, w, NULL);
		if (op_ready(op)) {
			op_unref(s->last);
			s->last = op;
			op_run(op);
			op_unref(op);
			ctx_print_flush(c);
			return c->sticky;
		}
		*w = op->work;
		for (size_t i = 0; i < op->ndeps; i++)
			op_unref(op->deps[i]);
		free(op->deps);
		free(op);
	}
	r = stream_queue(s, w, NULL, &op);
	if (r)
		return r;
	op_wait(op);
	op_unref(op);
	ctx_print_flush(c);
	return c->sticky;
}

bool stream_busy(struct stream *s)
{
	struct ctx *c = s->obj.ctx;

	if (s->last && !s->last->done)
		return true;
	if (s != c->legacy)
		return false;
	for (struct stream *o = c->streams; o; o = o->next)
		if (!(o->flags & CU_STREAM_NON_BLOCKING) && o->last && !o->last->done)
			return true;
	return false;
}

/* Ops to wait for; each holds a reference. */
struct oplist { struct op **v; size_t n, cap; };

static void list_add(struct oplist *l, struct op *op)
{
	if (!op || op->done)
		return;
	l->v = xgrow(l->v, l->n + 1, &l->cap, sizeof(*l->v));
	l->v[l->n++] = op_ref(op);
}

static void list_wait(struct oplist *l)
{
	for (size_t i = 0; i < l->n; i++) {
		op_wait(l->v[i]);
		op_unref(l->v[i]);
	}
	free(l->v);
}

/* Waits for the ops that are queued now; for the default stream also for those it would wait for. */
void stream_wait(struct stream *s)
{
	struct ctx *c = s->obj.ctx;
	struct oplist l = { 0 };

	for (struct stream *o = c->streams; o; o = o->next)
		if (o == s || (s == c->legacy && !(o->flags & CU_STREAM_NON_BLOCKING)))
			list_add(&l, o->last);
	list_wait(&l);
}

void ctx_wait(struct ctx *c)
{
	struct oplist l = { 0 };

	for (struct stream *o = c->streams; o; o = o->next)
		list_add(&l, o->last);
	list_wait(&l);
}

/* Waits for everything that any context has queued. */
void all_wait(void)
{
	struct oplist l = { 0 };
	struct obj *o;

	for (size_t it = 0; (o = obj_next(&it, NULL));)
		if (o->kind == K_CTX)
			for (struct stream *s = ((struct ctx *)o)->streams; s; s = s->next)
				list_add(&l, s->last);
	list_wait(&l);
}

static void stream_end(struct stream *s)
{
	capture_drop(s);
	obj_forget(s);
	if (!s->thread) {
		stream_unlink(s);
		return;
	}
	s->gone = true;		/* its thread unlinks it when it has no work left */
	pthread_cond_signal(&s->wake);
}

void stream_ctx_destroy(struct ctx *c)
{
	ctx_wait(c);
	for (struct stream *s = c->streams, *next; s; s = next) {
		next = s->next;
		if (!s->gone)
			stream_end(s);
	}
	while (c->streams)
		pthread_cond_wait(&sim.progress, &sim.lock);
	c->legacy = NULL;
}

/* per-thread default streams */

struct mine { uint64_t ctx, stream; };
static __thread struct { struct mine *v; size_t n, cap; } mine;
static pthread_key_t mine_key;
static pthread_once_t mine_once = PTHREAD_ONCE_INIT;

static void mine_end(void *arg)
{
	(void)arg;
	pthread_mutex_lock(&sim.lock);
	for (size_t i = 0; i < mine.n; i++) {
		struct stream *s = obj_get_id(mine.v[i].stream, K_STREAM);

		if (s && sim.inited && !sim.exiting)
			stream_end(s);
	}
	pthread_mutex_unlock(&sim.lock);
	free(mine.v);
	mine.v = NULL;
	mine.n = mine.cap = 0;
}

static void mine_init(void)
{
	pthread_key_create(&mine_key, mine_end);
}

static struct stream *mine_get(struct ctx *c)
{
	struct stream *s;

	for (size_t i = 0; i < mine.n; i++) {
		if (mine.v[i].ctx != c->id)
			continue;
		s = obj_get_id(mine.v[i].stream, K_STREAM);
		if (s)
			return s;
		mine.v[i] = mine.v[--mine.n];	/* it ended with an earlier epoch of the context */
		break;
	}
	s = stream_new(c, 0, 0);
	if (!s)
		return NULL;
	pthread_once(&mine_once, mine_init);
	pthread_setspecific(mine_key, &mine);
	mine.v = xgrow(mine.v, mine.n + 1, &mine.cap, sizeof(*mine.v));
	mine.v[mine.n++] = (struct mine){ c->id, s->obj.handle };
	return s;
}

/* The stream that a handle means in context c; dflt is what 0 means in this entry point. */
CUresult stream_find(CUstream h, CUstream dflt, struct ctx *c, struct stream **out)
{
	struct ctx *green = (uintptr_t)h <= 2 ? ctx_current_green() : NULL;
	struct stream *s;

	if (!h)
		h = dflt;
	if (green)
		s = green->legacy;
	else if (!h || h == CU_STREAM_LEGACY)
		s = c->legacy;
	else if (h == CU_STREAM_PER_THREAD)
		s = mine_get(c);
	else
		s = obj_get(h, K_STREAM);
	if (!s)
		return h == CU_STREAM_PER_THREAD ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
	if (s->obj.ctx->dying)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (ctx_broken(s->obj.ctx))
		return s->obj.ctx->sticky;
	*out = s;
	return CUDA_SUCCESS;
}

/* The same for calls that use the stream: for the default one, captures matter. */
CUresult stream_get(CUstream h, CUstream dflt, struct ctx *c, struct stream **out)
{
	CUresult r = stream_find(h, dflt, c, out);

	return !r && *out == c->legacy ? capture_legacy(c, true) : r;
}

/* the calls */

static CUresult enter_stream(CUstream h, CUstream dflt, struct ctx **c, struct stream **s)
{
	CUresult r = sim_enter_ctx(c);

	if (r)
		return r;
	r = stream_get(h, dflt, *c, s);
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

static CUresult create(CUstream *out, unsigned int flags, int priority)
{
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out || flags & ~1U)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
	if (!state_charge(c->dev, sim.cfg.stream_mem))
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	c->overhead += sim.cfg.stream_mem;
	s = stream_new(c, flags, priority);
	if (!s)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	if (ctx_current_green())
		s->green = ctx_current_green()->green;
	*out = HANDLE(CUstream, s);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuStreamCreate(CUstream *out, unsigned int flags) { return create(out, flags, 0); }

API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
	return create(out, flags, priority);
}

API CUresult cuStreamDestroy_v2(CUstream h)
{
	CUresult r = sim_enter();
	struct stream *s;

	if (r)
		return r;
	s = obj_get(h, K_STREAM);
	if (!s || s == s->obj.ctx->legacy)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	stream_end(s);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuStreamDestroy(CUstream h) { return cuStreamDestroy_v2(h); }

static CUresult synchronize(CUstream h, CUstream dflt)
{
	struct stream *s;
	struct ctx *c;
	CUresult r = enter_stream(h, dflt, &c, &s);

	if (r)
		return r;
	r = stream_sync_check(s);
	if (r)
		return sim_leave(r);
	c = s->obj.ctx;
	s->refs++;
	stream_wait(s);
	stream_unref(s);
	ctx_print_flush(c);
	return sim_leave(c->sticky);
}

API CUresult cuStreamSynchronize(CUstream h) { return synchronize(h, NULL); }
API CUresult cuStreamSynchronize_ptsz(CUstream h) { return synchronize(h, CU_STREAM_PER_THREAD); }

static CUresult query(CUstream h, CUstream dflt)
{
	struct stream *s;
	struct ctx *c;
	CUresult r = enter_stream(h, dflt, &c, &s);

	if (r)
		return r;
	r = stream_sync_check(s);
	if (!r && stream_busy(s))
		r = CUDA_ERROR_NOT_READY;
	return sim_leave(r);
}

API CUresult cuStreamQuery(CUstream h) { return query(h, NULL); }
API CUresult cuStreamQuery_ptsz(CUstream h) { return query(h, CU_STREAM_PER_THREAD); }

static CUresult host_func(CUstream h, CUstream dflt, struct work *w)
{
	struct stream *s;
	struct ctx *c;
	CUresult r = enter_stream(h, dflt, &c, &s);

	if (r)
		return r;
	if (w->kind == W_CALLBACK) {
		if (s->cap) {
			capture_break(s);
			return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		}
		w->callback.stream = h;
	}
	return sim_leave(stream_put(s, w));
}

static CUresult launch_host(CUstream h, CUstream dflt, CUhostFn fn, void *arg)
{
	struct work w = { .kind = W_HOST, .host = { fn, arg } };

	return fn ? host_func(h, dflt, &w) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuLaunchHostFunc(CUstream h, CUhostFn fn, void *arg) { return launch_host(h, NULL, fn, arg); }

API CUresult cuLaunchHostFunc_ptsz(CUstream h, CUhostFn fn, void *arg)
{
	return launch_host(h, CU_STREAM_PER_THREAD, fn, arg);
}

static CUresult add_callback(CUstream h, CUstream dflt, CUstreamCallback fn, void *arg, unsigned int flags)
{
	struct work w = { .kind = W_CALLBACK, .callback = { fn, arg, NULL, 0 } };

	return fn && !flags ? host_func(h, dflt, &w) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuStreamAddCallback(CUstream h, CUstreamCallback fn, void *arg, unsigned int flags)
{
	return add_callback(h, NULL, fn, arg, flags);
}

API CUresult cuStreamAddCallback_ptsz(CUstream h, CUstreamCallback fn, void *arg, unsigned int flags)
{
	return add_callback(h, CU_STREAM_PER_THREAD, fn, arg, flags);
}

/* Queries of a stream that do not disturb it, capturing or not. */
static CUresult peek(CUstream h, CUstream dflt, struct ctx **c, struct stream **s)
{
	CUresult r = sim_enter_ctx(c);

	if (r)
		return r;
	r = stream_find(h, dflt, *c, s);
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

#define STREAM_GET(name, type, value) \
	static CUresult get_##name(CUstream h, CUstream dflt, type *out) \
	{ \
		struct stream *s; \
		struct ctx *c; \
		CUresult r = peek(h, dflt, &c, &s); \
		if (r) \
			return r; \
		if (!out) \
			return sim_leave(CUDA_ERROR_INVALID_VALUE); \
		*out = (value); \
		return sim_leave(CUDA_SUCCESS); \
	} \
	API CUresult cuStreamGet##name(CUstream h, type *out) { return get_##name(h, NULL, out); } \
	API CUresult cuStreamGet##name##_ptsz(CUstream h, type *out) { return get_##name(h, CU_STREAM_PER_THREAD, out); }

STREAM_GET(Priority, int, s->priority)
STREAM_GET(Flags, unsigned int, s->flags)
STREAM_GET(Id, unsigned long long, s->id)
STREAM_GET(Ctx, CUcontext, HANDLE(CUcontext, s->green && green_ctx(s->green) ? green_ctx(s->green) : s->obj.ctx))
STREAM_GET(Device, CUdevice, s->obj.ctx->dev)

STREAM_GET(GreenCtx, CUgreenCtx, (CUgreenCtx)(uintptr_t)s->green)

API CUresult cuStreamGetCtx_v2(CUstream h, CUcontext *out, CUgreenCtx *green)
{
	CUresult r = cuStreamGetCtx(h, out);

	return !r && green ? cuStreamGetGreenCtx(h, green) : r;
}

API CUresult cuStreamGetCtx_v2_ptsz(CUstream h, CUcontext *out, CUgreenCtx *green)
{
	CUresult r = cuStreamGetCtx_ptsz(h, out);

	return !r && green ? get_GreenCtx(h, CU_STREAM_PER_THREAD, green) : r;
}
