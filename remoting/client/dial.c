/*
 * TCP connections to workers, see dial.h.
 *
 * Locking: the addresses of an owner are published whole and never freed once another thread may use them. When they are looked up
 * again is the affair of the one thread that makes the owner's session's connection again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deadline.h"
#include "dial.h"
#include "wire.h"

/* The kernel repeats a SYN that gets no answer after 1, 3 and 7 seconds. Further attempts notice sooner that the network is back. */
#define DIAL_AGAIN_MS 250
#define DIAL_MOST 20

/* The result of the first attempt that has ended: 0 and *won, or an error. EINPROGRESS if none has ended. */
static int look_at_dials(struct pollfd *p, int n, int *won)
{
	for (int i = 0; i < n; i++) {
		int err = 0;
		socklen_t len = sizeof err;

		if (!p[i].revents)
			continue;
		if (getsockopt(p[i].fd, SOL_SOCKET, SO_ERROR, &err, &len))
			err = errno;
		*won = i;
		return err;
	}
	return EINPROGRESS;
}

static int dial_to(const struct addrinfo *a, int64_t deadline)
{
	struct pollfd p[DIAL_MOST];
	int n = 0, won = -1, err = EINPROGRESS;

	for (int64_t now = sl_now_ms(); err == EINPROGRESS && (!n || now < deadline); now = sl_now_ms()) {
		int64_t until = n + 1 < DIAL_MOST && now + DIAL_AGAIN_MS < deadline ? now + DIAL_AGAIN_MS : deadline;

		if (n < DIAL_MOST) {
			int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

			if (fd < 0) {
				err = errno;
				break;
			}
			p[n++] = (struct pollfd){ .fd = fd, .events = POLLOUT };
			if (!connect(fd, a->ai_addr, a->ai_addrlen)) {
				won = n - 1;
				err = 0;
				break;
			}
			if ((err = errno) != EINPROGRESS)
				break;
		}
		while (err == EINPROGRESS && (now = sl_now_ms()) < until) {
			int ready = poll(p, (nfds_t)n, (int)(until - now));

			if (ready > 0)
				err = look_at_dials(p, n, &won);
			else if (ready < 0 && errno != EINTR)
				err = errno;
		}
	}
	for (int i = 0; i < n; i++)
		if (err || i != won)
			close(p[i].fd);
	errno = err == EINPROGRESS ? ETIMEDOUT : err;
	return err ? -1 : p[won].fd;
}

/* The addresses of HOST:PORT or [IPV6]:PORT; NULL with errno. This takes as long as the resolver does. */
static struct addrinfo *look_up(const char *where)
{
	struct addrinfo hint = { .ai_socktype = SOCK_STREAM }, *list;
	const char *colon = strrchr(where, ':');
	char host[256];
	size_t n;

	errno = EINVAL;
	if (!colon || colon == where || (n = (size_t)(colon - where)) >= sizeof host)
		return NULL;
	if (where[0] == '[' && n > 2 && colon[-1] == ']') {
		where++;
		n -= 2;
	}
	memcpy(host, where, n);
	host[n] = 0;
	if (!getaddrinfo(host, colon + 1, &hint, &list))
		return list;
	errno = EHOSTUNREACH;
	return NULL;
}

/* The first address that answers. Each but the last gets half of the time that is left. */
static int dial_first(const struct addrinfo *a, int64_t deadline)
{
	int fd = -1;

	for (; a && fd < 0; a = a->ai_next) {
		int64_t now = sl_now_ms();

		fd = dial_to(a, a->ai_next ? now + (deadline - now) / 2 : deadline);
	}
	return fd;
}

int sl_look_again_ms = 10000, sl_look_every_ms = 30000;

static struct addrinfo *found[SL_MAX_OWNERS];
static int64_t look_at[SL_MAX_OWNERS]; /* 0: no attempt has failed since the last connection was made */

int sl_dial(const char *where, unsigned owner, bool keep, int64_t deadline)
{
	struct addrinfo *list = look_up(where), *unused = list;
	int fd, err;

	if (!list)
		return -1;
	fd = dial_first(list, deadline);
	err = errno;
	if (fd >= 0 && keep) {
		unused = found[owner];
		found[owner] = list;
	}
	if (unused)
		freeaddrinfo(unused);
	errno = err;
	return fd;
}

int sl_dial_beside(unsigned owner, int64_t deadline)
{
	return dial_first(__atomic_load_n(&found[owner], __ATOMIC_ACQUIRE), deadline);
}

int sl_dial_again(const char *where, unsigned owner, int64_t deadline, int64_t until)
{
	int64_t now = sl_now_ms(), *at = &look_at[owner];
	struct addrinfo *list;

	if (!*at)
		*at = now + sl_look_again_ms;
	if (now >= *at && (!until || until - now > sl_look_every_ms)) {
		list = look_up(where);
		*at = sl_now_ms() + sl_look_every_ms;
		/* The list before stays: a bulk connection may be on its way to one of its addresses. */
		if (list)
			__atomic_store_n(&found[owner], list, __ATOMIC_RELEASE);
	}
	return sl_dial_beside(owner, deadline);
}

void sl_dial_made(unsigned owner)
{
	look_at[owner] = 0;
}
