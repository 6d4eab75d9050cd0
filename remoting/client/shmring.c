/*
 * A ring has one writer and one reader. head counts bytes written, tail bytes read;
 * both only grow. A side with nothing to do spins a little, sets its sleep word,
 * checks again and sleeps on that word; a side that moves a count wakes the other
 * if its sleep word is set. The peer is not trusted: a count out of range ends the
 * session.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shmring.h"
#include "attention.h"
#include "deadline.h"

#define SPIN 400

struct dir {
	_Alignas(64) _Atomic uint64_t head;
	_Alignas(64) _Atomic uint64_t tail;
	_Alignas(64) _Atomic uint32_t reader_sleeps;
	_Alignas(64) _Atomic uint32_t writer_sleeps;
};

_Static_assert(offsetof(struct dir, head) == SL_SHM_HEAD && offsetof(struct dir, tail) == SL_SHM_TAIL &&
	       offsetof(struct dir, reader_sleeps) == SL_SHM_READER && offsetof(struct dir, writer_sleeps) == SL_SHM_WRITER, "a ring's control");

struct sl_shm {
	struct dir *out, *in;
	uint8_t *out_data, *in_data;
	uint64_t out_head, in_tail;	/* ours; the shared copies are for the peer */
	_Atomic bool closed;
};

struct sl_shm *sl_shm_attach(int fd)
{
	struct sl_shm *s = calloc(1, sizeof *s);
	off_t size = lseek(fd, 0, SEEK_END);
	uint8_t *p = MAP_FAILED;

	/* Without seals the worker could shrink it while we use it. */
	if (s && size == (off_t)SL_SHM_SIZE && fcntl(fd, F_GET_SEALS) >= 0 && fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)
		p = mmap(NULL, SL_SHM_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p == MAP_FAILED) {
		free(s);
		return NULL;
	}
	s->out = (struct dir *)(p + SL_SHM_TO_WORKER);
	s->in = (struct dir *)(p + SL_SHM_TO_CLIENT);
	s->out_data = p + SL_SHM_DATA;
	s->in_data = p + SL_SHM_DATA + SL_SHM_RING;
	return s;
}

static void wake(_Atomic uint32_t *w)
{
	if (atomic_load(w)) {
		atomic_store(w, 0);
		syscall(SYS_futex, w, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	}
}

/*
 * Waits until *count differs from seen; false on time-out or close. waiters is NULL, or that of the session whose
 * receiver this is: then it polls first, for as long as that pays.
 */
static bool wait_change(struct sl_shm *s, _Atomic uint64_t *count, uint64_t seen, _Atomic uint32_t *sleeps, const struct sl_waiters *waiters,
			int timeout_ms)
{
	static const struct sl_waiters nobody;
	int64_t end = 0, since = 0;

	for (int i = 0; i < SPIN; i++) {
		if (atomic_load_explicit(count, memory_order_acquire) != seen)
			return true;
		__builtin_ia32_pause();
	}
	while (sl_look(&since, waiters ? waiters : &nobody))
		if (atomic_load_explicit(count, memory_order_acquire) != seen)
			return true;
	for (;;) {
		struct timespec t = { 0, 200000000 };

		atomic_store(sleeps, 1);
		if (atomic_load(count) != seen) {
			atomic_store(sleeps, 0);
			return true;
		}
		if (atomic_load(&s->closed)) {
			errno = EPIPE;
			return false;
		}
		if (!end)
			end = sl_now_ms() + timeout_ms;
		else if (sl_now_ms() >= end) {
			errno = ETIMEDOUT;
			return false;
		}
		syscall(SYS_futex, sleeps, FUTEX_WAIT, 1, &t, NULL, 0);
	}
}

ssize_t sl_shm_write(struct sl_shm *s, const struct iovec *iov, int n, int timeout_ms)
{
	uint64_t head = s->out_head, tail = atomic_load_explicit(&s->out->tail, memory_order_acquire);
	size_t room, done = 0;

	while (head - tail == SL_SHM_RING) {
		if (!wait_change(s, &s->out->tail, tail, &s->out->writer_sleeps, NULL, timeout_ms))
			return -1;
		tail = atomic_load_explicit(&s->out->tail, memory_order_acquire);
	}
	if (head - tail > SL_SHM_RING || atomic_load(&s->closed)) {
		errno = EPIPE;
		return -1;
	}
	room = SL_SHM_RING - (size_t)(head - tail);
	for (int i = 0; i < n && room; i++) {
		size_t k = iov[i].iov_len < room ? iov[i].iov_len : room;
		size_t at = head % SL_SHM_RING, first = SL_SHM_RING - at;

		if (first > k)
			first = k;
		memcpy(s->out_data + at, iov[i].iov_base, first);
		memcpy(s->out_data, (const char *)iov[i].iov_base + first, k - first);
		head += k;
		room -= k;
		done += k;
	}
	s->out_head = head;
	atomic_store(&s->out->head, head);
	wake(&s->out->reader_sleeps);
	return (ssize_t)done;
}

ssize_t sl_shm_read(struct sl_shm *s, void *buf, size_t n, const struct sl_waiters *waiters, int timeout_ms)
{
	uint64_t tail = s->in_tail, head = atomic_load_explicit(&s->in->head, memory_order_acquire);
	size_t at = tail % SL_SHM_RING, first = SL_SHM_RING - at;

	if (head == tail) {
		if (!wait_change(s, &s->in->head, tail, &s->in->reader_sleeps, waiters, timeout_ms))
			return errno == EPIPE ? 0 : -1;
		head = atomic_load_explicit(&s->in->head, memory_order_acquire);
	}
	if (head - tail > SL_SHM_RING)
		return 0;
	if (n > head - tail)
		n = (size_t)(head - tail);
	if (first > n)
		first = n;
	memcpy(buf, s->in_data + at, first);
	memcpy((char *)buf + first, s->in_data, n - first);
	s->in_tail = tail + n;
	atomic_store(&s->in->tail, tail + n);
	wake(&s->in->writer_sleeps);
	return (ssize_t)n;
}

void sl_shm_close(struct sl_shm *s)
{
	atomic_store(&s->closed, true);
	atomic_store(&s->out->writer_sleeps, 0);
	syscall(SYS_futex, &s->out->writer_sleeps, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	atomic_store(&s->in->reader_sleeps, 0);
	syscall(SYS_futex, &s->in->reader_sleeps, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
