/*
 * Bytes over a stream socket, see exchange.h. Nothing is shared.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deadline.h"
#include "exchange.h"

bool sl_send_all(int fd, const void *buf, size_t n, int64_t deadline)
{
	const char *p = buf;

	while (n) {
		ssize_t r = send(fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (r > 0) {
			p += r;
			n -= (size_t)r;
		} else if (r < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			if (!sl_wait_fd(fd, POLLOUT, deadline))
				return false;
		} else if (r == 0 || errno != EINTR) {
			return false;
		}
	}
	return true;
}

/* Keeps one of the descriptors that came with a message, and closes the others. */
static void take_descriptors(struct msghdr *m, int *got)
{
	for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
		size_t have = h->cmsg_len > CMSG_LEN(0) ? (h->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < have; i++) {
			int one;

			memcpy(&one, CMSG_DATA(h) + i * sizeof one, sizeof one);
			if (got && *got < 0)
				*got = one;
			else
				close(one);
		}
	}
}

bool sl_recv_all(int fd, void *buf, size_t n, int *got, int64_t deadline)
{
	char *p = buf;

	while (n) {
		union {
			char buf[CMSG_SPACE(4 * sizeof(int))];
			struct cmsghdr align;
		} control;
		struct iovec iov = { p, n };
		struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf };
		ssize_t r = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);

		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			if (!sl_wait_fd(fd, POLLIN, deadline))
				return false;
			continue;
		}
		if (r < 0)
			return false;
		take_descriptors(&m, got);
		if (r == 0) {
			errno = ECONNRESET;
			return false;
		}
		p += r;
		n -= (size_t)r;
	}
	return true;
}
