/*
 * Host functions in streams (cuLaunchHostFunc, cuStreamAddCallback). When the worker
 * reaches the point in the stream it sends HOSTFN; the receiver thread queues it; a
 * callback thread runs the functions one after another and reports each as done,
 * after which the stream continues. Programs may not call CUDA from such a function,
 * so one thread is what CUDA itself would use. The shim's own functions (copies and
 * fills of host memory) have another thread, so that a slow function of the program's
 * does not delay them.
 *
 * A function behind a failed operation is not called, as CUDA does not call one after
 * an error; a callback is called with the error.
 *
 * A function in a graph is called whenever the graph runs, until HOSTFN_GONE says that
 * nothing has it any more. What is done at its end is done behind its calls, in the
 * same queue. A user object is such a function that is never called.
 *
 * Locking: one mutex for both queues, each of which has a condition; a thread is made
 * on first use and holds no lock while it runs a function. The program's threads, which
 * may be cancelled, wait for an sl_cond.
 */
#include "hostfn.h"
#include "codec.h"
#include "ctx.h"
#include "entry.h"
#include "errstate.h"
#include "futex.h"
#include "gen.h"
#include "handles.h"
#include "log.h"
#include "mapped.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stream.h"
#include "waits.h"

#include <signal.h>
#include <stdlib.h>

#define LOOK_MS 100	/* who waits for the functions looks so often whether the session has ended */

/* A call of a function that is due, or the end of one in a graph. */
struct due {
	struct due *next;
	struct hostfn *f;
	CUresult failed;
	bool end;
};

struct hostfn {
	uint32_t id;
	CUhostFn fn;
	CUstreamCallback callback;
	void (*inside)(void *, CUresult);
	void (*gone)(void *);	/* in a graph: at its end */
	CUstream stream;
	void *arg;
	uint32_t object;	/* id of the user object that it stands for */
	bool graph;
	uint8_t to;	/* session of the stream or graph, as in sl_buf */
	struct due once;
};

struct queue {
	pthread_cond_t wake;
	struct due *head, *last;
	bool running;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct queue program = { .wake = PTHREAD_COND_INITIALIZER }, own = { .wake = PTHREAD_COND_INITIALIZER };
static uint32_t open;	/* launched and not yet done; under lock */
static uint32_t open_inside;	/* those of them that are the shim's own */
static _Atomic uint32_t in_graphs;	/* functions in graphs */
static struct sl_cond done;

static void counted(bool inside, int n)
{
	__atomic_fetch_add(&open, (uint32_t)n, __ATOMIC_RELEASE);
	if (inside)
		__atomic_fetch_add(&open_inside, (uint32_t)n, __ATOMIC_RELEASE);
}

static void call(const struct hostfn *h, CUresult failed)
{
	if (h->inside)
		h->inside(h->arg, failed);
	else if (h->callback)
		h->callback(h->stream, failed ? failed : sl_sticky(), h->arg);
	else if (!failed)
		h->fn(h->arg);
	else
		sl_log(SL_WARN, "a host function is not called: earlier work in its stream failed with error %d", failed);
}

static void tell_done(const struct hostfn *h)
{
	sl_buf b;

	sl_buf_init(&b);
	b.to = h->to;
	sl_put(&b, struct wire_hostfn_done, .hostfn = h->id);
	sl_oneway(CTL_HOSTFN_DONE, &b);
	sl_buf_free(&b);
}

/* The end of a function: nothing calls it any more. */
static void discard(struct hostfn *h)
{
	sl_handle_free(SL_HOSTFN, h->id);
	sl_handle_free(SL_USEROBJ, h->object);
	if (h->gone)
		h->gone(h->arg);
	free(h);
}

uint32_t sl_functions;

bool sl_in_function(void)
{
	return sl_tls()->in_function;
}

/* Around a function of the program's, which may not call CUDA. */
static void program_runs(bool it, int n)
{
	if (!it)
		return;
	sl_tls()->in_function = n > 0;
	__atomic_fetch_add(&sl_functions, (uint32_t)n, __ATOMIC_RELAXED);
}

static void *run(void *arg)
{
	struct queue *q = arg;

	/* The GPU may wait for the end of a function, and for what this thread sends before it. So nothing that it sends is kept behind copies. */
	sl_tls()->unkept = true;
	for (;;) {
		struct hostfn *h;
		struct due *d;

		pthread_mutex_lock(&lock);
		while (!q->head)
			pthread_cond_wait(&q->wake, &lock);
		d = q->head;
		q->head = d->next;
		pthread_mutex_unlock(&lock);
		h = d->f;
		if (d->end) {
			discard(h);
			free(d);
			continue;
		}
		/* The function may look at what the stream's work has left, and that which follows at what it leaves. */
		if (q == &program)
			sl_mirror_stale();
		program_runs(q == &program, 1);
		call(h, d->failed);
		program_runs(q == &program, -1);
		if (q == &program)
			sl_mapped_send();
		if (!d->failed) /* else no stream waits for it */
			tell_done(h);
		if (h->graph) {
			free(d);
			continue;
		}
		sl_handle_free(SL_HOSTFN, h->id);
		free(h);
		pthread_mutex_lock(&lock);
		counted(q == &own, -1);
		sl_cond_broadcast(&done);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

unsigned sl_hostfns_open(void)
{
	return __atomic_load_n(&open, __ATOMIC_ACQUIRE);
}

static CUresult wait_none(const uint32_t *count)
{
	CUresult err = CUDA_SUCCESS;
	int64_t began;

	if (!__atomic_load_n(count, __ATOMIC_ACQUIRE))
		return CUDA_SUCCESS;
	began = sl_waits_begin();
	pthread_mutex_lock(&lock);
	while (__atomic_load_n(count, __ATOMIC_ACQUIRE) && !(err = sl_dead()))
		sl_cond_wait(&done, &lock, LOOK_MS);
	pthread_mutex_unlock(&lock);
	sl_waits_end(began, false);
	return err;
}

CUresult sl_hostfns_wait(void)
{
	return wait_none(&open);
}

CUresult sl_hostfns_wait_inside(void)
{
	return wait_none(&open_inside);
}

/* Signals belong to the program's threads. */
static CUresult ensure_thread(struct queue *q)
{
	sigset_t all, old;
	pthread_t thread;
	CUresult err = CUDA_SUCCESS;

	pthread_mutex_lock(&lock);
	if (!q->running) {
		sigfillset(&all);
		sigdelset(&all, SIGSEGV); /* the program's functions touch memory that traps, see trap.h */
		pthread_sigmask(SIG_SETMASK, &all, &old);
		if (pthread_create(&thread, NULL, run, q))
			err = CUDA_ERROR_OPERATING_SYSTEM;
		else
			pthread_detach(thread);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
		q->running = !err;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

/* The lock is held. */
static void enqueue(struct due *d)
{
	struct queue *q = d->f->inside ? &own : &program;

	d->next = NULL;
	if (q->head)
		q->last->next = d;
	else
		q->head = d;
	q->last = d;
	pthread_cond_signal(&q->wake);
}

/* A function in a graph is over; once. unused: no graph ever had it, and the worker no such user object. */
static void over(struct hostfn *h, bool unused)
{
	struct due *d;

	if (!sl_handle_claim(SL_HOSTFN, h->id))
		return;
	if (unused && h->object)
		h->gone = NULL;
	atomic_fetch_sub(&in_graphs, 1);
	d = calloc(1, sizeof *d);
	if (!d)
		return; /* it stays */
	d->f = h;
	d->end = true;
	pthread_mutex_lock(&lock);
	enqueue(d);
	pthread_mutex_unlock(&lock);
}

/* Receiver thread. */
void sl_on_hostfn(uint32_t id, CUresult failed)
{
	struct hostfn *h = sl_handle_state_by_id(SL_HOSTFN, id);
	struct due *d;

	if (!h)
		return;
	if (h->graph && failed) {
		over(h, true);
		return;
	}
	d = h->graph ? calloc(1, sizeof *d) : &h->once;
	if (!d) {
		sl_log(SL_ERROR, "there is no memory to call a host function");
		abort(); /* its stream would wait for ever */
	}
	/* A function outside of graphs only once, even if the worker sends its HOSTFN again. */
	if (!h->graph)
		sl_handle_set_state(SL_HOSTFN, sl_handle_value(SL_HOSTFN, id), NULL);
	d->f = h;
	d->failed = failed;
	pthread_mutex_lock(&lock);
	enqueue(d);
	pthread_mutex_unlock(&lock);
}

/* Receiver thread. */
void sl_on_hostfn_gone(uint32_t id)
{
	struct hostfn *h = sl_handle_state_by_id(SL_HOSTFN, id);

	if (h && h->graph)
		over(h, false);
}

/* --- in graphs --- */

static uint8_t session_of(const sl_buf *b)
{
	struct sl_ctx *c;

	if (sl_sessions == 1 || b->to || sl_ctx_use(&c))
		return b->to;
	return (uint8_t)(sl_ctx_session(atomic_load(&c->id)) + 1);
}


bool sl_hostfns_in_graphs(void)
{
	return atomic_load_explicit(&in_graphs, memory_order_relaxed) != 0;
}

static uint32_t in_graph(struct hostfn f, CUgraph graph)
{
	struct hostfn *h;
	void *value;
	sl_buf b;

	if (ensure_thread(f.inside ? &own : &program))
		return 0;
	h = malloc(sizeof *h);
	if (!h)
		return 0;
	*h = f;
	h->graph = true;
	sl_buf_init(&b);
	sl_route(&b, SL_GRAPH, graph);
	h->to = session_of(&b);
	sl_buf_free(&b);
	h->id = sl_handle_new(SL_HOSTFN, h, &value);
	if (!h->id) {
		free(h);
		return 0;
	}
	atomic_fetch_add(&in_graphs, 1);
	return h->id;
}

uint32_t sl_hostfn_in_graph(CUhostFn fn, void *arg, CUgraph graph)
{
	return in_graph((struct hostfn){ .fn = fn, .arg = arg }, graph);
}

uint32_t sl_hostfn_inside_graph(void (*f)(void *, CUresult), void *arg, void (*gone)(void *), CUgraph graph)
{
	return in_graph((struct hostfn){ .inside = f, .arg = arg, .gone = gone }, graph);
}

uint32_t sl_hostfn_object(CUhostFn destroy, void *arg, uint32_t object)
{
	return in_graph((struct hostfn){ .gone = destroy, .arg = arg, .object = object }, NULL);
}

void sl_hostfn_unused(uint32_t id)
{
	struct hostfn *h = sl_handle_state_by_id(SL_HOSTFN, id);

	if (h && h->graph)
		over(h, true);
}

void *sl_hostfn_of(uint32_t id, CUhostFn *fn)
{
	struct hostfn *h = sl_handle_state_by_id(SL_HOSTFN, id);

	if (fn)
		*fn = h ? h->fn : NULL;
	return h ? h->arg : NULL;
}

/* --- in streams --- */

/* Puts the function that f describes into the stream. */
static CUresult launch(CUstream hStream, struct hostfn f)
{
	struct hostfn *h;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t stream;
	void *value;
	sl_buf b;

	if (!err)
		err = ensure_thread(f.inside ? &own : &program);
	if (err)
		return err;
	stream = sl_stream_id(hStream, &err);
	if (err)
		return err;
	h = calloc(1, sizeof *h);
	if (!h)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*h = f;
	h->stream = hStream;
	h->id = sl_handle_new(SL_HOSTFN, h, &value);
	if (!h->id) {
		free(h);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	counted(f.inside, 1);
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, hStream);
	h->to = session_of(&b);
	sl_put(&b, struct wire_launch_host, .stream = stream, .hostfn = h->id);
	err = sl_oneway(CTL_LAUNCH_HOST, &b);
	sl_buf_free(&b);
	if (err) {
		counted(f.inside, -1);
		sl_handle_free(SL_HOSTFN, h->id);
		free(h);
	}
	return err;
}

/* Whether the stream captures, so that what is put into it becomes part of a graph. */
static CUresult capturing(CUstream hStream, CUgraph *graph)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult err;

	*graph = NULL;
	if (!sl_capturing_any())
		return CUDA_SUCCESS;
	err = sl_cuStreamGetCaptureInfo_v2(hStream, &status, NULL, graph, NULL, NULL);
	if (!err && status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		*graph = NULL;
	return CUDA_SUCCESS;
}

static CUresult capture(CUstream hStream, CUgraph graph, CUhostFn fn, void *arg)
{
	CUresult err = CUDA_SUCCESS;
	uint32_t stream = sl_stream_id(hStream, &err), id;
	sl_buf b;

	if (err)
		return err;
	id = sl_hostfn_in_graph(fn, arg, graph);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, hStream);
	sl_put(&b, struct wire_launch_host, .stream = stream, .hostfn = id);
	err = sl_oneway(CTL_LAUNCH_HOST, &b);
	sl_buf_free(&b);
	if (err)
		sl_hostfn_unused(id);
	return err;
}

CUresult sl_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	CUgraph graph;
	CUresult err;

	if (!fn)
		return CUDA_ERROR_INVALID_VALUE;
	err = capturing(hStream, &graph);
	if (err)
		return err;
	return graph ? capture(hStream, graph, fn, userData) : launch(hStream, (struct hostfn){ .fn = fn, .arg = userData });
}

CUresult sl_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
	if (!callback || flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_capturing_any())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	return launch(hStream, (struct hostfn){ .callback = callback, .arg = userData });
}

CUresult sl_hostfn_inside(CUstream s, void (*f)(void *, CUresult), void *arg)
{
	return launch(s, (struct hostfn){ .inside = f, .arg = arg });
}
