/* Waiting with an end, by the monotonic clock in milliseconds, which stands still while the machine is suspended. Used by both libraries. */
#ifndef SLUICE_DEADLINE_H
#define SLUICE_DEADLINE_H

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline int64_t sl_now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* As sl_now_ms, and goes on while the machine is suspended: for what is told, not for what is waited for. */
static inline int64_t sl_passed_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_BOOTTIME, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
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
