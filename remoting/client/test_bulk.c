/*
 * Bulk connections against a worker that is made here: whatever becomes of connections, every byte of a copy to the device arrives once and the
 * last frame is the last one; what comes from the device is written where it belongs, and not after its delivery has ended.
 */
static int idle_ms = 20000;
#define SL_BULK_IDLE_MS idle_ms
#include "bulk.c"
#include "bulkdown.c"
#include "bulkup.c"
#include "test.h"
#include "waits.h"

#include <semaphore.h>
#include <signal.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define DEVICE 0x1000000u	/* address of the device's memory */

const char sl_log_prefix[] = "test_bulk: ";
const int sl_log_default = -1;
struct sl_stats sl_stats;
unsigned sl_sessions = 1;

/* ---- what the rest of the shim does ---- */

enum { SOON_MS = 300, PATIENT_MS = 20000 };	/* keep-alive times: where a test waits for one, and where a busy machine may take none for dead */

static struct sl_peer peer = { .keepalive_ms = SOON_MS };
static bool ended, capturing;
static CUresult open_result;
static unsigned most = 16, opened;
static int open_us, open_slow;	/* us; how many answers take 2 ms */

static __thread struct sl_thread tls;
struct sl_thread *sl_tls(void) { return &tls; }
bool sl_exiting(void) { return false; }
bool sl_ended(void) { return __atomic_load_n(&ended, __ATOMIC_ACQUIRE); }
CUresult sl_dead(void) { return sl_ended() ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS; }
bool sl_capturing_any(void) { return capturing; }
bool sl_forms_lack(const uint8_t *lacks, uint16_t op) { return *lacks && op == CTL_COPY_IN_BULK; }
int64_t sl_waits_begin(void) { return 0; }
void sl_waits_end(int64_t began, bool trip) { (void)began; (void)trip; }

struct sl_peer *sl_peer_route(const sl_buf *b, uint32_t *ctx)
{
	(void)b;
	*ctx = 1;
	return &peer;
}

bool sl_thread_start(void *(*f)(void *), void *arg)
{
	pthread_t t;

	return !pthread_create(&t, NULL, f, arg) && !pthread_detach(t);
}

CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r)
{
	struct wire_bulk_open_reply a = { .key = "fifteen letters", .session = 7, .most = most };

	CHECK(op == CTL_BULK_OPEN && !b->n);
	opened++;
	usleep((useconds_t)(open_slow-- > 0 ? 2000 : open_us));
	*r = (sl_reply){ .result = open_result };
	r->data = r->inl;
	memcpy(r->inl, &a, sizeof a);
	r->n = open_result ? 0 : sizeof a;
	return open_result;
}

/* ---- the worker ---- */

enum how { GOOD, REFUSES, CUTS, SILENT, LIES, FORGETS, HOWS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum how how;		/* what connections are like; HOWS: each as it comes */
static uint64_t state = 1;
static unsigned joined[2], refused;
static int client_end[64], worker_end[64];	/* of connections to the client */
static uint8_t *device;
static size_t device_n;
static struct stored { uint64_t number; uint32_t size; uint8_t *p; struct stored *next; } *stored;
static uint64_t dropped[4096];
static unsigned ndropped, copied, plain, lasts;
static bool behind_last;

static bool get(int fd, void *p, size_t n)
{
	for (size_t at = 0; at < n;) {
		ssize_t r = recv(fd, (char *)p + at, n - at, 0);

		if (r <= 0)
			return false;
		at += (size_t)r;
	}
	return true;
}

struct worker_line { int fd; enum how how; unsigned parts; };

static void *serve(void *arg)
{
	struct worker_line w = *(struct worker_line *)arg;
	struct wire_bulk_part h;

	free(arg);
	while (get(w.fd, &h, sizeof h)) {
		struct wire_bulk_taken t = { .number = h.number };
		struct stored *s = malloc(sizeof *s);
		bool bad = w.how != GOOD && !w.parts--;

		CHECK(h.size && h.size <= SL_MAX_BULK_PART && !h.offset);
		*s = (struct stored){ .number = h.number, .size = h.size, .p = malloc(h.size) };
		if (!get(w.fd, s->p, bad && w.how == CUTS ? h.size / 3 : h.size) || (bad && (w.how == CUTS || w.how == FORGETS))) {
			free(s->p);
			free(s);
			break;
		}
		pthread_mutex_lock(&lock);
		s->next = stored;
		stored = s;
		pthread_mutex_unlock(&lock);
		if (bad && w.how == SILENT) {
			while (recv(w.fd, &h, 1, 0) > 0) /* until the client gives up */
				;
			break;
		}
		t.number += bad && w.how == LIES;
		if (send(w.fd, &t, sizeof t, MSG_NOSIGNAL) != sizeof t)
			break;
	}
	close(w.fd);
	return NULL;
}

enum sl_connected sl_connect_bulk(const struct sl_ask *ask, uint32_t session, const struct wire_bulk_key *key, uint32_t keepalive_ms,
				  struct sl_connection *c, char *reason, size_t cap)
{
	struct timeval tv = { keepalive_ms / 1000, keepalive_ms % 1000 * 1000 };
	struct worker_line *w = malloc(sizeof *w);
	int ends[2];

	CHECK(ask->kind == SL_SESSION_BULK && session == 7 && !memcmp(key->key, "fifteen letters", 16) && ask->quiet && cap);
	*reason = 0;
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
	setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv);
	pthread_mutex_lock(&lock);
	*w = (struct worker_line){ .fd = ends[1], .how = how == HOWS ? next_random(&state) % HOWS : how, .parts = 1 + next_random(&state) % 4 };
	if (w->how == REFUSES) {
		refused++;
		pthread_mutex_unlock(&lock);
		close(ends[0]);
		close(ends[1]);
		free(w);
		return SL_BROKEN;
	}
	if (key->direction == SL_BULK_TO_CLIENT) {
		client_end[joined[1]] = ends[0];
		worker_end[joined[1]] = ends[1];
		free(w);
	} else {
		CHECK(sl_thread_start(serve, w));
	}
	joined[key->direction]++;
	pthread_mutex_unlock(&lock);
	c->fd = ends[0];
	return SL_CONNECTED;
}

static void note_last(bool last)
{
	if (lasts)
		behind_last = true;
	lasts += last;
}

CUresult sl_oneway_copy(const struct sl_copy_in *c, uint16_t op, const sl_buf *b, const void *data, size_t n)
{
	struct wire_copy_in_bulk m;
	struct stored **p, *s;

	CHECK(c->t == &peer && c->ctx == 3 && !data && !n);
	if (sl_ended())
		return sl_dead();
	pthread_mutex_lock(&lock);
	if (op == CTL_BULK_DROP) {
		CHECK(b->n == sizeof(struct wire_bulk_drop) && ndropped < sizeof dropped / sizeof *dropped);
		memcpy(&dropped[ndropped++], b->p, 8);
	} else {
		CHECK(op == CTL_COPY_IN_BULK && b->n == sizeof m);
		memcpy(&m, b->p, sizeof m);
		for (p = &stored; (s = *p) && s->number != m.part; p = &s->next)
			;
		CHECK(s && s->size == m.size && m.dst >= DEVICE && m.dst - DEVICE + m.size <= device_n && m.stream == 5 && m.last <= 1);
		for (unsigned i = 0; i < ndropped; i++)
			CHECK(dropped[i] != m.part, "a part that was dropped is used");
		memcpy(device + (m.dst - DEVICE), s->p, s->size);
		*p = s->next;
		free(s->p);
		free(s);
		copied++;
		note_last(m.last);
	}
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

static CUresult send_plain(void *arg, const struct sl_copy_in *c, size_t at, size_t n, bool last)
{
	CHECK(arg == &plain && n && n <= MIB && at + n <= c->n);
	if (sl_ended())
		return sl_dead();
	pthread_mutex_lock(&lock);
	memcpy(device + (c->dst - DEVICE) + at, c->src + at, n);
	plain++;
	note_last(last);
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

/* ---- helpers ---- */

static void begin(const char *setting, enum how h)
{
	setenv("SLUICE_BULK", setting, 1);
	how = h;
	peer.keepalive_ms = h == GOOD ? PATIENT_MS : SOON_MS;
	ended = false;
	joined[0] = joined[1] = refused = opened = copied = plain = lasts = ndropped = 0;
	behind_last = false;
	peer.bulk = sl_bulk_new(&peer);
	CHECK(peer.bulk);
}

static unsigned running(uint32_t direction)
{
	unsigned n = 0;

	pthread_mutex_lock(&peer.bulk->lock);
	for (unsigned i = 0; i < SL_MAX_BULK; i++)
		n += peer.bulk->line[direction][i].running;
	pthread_mutex_unlock(&peer.bulk->lock);
	return n;
}

static unsigned up(uint32_t direction)
{
	unsigned n;

	pthread_mutex_lock(&peer.bulk->lock);
	n = peer.bulk->up[direction];
	pthread_mutex_unlock(&peer.bulk->lock);
	return n;
}

/* Connections that were made. */
static unsigned joins(uint32_t direction)
{
	unsigned n;

	pthread_mutex_lock(&lock);
	n = joined[direction];
	pthread_mutex_unlock(&lock);
	return n;
}

static void finish(void)
{
	__atomic_store_n(&ended, true, __ATOMIC_RELEASE);
	sl_bulk_end(&peer);
	WAIT_FOR(!running(0) && !running(1));
	pthread_mutex_lock(&peer.bulk->lock); /* the last thread may just be leaving it */
	pthread_mutex_unlock(&peer.bulk->lock);
	for (unsigned i = 0; i < joined[1]; i++)
		close(worker_end[i]);
	sl_bulk_free(peer.bulk);
	peer.bulk = NULL;
}

/* Connections may be tried again at once. */
static void forgive(void)
{
	pthread_mutex_lock(&peer.bulk->lock);
	for (unsigned i = 0; i < SL_MAX_BULK; i++)
		peer.bulk->line[0][i].again = peer.bulk->line[1][i].again = 0;
	pthread_mutex_unlock(&peer.bulk->lock);
}

static bool ready(uint32_t direction)
{
	return sl_bulk_ready(&peer, direction);
}

static CUresult upload(const uint8_t *src, size_t at, size_t n, bool blocking)
{
	const struct sl_copy_in c = { .t = &peer, .ctx = 3, .dst = DEVICE + at, .src = src, .n = n, .stream = 5, .blocking = blocking };
	CUresult err = CUDA_SUCCESS;

	if (sl_bulk_upload(&c, send_plain, &plain, &err))
		return err;
	for (size_t done = 0, m; done < n && !err; done += m) {
		m = n - done < MIB ? n - done : MIB;
		err = send_plain(&plain, &c, done, m, blocking && done + m == n);
	}
	return err;
}

static uint8_t *bytes(size_t n)
{
	uint8_t *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t s = n;

	CHECK(p != MAP_FAILED);
	for (size_t i = 0; i < n; i++)
		p[i] = (uint8_t)next_random(&s);
	return p;
}

/* ---- tests ---- */

static void asking(void)
{
	struct sl_bulk *b;
	uint8_t lacking = 1;

	setenv("SLUICE_BULK", "0", 1);
	CHECK(!sl_bulk_new(&peer));
	setenv("SLUICE_BULK", "99", 1);
	CHECK((b = sl_bulk_new(&peer)) && b->wants == SL_MAX_BULK && b->told);
	sl_bulk_free(b);
	peer.lacks = &lacking;
	CHECK(!sl_bulk_new(&peer), "a worker of an older release");
	peer.lacks = NULL;
	for (int i = 0; i < 2; i++) { /* a setting that says nothing is as none */
		i ? setenv("SLUICE_BULK", "many", 1) : unsetenv("SLUICE_BULK");
		b = sl_bulk_new(&peer);
		CHECK(sl_processors() < 4 ? !b : b && !b->told && b->wants == (sl_processors() < 12 ? (unsigned)sl_processors() / 2 : 6));
		sl_bulk_free(b);
	}

	begin("3", GOOD);
	capturing = true;
	CHECK(!ready(0) && !opened, "nothing is asked while work is captured");
	capturing = false;
	open_result = CUDA_ERROR_LAUNCH_FAILED;
	CHECK(!ready(0) && !ready(0) && opened == 1, "it is asked again later");
	peer.bulk->ask_again = 0;
	open_result = 0;
	peer.bulk->told = false;
	open_us = 2000;
	CHECK(!ready(0) && opened == 3 && peer.bulk->ask_nap == 10000, "a worker that is far away");
	open_us = 0;
	for (int i = 0; i < 100 && !up(0); i++) { /* this machine may be slow as well */
		peer.bulk->ask_again = 0;
		opened = 0;
		open_slow = 1;
		if (ready(0))
			break;
	}
	CHECK(opened == 2, "or slow the first time");
	WAIT_FOR(up(0) == 3);
	finish();

	idle_ms = 300;
	begin("3", GOOD);
	peer.bulk->ask_again = 0;
	open_us = 0;
	most = 2;
	peer.bulk->told = true;
	CHECK(ready(0) && ready(1) && opened == 1);
	WAIT_FOR(joins(0) == 2 && joins(1) == 2);
	most = 16;
	WAIT_FOR(!running(0) && !running(1)); /* not used */
	CHECK(ready(0));
	WAIT_FOR(joins(0) == 4);
	finish();
	CHECK(joins(0) == 4 && joins(1) == 2);
	idle_ms = 20000;

	begin("3", GOOD);
	open_result = CUDA_ERROR_NOT_SUPPORTED;
	CHECK(!ready(0));
	peer.bulk->ask_again = 0;
	CHECK(!ready(1) && opened == 1, "that is final");
	open_result = 0;
	finish();

	begin("3", REFUSES);
	CHECK(ready(0));
	WAIT_FOR(!running(0));
	CHECK(!ready(0) && refused == 3, "not at once");
	forgive();
	CHECK(ready(0));
	WAIT_FOR(!running(0));
	CHECK(refused == 6 && peer.bulk->line[0][0].again > sl_now_ms() + 1500, "later and later");
	finish();
}

struct uploader { const uint8_t *src; size_t at, n; pthread_t thread; };

static void *upload_some(void *arg)
{
	struct uploader *u = arg;
	uint64_t s = u->at + 1;

	for (int i = 0; i < 6; i++) {
		size_t from = next_random(&s) % (u->n / 2), n = u->n - from;

		pthread_mutex_lock(&lock);
		memset(device + u->at + from, 0x55, n);
		pthread_mutex_unlock(&lock);
		forgive();
		ready(0);
		if (i % 3)
			WAIT_FOR(up(0) || !running(0));
		CHECK(!upload(u->src + from, u->at + from, n, false));
		pthread_mutex_lock(&lock);
		CHECK(!memcmp(device + u->at + from, u->src + from, n), "what arrived is not what was sent");
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

/* Copies of two threads over connections of every kind, which come and go. */
static void uploads(void)
{
	const size_t n = 9 * MIB + 4321;
	struct uploader u[2];

	device_n = 2 * n;
	device = malloc(device_n);
	for (int h = GOOD; h <= HOWS; h++) {
		begin("3", h);
		for (int i = 0; i < 2; i++) {
			u[i] = (struct uploader){ .src = bytes(n), .at = (size_t)i * n, .n = n };
			CHECK(!pthread_create(&u[i].thread, NULL, upload_some, &u[i]));
		}
		for (int i = 0; i < 2; i++) {
			pthread_join(u[i].thread, NULL);
			munmap((void *)(uintptr_t)u[i].src, n);
		}
		CHECK(!lasts && (h == REFUSES ? !copied && plain : copied > 0) && (h != GOOD || !ndropped), "kind %d: %u copied, %u plain, %u dropped, %u last", h, copied, plain, ndropped, lasts);
		finish();
	}
	/* The last frame of a blocking copy, and no other, says so. */
	for (int i = 0; i < 40; i++) {
		uint8_t *src = bytes(n);

		begin("2", i % 2 ? HOWS : GOOD);
		ready(0);
		if (i % 4 < 2)
			WAIT_FOR(up(0) || !running(0));
		CHECK(!upload(src, 17, n, true));
		CHECK(lasts == 1 && !behind_last && !memcmp(device + 17, src, n));
		munmap(src, n);
		finish();
	}
	free(device);
}

/* Connections that are for copies in the background take no others. */
static void reserved(void)
{
	const size_t n = 3 * MIB;
	uint8_t *src = bytes(n);
	struct sl_copy_in c = { .t = &peer, .ctx = 3, .dst = DEVICE, .src = src, .n = n, .stream = 5 };
	struct sl_peer without = { 0 };
	CUresult err = CUDA_ERROR_UNKNOWN;

	device_n = n;
	device = calloc(1, n);
	CHECK(sl_bulk_reserve(&without));
	sl_bulk_release(&without);
	begin("2", GOOD);
	CHECK(sl_bulk_reserve(&peer));
	ready(0);
	WAIT_FOR(up(0) == 2);
	CHECK(!upload(src, 0, n, false) && !copied && plain == 3);
	tls.unkept = true;
	CHECK(sl_bulk_upload(&c, send_plain, &plain, &err) && !err && copied == 3 && plain == 3 && !memcmp(device, src, n));
	tls.unkept = false;
	sl_bulk_release(&peer);
	CHECK(!upload(src, 0, n, false) && copied == 6 && plain == 3);
	peer.bulk->job = &(struct sl_bulk_job){ 0 };
	CHECK(!sl_bulk_reserve(&peer) && !peer.bulk->reserved, "another copy has the connections");
	peer.bulk->job = NULL;
	finish();
	munmap(src, n);
	free(device);
}

static void *end_soon(void *arg)
{
	usleep(*(useconds_t *)arg);
	__atomic_store_n(&ended, true, __ATOMIC_RELEASE);
	sl_bulk_end(&peer);
	return NULL;
}

/* The session ends in the middle of a copy: it returns, and nobody reads its source any more. */
static void ends(void)
{
	device_n = 64 * MIB;
	device = malloc(device_n);
	for (useconds_t after = 0; after < 20000; after += 1300) {
		uint8_t *src = bytes(device_n);
		int64_t began = sl_now_ms();
		pthread_t t;

		begin("3", after % 200 ? SILENT : GOOD);
		ready(0);
		WAIT_FOR(up(0));
		CHECK(!pthread_create(&t, NULL, end_soon, &after));
		upload(src, 0, device_n, true);
		munmap(src, device_n);
		CHECK(sl_now_ms() < began + 10000);
		pthread_join(t, NULL);
		finish();
	}
	free(device);
}

/* Memory that a system call cannot read: the caller reads it, which may have a way to do so. */
static void *reader_of;

static void make_readable(int sig)
{
	(void)sig;
	mprotect(reader_of, MIB, PROT_READ | PROT_WRITE);
}

static void protected(void)
{
	const size_t n = 8 * MIB;
	uint8_t *src = bytes(n), *copy = malloc(n);

	memcpy(copy, src, n);
	device_n = n;
	device = malloc(n);
	begin("2", GOOD);
	ready(0);
	WAIT_FOR(up(0) == 2);
	reader_of = src + 3 * MIB;
	signal(SIGSEGV, make_readable);
	mprotect(reader_of, MIB, PROT_NONE);
	CHECK(!upload(src, 0, n, true));
	signal(SIGSEGV, SIG_DFL);
	CHECK(plain && !memcmp(device, copy, n));
	finish();
	munmap(src, n);
	free(copy);
	free(device);
}

/* ---- from the device ---- */

static void put(int fd, const void *p, size_t n)
{
	CHECK(send(fd, p, n, MSG_NOSIGNAL) == (ssize_t)n, "%s", strerror(errno));
}

static void put_part(int fd, uint64_t number, uint64_t off, const void *p, uint32_t n)
{
	struct wire_bulk_part h = { .number = number, .offset = off, .size = n };

	put(fd, &h, sizeof h);
	put(fd, p, n);
}

static bool taken(int fd, uint64_t number, uint64_t off)
{
	struct wire_bulk_taken t;

	return get(fd, &t, sizeof t) && t.number == number && t.offset == off;
}

static bool closed(int fd)
{
	char c;

	return recv(fd, &c, 1, 0) <= 0;
}

static uint64_t bytes_in(void)
{
	return __atomic_load_n(&sl_stats.bulk_bytes_in, __ATOMIC_RELAXED);
}

/* A connection to the client; the worker's end. */
static int connection(void)
{
	int fd;

	forgive();
	CHECK(!up(1) && ready(1));
	WAIT_FOR(up(1) == 1);
	pthread_mutex_lock(&lock);
	fd = worker_end[joined[1] - 1];
	pthread_mutex_unlock(&lock);
	return fd;
}

static void downloads(void)
{
	static uint8_t to[4 * MIB], from[4 * MIB], zero[4 * MIB];
	const size_t pitch = 1000, width = 300, height = 4000;
	uint32_t id;
	int fd;

	for (size_t i = 0; i < sizeof from; i++)
		from[i] = (uint8_t)(i * 7 + i / 1000);
	begin("1", GOOD);
	fd = connection();
	id = sl_delivery_new(to, 2 * MIB + 5);
	put_part(fd, id, MIB, from + MIB, MIB);
	CHECK(taken(fd, id, MIB));
	put_part(fd, id, 2 * MIB, from + 2 * MIB, 5);
	put_part(fd, id, 0, from, MIB);
	CHECK(taken(fd, id, 2 * MIB) && taken(fd, id, 0) && !memcmp(to, from, 2 * MIB + 5) && !to[2 * MIB + 5]);
	sl_delivery_drop(id);
	put_part(fd, id, 0, zero, MIB); /* which is no more */
	CHECK(taken(fd, id, 0) && !memcmp(to, from, MIB));

	id = sl_delivery_new_3d(to, pitch, pitch * height / 2, width, height / 2, 2);
	memset(to, 0, sizeof to);
	for (size_t at = 0, n; at < width * height; at += n) {
		n = width * height - at < 77777 ? width * height - at : 77777;
		put_part(fd, id, at, from + at, (uint32_t)n);
		CHECK(taken(fd, id, at));
	}
	for (size_t y = 0; y < height; y++)
		CHECK(!memcmp(to + y * pitch, from + y * width, width) && !memcmp(to + y * pitch + width, zero, pitch - width));
	sl_delivery_drop(id);

	/* What makes no sense ends the connection, and nothing is written. */
	memset(to, 0, sizeof to);
	for (int i = 0; i < 5; i++) {
		struct wire_bulk_part h = { .number = id = sl_delivery_new(to, MIB), .size = (uint32_t)MIB };

		if (i)
			fd = connection();
		h.offset = i == 0 ? 1 : i == 1 ? UINT64_MAX : 0;
		h.size = i == 2 ? 0 : i == 3 ? (uint32_t)MIB + 1 : h.size;
		h.number |= i == 4 ? (uint64_t)1 << 32 : 0;
		put(fd, &h, sizeof h);
		(void)!send(fd, from, MIB, MSG_NOSIGNAL);
		CHECK(closed(fd) && !memcmp(to, zero, sizeof to));
		WAIT_FOR(!running(1));
		sl_delivery_drop(id);
	}
	finish();
}

/* A delivery ends while a part of it arrives: from then on nothing is written. */
static void ending(void)
{
	static uint8_t to[MIB], from[MIB], was[MIB];
	uint32_t id;
	int fd;

	memset(from, 0x77, sizeof from);
	begin("1", GOOD);
	peer.keepalive_ms = SOON_MS; /* a part that is thrown away does not come to its end */
	for (int i = 0; i < 20; i++) {
		struct wire_bulk_part h = { .size = (uint32_t)MIB };
		int64_t began = sl_now_ms();
		uint64_t had = bytes_in();

		memset(to, 0, sizeof to);
		fd = connection();
		h.number = id = sl_delivery_new(to, MIB);
		put(fd, &h, sizeof h);
		put(fd, from, 100000);
		if (i % 2)
			WAIT_FOR(bytes_in() > had);
		if (i % 4 < 2) {
			sl_delivery_drop(id);
		} else {
			__atomic_store_n(&ended, true, __ATOMIC_RELEASE);
			CHECK(sl_delivery_wait(id) == CUDA_ERROR_DEVICE_UNAVAILABLE);
		}
		CHECK(sl_now_ms() < began + 5000);
		memcpy(was, to, sizeof to);
		(void)!send(fd, from, 100000, MSG_NOSIGNAL);
		WAIT_FOR(!running(1));
		CHECK(!memcmp(was, to, sizeof to));
		__atomic_store_n(&ended, false, __ATOMIC_RELEASE);
	}
	finish();
}

/* A part waits for the frames before it, but not for ever. */
static void early(void)
{
	static uint8_t to[100000], from[sizeof to];	/* which fit a socket */
	struct wire_bulk_part h = { .size = sizeof from, .after = 2 };
	uint64_t had;
	uint32_t id;
	int fd;

	memset(from, 0x33, sizeof from);
	begin("1", GOOD);
	fd = connection();
	h.number = id = sl_delivery_new(to, sizeof to);
	had = bytes_in();
	sl_bulk_wrote(peer.bulk);
	put(fd, &h, sizeof h);
	put(fd, from, sizeof from);
	WAIT_FOR(bytes_in() >= had + sizeof h);
	usleep(50000);
	CHECK(bytes_in() == had + sizeof h, "it is not read before");
	sl_bulk_wrote(peer.bulk);
	CHECK(taken(fd, id, 0) && !memcmp(to, from, sizeof from));
	finish();
	begin("1", GOOD);
	peer.keepalive_ms = SOON_MS;
	fd = connection();
	memset(to, 0, sizeof to);
	put(fd, &h, sizeof h);
	CHECK(closed(fd) && !to[0], "the worker sends it in frames then");
	WAIT_FOR(!running(1));
	finish();
	begin("1", GOOD);
	peer.bulk->wrote = UINT32_MAX;
	fd = connection();
	for (h.after = UINT32_MAX - 5; h.after != 1; h.after++) { /* it passes through zero */
		put(fd, &h, sizeof h);
		put(fd, from, sizeof from);
		if (!h.after)
			sl_bulk_wrote(peer.bulk);
		CHECK(taken(fd, id, 0));
	}
	sl_delivery_drop(id);
	CHECK(!sl_deliveries_open());
	finish();
}

int main(void)
{
	alarm(300);
	asking();
	uploads();
	reserved();
	ends();
	protected();
	downloads();
	ending();
	early();
	puts("test_bulk: ok");
	return 0;
}
