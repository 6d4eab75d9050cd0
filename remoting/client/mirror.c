/*
 * See mirror.h. One lock guards all of it, and is held while bytes are fetched: so a
 * page's state and its protection change together. It is never taken by a thread that
 * the fetched bytes come through, and whoever holds it touches no mirror that is
 * protected against that: the bytes of a page that is sent are read while it may be read.
 */
#include "mirrors.h"
#include "ctx.h"
#include "guard.h"
#include "log.h"
#include "session.h"
#include "transfer.h"
#include "trap.h"
#include "waits.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Static_assert(SL_AHEAD_MOST * PAGE <= SL_MAX_COPY_IN && SL_MAX_HOST_MAP / PAGE / 4096 <= SL_AHEAD_MOST, "a read");

_Atomic unsigned sl_mirrors;
bool sl_mirrors_busy;

static struct mirror **all;	/* by address */
static size_t count, capacity;
static size_t maps;		/* that the kernel needs more, because pages side by side are in different states */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the list --- */

/* Place of the first mirror that ends above p. */
static size_t first_above(uint64_t p)
{
	size_t lo = 0, hi = count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (all[mid]->base + all[mid]->pages * PAGE <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static struct mirror *find(uint64_t p)
{
	size_t i = first_above(p);

	return i < count && all[i]->base <= p ? all[i] : NULL;
}

bool sl_mirror_has_slow(uint64_t p, size_t n)
{
	bool found;

	pthread_mutex_lock(&lock);
	found = first_above(p) < count && all[first_above(p)]->base < p + n;
	pthread_mutex_unlock(&lock);
	return found;
}

/* Without protection what one side writes is lost to the other: better no program than one that computes with that. */
void sl_mirrors_protect(struct mirror *m, size_t from, size_t to, int prot)
{
	uint64_t p = address(m, from);
	unsigned char there;

	if (m->kind & SL_MIRROR_FIXED || !mprotect((void *)(uintptr_t)p, (to - from) * PAGE, prot))
		return;
	for (size_t i = from; i < to; i++) /* a map more would make mprotect fail with the same error */
		m->gone |= mincore((void *)(uintptr_t)address(m, i), PAGE, &there) && errno == ENOMEM;
	if (m->gone && m->kind & SL_MIRROR_REGISTERED) {
		sl_log(SL_WARN, "memory at %#llx was unmapped before it was unregistered: kernels no longer reach it", (unsigned long long)m->base);
		return;
	}
	sl_log(SL_ERROR, "memory that kernels reach cannot be protected: too many maps; raise vm.max_map_count");
	abort();
}

/*
 * Of pages [from, to] of m, those whose state is not that of the page before, at which the kernel so needs another map. Page 0 comes after
 * the last page of the mirror before, where no address lies between; page m->pages is the first of the mirror after, likewise.
 */
static size_t turns(const struct mirror *m, size_t from, size_t to)
{
	size_t n = 0, place;

	if (m->kind & SL_MIRROR_FIXED)
		return 0;
	for (size_t i = from ? from : 1; i <= to && i < m->pages; i++)
		n += m->state[i] != m->state[i - 1];
	if (from && to < m->pages)
		return n;
	place = first_above(m->base);
	if (!from && place && address(all[place - 1], all[place - 1]->pages) == m->base)
		n += m->state[0] != all[place - 1]->state[all[place - 1]->pages - 1];
	if (to >= m->pages && place + 1 < count && all[place + 1]->base == address(m, m->pages))
		n += m->state[m->pages - 1] != all[place + 1]->state[0];
	return n;
}

void sl_mirrors_set(struct mirror *m, size_t from, size_t to, uint8_t state)
{
	maps -= turns(m, from, to);
	for (size_t i = from; i < to; i++) {
		m->written += (state == WRITTEN) - (m->state[i] == WRITTEN);
		m->stale += (state == STALE) - (m->state[i] == STALE);
		m->state[i] = state;
	}
	maps += turns(m, from, to);
}

/* What was written goes to the other side, and every page is stale. */
static void make_stale(struct mirror *m)
{
	sl_mirrors_send(m);
	sl_trap_keep();
	sl_mirrors_protect(m, 0, m->pages, PROT_NONE);
	sl_mirrors_set(m, 0, m->pages, STALE);
}

/* How many maps of a process may be for mirrors: half of those that the kernel allows it. */
static size_t most_maps(void)
{
	static size_t most;
	char text[24] = "";
	int fd;

	if (most)
		return most;
	most = 65530 / 2;
	fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return most;
	if (read(fd, text, sizeof text - 1) > 0 && atol(text) > 0)
		most = (size_t)atol(text) / 2;
	close(fd);
	return most;
}

/* Before pages get a protection of their own: if there are too many of those, all get the same, and the program takes them by faults again. */
static void make_room(void)
{
	if (maps <= most_maps())
		return;
	for (size_t i = 0; i < count; i++) {
		struct mirror *m = all[i];

		if (m->gone || m->kind & SL_MIRROR_FIXED)
			continue;
		if (m->kind & SL_MIRROR_READ_ONLY)
			sl_mirrors_send(m);
		else
			make_stale(m);
	}
	sl_log(SL_DEBUG, "pages of mirrors had too many protections of their own: %zu are left", maps);
}

/* --- before work and after waits --- */

void sl_mirror_send_slow(void)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++)
		if (all[i]->written)
			sl_mirrors_send(all[i]);
	sl_mirrors_busy = true;
	pthread_mutex_unlock(&lock);
}

void sl_mirror_stale_slow(void)
{
	pthread_mutex_lock(&lock);
	sl_mirrors_busy = false;
	sl_mirrors_waited();
	for (size_t i = 0; i < count; i++) {
		struct mirror *m = all[i];

		if (m->stale == m->pages || m->gone || m->kind & SL_MIRROR_READ_ONLY)
			continue;
		make_stale(m);
		sl_habit_learn(&m->habit, &m->fetch, m->pages);
	}
	pthread_mutex_unlock(&lock);
}

/* --- faults --- */

/* The end of the pages that are taken at a fault at page i, all of one state. */
static size_t advance(const struct mirror *m, struct sl_ahead *a, size_t i)
{
	size_t to = sl_ahead(a, i, m->pages, a == &m->fetch && m->habit.most);

	return run(m, i, to < m->pages ? to : m->pages);
}

/* The session has ended: the program may have pages [from, to), whatever they hold. */
static void give_up(struct mirror *m, size_t from, size_t to)
{
	if (!sl_dead()) {
		sl_log(SL_ERROR, "there is no memory to follow what the program writes");
		abort(); /* otherwise the GPU would not see it, or lose what it has written beside it */
	}
	sl_mirrors_protect(m, from, to, PROT_READ | PROT_WRITE);
	sl_mirrors_set(m, from, to, WRITTEN);
}

static CUresult fetch_bytes(const struct mirror *m, uint64_t p, size_t n)
{
	const uint8_t *got;
	CUresult err = sl_mirrors_read(m, p, n, &got);

	return !err && !sl_trap_poke(p, got, n) ? CUDA_ERROR_OUT_OF_MEMORY : err;
}

static bool fetch(struct mirror *m, size_t from, size_t to)
{
	CUresult err = CUDA_SUCCESS;

	if (!m->spans)
		err = fetch_bytes(m, address(m, from), bytes(m, from, to));
	for (unsigned i = 0; i < m->nspans && !err; i++) {
		struct span s = within(m, &m->spans[i], from, to);

		if (s.n)
			err = fetch_bytes(m, s.p, s.n);
	}
	if (err) {
		sl_log(SL_ERROR, "what the GPU has written to memory at %#llx is lost: error %d", (unsigned long long)address(m, from), err);
		return false;
	}
	sl_mirrors_protect(m, from, to, PROT_READ);
	sl_mirrors_set(m, from, to, SAME);
	m->habit.fetched += to - from;
	return true;
}

/* Notes what pages [from, to), which are the same, hold, and lets the program write to them. */
static bool open_pages(struct mirror *m, size_t from, size_t to)
{
	bool managed = m->kind & SL_MIRROR_MANAGED;

	if (managed && sl_mirrors_busy && !m->was) {
		m->was = calloc(m->pages, sizeof *m->was);
		if (!m->was)
			return false;
	}
	for (size_t i = from; (!managed || sl_mirrors_busy) && i < to; i++) {
		m->was[i] = malloc(PAGE);
		if (!m->was[i])
			return false;
		memcpy(m->was[i], (void *)(uintptr_t)address(m, i), PAGE);
	}
	m->raced |= sl_mirrors_busy;
	sl_mirrors_protect(m, from, to, PROT_READ | PROT_WRITE);
	sl_mirrors_set(m, from, to, WRITTEN);
	return true;
}

static bool touched(uint64_t p, bool write)
{
	struct mirror *m;
	size_t i, to;
	bool ours;

	pthread_mutex_lock(&lock);
	m = find(p);
	ours = m && !(m->kind & SL_MIRROR_FIXED);
	if (ours) {
		make_room();
		i = (p - m->base) / PAGE;
		if (m->state[i] == STALE) {
			to = advance(m, &m->fetch, i);
			if (!fetch(m, i, to))
				give_up(m, i, to);
		}
		if (m->state[i] == SAME && write) {
			to = advance(m, &m->open, i);
			if (!open_pages(m, i, to))
				give_up(m, i, to);
		}
		if (m->gone) /* another map took its place */
			ours = !mprotect((void *)(uintptr_t)address(m, i), PAGE, PROT_READ | PROT_WRITE);
	}
	pthread_mutex_unlock(&lock);
	sl_waits_take("(reading memory that the GPU has written)");
	return ours;
}

/* In a forked child, whose one thread this is: it gets what was there, and nothing is sent. */
static bool left_alone(uint64_t p)
{
	struct mirror *m = find(p);

	return m && !(m->kind & SL_MIRROR_FIXED) && !mprotect((void *)(uintptr_t)m->base, m->pages * PAGE, PROT_READ | PROT_WRITE);
}

/* --- beginning and ending --- */

static void discard(struct mirror *m)
{
	for (size_t i = 0; m->was && i < m->pages; i++)
		free(m->was[i]);
	free(m->was);
	free(m->state);
	free(m->spans);
	free(m);
}

/* A mirror of whole pages in the list. The lock is held. */
static CUresult add(const struct sl_other *o, uint64_t base, size_t n, unsigned kind, struct mirror **out)
{
	struct mirror *m = calloc(1, sizeof *m);
	bool managed = kind & SL_MIRROR_MANAGED;
	CUresult err = CUDA_SUCCESS;
	size_t i;

	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*m = (struct mirror){ .base = base, .n = n, .pages = (n + PAGE - 1) / PAGE, .kind = kind, .other = *o };
	m->state = malloc(m->pages);
	if (!managed)
		m->was = calloc(m->pages, sizeof *m->was);
	if (!m->state || (!managed && !m->was))
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (!err && count == capacity) {
		struct mirror **more = realloc(all, (capacity ? 2 * capacity : 16) * sizeof *all);

		if (more) {
			all = more;
			capacity = capacity ? 2 * capacity : 16;
		} else {
			err = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (err) {
		discard(m);
		return err;
	}
	make_room();
	memset(m->state, SAME, m->pages);
	i = first_above(base);
	memmove(all + i + 1, all + i, (count - i) * sizeof *all);
	all[i] = m;
	count++;
	maps += turns(m, 0, m->pages);
	atomic_fetch_add(&sl_mirrors, 1);
	*out = m;
	return CUDA_SUCCESS;
}

/* Takes the mirror in place i out of the list, and lets the program have its memory. */
static void take_out(size_t i)
{
	struct mirror *m = all[i];

	maps -= turns(m, 0, m->pages);
	memmove(all + i, all + i + 1, (--count - i) * sizeof *all);
	atomic_fetch_sub(&sl_mirrors, 1);
	if (!m->gone)
		sl_mirrors_protect(m, 0, m->pages, PROT_READ | PROT_WRITE);
	discard(m);
}

/* Fetches what is stale, while that can be done. */
static void fetch_all(struct mirror *m)
{
	for (size_t i = 0, j; m->stale && i < m->pages; i = j) {
		j = run(m, i, m->pages - i > SL_AHEAD_MOST ? i + SL_AHEAD_MOST : m->pages);
		if (m->state[i] == STALE && !fetch(m, i, j))
			return;
	}
}

CUresult sl_mirror_pinned(const struct sl_other *o, uint64_t base, size_t n, unsigned kind)
{
	struct mirror *m;
	CUresult err;

	if (!sl_trap_start(touched, left_alone)) {
		sl_log(SL_WARN, "kernels cannot reach host memory: /proc/self/mem cannot be opened, or a thread not made");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	if (!(kind & SL_MIRROR_FIXED))
		sl_guard_joins(base, true);
	pthread_mutex_lock(&lock);
	err = add(o, base, n, kind, &m);
	if (!err)
		sl_mirrors_set(m, 0, m->pages, WRITTEN);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_mirror_managed(uint64_t base, size_t n)
{
	struct sl_other o;
	struct mirror *m;
	CUresult err = sl_transfer_begin(&o, 0);

	if (err)
		return err;
	if (!sl_trap_start(touched, left_alone))
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&lock);
	err = add(&o, base, n, SL_MIRROR_MANAGED, &m);
	if (!err) {
		sl_transfer_zero(&o, base, n);
		sl_trap_keep();
		sl_mirrors_protect(m, 0, m->pages, PROT_READ);
	}
	pthread_mutex_unlock(&lock);
	return err;
}

void sl_mirror_drop(uint64_t base, bool keep)
{
	size_t i;

	if (!atomic_load(&sl_mirrors))
		return;
	pthread_mutex_lock(&lock);
	i = first_above(base);
	if (i < count && all[i]->base == base) {
		if (keep)
			fetch_all(all[i]);
		take_out(i);
	}
	pthread_mutex_unlock(&lock);
}

void sl_mirror_drop_ctx(uint32_t ctx_id)
{
	if (!atomic_load(&sl_mirrors))
		return;
	pthread_mutex_lock(&lock);
	for (size_t i = count; i-- > 0;)
		if (all[i]->other.ctx_id == ctx_id)
			take_out(i);
	pthread_mutex_unlock(&lock);
}

/* --- managed variables --- */

/* Adds what m has of a variable. The lock is held. */
static CUresult add_span(struct mirror *m, const struct span *v)
{
	struct span s = within(m, v, 0, m->pages), *more;
	CUresult err = CUDA_SUCCESS;

	for (unsigned i = 0; i < m->nspans; i++)
		if (m->spans[i].p == s.p)
			return CUDA_SUCCESS;
	more = realloc(m->spans, (m->nspans + 1) * sizeof *more);
	if (!more)
		return CUDA_ERROR_OUT_OF_MEMORY;
	m->spans = more;
	/* In pages that the program has already, the variable must be, too. */
	for (size_t i = (s.p - m->base) / PAGE; m->base + i * PAGE < s.p + s.n && !err; i++) {
		struct span part = within(m, &s, i, i + 1);

		if (m->state[i] != STALE)
			err = fetch_bytes(m, part.p, part.n);
	}
	if (!err)
		m->spans[m->nspans++] = s;
	return err;
}

/* A mirror of [lo, hi), where there is none, whose pages are stale. The lock is held. */
static CUresult add_stale(const struct sl_other *o, uint64_t lo, uint64_t hi)
{
	struct mirror *m;
	CUresult err = add(o, lo, hi - lo, SL_MIRROR_MANAGED, &m);

	if (!err) {
		sl_mirrors_protect(m, 0, m->pages, PROT_NONE);
		sl_mirrors_set(m, 0, m->pages, STALE);
	}
	return err;
}

CUresult sl_mirror_variable(uint64_t p, size_t n)
{
	uint64_t lo = p & ~(PAGE - 1), hi = (p + n + PAGE - 1) & ~(PAGE - 1);
	struct span v = { p, n };
	struct sl_other o;
	CUresult err = sl_transfer_begin(&o, 0);

	if (err)
		return err;
	if (!sl_trap_start(touched, left_alone))
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&lock);
	sl_trap_keep();
	for (uint64_t at = lo; at < hi && !err;) {
		size_t i = first_above(at);
		struct mirror *m = i < count && all[i]->base < hi ? all[i] : NULL;

		if (!m || m->base > at) {
			err = add_stale(&o, at, m ? m->base : hi);
			continue;
		}
		err = m->kind & SL_MIRROR_MANAGED && (m->spans || m->stale == m->pages) ? add_span(m, &v) : CUDA_ERROR_NOT_SUPPORTED;
		at = m->base + m->pages * PAGE;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

void sl_mirror_variable_end(uint64_t p, size_t n)
{
	if (!atomic_load(&sl_mirrors))
		return;
	pthread_mutex_lock(&lock);
	for (size_t i = first_above(p); i < count && all[i]->base < p + n;) {
		struct mirror *m = all[i];
		uint64_t base = m->base;
		size_t size = m->pages * PAGE;

		for (unsigned k = m->nspans; k-- > 0;)
			if (m->spans[k].p >= p && m->spans[k].p < p + n)
				m->spans[k] = m->spans[--m->nspans];
		if (!m->spans || m->nspans) {
			i++;
			continue;
		}
		take_out(i);
		madvise((void *)(uintptr_t)base, size, MADV_DONTNEED);
		mprotect((void *)(uintptr_t)base, size, PROT_NONE); /* the addresses stay the device's */
	}
	pthread_mutex_unlock(&lock);
}
