/*
 * See mirror.h. One lock guards all of it, and is held while bytes are fetched: so a
 * page's state and its protection change together. It is never taken by a thread that
 * the fetched bytes come through, and whoever holds it touches no mirror that is
 * protected against that: the bytes of a page that is sent are read while it may be read.
 */
#include "mirror.h"
#include "ahead.h"
#include "changes.h"
#include "ctx.h"
#include "log.h"
#include "session.h"
#include "transfer.h"
#include "trap.h"
#include "waits.h"
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE SL_MIRROR_PAGE

enum { STALE, SAME, WRITTEN };

_Static_assert(SL_AHEAD_MOST * PAGE <= SL_MAX_COPY_IN && SL_MAX_HOST_MAP / PAGE / 4096 <= SL_AHEAD_MOST, "a read");

/* A variable, or the part of one that is in a mirror. */
struct span {
	uint64_t p;
	size_t n;
};

struct mirror {
	uint64_t base;
	size_t n, pages;
	unsigned kind;		/* SL_MIRROR_... */
	bool gone;		/* the program has unmapped it */
	struct sl_other other;
	uint8_t *state;		/* of each page */
	uint8_t **was;		/* what each written page held; NULL: all of it is to be sent */
	bool raced;		/* a page was first written to while work may have run */
	size_t written, stale;	/* pages in these states */
	struct sl_ahead fetch, open;
	struct sl_habit habit;
	struct span *spans;	/* of the managed variables in it, which alone the device has; NULL: it has all */
	unsigned nspans;
};

_Atomic unsigned sl_mirrors;

static struct mirror **all;	/* by address */
static size_t count, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool busy;	/* work was submitted since the last wait */
static unsigned looks;	/* for clashes, still to be made after this wait: each is a round trip */
static _Atomic bool clash;	/* in managed memory, and not yet told */

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

static uint64_t address(const struct mirror *m, size_t page)
{
	return m->base + page * PAGE;
}

/* Bytes of the pages, of which the last may be less than a page. */
static size_t bytes(const struct mirror *m, size_t from, size_t to)
{
	return (to == m->pages ? m->n : to * PAGE) - from * PAGE;
}

/* Without protection what one side writes is lost to the other: better no program than one that computes with that. */
static void protect(struct mirror *m, size_t from, size_t to, int prot)
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

static void set(struct mirror *m, size_t from, size_t to, uint8_t state)
{
	for (size_t i = from; i < to; i++) {
		m->written += (state == WRITTEN) - (m->state[i] == WRITTEN);
		m->stale += (state == STALE) - (m->state[i] == STALE);
		m->state[i] = state;
	}
}

/* End of the run of pages, from page from on and before page most, that are in its state. */
static size_t run(const struct mirror *m, size_t from, size_t most)
{
	size_t to = from + 1;

	while (to < most && m->state[to] == m->state[from])
		to++;
	return to;
}

/* What [p, p+n) holds on the other side, until the next such call. The lock is held. */
static CUresult read_other(const struct mirror *m, uint64_t p, size_t n, const uint8_t **got)
{
	static uint8_t *room;
	static size_t size;

	if (n > size) {
		free(room);
		room = malloc(n);
		size = room ? n : 0;
		if (!room)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*got = room;
	return (m->kind & SL_MIRROR_MANAGED ? sl_transfer_copy : sl_transfer_read)(&m->other, p, room, n);
}

/* --- sending --- */

/* Pages whose changes are sent together; a mask has a bit for each of their bytes. */
enum { MERGE_PAGES = 64, PAGE_MASK = PAGE / 8, LOOKS = 16, LOOK_PAGES = 256 };

_Static_assert(MERGE_PAGES * PAGE <= SL_MAX_MERGE, "a merge");

static void send_merge(const struct mirror *m, size_t page, size_t from, size_t to, const uint8_t *masks)
{
	static uint8_t before[MERGE_PAGES * PAGE]; /* the lock is held */
	uint64_t p = address(m, page) + from;

	for (size_t i = 0; m->raced && i * PAGE < to; i++)
		memcpy(before + i * PAGE, m->was[page + i], PAGE);
	sl_transfer_merge(&m->other, p, to - from, masks + from / 8, (const uint8_t *)(uintptr_t)p, m->raced ? before + from : NULL);
}

/* Sends what changed in pages [from, to): pages of which much changed together, of others the part that did. */
static void send_changes(const struct mirror *m, size_t from, size_t to)
{
	uint8_t masks[MERGE_PAGES * PAGE_MASK];
	size_t first = from;	/* page of which masks begin */

	for (size_t i = from; i < to; i++) {
		struct sl_changes c = sl_changes((const uint8_t *)(uintptr_t)address(m, i), m->was[i], PAGE, masks + (i - first) * PAGE_MASK);
		bool much = c.words >= PAGE / 8 / 4;

		if (much && i + 1 < to && i + 1 - first < MERGE_PAGES)
			continue;
		if (much || first < i)
			send_merge(m, first, 0, (i - first + much) * PAGE, masks);
		if (!much && c.words)
			send_merge(m, i, c.from, c.to, masks + (i - first) * PAGE_MASK);
		first = i + 1;
	}
}

/* The part of a span that lies in pages [from, to); empty if none does. */
static struct span within(const struct mirror *m, const struct span *s, size_t from, size_t to)
{
	uint64_t lo = address(m, from), hi = address(m, to);
	struct span in = { .p = s->p > lo ? s->p : lo };
	uint64_t end = s->p + s->n < hi ? s->p + s->n : hi;

	in.n = end > in.p ? end - in.p : 0;
	return in;
}

static void send_variables(const struct mirror *m, size_t from, size_t to)
{
	for (unsigned i = 0; i < m->nspans; i++) {
		struct span s = within(m, &m->spans[i], from, to);

		if (s.n)
			sl_transfer_send(&m->other, s.p, s.n);
	}
}

/* What the device has of pages [from, to): all of it, or the part in the k-th variable. */
static struct span part(const struct mirror *m, unsigned k, size_t from, size_t to)
{
	return m->spans ? within(m, &m->spans[k], from, to) : (struct span){ address(m, from), bytes(m, from, to) };
}

/* Sends what changed in s, part of a page of managed memory. */
static void send_runs(const struct mirror *m, struct span s)
{
	const uint8_t *now = (const uint8_t *)(uintptr_t)s.p, *was = m->was[(s.p - m->base) / PAGE] + (s.p - m->base) % PAGE;

	for (size_t i = 0, j; i < s.n; i = j) {
		for (j = i + 1; j < s.n && (now[j] != was[j]) == (now[i] != was[i]); j++)
			;
		if (now[i] != was[i])
			sl_transfer_send(&m->other, s.p + i, j - i);
	}
}

/* After a wait: looks for bytes in s, a part of managed memory, that both sides have changed. */
static void look_for_clash(const struct mirror *m, struct span s)
{
	const uint8_t *theirs;

	if (!s.n || read_other(m, s.p, s.n, &theirs))
		return;
	for (uint64_t p = s.p, k; p < s.p + s.n; p += k) {
		size_t off = (p - m->base) % PAGE;

		k = PAGE - off < s.p + s.n - p ? PAGE - off : s.p + s.n - p;
		if (!sl_changes_clash((const uint8_t *)(uintptr_t)p, theirs + (p - s.p), m->was[(p - m->base) / PAGE] + off, k))
			continue;
		sl_mirror_clashed();
		atomic_store(&clash, true);
		return;
	}
}

/* Sends what changed in pages [from, to) of managed memory, which were written while work may have run. */
static void send_raced(const struct mirror *m, size_t from, size_t to)
{
	unsigned parts = m->spans ? m->nspans : 1;

	for (size_t i = from, j; !busy && looks && i < to; i = j) {
		j = to - i < LOOK_PAGES ? to : i + LOOK_PAGES;
		looks--;
		for (unsigned k = 0; k < parts; k++)
			look_for_clash(m, part(m, k, i, j));
	}
	for (size_t i = from; i < to; i++)
		for (unsigned k = 0; k < parts; k++)
			send_runs(m, part(m, k, i, i + 1));
}

/* Sends pages [from, to), which are written, and notes them as the same. */
static void send_pages(struct mirror *m, size_t from, size_t to)
{
	sl_trap_keep();
	protect(m, from, to, PROT_READ);
	if (m->gone)
		return;
	for (size_t i = from, j; i < to; i = j) {
		j = i + 1;
		if (m->was && m->was[i]) {
			while (j < to && m->was[j])
				j++;
			(m->kind & SL_MIRROR_MANAGED ? send_raced : send_changes)(m, i, j);
			for (size_t k = i; k < j; k++) {
				free(m->was[k]);
				m->was[k] = NULL;
			}
			continue;
		}
		if (m->spans) {
			send_variables(m, i, j);
			continue;
		}
		/* Page-locked memory that was never sent: the other side may hold zeroes. */
		if (m->kind & SL_MIRROR_FRESH && sl_zeroes((const uint8_t *)(uintptr_t)address(m, i), bytes(m, i, j)))
			continue;
		while (j < to && (!m->was || !m->was[j]) && !(m->kind & SL_MIRROR_FRESH && sl_zeroes((const uint8_t *)(uintptr_t)address(m, j), bytes(m, j, j + 1))))
			j++;
		sl_transfer_send(&m->other, address(m, i), bytes(m, i, j));
	}
	set(m, from, to, SAME);
}

static void send_written(struct mirror *m)
{
	for (size_t i = 0, j; m->written && !m->gone && i < m->pages; i = j) {
		const uint8_t *at = memchr(m->state + i, WRITTEN, m->pages - i);

		if (!at)
			return;
		i = (size_t)(at - m->state);
		j = run(m, i, m->pages);
		send_pages(m, i, j);
	}
	m->raced = false;
}

void sl_mirror_send_slow(void)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++)
		if (all[i]->written)
			send_written(all[i]);
	busy = true;
	pthread_mutex_unlock(&lock);
}

void sl_mirror_clashed(void)
{
	static _Atomic bool told;

	if (!atomic_exchange(&told, true))
		sl_log(SL_ERROR, "the program and a kernel have written different values to the same bytes of host or managed memory at a time; see docs/limits.md");
}

CUresult sl_mirror_clash_slow(void)
{
	return atomic_exchange(&clash, false) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

void sl_mirror_stale_slow(void)
{
	pthread_mutex_lock(&lock);
	busy = false;
	looks = LOOKS;
	for (size_t i = 0; i < count; i++) {
		struct mirror *m = all[i];

		if (m->stale == m->pages || m->gone || m->kind & SL_MIRROR_READ_ONLY)
			continue;
		send_written(m);
		sl_trap_keep();
		protect(m, 0, m->pages, PROT_NONE);
		set(m, 0, m->pages, STALE);
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
	protect(m, from, to, PROT_READ | PROT_WRITE);
	set(m, from, to, WRITTEN);
}

static CUresult fetch_bytes(const struct mirror *m, uint64_t p, size_t n)
{
	const uint8_t *got;
	CUresult err = read_other(m, p, n, &got);

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
	protect(m, from, to, PROT_READ);
	set(m, from, to, SAME);
	m->habit.fetched += to - from;
	return true;
}

/* Notes what pages [from, to), which are the same, hold, and lets the program write to them. */
static bool open_pages(struct mirror *m, size_t from, size_t to)
{
	bool managed = m->kind & SL_MIRROR_MANAGED;

	if (managed && busy && !m->was) {
		m->was = calloc(m->pages, sizeof *m->was);
		if (!m->was)
			return false;
	}
	for (size_t i = from; (!managed || busy) && i < to; i++) {
		m->was[i] = malloc(PAGE);
		if (!m->was[i])
			return false;
		memcpy(m->was[i], (void *)(uintptr_t)address(m, i), PAGE);
	}
	m->raced |= busy;
	protect(m, from, to, PROT_READ | PROT_WRITE);
	set(m, from, to, WRITTEN);
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
	memset(m->state, SAME, m->pages);
	i = first_above(base);
	memmove(all + i + 1, all + i, (count - i) * sizeof *all);
	all[i] = m;
	count++;
	atomic_fetch_add(&sl_mirrors, 1);
	*out = m;
	return CUDA_SUCCESS;
}

/* Takes the mirror in place i out of the list, and lets the program have its memory. */
static void take_out(size_t i)
{
	struct mirror *m = all[i];

	memmove(all + i, all + i + 1, (--count - i) * sizeof *all);
	atomic_fetch_sub(&sl_mirrors, 1);
	if (!m->gone)
		protect(m, 0, m->pages, PROT_READ | PROT_WRITE);
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
	pthread_mutex_lock(&lock);
	err = add(o, base, n, kind, &m);
	if (!err)
		set(m, 0, m->pages, WRITTEN);
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
		protect(m, 0, m->pages, PROT_READ);
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
		protect(m, 0, m->pages, PROT_NONE);
		set(m, 0, m->pages, STALE);
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
