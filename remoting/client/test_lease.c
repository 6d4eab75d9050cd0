/*
 * The lease's socket against a daemon of our own: the bytes of the request, the
 * descriptor, refusals, and a daemon that is absent, restarts, is full, is
 * silent or talks nonsense.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "lease.h"
#include "test.h"

static char dir[64], path[256];

struct step {
	uint32_t magic, status, owners, len;
	const char *payload;
	int ndesc;	/* descriptors to attach */
	int cut;	/* bytes of the answer to send, -1 all */
	bool silent;
};

static struct step steps[4];
static int nsteps;
static uint8_t asked[64];

static int listen_at(const char *p, int backlog)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	strcpy(a.sun_path, p);
	unlink(p);
	if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, backlog)) {
		perror(p);
		exit(1);
	}
	return fd;
}

static void answer(int c, const struct step *s)
{
	uint32_t head[4] = { s->magic, s->status, s->owners, s->len };
	char control[CMSG_SPACE(4 * sizeof(int))] = { 0 }, buf[8192];
	struct iovec iov = { buf, 0 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	int pair[2], fds[4];

	memcpy(buf, head, 16);
	if (s->payload)
		memcpy(buf + 16, s->payload, s->len);
	iov.iov_len = s->cut >= 0 ? (size_t)s->cut : 16u + (s->payload ? s->len : 0);
	if (s->ndesc) {
		struct cmsghdr *h;

		socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
		for (int i = 0; i < s->ndesc; i++)
			fds[i] = pair[1];
		m.msg_control = control;
		m.msg_controllen = CMSG_SPACE((size_t)s->ndesc * sizeof(int));
		h = CMSG_FIRSTHDR(&m);
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN((size_t)s->ndesc * sizeof(int));
		memcpy(CMSG_DATA(h), fds, (size_t)s->ndesc * sizeof(int));
	}
	if (iov.iov_len && sendmsg(c, &m, MSG_NOSIGNAL) < 0)
		perror("sendmsg");
	if (s->ndesc) {
		close(pair[1]);
		/* Nobody takes it where the answer is cut short. */
		if (send(pair[0], "hi", 2, MSG_NOSIGNAL) < 0 && s->cut < 0 && errno != EPIPE)
			perror("send");
		close(pair[0]);
	}
}

/* Listens after arg milliseconds, then answers step by step. */
static void *daemon_thread(void *arg)
{
	usleep(*(int *)arg * 1000u);
	int l = listen_at(path, 16), held = -1;

	for (int i = 0; i < nsteps; i++) {
		int c = accept(l, NULL, NULL);

		if (recv(c, asked, sizeof asked, MSG_WAITALL) != sizeof asked)
			fprintf(stderr, "short request\n");
		if (steps[i].silent) {
			held = c;
			continue;
		}
		answer(c, &steps[i]);
		close(c);
	}
	if (held >= 0) {
		char b;

		if (read(held, &b, 1) < 0)
			perror("read");
		close(held);
	}
	close(l);
	unlink(path);
	return NULL;
}

static int fds_open(void)
{
	int n = 0;

	for (int i = 0; i < 256; i++)
		n += fcntl(i, F_GETFD) >= 0;
	return n;
}

static int64_t ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int run(int delay, int n, const struct step *s, struct sl_lease_answer *a)
{
	pthread_t t;
	int fd;

	nsteps = n;
	memcpy(steps, s, (size_t)n * sizeof *s);
	pthread_create(&t, NULL, daemon_thread, &delay);
	if (!delay)
		while (access(path, F_OK))
			usleep(1000);
	fd = sl_lease_open(path, 2, 3, 300, 0, a);
	pthread_join(t, NULL);
	return fd;
}

#define OK 0x4c4c4c53u, 0, 5

static void good(void)
{
	static const uint32_t shm = 1;
	struct sl_lease_answer a;
	char b[3] = "";
	int before = fds_open(), fd;

	fd = run(0, 1, (struct step[]){ { OK, 0, NULL, 1, -1, false } }, &a);
	CHECK(fd >= 0 && a.owners == 5 && !a.shm && !a.status);
	CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC && fcntl(fd, F_GETFL) & O_NONBLOCK);
	CHECK(read(fd, b, 2) == 2 && !strcmp(b, "hi"));
	close(fd);
	CHECK(!memcmp(asked, "SLUICE-L\1\0\0\0\2\0\0\0\3\0\0\0\0\0\0\0test_lease\0", 35));

	fd = run(0, 1, (struct step[]){ { OK, 4, (const char *)&shm, 1, -1, false } }, &a);
	CHECK(fd >= 0 && a.shm);
	close(fd);

	/* More descriptors than one are closed, not kept. */
	fd = run(0, 1, (struct step[]){ { OK, 0, NULL, 3, -1, false } }, &a);
	CHECK(fd >= 0);
	close(fd);
	CHECK(fds_open() == before);
}

static void refused(void)
{
	struct sl_lease_answer a;
	int before = fds_open();

	CHECK(run(0, 1, (struct step[]){ { 0x4c4c4c53u, 3, 1, 9, "ended\nnow", 1, -1, false } }, &a) == -1);
	CHECK(a.status == 3 && !strcmp(a.reason, "ended now"));
	CHECK(run(0, 1, (struct step[]){ { 1, 0, 1, 0, NULL, 1, -1, false } }, &a) == -1 && strstr(a.reason, "not the daemon"));
	CHECK(run(0, 1, (struct step[]){ { 0x4c4c4c53u, 0, 1, 5000, NULL, 1, -1, false } }, &a) == -1 && strstr(a.reason, "not the daemon"));
	CHECK(run(0, 1, (struct step[]){ { 0x4c4c4c53u, 0, 0, 0, NULL, 1, -1, false } }, &a) == -1 && strstr(a.reason, "owners"));
	CHECK(run(0, 1, (struct step[]){ { OK, 0, NULL, 0, -1, false } }, &a) == -1 && strstr(a.reason, "without its connection"));
	CHECK(run(0, 1, (struct step[]){ { OK, 0, NULL, 0, 0, true } }, &a) == -1 && strstr(a.reason, "no answer"));
	CHECK(a.status == ~0u);
	CHECK(fds_open() == before);
}

/* Killed before or inside its answer, or busy: asked again. */
static void restarts(void)
{
	struct sl_lease_answer a;
	int before = fds_open(), fd;

	fd = run(0, 4, (struct step[]){ { OK, 0, NULL, 0, 0, false }, { OK, 0, NULL, 1, 7, false },
					{ 0x4c4c4c53u, 6, 1, 4, "busy", 0, -1, false }, { OK, 0, NULL, 1, -1, false } }, &a);
	CHECK(fd >= 0 && a.owners == 5);
	close(fd);
	/* Not there yet: its directory is. */
	fd = run(300, 1, (struct step[]){ { OK, 0, NULL, 1, -1, false } }, &a);
	CHECK(fd >= 0);
	close(fd);
	CHECK(fds_open() == before);
}

static void absent(void)
{
	struct sl_lease_answer a;
	int64_t t = ms();
	int fd;

	/* The directory is gone, and with it the lease: no waiting. */
	CHECK(sl_lease_open("/nonexistent/lease/sock", 1, 0, 300, 0, &a) == -1 && strstr(a.reason, "ended"));
	CHECK(ms() - t < 200);
	fd = listen_at(path, 1);
	close(fd);
	t = ms();
	CHECK(sl_unix_dial(path, t + 200, true) == -1 && errno == ECONNREFUSED && ms() - t >= 200);
	t = ms();
	CHECK(sl_unix_dial(path, t + 200, false) == -1 && errno == ECONNREFUSED && ms() - t < 150);
	unlink(path);
	/* Nobody waits longer than asked. */
	t = ms();
	CHECK(sl_lease_open(path, 1, 0, 300, t + 200, &a) == -1 && strstr(a.reason, "ended") && ms() - t >= 200 && ms() - t < 1000);
}

static void *accept_later(void *arg)
{
	int l = *(int *)arg, c;

	usleep(100000);
	for (int i = 0; i < 3; i++)
		if ((c = accept(l, NULL, NULL)) >= 0)
			close(c);
	return NULL;
}

/* A full backlog of a Unix socket answers EAGAIN at once. */
static void full(void)
{
	int l = listen_at(path, 0), a, b;
	pthread_t t;

	a = sl_unix_dial(path, 0, false);
	CHECK(a >= 0);
	b = sl_unix_dial(path, 0, false);
	CHECK(b == -1 && errno == EAGAIN);
	pthread_create(&t, NULL, accept_later, &l);
	b = sl_unix_dial(path, ms() + 3000, false);
	CHECK(b >= 0);
	close(a);
	close(b);
	shutdown(l, SHUT_RDWR);
	close(l);
	pthread_join(t, NULL);
	unlink(path);
}

/* Longer than an address holds. */
static void deep(void)
{
	char p[400], q[400];
	int l, c, n = snprintf(p, sizeof p, "%s/", dir);

	memset(p + n, 'd', 120);
	p[n + 120] = 0;
	CHECK(!mkdir(p, 0700));
	l = open(p, O_PATH | O_DIRECTORY);
	snprintf(q, sizeof q, "/proc/self/fd/%d/sock", l);
	c = listen_at(q, 1);
	strcat(p, "/sock");
	int fd = sl_unix_dial(p, 0, false);
	CHECK(fd >= 0);
	close(fd);
	close(c);
	close(l);
	unlink(p);
	*strrchr(p, '/') = 0;
	rmdir(p);
}

int main(void)
{
	signal(SIGPIPE, SIG_IGN);
	strcpy(dir, "/tmp/sluice-lease-XXXXXX");
	if (!mkdtemp(dir))
		return 1;
	snprintf(path, sizeof path, "%s/sock", dir);
	good();
	refused();
	restarts();
	absent();
	full();
	deep();
	rmdir(dir);
	printf("test_lease: ok\n");
	return 0;
}
