/* What is taken for a slow link: which rates of the last stretches, which connections; and what a look at a socket sees. */
#include "peer.h"
#include "test.h"
#include "throughput.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#define MIB (1u << 20)

/* One stretch of 1 MiB for each rate in MB/s; the link's rate then, in MB/s. */
static unsigned rate_of(const unsigned *mb, size_t n)
{
	struct sl_throughput r;

	sl_throughput_init(&r);
	for (size_t i = 0; i < n; i++) {
		uint64_t ns = (uint64_t)(MIB * 1e3 / mb[i]);

		/* In two parts: the second one completes it. */
		sl_throughput_count(&r, MIB / 2, ns / 2);
		sl_throughput_count(&r, MIB / 2, ns - ns / 2);
	}
	return (unsigned)((sl_throughput(&r) + 500000) / 1000000);
}

#define RATE(...) rate_of((const unsigned[]){ __VA_ARGS__ }, sizeof((const unsigned[]){ __VA_ARGS__ }) / sizeof(unsigned))

static void rates(void)
{
	CHECK(RATE(125, 125, 125, 125, 125, 125, 125) == 0, "seven stretches say nothing yet");
	CHECK(RATE(125, 124, 126, 125, 123, 125, 125, 125) == 125);
	CHECK(RATE(125, 900, 126, 125, 123, 125, 3000, 125) == 126, "two bursts");
	CHECK(RATE(125, 900, 126, 800, 123, 125, 3000, 125) == 0, "three fast ones: neither a slow link nor a fast one");
	CHECK(RATE(125, 5, 126, 125, 123, 125, 4, 125) == 125, "two stalls");
	CHECK(RATE(125, 5, 126, 6, 123, 125, 4, 125) == 0, "three stalls");
	CHECK(RATE(2000, 300, 1500, 200, 3, 1800, 60, 900) == 0, "a busy machine");
	CHECK(RATE(1200, 1100, 1250, 1000, 1240, 1230, 1210, 1190) == 1230, "10 Gb/s");
	/* What was before the last eight is forgotten. */
	CHECK(RATE(3000, 3000, 3000, 3000, 125, 125, 125, 125, 125, 125, 125, 125) == 125, "it became slow");
	CHECK(RATE(125, 125, 125, 125, 125, 125, 125, 125, 2000, 2000, 2000) == 0, "it became fast");
	CHECK(RATE(125, 125, 2000, 2000, 2000, 2000, 2000, 2000, 2000, 2000) == 2000);
}

static void forgets(void)
{
	struct sl_throughput r;

	sl_throughput_init(&r);
	for (int i = 0; i < 8; i++)
		sl_throughput_count(&r, MIB, 8000000);
	CHECK(sl_throughput(&r) / 1000000 == 131);
	sl_throughput_forget(&r);
	CHECK(sl_throughput(&r) == 0);
	for (int i = 0; i < 7; i++)
		sl_throughput_count(&r, MIB, 8000000);
	CHECK(sl_throughput(&r) == 0);
	/* Another thread is counting: this one does not wait, and what it has does not count. */
	pthread_mutex_lock(&r.lock);
	sl_throughput_count(&r, MIB, 8000000);
	CHECK(sl_throughput(&r) == 0);
	pthread_mutex_unlock(&r.lock);
	sl_throughput_count(&r, MIB, 8000000);
	CHECK(sl_throughput(&r) != 0);
}

/* A connection over the loopback interface. */
static void tcp_pair(int fd[2], int family)
{
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr *a = family == AF_INET ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6;
	socklen_t n = family == AF_INET ? sizeof v4 : sizeof v6;
	int l = socket(family, SOCK_STREAM, 0);

	fd[0] = fd[1] = -1;
	if (family == AF_INET6 && (l < 0 || bind(l, a, n))) { /* a machine without IPv6 */
		if (l >= 0)
			close(l);
		return;
	}
	if (family == AF_INET)
		CHECK(!bind(l, a, n));
	CHECK(!listen(l, 1) && !getsockname(l, a, &n));
	fd[0] = socket(family, SOCK_STREAM, 0);
	CHECK(!connect(fd[0], a, n));
	fd[1] = accept(l, NULL, NULL);
	CHECK(fd[1] >= 0);
	close(l);
}

static void machines(void)
{
	int fd[2];

	tcp_pair(fd, AF_INET);
	CHECK(sl_same_machine(fd[0]));
	close(fd[0]);
	close(fd[1]);
	tcp_pair(fd, AF_INET6);
	if (fd[0] >= 0) {
		CHECK(sl_same_machine(fd[0]));
		close(fd[0]);
		close(fd[1]);
	}
	/* Behind a Unix socket there may be a process that encrypts for a network. */
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, fd));
	CHECK(!sl_same_machine(fd[0]));
	close(fd[0]);
	close(fd[1]);
	CHECK(!sl_same_machine(-1));
}

static void send_all(struct sl_peer *t, size_t n)
{
	static char bytes[64 << 10];

	for (size_t k; n; n -= k) {
		k = n < sizeof bytes ? n : sizeof bytes;
		CHECK(write(t->fd, bytes, k) == (ssize_t)k);
		t->uploads.throughput.written += k;
	}
}

static void receive_all(int fd, size_t n)
{
	static char bytes[64 << 10];

	while (n) {
		ssize_t k = read(fd, bytes, n < sizeof bytes ? n : sizeof bytes);

		CHECK(k > 0);
		n -= (size_t)k;
	}
}

static void looks(bool tcp)
{
	const struct timespec nap = { 0, 1000000 };
	struct sl_peer t = { 0 };
	struct sl_look l = { 0 };
	int fd[2];

	if (tcp)
		tcp_pair(fd, AF_INET);
	else
		CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, fd));
	t.fd = fd[0];
	sl_throughput_init(&t.uploads.throughput);
	sl_look_begin(&l, &t);
	CHECK(l.good && !l.queued && !l.full && !l.seen);
	send_all(&t, 50000);
	receive_all(fd[1], 50000);
	/* An acknowledgement may take its time. */
	do {
		nanosleep(&nap, NULL);
		sl_look_again(&l, &t);
		CHECK(l.good);
	} while (l.queued || l.seen < 50000);
	CHECK(l.seen == 50000, "%llu bytes", (unsigned long long)l.seen);
	CHECK(!t.uploads.throughput.bytes, "what buffers absorb says nothing of the link");
	close(fd[0]);
	close(fd[1]);
	sl_look_again(&l, &t);
	CHECK(!l.good);
}

int main(void)
{
	rates();
	forgets();
	machines();
	looks(true);
	looks(false);
	printf("test_throughput: ok\n");
	return 0;
}
