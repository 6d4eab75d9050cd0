/*
 * The decoder of a snapshot: what is right, what is too much, and every length
 * that is too short or too long. The list that several owners' devices make. And how
 * often a worker's name is looked up.
 */
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "connect.h"
#include "deadline.h"
#include "dial.h"
#include "log.h"
#include "test.h"

const char sl_log_prefix[] = "test_connect: ";
const int sl_log_default = -1;

static uint8_t data[1 << 18];
static size_t size;

static void add(const void *p, size_t n)
{
	memcpy(data + size, p, n);
	size += n;
}

/* A snapshot of some devices, each with some attributes. */
static void make(uint32_t ndev, uint32_t nattr)
{
	struct wire_snapshot_head h = { .driver_version = 13000, .ndev = ndev, .keepalive_ms = 10000, .driver_string = "580.159.04" };

	size = 0;
	add(&h, sizeof h);
	for (uint32_t d = 0; d < ndev; d++) {
		struct wire_device_head v = { .name = "a\x1bGPU", .total_mem = 1000 + d, .pci_bus = 0x41, .pci_bus_id = "0000:41:00.0",
					      .prio_greatest = -5, .cc_major = 9, .nattr = nattr };

		v.limits[7] = SL_UNSUPPORTED;
		v.uuid[0] = (uint8_t)d;
		add(&v, sizeof v);
		for (uint32_t i = 0; i < nattr; i++)
			add(&(int32_t){ (int32_t)(100 * d + i) }, 4);
		for (uint32_t i = 0; i < nattr; i++)
			add(&(uint8_t){ i & 1 }, 1);
		while (size % 8)
			add("", 1);
	}
}

static bool decoded(struct sl_snapshot *s, size_t n)
{
	/* As large as the message, so that the sanitizer sees a byte read behind it. */
	uint8_t *p = malloc(n ? n : 1);
	bool ok;

	memcpy(p, data, n);
	ok = sl_snapshot_decode(s, p, n);
	free(p);
	return ok;
}

/* ---- a worker whose name is known once ---- */

static int listening;
static struct sockaddr_in address = { .sin_family = AF_INET }, moved;
static unsigned lookups;
static bool answers; /* after the first time */

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **list)
{
	static struct addrinfo a = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_addrlen = sizeof address, .ai_addr = (void *)&address }, b;

	(void)hints;
	CHECK(!strcmp(node, "worker.example") && !strcmp(service, "7"));
	b = a;
	b.ai_addr = (void *)&moved;
	*list = lookups++ ? &b : &a;
	return lookups > 1 && !answers ? EAI_AGAIN : 0;
}

void freeaddrinfo(struct addrinfo *list)
{
	(void)list;
}

/* Takes so many bytes of a connection, and answers with a WELCOME. */
static int welcome(size_t asks, const void *p, size_t n)
{
	struct wire_welcome w = { .magic = SL_WELCOME_MAGIC, .version = SL_VERSION, .size = (uint32_t)n };
	int c = accept(listening, NULL, NULL);
	uint8_t ask[256];

	CHECK(recv(c, ask, asks, MSG_WAITALL) == (ssize_t)asks);
	CHECK(send(c, &w, sizeof w, MSG_NOSIGNAL) == sizeof w && send(c, p, n, MSG_NOSIGNAL) == (ssize_t)n);
	return c;
}

static void *worker(void *arg)
{
	int first = welcome(sizeof(struct wire_hello), data, size);

	close(welcome(sizeof(struct wire_hello) + sizeof(struct wire_attach), arg, sizeof(struct wire_attached)));
	close(first);
	return NULL;
}

/* A connection that is made again goes to the address that the first one went to: nobody may answer for the name. */
static void looked_up_once(void)
{
	struct sl_ask ask = { .kind = SL_SESSION_COMPUTE, .patience_ms = 10000 };
	struct wire_attached told = { .received = 7 }, heard = { 0 };
	socklen_t len = sizeof address;
	struct wire_attach attach = { 0 };
	static struct sl_snapshot s;
	struct sl_connection c, again;
	char reason[64];
	pthread_t t;

	listening = socket(AF_INET, SOCK_STREAM, 0);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	/* The port is used again below. */
	CHECK(!setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)) && !bind(listening, (void *)&address, sizeof address) && !listen(listening, 4) && !getsockname(listening, (void *)&address, &len));
	setenv("SLUICE_WORKER", "tcp:worker.example:7", 1);
	unsetenv("SLUICE_SOCKET");
	make(1, 1);
	pthread_create(&t, NULL, worker, &told);
	CHECK(sl_connect(&ask, &c, &s) == SL_CONNECTED && s.ndev == 1 && lookups == 1);
	ask.kind = SL_SESSION_ATTACH;
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_CONNECTED);
	CHECK(heard.received == 7 && lookups == 1);
	pthread_join(t, NULL);
	close(c.fd);
	close(again.fd);
	close(listening);
}

static void *moved_worker(void *arg)
{
	close(welcome(sizeof(struct wire_hello) + sizeof(struct wire_attach), arg, sizeof(struct wire_attached)));
	return NULL;
}

static void *stranger(void *arg)
{
	close(accept(*(int *)arg, NULL, NULL));
	return NULL;
}

/* After the address has failed for a while, the name may stand for another one. */
static void looked_up_again(void)
{
	struct sl_ask ask = { .kind = SL_SESSION_ATTACH, .patience_ms = 10000 };
	struct wire_attached told = { .received = 8 }, heard = { 0 };
	socklen_t len = sizeof moved;
	struct wire_attach attach = { 0 };
	struct sl_connection again;
	int other;
	char reason[64];
	pthread_t t;

	moved = address;
	moved.sin_port = 0;
	listening = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(!bind(listening, (void *)&moved, sizeof moved) && !listen(listening, 4) && !getsockname(listening, (void *)&moved, &len));
	sl_look_again_ms = 1;
	sl_look_every_ms = 0;
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_UNREACHABLE && lookups == 1);
	usleep(2000);
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_UNREACHABLE && lookups == 2);
	ask.until = sl_now_ms() + 5000;
	sl_look_every_ms = 60000; /* more than is left */
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_UNREACHABLE && lookups == 2);
	/* What answers at the old address, and is no worker, does not count as a connection that was made. */
	ask.until = 0;
	sl_look_every_ms = 0;
	other = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(!setsockopt(other, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)) && !bind(other, (void *)&address, sizeof address) && !listen(other, 4));
	pthread_create(&t, NULL, stranger, &other);
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_BROKEN && lookups == 3);
	pthread_join(t, NULL);
	answers = true;
	pthread_create(&t, NULL, moved_worker, &told);
	CHECK(sl_connect_again(&ask, 1, &attach, 10000, &again, &heard, reason, sizeof reason) == SL_CONNECTED && heard.received == 8 && lookups == 4);
	pthread_join(t, NULL);
	close(again.fd);
	close(listening);
	close(other);
}

int main(void)
{
	static struct sl_snapshot s, all;
	struct wire_snapshot_head *h = (void *)data;

	make(2, 3);
	CHECK(decoded(&s, size));
	CHECK(s.ndev == 2 && s.driver_version == 13000 && s.keepalive_ms == 10000 && !strcmp(s.driver_string, "580.159.04"));
	CHECK(!strcmp(s.dev[0].name, "a?GPU") && s.dev[1].total_mem == 1001 && s.dev[1].uuid[0] == 1 && s.dev[1].pci_bus == 0x41);
	CHECK(!strcmp(s.dev[1].pci_bus_id, "0000:41:00.0") && s.dev[1].prio_greatest == -5 && s.dev[1].limits[7] == SL_UNSUPPORTED);
	CHECK(s.dev[1].nattr == 3 && s.dev[1].attr[2] == 102 && s.dev[1].attr_ok[1] == 1 && !s.dev[1].attr_ok[2] && !s.dev[1].attr[3]);
	for (size_t n = 0; n < size; n++)
		CHECK(!decoded(&s, n));
	add("", 1);
	CHECK(!decoded(&s, size));

	make(SL_MAX_DEVICES, SL_MAX_ATTRS);
	CHECK(decoded(&s, size) && s.ndev == SL_MAX_DEVICES);
	make(SL_MAX_DEVICES + 1, 1);
	CHECK(!decoded(&s, size));
	make(1, SL_MAX_ATTRS + 1);
	CHECK(!decoded(&s, size));
	make(1, 1);
	h->keepalive_ms = SL_KEEPALIVE_LEAST_MS - 1;
	CHECK(!decoded(&s, size));
	h->keepalive_ms = SL_KEEPALIVE_MOST_MS + 1;
	CHECK(!decoded(&s, size));

	/* Two owners: one list, and the older driver. */
	make(10, 1);
	CHECK(decoded(&s, size) && sl_snapshot_add(&all, &s) && all.ndev == 10 && all.driver_version == 13000 && all.keepalive_ms == 10000);
	make(6, 1);
	h->driver_version = 12040;
	strcpy(h->driver_string, "550.1");
	CHECK(decoded(&s, size) && sl_snapshot_add(&all, &s) && all.ndev == 16 && all.driver_version == 12040);
	CHECK(!strcmp(all.driver_string, "550.1") && all.dev[10].total_mem == 1000);
	CHECK(!sl_snapshot_add(&all, &s) && all.ndev == 16);
	looked_up_once();
	looked_up_again();
	printf("test_connect: ok\n");
	return 0;
}
