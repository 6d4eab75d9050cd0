/*
 * Deliveries: the program's memory that the worker's DATA frames may be written
 * to. A program's copy opens one; the receiver thread finds it by the id in the
 * frame, writes, and ends it with the last frame. The lock is held for a few
 * instructions only, never while bytes are read.
 *
 * The threads of bulk connections write, too, and are in a list while they do. A thread that ends a
 * delivery shuts their connections down and waits until they have left the list.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "delivery.h"
#include "session.h"
#include "waits.h"

#define MAX_OPEN (1u << 16)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sl_delivery *all;
static uint32_t count, hint;
static uint32_t open;	/* futex: how many are open */
static struct sl_writer *writers;
static uint32_t left;	/* futex: how often a writer has left */
static unsigned leave_waits;

/* Waits until the number of open deliveries differs from seen, or 100 ms have passed. */
static void wait_change(uint32_t seen)
{
	int64_t began = sl_waits_begin();

	syscall(SYS_futex, &open, FUTEX_WAIT_PRIVATE, seen, &(struct timespec){ 0, 100000000 }, NULL, 0);
	sl_waits_end(began, false);
}

void sl_delivery_wake(void)
{
	syscall(SYS_futex, &open, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* The id of the delivery at a place. Called with the lock held. */
static uint32_t id_of(uint32_t i)
{
	return (i + 1) | (all[i].gen & 0x7fff) << 17;
}

static uint32_t delivery_add(struct sl_delivery d)
{
	uint32_t i, id = 0;

again:
	pthread_mutex_lock(&lock);
	for (i = 0; i < count; i++) {
		uint32_t k = (hint + i) % count;

		if (!all[k].busy) {
			i = k;
			goto found;
		}
	}
	if (count < MAX_OPEN) {
		uint32_t n = count ? count * 2 : 64;
		struct sl_delivery *p = realloc(all, n * sizeof *p);

		if (!p)
			goto out;
		memset(p + count, 0, (n - count) * sizeof *p);
		i = count;
		all = p;
		count = n;
	} else {
		/* The table is full: wait for one to end, as a full stream makes CUDA wait. */
		pthread_mutex_unlock(&lock);
		if (sl_dead())
			return 0;
		wait_change(__atomic_load_n(&open, __ATOMIC_ACQUIRE));
		goto again;
	}
found:
	d.busy = 1;
	d.gen = all[i].gen + 1;
	all[i] = d;
	hint = i + 1;
	id = id_of(i);
	__atomic_fetch_add(&open, 1, __ATOMIC_RELAXED);
out:
	pthread_mutex_unlock(&lock);
	return id;
}

uint32_t sl_delivery_new(void *dst, size_t n)
{
	return delivery_add((struct sl_delivery){ .dst = dst, .n = n });
}

uint32_t sl_delivery_new_3d(void *dst, size_t pitch, size_t slice, size_t width, size_t h, size_t d)
{
	return delivery_add((struct sl_delivery){ .dst = dst, .n = (uint64_t)width * h * d, .pitch = pitch, .slice = slice, .width = width, .h = h });
}

/* The open delivery of an id, or NULL. Called with the lock held. */
static struct sl_delivery *delivery_of(uint32_t id)
{
	uint32_t i = (id & 0x1ffff) - 1;

	if (i >= count || !all[i].busy || (all[i].gen & 0x7fff) != id >> 17)
		return NULL;
	return &all[i];
}

bool sl_delivery_find(uint32_t id, struct sl_delivery *out)
{
	struct sl_delivery *d;

	pthread_mutex_lock(&lock);
	if ((d = delivery_of(id)))
		*out = *d;
	pthread_mutex_unlock(&lock);
	return d;
}

/* Ends what is written to a delivery, or to any if id is 0. Called with the lock held. */
static void end_writers(uint32_t id)
{
	for (;;) {
		uint32_t seen = __atomic_load_n(&left, __ATOMIC_RELAXED);
		bool any = false;

		for (struct sl_writer *w = writers; w; w = w->next)
			if (!id || w->id == id) {
				shutdown(w->fd, SHUT_RDWR);
				any = true;
			}
		if (!any)
			return;
		leave_waits++;
		pthread_mutex_unlock(&lock);
		syscall(SYS_futex, &left, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
		pthread_mutex_lock(&lock);
		leave_waits--;
	}
}

void sl_delivery_drop(uint32_t id)
{
	struct sl_delivery *d;

	pthread_mutex_lock(&lock);
	if ((d = delivery_of(id)))
		d->ending = true;
	if (__builtin_expect(writers != NULL, 0))
		end_writers(id);
	if ((d = delivery_of(id))) {
		d->busy = 0;
		__atomic_fetch_sub(&open, 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	sl_delivery_wake();
}

void sl_delivery_settle(void)
{
	pthread_mutex_lock(&lock);
	end_writers(0);
	pthread_mutex_unlock(&lock);
}

CUresult sl_delivery_wait(uint32_t id)
{
	for (;;) {
		uint32_t seen = __atomic_load_n(&open, __ATOMIC_ACQUIRE);
		bool busy;

		pthread_mutex_lock(&lock);
		busy = delivery_of(id) != NULL;
		pthread_mutex_unlock(&lock);
		if (!busy)
			return CUDA_SUCCESS;
		if (sl_ended()) {
			sl_delivery_drop(id);
			return sl_dead();
		}
		wait_change(seen);
	}
}

/* The length of the memory from dst on that a delivery may write to. */
static uint64_t span(const struct sl_delivery *d)
{
	uint64_t rows;

	if (!d->width)
		return d->n;
	rows = d->n / d->width;
	return rows ? (rows - 1) / d->h * d->slice + (rows - 1) % d->h * d->pitch + d->h * d->pitch + d->width : 0;
}

CUresult sl_delivery_wait_range(const void *p, size_t n)
{
	const uint8_t *from = p, *to = from + n;

	for (;;) {
		uint32_t seen = __atomic_load_n(&open, __ATOMIC_ACQUIRE);
		bool busy = false;

		if (!seen)
			return CUDA_SUCCESS;
		pthread_mutex_lock(&lock);
		for (uint32_t i = 0; i < count && !busy; i++)
			busy = all[i].busy && all[i].dst < to && from < all[i].dst + span(&all[i]);
		pthread_mutex_unlock(&lock);
		if (!busy)
			return CUDA_SUCCESS;
		if (sl_dead())
			return sl_dead();
		wait_change(seen);
	}
}

CUresult sl_delivery_wait_all(void)
{
	CUresult err = CUDA_SUCCESS;
	uint32_t n;

	if (__builtin_expect(!sl_deliveries_open(), 1))
		return CUDA_SUCCESS;
	pthread_mutex_lock(&lock);
	n = count;
	pthread_mutex_unlock(&lock);
	for (uint32_t i = 0; i < n && !err; i++) { /* at most one for each place, whatever begins meanwhile */
		uint32_t id;

		pthread_mutex_lock(&lock);
		id = all[i].busy ? id_of(i) : 0;
		pthread_mutex_unlock(&lock);
		if (id)
			err = sl_delivery_wait(id);
	}
	return err;
}

unsigned sl_deliveries_open(void)
{
	return __atomic_load_n(&open, __ATOMIC_ACQUIRE);
}

enum sl_write sl_delivery_write(struct sl_writer *w, uint32_t id, uint64_t off, uint64_t n, struct sl_delivery *out)
{
	enum sl_write what;
	struct sl_delivery *d;

	pthread_mutex_lock(&lock);
	d = delivery_of(id);
	/* The thread that ends the session says so first, and then ends the writes. */
	what = !d || d->ending || sl_ended() ? SL_WRITE_NONE : off > d->n || n > d->n - off ? SL_WRITE_BEYOND : SL_WRITE_GO;
	if (what == SL_WRITE_GO) {
		*out = *d;
		w->id = id;
		w->next = writers;
		writers = w;
	}
	pthread_mutex_unlock(&lock);
	return what;
}

void sl_delivery_written(struct sl_writer *w)
{
	pthread_mutex_lock(&lock);
	for (struct sl_writer **p = &writers; *p; p = &(*p)->next)
		if (*p == w) {
			*p = w->next;
			break;
		}
	__atomic_fetch_add(&left, 1, __ATOMIC_RELAXED);
	if (leave_waits)
		syscall(SYS_futex, &left, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
	pthread_mutex_unlock(&lock);
}
