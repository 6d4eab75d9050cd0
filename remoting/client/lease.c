/*
 * The lease's socket, see lease.h.
 *
 * Flow: connect, send 64 bytes, receive 16 with the descriptor attached, then the
 * payload. One thread, nothing shared, no lock. A daemon may be killed and
 * restarted at any moment of this; so a connection that ends before the first byte
 * of an answer is made again while the patience lasts: asking twice costs at most a
 * session that ends as soon as it has begun.
 */
#define _GNU_SOURCE
#include "lease.h"
#include "deadline.h"
#include "exchange.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static void nap(int *ms)
{
	struct timespec t = { 0, *ms * 1000000L };

	nanosleep(&t, NULL);
	if (*ms < 100)
		*ms *= 2;
}

/* ---- connecting ---- */

/* Opens the directory of a path; the name in it goes into *name. */
static int open_dir(const char *path, const char **name)
{
	const char *slash = strrchr(path, '/');
	char dir[4096];
	size_t n = slash ? (size_t)(slash - path) : 0;

	*name = slash ? slash + 1 : path;
	if (n >= sizeof dir) {
		errno = ENAMETOOLONG;
		return -1;
	}
	memcpy(dir, path, n);
	dir[n] = 0;
	return open(!slash ? "." : n ? dir : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static int dial_once(const char *path)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd, dir = -1, n, err;
	const char *name;

	/* An address holds 107 bytes; a longer path is reached through its directory. */
	if (strlen(path) < sizeof a.sun_path) {
		strcpy(a.sun_path, path);
	} else {
		dir = open_dir(path, &name);
		if (dir < 0)
			return -1;
		n = snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/%s", dir, name);
		if (n < 0 || (size_t)n >= sizeof a.sun_path) {
			close(dir);
			errno = ENAMETOOLONG;
			return -1;
		}
	}
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a)) {
		err = errno;
		close(fd);
		errno = err;
		fd = -1;
	}
	err = errno;
	if (dir >= 0)
		close(dir);
	errno = err;
	return fd;
}

/* Whether the directory still exists of a path that has no socket in it. */
static bool dir_lives(const char *path)
{
	const char *name;
	int fd = open_dir(path, &name);

	if (fd < 0)
		return false;
	close(fd);
	return true;
}

int sl_unix_dial(const char *path, int64_t deadline, bool absent)
{
	int ms = 5;

	for (;;) {
		int fd = dial_once(path), err = errno;
		bool again = fd < 0 && (err == EAGAIN || err == EINTR ||
					(absent && (err == ECONNREFUSED || (err == ENOENT && dir_lives(path)))));

		errno = err;
		if (!again || sl_now_ms() >= deadline)
			return fd;
		nap(&ms);
	}
}

/* ---- asking ---- */

void sl_program_name(char *name, size_t cap)
{
	int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	ssize_t n;

	memset(name, 0, cap);
	if (fd < 0)
		return;
	n = read(fd, name, cap - 1);
	close(fd);
	/* The kernel ends the name with a newline. */
	if (n > 0 && name[n - 1] == '\n')
		name[n - 1] = 0;
}

static int fail(struct sl_lease_answer *a, int fd, int got, const char *path, const char *why, const char *remedy)
{
	if (fd >= 0)
		close(fd);
	if (got >= 0)
		close(got);
	snprintf(a->reason, sizeof a->reason, "lease socket %s: %s; %s", path, why, remedy);
	return -1;
}

/* One request on a new connection. *again: the daemon went away, or is busy. */
static int ask(const char *path, int fd, uint32_t kind, uint32_t owner, int64_t deadline, struct sl_lease_answer *a, bool *again)
{
	struct wire_lease_request q = { .version = SL_LEASE_VERSION, .kind = kind, .owner = owner };
	char payload[SL_MAX_LEASE_PAYLOAD + 1];
	struct wire_lease_answer h;
	uint32_t flags = 0;
	int got = -1;

	memcpy(q.magic, SL_LEASE_REQUEST_MAGIC, sizeof q.magic);
	sl_program_name(q.program, sizeof q.program);
	*again = false;
	if (!sl_send_all(fd, &q, sizeof q, deadline) || !sl_recv_all(fd, &h, sizeof h, &got, deadline)) {
		*again = errno != ETIMEDOUT;
		return fail(a, fd, got, path, errno == ETIMEDOUT ? "no answer" : "closed without an answer",
			    "is sluiced healthy on this node? see sluice health");
	}
	if (h.magic != SL_LEASE_ANSWER_MAGIC || h.size > SL_MAX_LEASE_PAYLOAD)
		return fail(a, fd, got, path, "not the daemon's answer", "are shim and sluiced of one version?");
	if (!sl_recv_all(fd, payload, h.size, &got, deadline)) {
		*again = errno != ETIMEDOUT;
		return fail(a, fd, got, path, "the answer was cut short", "is sluiced healthy on this node? see sluice health");
	}
	close(fd);
	a->status = h.status;
	a->owners = h.owners;
	if (h.status) {
		payload[h.size] = 0;
		for (char *p = payload; *p; p++)
			if ((unsigned char)*p < 0x20 || *p == 0x7f)
				*p = ' ';
		snprintf(a->reason, sizeof a->reason, "%.*s", (int)sizeof a->reason - 1, payload);
		if (got >= 0)
			close(got);
		*again = h.status == SL_STATUS_BUSY;
		return -1;
	}
	if (got < 0)
		return fail(a, -1, -1, path, "the session came without its connection", "are shim and sluiced of one version?");
	if (!h.owners)
		return fail(a, -1, got, path, "the lease has no owners", "are shim and sluiced of one version?");
	if (h.owners > SL_MAX_OWNERS)
		return fail(a, -1, got, path, "the lease is spread over more owners than a program can use",
			    "ask for fewer fractions; see docs/limits.md");
	if (h.size >= sizeof flags)
		memcpy(&flags, payload, sizeof flags);
	a->shm = flags & SL_LEASE_SHM;
	fcntl(got, F_SETFL, fcntl(got, F_GETFL) | O_NONBLOCK);
	return got;
}

int sl_lease_open(const char *path, uint32_t kind, uint32_t owner, int answer_ms, int64_t until, struct sl_lease_answer *a)
{
	int64_t deadline = sl_deadline(SL_LEASE_PATIENCE_MS, until);
	bool again;
	int ms = 5;

	for (;;) {
		int fd = sl_unix_dial(path, deadline, true), got;

		memset(a, 0, sizeof *a);
		a->status = ~0u;
		if (fd < 0)
			return fail(a, -1, -1, path, strerror(errno),
				    errno == EACCES || errno == EPERM ? "the lease is another user's" :
				    errno == ENOENT ? "the lease has ended, or was never on this node" :
				    "is sluiced running on this node? see sluice health");
		got = ask(path, fd, kind, owner, sl_deadline(answer_ms, until), a, &again);
		if (got >= 0 || !again || sl_now_ms() >= deadline)
			return got;
		nap(&ms);
	}
}
