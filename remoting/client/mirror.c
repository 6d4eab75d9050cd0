/*
 * See mirror.h. One lock guards all of it, and is held while bytes are fetched: so a
 * page's state and its protection change together. It is never taken by a thread that
 * the fetched bytes come through, and whoever holds it touches no mirror that is
 * protected against that: the bytes of a page that is sent are read while it may be read.
 */
#include "mirror.h"
#include "changes.h"
#include "codec.h"
#include "ctx.h"
#include "delivery.h"
#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "log.h"
#include "route.h"
#include "send.h"
#include "stream.h"
#include "trap.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE SL_MIRROR_PAGE

enum { STALE, SAME, WRITTEN };

/* How far a run of faults at successive pages has got: such a run takes more at a time. */
struct ahead {
	size_t next, pages;
};

enum { AHEAD_FIRST = 16, AHEAD_MOST = 1024 };

_Static_assert(AHEAD_MOST * PAGE <= SL_MAX_COPY_IN && SL_MAX_HOST_MAP / PAGE / 4096 <= AHEAD_MOST, "a read");

struct mirror {
	uint64_t base;
	size_t n, pages;
	bool managed;
	struct sl_ctx *ctx;
	uint32_t ctx_id;
	uint8_t *state;		/* of each page */
	uint8_t **was;		/* page-locked: what each written page held; NULL: all of it is to be sent */
	size_t written, stale;	/* pages in these states */
	struct ahead fetch, open;
};

_Atomic unsigned sl_mirrors;

static struct mirror **all;	/* by address */
static size_t count, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The stream of each context that bytes are moved by, which waits for no other. */
static struct {
	uint32_t ctx_id, stream;
} streams[32];

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

bool sl_mirror_has_slow(uint64_t p)
{
	bool found;

	pthread_mutex_lock(&lock);
	found = find(p);
	pthread_mutex_unlock(&lock);
	return found;
}

struct sl_ctx *sl_mirror_ctx(uint64_t p)
{
	struct mirror *m;
	struct sl_ctx *c;

	if (!atomic_load_explicit(&sl_mirrors, memory_order_relaxed))
		return NULL;
	pthread_mutex_lock(&lock);
	m = find(p);
	c = m ? m->ctx : NULL;
	pthread_mutex_unlock(&lock);
	return c;
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
static void protect(const struct mirror *m, size_t from, size_t to, int prot)
{
	if (!mprotect((void *)(uintptr_t)address(m, from), (to - from) * PAGE, prot))
		return;
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

/* --- the other side --- */

static CUresult stream_of(uint32_t ctx_id, uint32_t *stream)
{
	unsigned i, spare = 32;
	CUstream s;
	CUresult err;

	for (i = 0; i < 32; i++) {
		if (streams[i].ctx_id == ctx_id) {
			*stream = streams[i].stream;
			return CUDA_SUCCESS;
		}
		if (!streams[i].ctx_id && spare == 32)
			spare = i;
	}
	if (spare == 32)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
	if (!err) {
		streams[spare].ctx_id = ctx_id;
		*stream = streams[spare].stream = sl_handle_bare(s);
	}
	return err;
}

struct transfer {
	const struct mirror *m;
	uint64_t p;
	size_t n;
	void *to;
};

static CUresult send_there(void *arg)
{
	struct transfer *t = arg;
	const uint8_t *from = (const uint8_t *)(uintptr_t)t->p;
	uint32_t stream;
	CUresult err = stream_of(t->m->ctx_id, &stream);

	while (t->n && !err) {
		size_t n = t->n < SL_MAX_COPY_IN ? t->n : SL_MAX_COPY_IN;
		sl_buf b;

		sl_buf_init(&b);
		sl_put(&b, struct wire_host_write, .dst = t->p, .stream = stream);
		err = sl_oneway_bulk(CTL_HOST_WRITE, &b, from, n);
		sl_buf_free(&b);
		t->p += n;
		from += n;
		t->n -= n;
	}
	return err;
}

/* A page-locked block's: of at most AHEAD_MOST pages. */
static CUresult read_there(void *arg)
{
	struct transfer *t = arg;
	sl_reply r;
	sl_buf b;
	CUresult err;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_read, .src = t->p, .size = t->n);
	err = sl_wait(CTL_HOST_READ, &b, &r);
	sl_get_bytes(&r, t->to, t->n);
	if (!err && r.bad)
		err = CUDA_ERROR_UNKNOWN;
	sl_reply_free(&r);
	sl_buf_free(&b);
	return err;
}

static CUresult copy_there(void *arg)
{
	struct transfer *t = arg;
	uint32_t delivery, stream;
	CUresult err = stream_of(t->m->ctx_id, &stream);
	sl_buf b;

	if (err)
		return err;
	delivery = sl_delivery_new(t->to, t->n);
	if (!delivery)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_out, .src = t->p, .size = t->n, .stream = stream, .delivery = delivery);
	err = sl_wait(CTL_COPY_OUT, &b, NULL);
	sl_buf_free(&b);
	if (!err)
		return sl_delivery_wait(delivery);
	sl_delivery_drop(delivery);
	return err;
}

/* --- sending --- */

static void send(const struct mirror *m, uint64_t p, size_t n)
{
	struct transfer t = { .m = m, .p = p, .n = n };

	sl_ctx_with(m->ctx, send_there, &t);
}

static bool zeroes(uint64_t p, size_t n)
{
	const uint8_t *b = (const uint8_t *)(uintptr_t)p;

	return !b[0] && !memcmp(b, b + 1, n - 1);
}

/* Pages whose changes are sent together; a mask has a bit for each of their bytes. */
enum { MERGE_PAGES = 64, PAGE_MASK = PAGE / 8 };

_Static_assert(MERGE_PAGES * PAGE <= SL_MAX_MERGE, "a merge");

struct merge {
	uint64_t p;
	size_t n;
	const uint8_t *mask;
};

static CUresult merge_there(void *arg)
{
	struct merge *g = arg;
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_merge, .dst = g->p, .size = (uint32_t)g->n);
	sl_put_bytes(&b, g->mask, g->n / 8);
	err = sl_oneway_bulk(CTL_HOST_MERGE, &b, (const void *)(uintptr_t)g->p, g->n);
	sl_buf_free(&b);
	return err;
}

static void send_merge(const struct mirror *m, size_t page, size_t from, size_t to, const uint8_t *masks)
{
	struct merge g = { .p = address(m, page) + from, .n = to - from, .mask = masks + from / 8 };

	sl_ctx_with(m->ctx, merge_there, &g);
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

/* Sends pages [from, to), which are written, and notes them as the same. */
static void send_pages(struct mirror *m, size_t from, size_t to)
{
	sl_trap_keep();
	protect(m, from, to, PROT_READ);
	for (size_t i = from, j; i < to; i = j) {
		j = i + 1;
		if (m->was && m->was[i]) {
			while (j < to && m->was[j])
				j++;
			send_changes(m, i, j);
			for (size_t k = i; k < j; k++) {
				free(m->was[k]);
				m->was[k] = NULL;
			}
			continue;
		}
		/* Page-locked memory that was never sent: the other side holds zeroes. */
		if (!m->managed && zeroes(address(m, i), bytes(m, i, j)))
			continue;
		while (j < to && (m->managed || (!m->was[j] && !zeroes(address(m, j), bytes(m, j, j + 1)))))
			j++;
		send(m, address(m, i), bytes(m, i, j));
	}
	set(m, from, to, SAME);
}

static void send_written(struct mirror *m)
{
	for (size_t i = 0, j; m->written && i < m->pages; i = j) {
		const uint8_t *at = memchr(m->state + i, WRITTEN, m->pages - i);

		if (!at)
			return;
		i = (size_t)(at - m->state);
		j = run(m, i, m->pages);
		send_pages(m, i, j);
	}
}

void sl_mirror_send_slow(void)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++)
		if (all[i]->written)
			send_written(all[i]);
	pthread_mutex_unlock(&lock);
}

void sl_mirror_stale_slow(void)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++) {
		struct mirror *m = all[i];

		if (m->stale == m->pages)
			continue;
		send_written(m);
		sl_trap_keep();
		protect(m, 0, m->pages, PROT_NONE);
		set(m, 0, m->pages, STALE);
	}
	pthread_mutex_unlock(&lock);
}

/* --- faults --- */

/* The end of the pages that are taken at a fault at page i, all of one state: more in a large mirror, which thus has few maps. */
static size_t advance(const struct mirror *m, struct ahead *a, size_t i)
{
	size_t first = m->pages / 4096 > AHEAD_FIRST ? m->pages / 4096 : AHEAD_FIRST;
	size_t most = first > AHEAD_MOST ? first : AHEAD_MOST;

	a->pages = i != a->next || !a->pages ? first : a->pages < most ? a->pages * 2 : most;
	a->next = i + a->pages;
	return run(m, i, a->next < m->pages ? a->next : m->pages);
}

/* The session has ended: the program may have pages [from, to), whatever they hold. */
static void give_up(struct mirror *m, size_t from, size_t to)
{
	if (!sl_dead()) {
		sl_log(SL_ERROR, "there is no memory to follow what the program writes");
		abort(); /* else the GPU would not see it, or lose what it has written beside it */
	}
	protect(m, from, to, PROT_READ | PROT_WRITE);
	set(m, from, to, WRITTEN);
}

static bool fetch(struct mirror *m, size_t from, size_t to)
{
	struct transfer t = { .m = m, .p = address(m, from), .n = bytes(m, from, to) };
	CUresult err = CUDA_ERROR_OUT_OF_MEMORY;

	t.to = malloc(t.n);
	if (t.to)
		err = sl_ctx_with(m->ctx, m->managed ? copy_there : read_there, &t);
	if (!err && !sl_trap_poke(address(m, from), t.to, bytes(m, from, to)))
		err = CUDA_ERROR_OUT_OF_MEMORY;
	free(t.to);
	if (err) {
		sl_log(SL_ERROR, "what the GPU has written to memory at %#llx is lost: error %d", (unsigned long long)address(m, from), err);
		return false;
	}
	protect(m, from, to, PROT_READ);
	set(m, from, to, SAME);
	return true;
}

/* Notes what pages [from, to), which are the same, hold, and lets the program write to them. */
static bool open_pages(struct mirror *m, size_t from, size_t to)
{
	for (size_t i = from; m->was && i < to; i++) {
		m->was[i] = malloc(PAGE);
		if (!m->was[i])
			return false;
		memcpy(m->was[i], (void *)(uintptr_t)address(m, i), PAGE);
	}
	protect(m, from, to, PROT_READ | PROT_WRITE);
	set(m, from, to, WRITTEN);
	return true;
}

static bool touched(uint64_t p, bool write)
{
	struct mirror *m;
	size_t i, to;

	pthread_mutex_lock(&lock);
	m = find(p);
	if (m) {
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
	}
	pthread_mutex_unlock(&lock);
	return m;
}

/* In a forked child, whose one thread this is: it gets what was there, and nothing is sent. */
static bool left_alone(uint64_t p)
{
	struct mirror *m = find(p);

	return m && !mprotect((void *)(uintptr_t)m->base, m->pages * PAGE, PROT_READ | PROT_WRITE);
}

/* --- beginning and ending --- */

static void discard(struct mirror *m)
{
	for (size_t i = 0; m->was && i < m->pages; i++)
		free(m->was[i]);
	free(m->was);
	free(m->state);
	free(m);
}

/* A mirror of whole pages in the current context, in the list. The lock is held. */
static CUresult add(uint64_t base, size_t n, bool managed, struct mirror **out)
{
	struct mirror *m = calloc(1, sizeof *m);
	struct sl_ctx *c;
	uint32_t stream;
	size_t i;
	CUresult err;

	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_ctx_use(&c);
	if (!err) {
		*m = (struct mirror){ .base = base, .n = n, .pages = (n + PAGE - 1) / PAGE, .managed = managed, .ctx = c, .ctx_id = atomic_load(&c->id) };
		m->state = malloc(m->pages);
		if (!managed)
			m->was = calloc(m->pages, sizeof *m->was);
		if (!m->state || (!managed && !m->was))
			err = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!err)
		err = stream_of(m->ctx_id, &stream);
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
	protect(m, 0, m->pages, PROT_READ | PROT_WRITE);
	discard(m);
}

static CUresult unmap_there(void *arg)
{
	const struct mirror *m = arg;
	sl_buf b;
	CUresult err;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_unmap, .address = m->base);
	err = sl_oneway(CTL_HOST_UNMAP, &b);
	sl_buf_free(&b);
	return err;
}

/* Fetches what is stale, while that can be done. */
static void fetch_all(struct mirror *m)
{
	for (size_t i = 0, j; m->stale && i < m->pages; i = j) {
		j = run(m, i, m->pages - i > AHEAD_MOST ? i + AHEAD_MOST : m->pages);
		if (m->state[i] == STALE && !fetch(m, i, j))
			return;
	}
}

static CUresult map_there(uint64_t base, size_t n)
{
	sl_buf b;
	CUresult err;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_map, .address = base, .size = n);
	err = sl_wait(CTL_HOST_MAP, &b, NULL);
	sl_buf_free(&b);
	return err;
}

/* Whether there is a mirror at base, by its context; NULL if not. */
static CUresult reached(uint64_t base, struct sl_ctx **c)
{
	*c = sl_mirror_ctx(base);
	if (!*c || !sl_ctx_foreign(*c))
		return CUDA_SUCCESS;
	sl_log(SL_WARN, "host memory is reached by kernels of one owner's devices; these are another's");
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* The lock is not held while the worker is asked: it may be waiting for a host function, which needs the lock. */
static CUresult make_pinned(uint64_t base, size_t n)
{
	struct mirror *m;
	CUresult err;

	if (!sl_trap_start(touched, left_alone)) {
		sl_log(SL_WARN, "kernels cannot reach host memory: /proc/self/mem cannot be opened, or a thread not made");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	err = map_there(base, (n + PAGE - 1) / PAGE * PAGE);
	if (err == CUDA_ERROR_OUT_OF_MEMORY || err == CUDA_ERROR_NOT_SUPPORTED)
		sl_log(SL_WARN, "kernels cannot reach %zu bytes of host memory: %s; see docs/limits.md", n,
		       err == CUDA_ERROR_OUT_OF_MEMORY ? "the owner has no more for this session" : "the owner uses their address");
	if (err)
		return err;
	pthread_mutex_lock(&lock);
	err = add(base, n, false, &m);
	if (!err)
		set(m, 0, m->pages, WRITTEN);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_mirror_pinned(uint64_t base, size_t n)
{
	static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	pthread_mutex_lock(&making);
	err = reached(base, &c);
	if (!err && !c)
		err = make_pinned(base, n);
	pthread_mutex_unlock(&making);
	return err;
}

/* Fills device memory with zeroes, before anything that follows. */
static void zero_there(const struct mirror *m)
{
	CUstream s;
	uint32_t id;

	if (stream_of(m->ctx_id, &id))
		return;
	s = sl_handle_value(SL_STREAM, id);
	fw_cuMemsetD8Async(m->base, 0, m->n, s);
	fw_cuStreamSynchronize(s);
}

CUresult sl_mirror_managed(uint64_t base, size_t n)
{
	struct mirror *m;
	CUresult err = CUDA_ERROR_NOT_SUPPORTED;

	pthread_mutex_lock(&lock);
	if (sl_trap_start(touched, left_alone))
		err = add(base, n, true, &m);
	if (!err) {
		zero_there(m);
		sl_trap_keep();
		protect(m, 0, m->pages, PROT_READ);
	}
	pthread_mutex_unlock(&lock);
	return err;
}

void sl_mirror_drop(uint64_t base)
{
	size_t i;

	if (!atomic_load(&sl_mirrors))
		return;
	pthread_mutex_lock(&lock);
	i = first_above(base);
	if (i < count && all[i]->base == base) {
		if (!all[i]->managed)
			sl_ctx_with(all[i]->ctx, unmap_there, all[i]);
		take_out(i);
	}
	pthread_mutex_unlock(&lock);
}

void sl_mirror_drop_ctx(uint32_t ctx_id)
{
	if (!atomic_load(&sl_mirrors))
		return;
	pthread_mutex_lock(&lock);
	for (size_t i = count; i-- > 0;) {
		if (all[i]->ctx_id != ctx_id)
			continue;
		if (!all[i]->managed) { /* which another context may go on using */
			fetch_all(all[i]);
			sl_ctx_with(all[i]->ctx, unmap_there, all[i]);
		}
		take_out(i);
	}
	for (unsigned i = 0; i < 32; i++)
		if (streams[i].ctx_id == ctx_id)
			streams[i].ctx_id = 0;
	pthread_mutex_unlock(&lock);
}
