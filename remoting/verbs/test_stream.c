//go:build ignore

/*
 * Two processes, or two threads, with a TCP connection between them talk by the stream of rdma.h. On a device of the machine's, or on
 * the simulated one (remoting/simverbs).
 *
 *	test_stream ADDRESS            all tests, over a connection to this local address
 *	test_stream ADDRESS cut COMMAND  writes and reads until COMMAND, run after a second, has ended the stream: the error has to come
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stream.c" /* a side that lies says what no function says */

#define MIB (1u << 20)
#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); exit(1); } } while (0)

static const char *address = "127.0.0.1";
static int scale = 1; /* how much less is sent where all is emulated */

struct side {
	int fd;
	struct sl_rdma *r;
	uint64_t seed_out, seed_in, bytes;
};

static void connect_pair(int fd[2])
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(inet_pton(AF_INET, address, &a.sin_addr) == 1);
	CHECK(!bind(l, (struct sockaddr *)&a, len) && !listen(l, 1) && !getsockname(l, (struct sockaddr *)&a, &len));
	fd[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(!connect(fd[0], (struct sockaddr *)&a, len));
	fd[1] = accept(l, NULL, NULL);
	CHECK(fd[1] >= 0);
	close(l);
}

static struct sl_rdma *open_stream(int fd)
{
	char why[256] = "";
	struct sl_rdma *r = sl_rdma_open(fd, getenv("DEVICE"), why, sizeof why);

	if (!r)
		fprintf(stderr, "no stream: %s\n", why);
	CHECK(r);
	return r;
}

static void join(struct sl_rdma *r, const struct wire_verbs_card *card)
{
	char why[256] = "";

	if (!sl_rdma_join(r, card, why, sizeof why))
		fprintf(stderr, "join: %s\n", why);
	CHECK(!*why);
}

/* Both ends in this process. */
static void open_pair(struct side s[2])
{
	struct wire_verbs_card card[2];
	int fd[2];

	connect_pair(fd);
	for (int i = 0; i < 2; i++) {
		s[i] = (struct side){ .fd = fd[i], .r = open_stream(fd[i]), .seed_out = (uint64_t)i + 1, .seed_in = 2 - (uint64_t)i };
		sl_rdma_card(s[i].r, &card[i]);
	}
	join(s[0].r, &card[1]);
	join(s[1].r, &card[0]);
	CHECK(sl_rdma_greet(s[0].r) && sl_rdma_greet(s[1].r));
	CHECK(sl_rdma_met(s[0].r, 20000) && sl_rdma_met(s[1].r, 20000));
}

static void close_pair(struct side s[2])
{
	for (int i = 0; i < 2; i++) {
		sl_rdma_free(s[i].r);
		close(s[i].fd);
	}
}

static uint64_t next(uint64_t *x)
{
	*x ^= *x << 13;
	*x ^= *x >> 7;
	*x ^= *x << 17;
	return *x;
}

/* Sends bytes in writes of all sizes, in up to four parts each. */
static void *sends(void *arg)
{
	struct side *s = arg;
	uint64_t x = s->seed_out * 0x9e3779b97f4a7c15u, sizes = x, done = 0;
	static _Thread_local uint64_t buf[3 * MIB / 8];

	while (done < s->bytes) {
		size_t n = next(&sizes) % 5 == 0 ? next(&sizes) % sizeof buf : next(&sizes) % 300, at = 0;
		struct iovec iov[4];

		n = (n / 8 + 1) * 8;
		if (n > s->bytes - done)
			n = (size_t)(s->bytes - done);
		for (size_t i = 0; i < n / 8; i++)
			buf[i] = next(&x);
		while (at < n) {
			size_t from = at;
			int parts = 0;
			ssize_t k;

			for (; parts < 4 && from < n; parts++) {
				size_t len = parts == 3 ? n - from : (n - from) / 2 + 1;

				iov[parts] = (struct iovec){ (char *)buf + from, len };
				from += len;
			}
			k = sl_rdma_write(s->r, iov, parts, 60000);
			CHECK(k > 0);
			at += (size_t)k;
		}
		done += n;
	}
	return NULL;
}

static void *receives(void *arg)
{
	struct side *s = arg;
	uint64_t x = s->seed_in * 0x9e3779b97f4a7c15u, sizes = x ^ 77, done = 0, word = 0;
	static _Thread_local uint8_t buf[1 * MIB];
	unsigned have = 0;

	while (done < s->bytes) {
		size_t n = next(&sizes) % 3 ? next(&sizes) % 200 + 1 : next(&sizes) % sizeof buf + 1;
		ssize_t k = sl_rdma_read(s->r, buf, n, 60000);

		CHECK(k > 0);
		for (ssize_t i = 0; i < k; i++) {
			word |= (uint64_t)buf[i] << (8 * have);
			if (++have == 8) {
				uint64_t want = next(&x);

				CHECK(word == want);
				word = have = 0;
			}
		}
		done += (uint64_t)k;
	}
	return NULL;
}

/* Both directions at once. */
static void both_ways(void)
{
	struct side s[2];
	pthread_t th[4];

	open_pair(s);
	for (int i = 0; i < 2; i++) {
		s[i].bytes = 64 * MIB / (uint64_t)scale;
		pthread_create(&th[2 * i], NULL, sends, &s[i]);
		pthread_create(&th[2 * i + 1], NULL, receives, &s[i]);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(th[i], NULL);
	CHECK(sl_rdma_flush(s[0].r, 20000) && sl_rdma_flush(s[1].r, 20000));
	printf("both ways: %llu MiB each, %llu messages sent, %llu of them of the control\n", (unsigned long long)(s[0].bytes / MIB),
	       (unsigned long long)s[0].r->sent, (unsigned long long)s[0].r->credits);
	close_pair(s);
}

/* A request and its answer, and what that costs. */
static void *echoes(void *arg)
{
	struct side *s = arg;
	char b[64];
	ssize_t k;

	while ((k = sl_rdma_read(s->r, b, sizeof b, 60000)) > 0)
		CHECK(sl_rdma_write(s->r, &(struct iovec){ b, (size_t)k }, 1, 60000) == k);
	return NULL;
}

static void round_trips(void)
{
	int64_t best = INT64_MAX, began;
	int n = 4000 / scale;
	struct side s[2];
	pthread_t th;
	char b[64] = "request";

	open_pair(s);
	pthread_create(&th, NULL, echoes, &s[1]);
	for (int i = 0; i < n; i++) {
		ssize_t k = 0;

		began = sl_now_ns();
		CHECK(sl_rdma_write(s[0].r, &(struct iovec){ b, sizeof b }, 1, 60000) == (ssize_t)sizeof b);
		while (k < (ssize_t)sizeof b) {
			ssize_t got = sl_rdma_read(s[0].r, b, sizeof b, 60000);

			CHECK(got > 0);
			k += got;
		}
		if (sl_now_ns() - began < best)
			best = sl_now_ns() - began;
	}
	printf("round trips: %d, the best in %.1f us, %llu messages sent\n", n, (double)best / 1e3, (unsigned long long)s[0].r->sent);
	CHECK(s[0].r->sent < (uint64_t)n + (uint64_t)n / 32 + 8);
	shutdown(s[0].fd, SHUT_RDWR);
	pthread_join(th, NULL);
	close_pair(s);
}

/* The other side does not read: the writer waits, and goes on when it does. */
static void held_up(void)
{
	static uint8_t buf[MIB];
	struct side s[2];
	uint64_t put = 0, got = 0;
	int64_t began;

	open_pair(s);
	for (;;) {
		ssize_t k = sl_rdma_write(s[0].r, &(struct iovec){ buf, sizeof buf }, 1, 200);

		if (k < 0) {
			CHECK(errno == ETIMEDOUT);
			break;
		}
		put += (uint64_t)k;
	}
	CHECK(put == SL_RDMA_RING);
	while (got < put) {
		ssize_t k = sl_rdma_read(s[1].r, buf, sizeof buf, 60000);

		CHECK(k > 0);
		got += (uint64_t)k;
	}
	CHECK(sl_rdma_write(s[0].r, &(struct iovec){ buf, 5 }, 1, 60000) == 5);
	CHECK(sl_rdma_read(s[1].r, buf, sizeof buf, 60000) == 5);
	began = sl_now_ms();
	CHECK(sl_rdma_read(s[1].r, buf, sizeof buf, 100) == -1 && errno == EAGAIN && sl_now_ms() - began >= 99);
	CHECK(sl_rdma_read(s[1].r, buf, sizeof buf, 0) == -1 && errno == EAGAIN);
	CHECK(!sl_rdma_readable(s[1].r, 20));
	close_pair(s);
	printf("held up: after %llu bytes\n", (unsigned long long)put);
}

/*
 * Thousands of writes that nobody has looked at: the other side has receives for SL_RDMA_RECEIVES messages, and what is more waits, goes in
 * larger ones, and holds nobody up.
 */
static void many_small(void)
{
	struct side s[2];
	uint64_t x = 88, y = 88, b;
	int n = 20000 / scale;

	open_pair(s);
	for (int i = 0; i < n; i++) {
		next(&x);
		CHECK(sl_rdma_write(s[0].r, &(struct iovec){ &x, 8 }, 1, 1000) == 8);
	}
	CHECK(s[0].r->sent < SL_RDMA_RECEIVES);
	for (int i = 0; i < n; i++) {
		size_t got = 0;

		while (got < 8) {
			ssize_t k = sl_rdma_read(s[1].r, (uint8_t *)&b + got, 8 - got, 0);

			if (k < 0 && errno == EAGAIN)
				CHECK(sl_rdma_read(s[0].r, &b, 1, 0) == -1 && errno == EAGAIN); /* the writer's side looks, too */
			else
				CHECK(k > 0);
			got += k > 0 ? (size_t)k : 0;
		}
		CHECK(b == next(&y));
	}
	for (int i = 0; i < 3000; i++) {
		CHECK(sl_rdma_write(s[0].r, &(struct iovec){ &b, 8 }, 1, 60000) == 8 && sl_rdma_flush(s[0].r, 20000));
		CHECK(sl_rdma_read(s[1].r, &b, 8, 60000) == 8);
	}
	CHECK(sl_rdma_flush(s[0].r, 20000));
	close_pair(s);
	printf("many small: %d writes were held by nobody\n", n);
}

struct late {
	struct side *s;
	bool writes;
	ssize_t result;
	int error;
};

static void *waits(void *arg)
{
	static uint8_t b[MIB];
	struct late *l = arg;

	do
		l->result = l->writes ? sl_rdma_write(l->s->r, &(struct iovec){ b, sizeof b }, 1, 60000) : sl_rdma_read(l->s->r, b, 1, 60000);
	while (l->writes && l->result > 0);
	l->error = errno;
	return NULL;
}

/* The socket's end is the stream's, on both sides, for a reader and a writer that wait; what came before it is read. */
static void socket_ends(void)
{
	for (int here = 0; here < 2; here++) {
		struct side s[2];
		struct late l[2];
		pthread_t th[2];
		char b[8];

		open_pair(s);
		CHECK(sl_rdma_write(s[0].r, &(struct iovec){ "before", 6 }, 1, 60000) == 6);
		CHECK(sl_rdma_flush(s[0].r, 20000));
		for (int i = 0; i < 2; i++) {
			l[i] = (struct late){ .s = &s[0], .writes = i };
			pthread_create(&th[i], NULL, waits, &l[i]);
		}
		usleep(100000);
		shutdown(s[here ? 0 : 1].fd, SHUT_RDWR);
		for (int i = 0; i < 2; i++)
			pthread_join(th[i], NULL);
		CHECK(l[0].result == 0 && l[1].result == -1 && l[1].error == EPIPE);
		CHECK(sl_rdma_read(s[1].r, b, 6, 1000) == 6 && !memcmp(b, "before", 6));
		close_pair(s);
	}
	printf("socket ends: both sides notice\n");
}

/* Tells the other side what is not so. */
static void lie_to(struct sl_rdma *r, uint64_t read, uint64_t received)
{
	pthread_mutex_lock(&r->lock);
	r->out_control[1].read = read; /* the first place has the greeting */
	r->out_control[1].received = received;
	post(r, &r->out_control[1], sizeof *r->out_control, sizeof *r->out_control, 0);
	pthread_mutex_unlock(&r->lock);
}

/* Says that imm bytes have come. */
static void claim(struct sl_rdma *r, uint32_t imm)
{
	pthread_mutex_lock(&r->lock);
	post(r, r->out, 8, SL_RDMA_CONTROL, imm);
	pthread_mutex_unlock(&r->lock);
}

/* Sends an empty message of another kind than the stream's, which takes one of the other side's receives too. */
static void send_other(struct sl_rdma *r, int opcode)
{
	struct vb_send w = { .opcode = opcode, .flags = VB_SIGNALED }, *bad;

	pthread_mutex_lock(&r->lock);
	CHECK(!r->dev.context->ops.post_send(r->qp, &w, &bad));
	r->sending++;
	pthread_mutex_unlock(&r->lock);
}

/* A message without a number, or whose number is of another kind, is not counted as one of this side's own that has been sent. */
static void other_kinds(void)
{
	enum { SEND = 2, SEND_WITH_IMM = 3 };

	for (int opcode = SEND; opcode <= SEND_WITH_IMM; opcode++) {
		struct side s[2];
		char b[8];

		open_pair(s);
		send_other(s[0].r, opcode);
		CHECK(sl_rdma_read(s[1].r, b, sizeof b, 20000) == -1 && errno == EPROTO);
		CHECK(s[1].r->sending >= 0);
		close_pair(s);
	}
	printf("other kinds of messages: each ends the stream\n");
}

/* Another side that lies about counts ends the stream and does nothing else. */
static void lies(void)
{
	static const struct { uint64_t read, received; } lie[] = { { 1, 0 }, { UINT64_MAX, 0 }, { 0, UINT64_MAX }, { 0, 1000 } };

	for (size_t i = 0; i < sizeof lie / sizeof lie[0]; i++) {
		struct side s[2];
		char b[8];

		open_pair(s);
		lie_to(s[0].r, lie[i].read, lie[i].received);
		CHECK(sl_rdma_read(s[1].r, b, sizeof b, 20000) == -1 && errno == EPROTO);
		CHECK(sl_rdma_write(s[1].r, &(struct iovec){ b, sizeof b }, 1, 1000) == -1);
		close_pair(s);
	}
	for (uint32_t imm = SL_RDMA_MESSAGE + 1;; imm = 0xffffffff) {
		struct side s[2];
		char b[8];

		open_pair(s);
		claim(s[0].r, imm);
		CHECK(sl_rdma_read(s[1].r, b, sizeof b, 20000) == -1 && errno == EPROTO);
		close_pair(s);
		if (imm == 0xffffffff)
			break;
	}
	printf("lies: each ends the stream\n");
}

/* Cards that make no sense are refused before anything is connected. */
static void cards(void)
{
	struct wire_verbs_card good, c;
	char why[256];
	struct side s[2];

	open_pair(s);
	sl_rdma_card(s[1].r, &good);
	for (int i = 0; i < 6; i++) {
		c = good;
		switch (i) {
		case 0: c.qpn = 0; break;
		case 1: c.qpn = 1u << 24; break;
		case 2: c.mtu = 6; break;
		case 3: c.size = SL_RDMA_RING * 2; break;
		case 4: c.link = 3; break;
		case 5: c.psn = 1u << 31; break;
		}
		*why = 0;
		CHECK(!sl_rdma_join(s[0].r, &c, why, sizeof why) && *why);
	}
	close_pair(s);
	printf("cards: what makes no sense is refused\n");
}

/* Writes until something ends it. */
static int until_it_ends(const char *command)
{
	static uint8_t buf[64 << 10];
	struct side s[2];
	pthread_t th;
	int64_t began = 0;
	ssize_t k;

	open_pair(s);
	pthread_create(&th, NULL, echoes, &s[1]);
	if (!fork()) {
		sleep(1);
		_exit(system(command) ? 1 : 0);
	}
	do {
		size_t got = 0;

		began = sl_now_ms();
		k = sl_rdma_write(s[0].r, &(struct iovec){ buf, 64 }, 1, 10000);
		while (k > 0 && got < 64) {
			ssize_t n = sl_rdma_read(s[0].r, buf, 64, 10000);

			if (n <= 0)
				k = n;
			else
				got += (size_t)n;
		}
	} while (k > 0);
	/* Where the link is lost the device says so after half a second, or nothing comes and the keep-alive of a session says so. */
	printf("cut: %zd, %s, after %lld ms\n", k, strerror(errno), (long long)(sl_now_ms() - began));
	return sl_now_ms() - began < 15000 ? 0 : 1;
}

int main(int n, char **arg)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (n > 1)
		address = arg[1];
	if (getenv("SCALE"))
		scale = atoi(getenv("SCALE"));
	if (n > 3)
		return until_it_ends(arg[3]);
	cards();
	round_trips();
	held_up();
	many_small();
	both_ways();
	socket_ends();
	lies();
	other_kinds();
	return 0;
}
