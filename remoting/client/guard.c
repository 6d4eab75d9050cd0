/*
 * See guard.h. Reservations are of whole 2 MiB granules, as the driver's are,
 * never given back, and remembered in a small sorted list so that a granule is
 * reserved once. They take address space, no memory.
 */
#include "guard.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* of Linux 5.14 */
#endif

/* The driver reserves and maps device memory in such granules, and the kernel has huge pages of that size. */
#define GRANULE ((uint64_t)2 << 20)
/* The kernel gives no user addresses beyond this. */
#define TOP ((uint64_t)1 << 47)

struct span {
	uint64_t lo, hi;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct span *spans;
static size_t count, capacity;

static bool map(uint64_t lo, uint64_t hi)
{
	void *want = (void *)(uintptr_t)lo, *got;

	got = mmap(want, hi - lo, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	/* Kernels before 4.17 may map at another address. */
	if (got != MAP_FAILED && got != want)
		munmap(got, hi - lo);
	return got == want;
}

/* First span that ends above p. */
static size_t first_after(uint64_t p)
{
	size_t lo = 0, hi = count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (spans[mid].hi <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

bool sl_guard_reserve(uint64_t p, size_t n)
{
	uint64_t lo = p & ~(GRANULE - 1), hi = (p + n + GRANULE - 1) & ~(GRANULE - 1), at;
	size_t i, j;
	bool ok = true;

	if (!p || hi <= lo || hi > TOP)
		return true;
	pthread_mutex_lock(&lock);
	if (count == capacity) {
		size_t cap = capacity ? capacity * 2 : 64;
		struct span *s = realloc(spans, cap * sizeof *s);

		if (!s) {
			pthread_mutex_unlock(&lock);
			return true;
		}
		spans = s;
		capacity = cap;
	}
	/* Spans i..j-1 touch [lo, hi): map the gaps and merge. */
	i = first_after(lo ? lo - 1 : 0);
	at = lo;
	for (j = i; j < count && spans[j].lo <= hi; j++) {
		if (spans[j].lo > at)
			ok &= map(at, spans[j].lo);
		if (spans[j].hi > at)
			at = spans[j].hi;
		if (spans[j].lo < lo)
			lo = spans[j].lo;
	}
	if (at < hi)
		ok &= map(at, hi);
	else
		hi = at;
	/* Not remembered, so that a later caller with the same range gets the same answer. */
	if (!ok) {
		pthread_mutex_unlock(&lock);
		return false;
	}
	if (i == j) {
		memmove(spans + i + 1, spans + i, (count - i) * sizeof *spans);
		count++;
	} else {
		memmove(spans + i + 1, spans + j, (count - j) * sizeof *spans);
		count -= j - i - 1;
	}
	spans[i].lo = lo;
	spans[i].hi = hi;
	pthread_mutex_unlock(&lock);
	return true;
}

void sl_guard_joins(uint64_t p, bool accessible)
{
	const size_t page = 4096;
	volatile char *at = (volatile char *)(uintptr_t)(p & ~(uint64_t)(page - 1));

	if (accessible) { /* other threads may write to it */
		madvise((void *)(uintptr_t)at, page, MADV_POPULATE_WRITE);
		return;
	}
	if (mprotect((void *)(uintptr_t)at, page, PROT_READ | PROT_WRITE))
		return;
	*at = 0;
	mprotect((void *)(uintptr_t)at, page, PROT_NONE);
}

bool sl_guard_taken(uint64_t p, size_t n)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512], flags[5];
	unsigned long lo, hi;
	bool begins = true, taken = !f; /* who cannot look expects the worst */

	while (f && !taken && fgets(line, sizeof line, f)) {
		if (begins && sscanf(line, "%lx-%lx %4s", &lo, &hi, flags) == 3 && lo < p + n && p < hi)
			taken = strncmp(flags, "---", 3) != 0;
		begins = strchr(line, '\n');
	}
	if (f)
		fclose(f);
	return taken;
}

/*
 * No program, library, driver or sanitizer is known to map its memory here, so what is
 * free in this process is most likely free in a worker too.
 */
#define PLACE_LO ((uint64_t)0x680000000000)
#define PLACE_HI ((uint64_t)0x6c0000000000)

void *sl_guard_place(size_t n, int fd)
{
	const int how = fd ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file = fd ? fd : -1;
	static _Atomic uint64_t next = PLACE_LO;
	uint64_t room = (n + GRANULE - 1) & ~(GRANULE - 1);
	void *p;

	for (int i = 0; i < 64 && room >= n && room < PLACE_HI - PLACE_LO; i++) {
		uint64_t at = atomic_fetch_add(&next, room);
		void *want = (void *)(uintptr_t)at;

		if (at + room > PLACE_HI) {
			atomic_store(&next, PLACE_LO);
			continue;
		}
		p = mmap(want, n, PROT_READ | PROT_WRITE, how | MAP_FIXED_NOREPLACE, file, 0);
		if (p == want)
			return p;
		if (p != MAP_FAILED) /* a kernel before 4.17 */
			munmap(p, n);
	}
	p = mmap(NULL, n, PROT_READ | PROT_WRITE, how, file, 0);
	return p == MAP_FAILED ? NULL : p;
}
