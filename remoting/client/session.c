/*
 * How a session begins and ends: connecting to every owner, starting the threads, and the
 * three ends (an error, a fork, the end of the process). session.h has the flow; send.c,
 * wait.c and receive.c move the frames; peer.h has the locks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "session.h"
#include "bulk.h"
#include "conf.h"
#include "connect.h"
#include "content.h"
#include "deadline.h"
#include "entry.h"
#include "errstate.h"
#include "log.h"
#include "peer.h"
#include "print.h"
#include "resume.h"
#include "rdmalink.h"
#include "shmring.h"
#include "../verbs/rdma.h"
#include "snapshot.h"
#include "stats.h"
#include "timeline.h"
#include "version.h"
#include "waits.h"

#define CONNECT_MS 10000
#define GONE_MS 500	/* how long the end of the process waits for the ends of its sessions */

enum { ST_NEW, ST_LIVE, ST_DEAD, ST_EXITING };

/* The state that all peers share: the loss of one ends the session of the process. */
static struct {
	pthread_mutex_t start_lock;
	int state;	/* ST_* */
	CUresult error;	/* what calls return when not live */
	pid_t pid;
	struct sl_snapshot snap; /* the devices of all owners, one list */
} S = {
	.start_lock = PTHREAD_MUTEX_INITIALIZER,
};

struct sl_peer sl_peers[SL_MAX_OWNERS];
unsigned sl_sessions = 1;	/* set before the first call, then constant */
static uint8_t peer_of[SL_MAX_DEVICES];	/* by a device's place in the list */

const char sl_log_prefix[] = "sluice: ";
const int sl_log_default = SL_ERROR;

/* ---- life and death ---- */

bool sl_forked(void)
{
	return S.pid && S.state != ST_NEW && getpid() != S.pid;
}

bool sl_exiting(void)
{
	return __atomic_load_n(&S.state, __ATOMIC_ACQUIRE) == ST_EXITING;
}

CUresult sl_dead(void)
{
	int st = __atomic_load_n(&S.state, __ATOMIC_ACQUIRE);

	if (st == ST_LIVE)
		return sl_sticky();
	return st == ST_NEW ? CUDA_ERROR_NOT_INITIALIZED : S.error;
}

bool sl_ended(void)
{
	return __atomic_load_n(&S.state, __ATOMIC_ACQUIRE) != ST_LIVE;
}

bool sl_broken(void)
{
	return __atomic_load_n(&S.state, __ATOMIC_RELAXED) == ST_DEAD;
}

const struct sl_snapshot *sl_snapshot(void)
{
	return S.state == ST_NEW ? NULL : &S.snap;
}

/* Closes every socket; the receivers notice it and wake all callers. */
void sl_die(CUresult error, const char *why)
{
	int live = ST_LIVE;
	CUresult none = CUDA_SUCCESS;

	/* The first reason counts. */
	__atomic_compare_exchange_n(&S.error, &none, error, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	if (!__atomic_compare_exchange_n(&S.state, &live, ST_DEAD, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return;
	sl_gate_close();
	sl_log(SL_ERROR, "session with the worker ended: %s", why);
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &sl_peers[i];

		if (t->shm)
			sl_shm_close(t->shm);
		shutdown(t->fd, SHUT_RDWR);
		sl_bulk_end(t);
	}
}

/* Tells the worker that the process ends; false if it does not hear that soon. */
static bool say_bye(struct sl_peer *t, int64_t until)
{
	if (t->again)
		return sl_resume_bye(t, until);
	if (t->rdma && !sl_rdma_flush(t->rdma, (int)(until - sl_now_ms())))
		return false;
	return !shutdown(t->fd, SHUT_WR);
}

/*
 * Ends the sessions of a process that ends. Who comes after it may look at once how much memory is free: its parent, which hears of
 * the end, or the next line of a script. So it waits until the workers are gone, whose connections are the last of them to go. A worker
 * that is stopped or out of reach is not waited for for long.
 */
static void end_sessions(void)
{
	bool told[SL_MAX_OWNERS];
	int64_t until = sl_now_ms() + GONE_MS;

	for (unsigned i = 0; i < sl_sessions; i++)
		sl_bulk_end(&sl_peers[i]);
	for (unsigned i = 0; i < sl_sessions; i++)
		told[i] = say_bye(&sl_peers[i], until);
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct pollfd p = { .fd = sl_peers[i].fd, .events = POLLRDHUP };
		int64_t left;

		while (told[i] && (left = until - sl_now_ms()) > 0)
			if (poll(&p, 1, (int)left) > 0 || errno != EINTR)
				break;
	}
}

/* From here on the driver answers DEINITIALIZED, as CUDA's does. */
static void at_exit(void *arg)
{
	int live = ST_LIVE;

	(void)arg;
	if (getpid() != S.pid)
		return;
	sl_timeline_end();
	S.error = CUDA_ERROR_DEINITIALIZED;
	if (!__atomic_compare_exchange_n(&S.state, &live, ST_EXITING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		__atomic_store_n(&S.state, ST_EXITING, __ATOMIC_RELEASE);
	sl_gate_close();
	if (live == ST_LIVE)
		end_sessions();
	/* Skipped if another thread holds stdout: the process is ending. */
	if (!ftrylockfile(stdout)) {
		sl_print_flush();
		funlockfile(stdout);
	}
	sl_stats_write();
}

/*
 * A child must not hold the socket: the worker ends when the last copy closes.
 * Weak, because musl has no such symbol; there the copy stays until the child ends.
 */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern int __cxa_atexit(void (*)(void *), void *, void *);

static void in_child(void)
{
	for (unsigned i = 0; i < sl_sessions; i++) {
		if (sl_peers[i].fd >= 0)
			close(sl_peers[i].fd);
		sl_peers[i].fd = -1;
		if (sl_peers[i].rdma)
			sl_rdma_forked(sl_peers[i].rdma);
		if (sl_peers[i].again)
			sl_resume_forked(&sl_peers[i]);
		sl_bulk_forked(&sl_peers[i]);
	}
	sl_gate_close();	/* if the kernel has not wiped the page */
}

/* ---- start ---- */

bool sl_thread_start(void *(*f)(void *), void *arg)
{
	pthread_attr_t attr;
	sigset_t all, old;
	pthread_t thread;
	int err;

	/* Signals are for the program's threads: ours block all of them. */
	sigfillset(&all);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 << 10);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&thread, &attr, f, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	return !err;
}

static CUresult start_threads(struct sl_peer *t)
{
	bool good = sl_thread_start(sl_receiver, t) && sl_thread_start(sl_sender, t) && (!t->shm || sl_thread_start(sl_watcher, t));

	return good ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult connect_error(enum sl_connected rc)
{
	switch (rc) {
	case SL_CONNECTED:
		return CUDA_SUCCESS;
	case SL_NO_ADDRESS:
		return CUDA_ERROR_NO_DEVICE;
	case SL_MISMATCH:
		return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	case SL_DENIED:
		return CUDA_ERROR_NOT_PERMITTED;
	case SL_NO_ROOM:
	case SL_NO_MEMORY:
		return CUDA_ERROR_OUT_OF_MEMORY;
	default:
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
}

/* SLUICE_COMPRESS=0 forbids it. */
static bool may_compress(void)
{
	const char *v = sl_config("SLUICE_COMPRESS");

	return !v || strcmp(v, "0");
}

static bool compresses(const struct sl_peer *t, const struct sl_snapshot *snap)
{
	return snap->features & SL_FEATURE_COMPRESS && !t->shm && !t->rdma && sl_link_matters(t->fd);
}

/* Connects to one owner and appends its devices to the list. */
static CUresult start_peer(struct sl_peer *t, unsigned i, struct sl_snapshot *snap, unsigned *owners)
{
	const struct sl_ask ask = { .kind = SL_SESSION_COMPUTE, .owner = i, .patience_ms = CONNECT_MS, .shm = true, .resume = true,
				    .rdma = sl_rdma_offers(), .compress = may_compress() };
	struct sl_snapshot *all = &S.snap;
	struct sl_connection c;
	CUresult err;

	*t = (struct sl_peer){ .fd = -1, .index = i, .first = i ? all->ndev : 0 };
	err = connect_error(sl_connect(&ask, &c, snap));
	if (err)
		return err;
	t->fd = c.fd;
	t->lacks = c.lacks;
	*owners = c.owners;
	t->keepalive_ms = snap->keepalive_ms;
	if (c.shm >= 0 && !(t->shm = sl_shm_attach(c.shm))) {
		sl_log(SL_ERROR, "the worker's shared memory cannot be mapped: %s", strerror(errno));
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	if (snap->features & SL_FEATURE_RDMA && (!ask.rdma || t->shm || !sl_rdma_agree(t))) {
		sl_log(SL_ERROR, ask.rdma && !t->shm ? "the connection was lost while RDMA was agreed on" : "the worker's welcome is malformed");
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	sl_throughput_init(&t->uploads.throughput);
	t->uploads.compress = compresses(t, snap);
	t->bulk = sl_bulk_new(t);
	t->content = sl_content_new(t);
	pthread_mutex_init(&t->order, NULL);
	pthread_mutex_init(&t->drain, NULL);
	pthread_mutex_init(&t->wait_lock, NULL);
	t->ring_size = SL_RING;
	if (c.resumable) {
		t->ring_size = SL_PIECE_WINDOW;
		if (!sl_resume_start(t, &c))
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	t->ring = mmap(NULL, t->ring_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	t->rx = malloc(SL_RXBUF);
	if (t->ring == MAP_FAILED || !t->rx)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!i)
		all->ndev = 0;
	if (!sl_snapshot_add(all, snap))
		return CUDA_ERROR_INVALID_DEVICE;
	for (uint32_t d = t->first; d < all->ndev; d++)
		peer_of[d] = (uint8_t)i;
	return CUDA_SUCCESS;
}

static void drop_peer(struct sl_peer *t)
{
	if (t->again)
		sl_resume_bye(t, sl_now_ms() + GONE_MS);
	sl_rdma_drop(t);
	if (t->fd >= 0)
		close(t->fd);
	if (t->ring && t->ring != MAP_FAILED)
		munmap(t->ring, t->ring_size);
	sl_resume_drop(t);
	free(t->rx);
	free(t->lacks);
	free(t->uploads.spare);
	sl_bulk_free(t->bulk);
	sl_content_free(t->content);
	*t = (struct sl_peer){ .fd = -1 };
}

static CUresult start(void)
{
	struct sl_snapshot *snap = malloc(sizeof *snap);
	unsigned n = 1, ignored, made = 0;
	CUresult err = snap ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	uint32_t *page;

	while (!err && made < n) {
		err = start_peer(&sl_peers[made], made, snap, made ? &ignored : &n);
		made++;
	}
	free(snap);
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!err && page == MAP_FAILED)
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		while (made--)
			drop_peer(&sl_peers[made]);
		if (page != MAP_FAILED)
			munmap(page, 4096);
		return err;
	}
#ifdef MADV_WIPEONFORK
	madvise(page, 4096, MADV_WIPEONFORK);
#endif
	sl_sessions = n;
	S.pid = getpid();
	*page = 1;
	__atomic_store_n(&S.state, ST_LIVE, __ATOMIC_RELEASE);
	sl_live = page;
	for (unsigned i = 0; i < n && !err; i++)
		err = start_threads(&sl_peers[i]);
	if (err) {
		sl_die(err, "no thread could be started");
		return err;
	}
	if (__register_atfork)
		__register_atfork(NULL, NULL, in_child, NULL);
	__cxa_atexit(at_exit, NULL, NULL);
	sl_timeline_begin();
	sl_log(SL_INFO, "%s", sl_version);
	return CUDA_SUCCESS;
}

unsigned sl_dev_session(uint32_t place)
{
	return place < SL_MAX_DEVICES ? peer_of[place] : 0;
}

uint32_t sl_session_first(unsigned session)
{
	return sl_peers[session].first;
}

CUresult sl_session_start(void)
{
	static CUresult outcome;
	static bool tried;
	static time_t failed_at;
	struct timespec now;
	CUresult err;

	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	sl_waits_start();
	sl_tracing = sl_waits_on || sl_log_level() >= SL_TRACE;
	pthread_mutex_lock(&S.start_lock);
	clock_gettime(CLOCK_MONOTONIC, &now);
	/*
	 * Only success is remembered: a job may wait for its worker and try again. But the runtime
	 * asks twice in a row as it starts, and must not wait twice for a silent worker.
	 */
	if (!tried || (outcome && S.state == ST_NEW && now.tv_sec - failed_at > 1)) {
		outcome = start();
		tried = true;
		clock_gettime(CLOCK_MONOTONIC, &now);
		failed_at = now.tv_sec;
	}
	err = S.state == ST_NEW || S.state == ST_LIVE ? outcome : sl_dead();
	pthread_mutex_unlock(&S.start_lock);
	return err;
}
