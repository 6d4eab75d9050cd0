/* See poller.h. */
#include "poller.h"
#include "ctx.h"
#include "deadline.h"
#include "log.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

enum { OFTEN_NS = 1000000, SELDOM_NS = 10000000 };

static const int64_t recent_ns = 2000000000;
static enum sl_poll (*look_)(void);
static _Atomic unsigned work;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begin = PTHREAD_COND_INITIALIZER;
static unsigned starts;		/* calls of sl_poller_start */

/* Compares the blocks until the poller is stopped. */
static void look_on(void)
{
	int64_t active = sl_now_ns();
	unsigned seen = 0;

	for (;;) {
		struct timespec t = { 0 };
		unsigned w = atomic_load_explicit(&work, memory_order_relaxed);
		enum sl_poll what = look_();

		if (what == SL_POLL_STOP)
			return;
		if (what == SL_POLL_FOUND || w != seen)
			active = sl_now_ns();
		seen = w;
		t.tv_nsec = sl_now_ns() - active < recent_ns ? OFTEN_NS : SELDOM_NS;
		nanosleep(&t, NULL);
	}
}

static void *run(void *arg)
{
	unsigned served = 0;

	(void)arg;
	prctl(PR_SET_NAME, "sluice-poll");
	sl_tls()->no_print = true;
	for (;;) {
		pthread_mutex_lock(&lock);
		while (served == starts)
			pthread_cond_wait(&begin, &lock);
		served = starts;
		pthread_mutex_unlock(&lock);
		look_on();
	}
	return NULL;
}

/* Signals belong to the program's threads. */
static void start(void)
{
	sigset_t every, old;
	pthread_t thread;

	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &old);
	if (pthread_create(&thread, NULL, run, NULL))
		sl_log(SL_WARN, "a running kernel does not see what the program writes to host memory: no thread can be made");
	else
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void sl_poller_start(enum sl_poll (*look)(void))
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_mutex_lock(&lock);
	look_ = look;
	starts++;
	pthread_cond_signal(&begin);
	pthread_mutex_unlock(&lock);
	pthread_once(&once, start);
}

void sl_poller_work(void)
{
	atomic_fetch_add_explicit(&work, 1, memory_order_relaxed);
}
