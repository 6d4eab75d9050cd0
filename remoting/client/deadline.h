/* Waiting with an end, by the monotonic clock, which stands still while the machine is suspended. Used by both libraries. */
#ifndef SLUICE_DEADLINE_H
#define SLUICE_DEADLINE_H

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline int64_t sl_clock_ms(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline int64_t sl_now_ms(void)
{
	return sl_clock_ms(CLOCK_MONOTONIC);
}

/* The end of a wait of so long that begins now, and that goes on no later than last, unless that is 0. */
static inline int64_t sl_deadline(int ms, int64_t last)
{
	int64_t end = sl_now_ms() + ms;

	return last && last < end ? last : end;
}

static inline int64_t sl_clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t sl_now_ns(void)
{
	return sl_clock_ns(CLOCK_MONOTONIC);
}

/* The processor time of the calling thread. */
static inline int64_t sl_processor_ns(void)
{
	return sl_clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* Waits for events (POLLIN, POLLOUT) on fd; false with errno, ETIMEDOUT at the deadline. */
static inline bool sl_wait_fd(int fd, short events, int64_t deadline)
{
	for (;;) {
		struct pollfd p = { .fd = fd, .events = events };
		int64_t left = deadline - sl_now_ms();
		int n;

		if (left <= 0) {
			errno = ETIMEDOUT;
			return false;
		}
		n = poll(&p, 1, (int)left);
		if (n > 0)
			return true;
		if (n < 0 && errno != EINTR)
			return false;
	}
}

#endif
