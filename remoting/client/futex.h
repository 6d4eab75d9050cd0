/* Waiting for another thread, by futexes: pthread_cond_wait is a cancellation point, and a thread that is cancelled in it keeps the lock. */
#ifndef SLUICE_FUTEX_H
#define SLUICE_FUTEX_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void sl_futex_wait(uint32_t *w, uint32_t v, const struct timespec *t)
{
	syscall(SYS_futex, w, FUTEX_WAIT_PRIVATE, v, t, NULL, 0);
}

static inline void sl_futex_wake(uint32_t *w)
{
	syscall(SYS_futex, w, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* A condition variable. Its fields belong to the lock that its callers hold. */
struct sl_cond {
	uint32_t broadcasts;	/* futex */
	unsigned waits;		/* threads */
};

/* Waits for a broadcast, for ms milliseconds, or without end if ms is negative. Called with the lock held, which it releases while it waits. */
static inline void sl_cond_wait(struct sl_cond *c, pthread_mutex_t *lock, int64_t ms)
{
	const struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	uint32_t seen = __atomic_load_n(&c->broadcasts, __ATOMIC_RELAXED);

	c->waits++;
	pthread_mutex_unlock(lock);
	sl_futex_wait(&c->broadcasts, seen, ms < 0 ? NULL : &t);
	pthread_mutex_lock(lock);
	c->waits--;
}

/* Wakes all threads that wait. Called with the lock held. */
static inline void sl_cond_broadcast(struct sl_cond *c)
{
	__atomic_fetch_add(&c->broadcasts, 1, __ATOMIC_RELAXED);
	if (c->waits)
		sl_futex_wake(&c->broadcasts);
}

#endif
