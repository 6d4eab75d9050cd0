/*
 * The log of failed calls: every call of the program that returns an error leaves a line, and so does every refusal.
 * The program reads the newest lines with cuLogsDumpToMemory and cuLogsDumpToFile, or has each of them told to a
 * callback, on the thread whose call has failed.
 *
 * Locking: lock guards the lines and the callbacks. Callbacks are called without any lock, when the failed call is about
 * to return; a call that fails within a callback is logged after it. A forked child has no log, since a thread may have held the lock.
 */
#define _GNU_SOURCE
#include "errlog.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctx.h"
#include "gen.h"
#include "session.h"

#define LINES 100
#define LINE_MAX 256
#define CALLBACKS 16

struct line {
	uint64_t tid;		/* the thread whose call has failed */
	unsigned prefix, n;	/* lengths of what stands before the message, and of all */
	char text[LINE_MAX];
};

struct callback {
	CUlogsCallback fn;
	void *data;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct line lines[LINES];
static unsigned int next; /* the number of the next line; line i is in lines[i % LINES] */
static struct callback callbacks[CALLBACKS];

static unsigned int oldest(void)
{
	return next > LINES ? next - LINES : 0;
}

/* Time of day (UTC), thread, source and severity: the form that readers of a driver's log expect. */
static unsigned put_prefix(char *text)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (unsigned)snprintf(text, LINE_MAX, "[%02d:%02d:%02d.%03d][%lu][CUDA][E] ", (int)(t.tv_sec / 3600 % 24), (int)(t.tv_sec / 60 % 60),
				  (int)(t.tv_sec % 60), (int)(t.tv_nsec / 1000000), (unsigned long)pthread_self());
}

static void put(const char *fmt, va_list ap)
{
	struct sl_thread *t = sl_tls();
	struct line l;

	l.tid = t->tid;
	l.prefix = put_prefix(l.text);
	vsnprintf(l.text + l.prefix, LINE_MAX - l.prefix, fmt, ap);
	l.n = (unsigned)strlen(l.text);
	pthread_mutex_lock(&lock);
	if (!t->errlog_pending)
		t->errlog_from = next;
	t->errlog_pending = true;
	lines[next++ % LINES] = l;
	pthread_mutex_unlock(&lock);
}

/* Tells the callbacks what the calling thread has logged since it was last told. */
static void tell(void)
{
	struct sl_thread *t = sl_tls();
	struct callback to[CALLBACKS];
	struct line l;
	bool mine = true;

	if (!t->errlog_pending || t->in_errlog)
		return;
	t->in_errlog = true;
	while (mine) {
		pthread_mutex_lock(&lock);
		memcpy(to, callbacks, sizeof to);
		if (t->errlog_from < oldest())
			t->errlog_from = oldest();
		while (t->errlog_from < next && lines[t->errlog_from % LINES].tid != t->tid)
			t->errlog_from++;
		mine = t->errlog_from < next;
		t->errlog_pending = mine;
		if (mine)
			l = lines[t->errlog_from++ % LINES];
		pthread_mutex_unlock(&lock);
		for (int i = 0; mine && i < CALLBACKS; i++)
			if (to[i].fn)
				to[i].fn(to[i].data, 0, l.text + l.prefix, l.n - l.prefix);
	}
	t->in_errlog = false;
}

void sl_errlog(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	put(fmt, ap);
	va_end(ap);
}

void sl_errlog_failed(const char *function, CUresult result)
{
	const char *name = "an unknown error";

	if (result == CUDA_ERROR_NOT_READY)
		return;
	sl_cuGetErrorName(result, &name);
	sl_errlog("%s returned %d (%s)", function, result, name);
	tell();
}

/* --- callbacks: a handle is the address of the entry --- */

CUresult sl_cuLogsRegisterCallback(CUlogsCallback fn, void *data, CUlogsCallbackHandle *out)
{
	CUresult err = CUDA_ERROR_OUT_OF_MEMORY;

	if (!fn)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < CALLBACKS && err; i++) {
		if (callbacks[i].fn)
			continue;
		callbacks[i] = (struct callback){ fn, data };
		if (out)
			*out = (CUlogsCallbackHandle)(void *)&callbacks[i];
		err = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_cuLogsUnregisterCallback(CUlogsCallbackHandle callback)
{
	CUresult err = CUDA_ERROR_INVALID_VALUE;

	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < CALLBACKS; i++) {
		if ((void *)callback != &callbacks[i] || !callbacks[i].fn)
			continue;
		callbacks[i].fn = NULL;
		err = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

/* --- reading --- */

CUresult sl_cuLogsCurrent(CUlogIterator *iterator, unsigned int flags)
{
	(void)flags;
	if (!iterator)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	*iterator = next;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

static const char left_out[] = "[older messages are left out]\n";

/*
 * Writes the newest lines from *at on that fit into room bytes with a NUL, and moves *at behind them. Returns the bytes
 * without the NUL, or -1 when there are lines and none fits. Called with the lock held.
 */
static long dump(unsigned int *at, char *to, size_t room)
{
	unsigned int from = *at > next || *at < oldest() ? oldest() : *at, first = next;
	size_t n = 0, used = 0;

	while (first > from && n + lines[(first - 1) % LINES].n + 1 < room)
		n += lines[--first % LINES].n + 1;
	if (first == next && from < next)
		return -1;
	if (first > *at && n + sizeof left_out <= room) {
		memcpy(to, left_out, sizeof left_out - 1);
		used = sizeof left_out - 1;
	}
	for (; first < next; first++) {
		const struct line *l = &lines[first % LINES];

		memcpy(to + used, l->text, l->n);
		used += l->n;
		to[used++] = '\n';
	}
	to[used] = 0;
	*at = next;
	return (long)used;
}

CUresult sl_cuLogsDumpToMemory(CUlogIterator *iterator, char *buffer, size_t *size, unsigned int flags)
{
	unsigned int all;
	long n;

	(void)flags;
	if (!buffer || !size || !*size)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	all = oldest();
	n = dump(iterator ? iterator : &all, buffer, *size);
	pthread_mutex_unlock(&lock);
	*size = n > 0 ? (size_t)n : 0;
	return n < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult sl_cuLogsDumpToFile(CUlogIterator *iterator, const char *pathToFile, unsigned int flags)
{
	static char text[LINES * (LINE_MAX + 1) + sizeof left_out]; /* under lock */
	bool written;
	unsigned int all;
	long n;
	int fd;

	(void)flags;
	if (!pathToFile)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	fd = open(pathToFile, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	all = oldest();
	n = dump(iterator ? iterator : &all, text, sizeof text);
	written = n <= 0 || write(fd, text, (size_t)n) == n;
	pthread_mutex_unlock(&lock);
	close(fd);
	return written ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
