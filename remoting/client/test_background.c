/* Copies in the background: everything leaves in the order of the calls, and nothing is read once it may be changed. */
#include "background.c"
#include "test.h"

#include <stdatomic.h>

#define MIB ((size_t)1 << 20)

struct sl_stats sl_stats;
unsigned sl_sessions = 1;
struct sl_peer sl_peers[SL_MAX_OWNERS];
_Atomic unsigned sl_mapped_blocks, sl_mapped_shared, sl_mapped_reached, sl_mirrors;

/* ---- what the rest of the shim does ---- */

static struct sl_peer *peer = &sl_peers[0];
static bool ended, no_threads;
static _Atomic bool blocked;	/* the link */
static _Atomic bool reading;	/* a copy is being sent */
static _Atomic unsigned reserved, released, threads;
static bool refuses;
static uint32_t left[200000];	/* what has left, under order: each thing's number */
static _Atomic unsigned nleft;

struct frame { struct wire_request h; uint32_t number; };

static __thread struct sl_thread tls;
struct sl_thread *sl_tls(void) { return &tls; }
CUresult sl_dead(void) { return sl_ended() ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS; }
void sl_die(CUresult error, const char *why) { CHECK(!error, "%s", why); }
bool sl_ended(void) { return __atomic_load_n(&ended, __ATOMIC_ACQUIRE); }
void sl_bulk_release(struct sl_peer *t) { CHECK(t == peer); released++; }

bool sl_bulk_reserve(struct sl_peer *t)
{
	CHECK(t == peer);
	reserved += !refuses;
	return !refuses;
}

bool sl_thread_start(void *(*f)(void *), void *arg)
{
	pthread_t t;

	if (no_threads)
		return false;
	threads++;
	return !pthread_create(&t, NULL, f, arg) && !pthread_detach(t);
}

static void leaves(uint32_t number)
{
	CHECK(nleft < sizeof left / sizeof *left);
	left[nleft++] = number;
}

CUresult sl_upload_now(const struct sl_copy_in *c)
{
	CHECK(c->t == peer && sl_tls()->unkept);
	reading = true;
	while (blocked && !sl_ended())
		usleep(100);
	pthread_mutex_lock(&peer->order);
	if (!sl_ended())
		leaves((uint32_t)c->dst);
	pthread_mutex_unlock(&peer->order);
	reading = false;
	return CUDA_SUCCESS;
}

void sl_send_kept(struct sl_peer *t, const uint8_t *p, size_t n)
{
	struct frame f;

	CHECK(t == peer);
	for (size_t at = 0; at < n; at += sizeof f.h + f.h.size) {
		CHECK(at + sizeof f <= n);
		memcpy(&f, p + at, sizeof f);
		CHECK(f.h.op == 9 && at + sizeof f.h + f.h.size <= n);
		leaves(f.number);
	}
}

/* ---- what a program does ---- */

static uint8_t source[96 * MIB];

static bool copy(uint32_t number, size_t at, size_t n)
{
	return sl_background_copy(&(struct sl_copy_in){ .t = peer, .dst = number, .src = source + at, .n = n });
}

/* A frame with so many bytes behind the number. */
static void frame(uint32_t number, size_t more)
{
	static const uint8_t zero[MIB];
	struct wire_request h = { .op = 9, .size = (uint32_t)(sizeof number + more) };

	pthread_mutex_lock(&peer->order);
	if (!peer->background.open || !sl_background_keep(peer, &h, &number, sizeof number, zero, more))
		leaves(number);
	pthread_mutex_unlock(&peer->order);
}

static bool soon(uint32_t number)
{
	struct wire_request h = { .op = 9, .size = sizeof number };
	bool kept;

	pthread_mutex_lock(&peer->order);
	kept = peer->background.open && sl_background_keep_soon(peer, &h, &number, sizeof number);
	pthread_mutex_unlock(&peer->order);
	return kept;
}

static bool open_now(void)
{
	bool open;

	pthread_mutex_lock(&peer->order);
	open = peer->background.open;
	pthread_mutex_unlock(&peer->order);
	return open;
}

static void begin(void)
{
	WAIT_FOR(!open_now());
	CHECK(!peer->background.frames && !peer->background.copies && reserved == released);
	nleft = 0;
}

/* Whether a thread of the program's waits for the copies. */
static bool waiting(void)
{
	bool any;

	pthread_mutex_lock(&peer->order);
	any = peer->background.moved.waits;
	pthread_mutex_unlock(&peer->order);
	return any;
}

/* ---- tests ---- */

static void order(void)
{
	begin();
	frame(1, 0);
	blocked = true;
	CHECK(copy(2, 0, 20 * MIB) && nleft == 1);
	for (uint32_t i = 3; i < 3000; i++)
		if (i % 1000)
			frame(i, i % 7 ? i % 100 : 3000);
		else
			CHECK(copy(i, 0, 10 * MIB));
	CHECK(soon(3000) && nleft == 1 && reserved == released + 1);
	blocked = false;
	WAIT_FOR(!open_now());
	CHECK(nleft == 3000);
	for (uint32_t i = 0; i < 3000; i++)
		CHECK(left[i] == i + 1, "%u came as number %u", left[i], i + 1);
	CHECK(!soon(1), "nothing is kept");
}

/* Copies and frames are bounded: who has more waits, and nobody waits who need not. */
static _Atomic bool done;

static void *too_many_copies(void *arg)
{
	(void)arg;
	CHECK(copy(3, 0, 20 * MIB));
	done = true;
	return NULL;
}

static void *too_many_frames(void *arg)
{
	(void)arg;
	for (uint32_t i = 10; i < 20; i++)
		frame(i, MIB);
	done = true;
	return NULL;
}

static void bounds(void)
{
	pthread_t t;

	begin();
	blocked = true;
	CHECK(copy(1, 0, 90 * MIB), "one may be of any size");
	done = false;
	CHECK(!pthread_create(&t, NULL, too_many_copies, NULL));
	WAIT_FOR(waiting());
	CHECK(!done);
	blocked = false;
	pthread_join(t, NULL);

	begin();
	blocked = true;
	CHECK(copy(1, 0, MIB));
	done = false;
	CHECK(!pthread_create(&t, NULL, too_many_frames, NULL));
	WAIT_FOR(waiting());
	CHECK(!done && !soon(20), "there is no room");
	blocked = false;
	pthread_join(t, NULL);
	WAIT_FOR(!open_now());
	CHECK(nleft == 11 && left[0] == 1 && left[1] == 10 && left[10] == 19);
}

/* What is sent is waited for, and what is taken later is not. */
static void *copies_on(void *arg)
{
	while (!done)
		copy(9, 90 * MIB, MIB);
	return arg;
}

static void sent(void)
{
	pthread_t t;

	begin();
	sl_background_sent();
	CHECK(copy(1, 0, MIB) && copy(2, 0, MIB));
	done = false;
	CHECK(!pthread_create(&t, NULL, copies_on, NULL));
	sl_background_sent();
	CHECK(nleft >= 2 && left[0] == 1 && left[1] == 2);
	done = true;
	pthread_join(t, NULL);
}

static void *unblock(void *arg)
{
	usleep(20000);
	if (arg)
		__atomic_store_n(&ended, true, __ATOMIC_RELEASE);
	blocked = false;
	return NULL;
}

/* Whether what stands behind copies has left is known without a lock. */
static void behind(void)
{
	uint64_t two;

	begin();
	CHECK(!sl_background_taken() && !sl_background_unsent(0));
	blocked = true;
	CHECK(copy(1, 0, MIB) && copy(2, 0, MIB));
	two = sl_background_taken();
	CHECK(copy(3, 0, MIB) && sl_background_taken() == two + 1);
	frame(4, 0);
	CHECK(sl_background_unsent(two) && sl_background_unsent(two + 1) && !nleft);
	sl_sessions = 2;
	CHECK(!sl_background_taken());
	sl_sessions = 1;
	blocked = false;
	while (sl_background_unsent(two))
		usleep(100);
	CHECK(nleft >= 2);
	WAIT_FOR(!open_now());
	CHECK(!sl_background_unsent(two + 1) && !sl_background_taken());
}

/* Memory is waited for while it is being sent, and while it is to be sent, and no other is. */
static void memory(void)
{
	pthread_t t;

	begin();
	sl_background_wait(source, sizeof source);
	blocked = true;
	CHECK(copy(1, 10 * MIB, MIB) && copy(2, 20 * MIB, MIB));
	sl_background_wait(source, 10 * MIB);
	sl_background_wait(source + 11 * MIB, 9 * MIB);
	sl_background_wait(source + 21 * MIB, MIB);
	CHECK(!nleft);
	CHECK(!pthread_create(&t, NULL, unblock, NULL));
	sl_background_wait(source + 21 * MIB - 1, 5);
	CHECK(nleft == 2);
	pthread_join(t, NULL);
	WAIT_FOR(!open_now());

	blocked = true;
	CHECK(copy(3, 10 * MIB, MIB));
	CHECK(!pthread_create(&t, NULL, unblock, NULL));
	sl_background_wait(source, 10 * MIB + 1);
	CHECK(nleft == 3 && !reading);
	pthread_join(t, NULL);
}

/* What cannot be copied in the background is refused, and leaves nothing behind. */
static void refusals(void)
{
	pthread_t t;

	begin();
	refuses = true;
	CHECK(!copy(1, 0, MIB) && !open_now());
	refuses = false;
	sl_mirrors = 1;
	CHECK(!copy(1, 0, MIB) && !open_now(), "memory is mirrored");
	sl_mirrors = 0;
	blocked = true;
	CHECK(copy(1, 0, MIB));
	sl_mirrors = 1;
	CHECK(!copy(2, 0, MIB));
	frame(3, 0);
	CHECK(!pthread_create(&t, NULL, unblock, NULL));
	sl_background_stop();
	CHECK(nleft == 2 && left[0] == 1 && left[1] == 3);
	sl_mirrors = 0;
	CHECK(!copy(4, 0, MIB));
	sl_background_go();
	pthread_join(t, NULL);
	CHECK(copy(4, 0, MIB));
}

/* Threads call as they like: what each has called leaves in its order. */
#define MOST 8000

static void *caller(void *arg)
{
	uint32_t base = (uint32_t)(uintptr_t)arg << 16;
	uint64_t s = base + 1;

	for (uint32_t i = 0; i < MOST; i++)
		if (next_random(&s) % 50 || !copy(base + i, 0, (1 + next_random(&s) % 30) * MIB))
			frame(base + i, next_random(&s) % 20 ? 8 : 70000);
	return NULL;
}

static void threads_of_the_program(void)
{
	uint32_t next[4] = { 0 };
	pthread_t t[4];

	begin();
	for (uintptr_t i = 0; i < 4; i++)
		CHECK(!pthread_create(&t[i], NULL, caller, (void *)i));
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	WAIT_FOR(!open_now());
	CHECK(nleft == 4 * MOST);
	for (uint32_t i = 0; i < nleft; i++)
		CHECK((left[i] & 0xffff) == next[left[i] >> 16]++, "thread %u", left[i] >> 16);
	CHECK(threads == 1 && reserved == released);
}

/* The session ends while copies and callers wait: nobody waits any more, and nothing is read. */
static void *calls_on(void *arg)
{
	(void)arg;
	for (uint32_t i = 0; i < 20; i++)
		frame(i, MIB);
	return NULL;
}

static void ends(void)
{
	pthread_t t, u;

	begin();
	blocked = true;
	CHECK(copy(1, 0, 50 * MIB) && copy(2, 0, 10 * MIB));
	CHECK(!pthread_create(&u, NULL, calls_on, NULL));
	CHECK(!pthread_create(&t, NULL, unblock, source));
	CHECK(!copy(3, 0, 60 * MIB));
	sl_background_wait(source, sizeof source);
	CHECK(!reading && !open_now());
	pthread_join(u, NULL);
	pthread_join(t, NULL);
	CHECK(!copy(4, 0, MIB) && reserved == released && !peer->background.first);
}

int main(void)
{
	alarm(300);
	pthread_mutex_init(&peer->order, NULL);
	no_threads = true;
	CHECK(!copy(1, 0, MIB) && !open_now() && reserved == released);
	no_threads = false;
	order();
	bounds();
	sent();
	behind();
	memory();
	refusals();
	threads_of_the_program();
	ends();
	puts("test_background: ok");
	return 0;
}
