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
 * Locking: one mutex for both queues, each of which has a condition; a thread is made
 * on first use and holds no lock while it runs a function.
 */
#include "hostfn.h"
#include "codec.h"
#include "ctx.h"
#include "entry.h"
#include "errstate.h"
#include "gen.h"
#include "handles.h"
#include "log.h"
#include "mirror.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stream.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

struct hostfn {
	struct hostfn *next;
	uint32_t id;
	CUhostFn fn;
	CUstreamCallback callback;
	void (*inside)(void *, CUresult);
	CUresult failed;
	CUstream stream;
	void *arg;
	uint8_t to;	/* session of the stream, as in sl_buf */
};

struct queue {
	pthread_cond_t wake;
	struct hostfn *head, *last;
	bool running;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct queue program = { .wake = PTHREAD_COND_INITIALIZER }, own = { .wake = PTHREAD_COND_INITIALIZER };
static uint32_t open;	/* launched and not yet done; under lock */
static uint32_t open_inside;	/* those of them that are the shim's own */
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;

static void counted(bool inside, int n)
{
	__atomic_fetch_add(&open, (uint32_t)n, __ATOMIC_RELEASE);
	if (inside)
		__atomic_fetch_add(&open_inside, (uint32_t)n, __ATOMIC_RELEASE);
}

static void call(const struct hostfn *h)
{
	if (h->inside)
		h->inside(h->arg, h->failed);
	else if (h->callback)
		h->callback(h->stream, h->failed ? h->failed : sl_sticky(), h->arg);
	else if (!h->failed)
		h->fn(h->arg);
	else
		sl_log(SL_WARN, "a host function is not called: earlier work in its stream failed with error %d", h->failed);
}

static void *run(void *arg)
{
	struct queue *q = arg;

	for (;;) {
		struct hostfn *h;
		sl_buf b;

		pthread_mutex_lock(&lock);
		while (!q->head)
			pthread_cond_wait(&q->wake, &lock);
		h = q->head;
		q->head = h->next;
		pthread_mutex_unlock(&lock);
		/* The function may look at what the stream's work has left, and that which follows at what it leaves. */
		if (q == &program)
			sl_mirror_stale();
		call(h);
		if (q == &program)
			sl_mirror_send();
		if (!h->failed) { /* else no stream waits for it */
			sl_buf_init(&b);
			b.to = h->to;
			sl_put(&b, struct wire_hostfn_done, .hostfn = h->id);
			sl_oneway(CTL_HOSTFN_DONE, &b);
			sl_buf_free(&b);
		}
		sl_handle_free(SL_HOSTFN, h->id);
		free(h);
		pthread_mutex_lock(&lock);
		counted(q == &own, -1);
		pthread_cond_broadcast(&done);
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

	if (!__atomic_load_n(count, __ATOMIC_ACQUIRE))
		return CUDA_SUCCESS;
	pthread_mutex_lock(&lock);
	while (__atomic_load_n(count, __ATOMIC_ACQUIRE) && !(err = sl_dead())) {
		struct timespec t;

		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_nsec += 100000000;
		if (t.tv_nsec >= 1000000000) {
			t.tv_nsec -= 1000000000;
			t.tv_sec++;
		}
		pthread_cond_timedwait(&done, &lock, &t);
	}
	pthread_mutex_unlock(&lock);
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

/* Receiver thread. */
void sl_on_hostfn(uint32_t id, CUresult failed)
{
	struct hostfn *h = sl_handle_state_by_id(SL_HOSTFN, id);
	struct queue *q;

	if (!h)
		return;
	/* Only once, even if the worker sends its HOSTFN again. */
	sl_handle_set_state(SL_HOSTFN, sl_handle_value(SL_HOSTFN, id), NULL);
	h->failed = failed;
	h->next = NULL;
	q = h->inside ? &own : &program;
	pthread_mutex_lock(&lock);
	if (q->head)
		q->last->next = h;
	else
		q->head = h;
	q->last = h;
	pthread_cond_signal(&q->wake);
	pthread_mutex_unlock(&lock);
}

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
	if (sl_sessions > 1)
		h->to = b.to ? b.to : (uint8_t)(sl_ctx_session(atomic_load(&c->id)) + 1);
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

/* Refused in a capture: a graph would run the function again and again, in no order of the session's. */
static CUresult refuse_capture(CUstream hStream, const char *name, uint8_t *once)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	if (sl_capturing_any() && !sl_cuStreamIsCapturing(hStream, &status) && status != CU_STREAM_CAPTURE_STATUS_NONE)
		return sl_refuse(name, once);
	return CUDA_SUCCESS;
}

CUresult sl_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	static uint8_t once;
	CUresult err;

	if (!fn)
		return CUDA_ERROR_INVALID_VALUE;
	err = refuse_capture(hStream, "cuLaunchHostFunc in a capture", &once);
	return err ? err : launch(hStream, (struct hostfn){ .fn = fn, .arg = userData });
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
