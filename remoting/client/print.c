/*
 * What kernels print. It is kept for the next thread that returns from a wait, as CUDA
 * prints when the program synchronises. The receiver never writes it: stdout may be
 * locked by a thread that waits for the receiver.
 */
#include "print.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PRINT_MAX (16u << 20)

/* For stdout, and for stderr. */
static struct print {
	char *text;
	size_t n, cap;
} prints[2];

static pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;
static bool printed; /* there may be something in them */

/* Writes without the lock: the thread that holds the stream may come here too. */
static void print_slow(void)
{
	struct print had[2];

	pthread_mutex_lock(&print_lock);
	memcpy(had, prints, sizeof had);
	memset(prints, 0, sizeof prints);
	__atomic_store_n(&printed, false, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&print_lock);
	for (int i = 0; i < 2; i++) {
		if (had[i].n)
			fwrite(had[i].text, 1, had[i].n, i ? stderr : stdout);
		free(had[i].text);
	}
}

void sl_print_flush(void)
{
	if (__builtin_expect(__atomic_load_n(&printed, __ATOMIC_ACQUIRE), 0))
		print_slow();
}

void sl_print_add(bool to_stderr, const void *text, size_t n)
{
	struct print *p = &prints[to_stderr];

	pthread_mutex_lock(&print_lock);
	if (p->n + n > p->cap && p->cap < PRINT_MAX) {
		size_t cap = p->cap ? p->cap * 4 : 64u << 10;
		char *more = realloc(p->text, cap);

		if (more) {
			p->text = more;
			p->cap = cap;
		}
	}
	/* Text beyond the limit is lost, as with CUDA's own buffer. */
	if (p->n + n <= p->cap) {
		memcpy(p->text + p->n, text, n);
		p->n += n;
		__atomic_store_n(&printed, true, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&print_lock);
}
