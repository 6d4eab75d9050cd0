/*
 * The daemon's socket: one line is sent, one answer received, and the connection closed.
 * It runs in slurmstepd before it forks, as the user; the daemon takes the user from the
 * socket's credentials.
 *
 * A daemon may hang, be killed and be started again at any moment of this. So nothing
 * blocks except poll(2), which has the deadline; a connection that ends before the first
 * byte of an answer is made again while the patience for an absent daemon lasts.
 */
#include "plugin.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_MAX (SL_BODY_MAX + SL_TEXT_MAX + 16)

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* Waits for input until the deadline; false with errno ETIMEDOUT then. */
static bool wait_for(int fd, int64_t deadline)
{
	for (;;) {
		struct pollfd p = { fd, POLLIN, 0 };
		int64_t left = deadline - now_ms();
		int n = poll(&p, 1, left > 0 ? (int)left : 0);

		if (n > 0)
			return true;
		if (n == 0 && left <= 0) {
			errno = ETIMEDOUT;
			return false;
		}
		if (n < 0 && errno != EINTR)
			return false;
	}
}

static int dial(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	struct ucred peer;
	socklen_t len = sizeof peer;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), err;

	if (fd < 0)
		return -1;
	strncpy(addr.sun_path, path, sizeof addr.sun_path - 1);
	/* The answer decides what the tasks' loader loads: it must come from root, or from the user of slurmd. */
	if (!connect(fd, (struct sockaddr *)&addr, sizeof addr) && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len)) {
		if (peer.uid == 0 || peer.uid == getuid())
			return fd;
		errno = EPERM;
	}
	err = errno;
	close(fd);
	errno = err;
	return -1;
}

/* Reads until the other end closes; -1 without an answer. */
static ssize_t receive(int fd, char *buf, size_t max, int64_t deadline)
{
	size_t n = 0;

	while (n < max) {
		ssize_t r = recv(fd, buf + n, max - n, 0);

		if (r > 0)
			n += (size_t)r;
		else if (r == 0)
			return (ssize_t)n;
		else if (errno == EAGAIN && !wait_for(fd, deadline))
			return -1;
		else if (errno != EAGAIN && errno != EINTR)
			return n && errno == ECONNRESET ? (ssize_t)n : -1;
	}
	return (ssize_t)n;
}

/* Whether the error may come from a daemon that is being started. */
static bool absent(int err)
{
	return err == ENOENT || err == ECONNREFUSED || err == ECONNRESET || err == EPIPE;
}

char *sl_ask(struct sl_answer *a, const char *socket, uint32_t job, uint32_t step, const char *own, int absent_ms, int answer_ms)
{
	int64_t start = now_ms(), deadline = start + answer_ms;
	char line[160], *buf = malloc(ANSWER_MAX + 1);
	int n = snprintf(line, sizeof line, "SLUICE-J 1 env %u %u%.100s\n", job, step, own);
	ssize_t got = -1;

	memset(a, 0, sizeof *a);
	a->kind = SL_SILENT;
	for (errno = ENOMEM; buf;) {
		int fd = dial(socket), err;

		if (fd >= 0) {
			got = -1;
			/* A new connection takes a line at once; after EPIPE there may still be an answer. */
			if (send(fd, line, (size_t)n, MSG_NOSIGNAL) == n || errno == EPIPE)
				got = receive(fd, buf, ANSWER_MAX, deadline);
			err = got == 0 ? ECONNRESET : errno;
			close(fd);
			errno = err;
		}
		if (got > 0 || now_ms() >= deadline)
			break;
		if (errno != EAGAIN && !(absent(errno) && now_ms() - start < absent_ms))
			break;
		/* EAGAIN: its backlog is full. */
		poll(NULL, 0, 10);
	}
	if (got > 0)
		sl_answer_read(a, buf, (size_t)got);
	else
		snprintf(a->text, sizeof a->text, "sluiced does not answer at %s: %s", socket, strerror(errno));
	return buf;
}
