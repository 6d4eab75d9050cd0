/*
 * All device and host ranges that this process was given, by address, so that a
 * pointer's kind, owner and extent are answered here.
 *
 * A sorted array under a read-write lock: lookups share it and take a binary
 * search; ranges number in the hundreds, and a change moves a few kilobytes.
 */
#include "ranges.h"
#include "shared.h"
#include "ctx.h"
#include "session.h"

#include <stdlib.h>
#include <string.h>

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct sl_range *all;
static size_t count, capacity;
static size_t graphs;	/* ranges of graphs that were added */
static _Atomic uint64_t last_id;

_Atomic uint64_t sl_locked_filter[64], sl_locked_least, sl_locked_span;

static bool locked_memory(const struct sl_range *r)
{
	return r->type == SL_RANGE_HOST || r->type == SL_RANGE_REGISTERED;
}

/* A thread that reads the two while they grow may look for an address in vain, or miss memory that is just being made. */
static void bounds_add(uint64_t lo, uint64_t hi)
{
	uint64_t least = atomic_load(&sl_locked_least), span = atomic_load(&sl_locked_span);

	if (span && least < lo)
		lo = least;
	if (span && least + span > hi)
		hi = least + span;
	atomic_store(&sl_locked_least, lo);
	atomic_store(&sl_locked_span, hi - lo);
}

static void filter_add(const struct sl_range *r)
{
	uint64_t first = r->base >> 21, last = (r->base + (r->size ? r->size - 1 : 0)) >> 21;

	for (uint64_t i = first; i <= last && i - first < 4096; i++) {
		uint64_t h = i * 0x9e3779b97f4a7c15u >> 52;

		atomic_fetch_or(&sl_locked_filter[h >> 6], 1ull << (h & 63));
	}
	if (last - first >= 4096)
		for (unsigned i = 0; i < 64; i++)
			atomic_store(&sl_locked_filter[i], ~0ull);
	bounds_add(r->base, r->base + r->size);
}

/* Clears the filter once there is no page-locked memory at all. Called with the lock held. */
static void filter_clear(void)
{
	for (size_t i = 0; i < count; i++)
		if (locked_memory(&all[i]))
			return;
	for (unsigned i = 0; i < 64; i++)
		atomic_store(&sl_locked_filter[i], 0);
	atomic_store(&sl_locked_span, 0);
}

uint64_t sl_range_next_id(void)
{
	return atomic_fetch_add(&last_id, 1) + 1;
}

/* Index of the first range that begins above p. */
static size_t above(uint64_t p)
{
	size_t lo = 0, hi = count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (all[mid].base <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* The innermost range that holds p: mappings lie inside reservations. */
static struct sl_range *holder(uint64_t p)
{
	size_t i = above(p), tries = 0;

	while (i-- && tries++ < 4096) {
		if (p - all[i].base < all[i].size || (p == all[i].base && !all[i].size))
			return &all[i];
		/* Only a reservation may contain others, and so be found further down. */
		if (all[i].type != SL_RANGE_MAPPED)
			break;
	}
	return NULL;
}

/* Forgets memory of graphs that lies where r is now: those graphs are gone. */
static void drop_graphs(const struct sl_range *r)
{
	size_t k = 0;

	for (size_t i = 0; i < count; i++)
		if (!all[i].graph || all[i].base >= r->base + r->size || r->base >= all[i].base + all[i].size)
			all[k++] = all[i];
		else
			graphs--;
	count = k;
}

int sl_range_add(const struct sl_range *r)
{
	size_t i;
	int ret = 0;

	pthread_rwlock_wrlock(&lock);
	if (graphs)
		drop_graphs(r);
	if (count == capacity) {
		size_t cap = capacity ? capacity * 2 : 64;
		struct sl_range *p = realloc(all, cap * sizeof *p);

		if (p) {
			all = p;
			capacity = cap;
		} else {
			ret = -1;
		}
	}
	if (!ret) {
		i = above(r->base);
		memmove(all + i + 1, all + i, (count - i) * sizeof *all);
		all[i] = *r;
		if (sl_sessions > 1)
			all[i].home = r->ctx_id ? r->ctx_id : r->home ? r->home : sl_ctx_cur();
		if (!all[i].buffer_id)
			all[i].buffer_id = sl_range_next_id();
		count++;
		graphs += r->graph;
		if (locked_memory(r))
			filter_add(r);
	}
	pthread_rwlock_unlock(&lock);
	return ret;
}

bool sl_range_find(uint64_t p, struct sl_range *out)
{
	struct sl_range *r;

	pthread_rwlock_rdlock(&lock);
	r = holder(p);
	if (r)
		*out = *r;
	pthread_rwlock_unlock(&lock);
	return r;
}

bool sl_range_overlaps(uint64_t p, uint64_t n)
{
	bool found = false;

	pthread_rwlock_rdlock(&lock);
	for (size_t i = 0; i < count && !found; i++)
		found = all[i].base < p + n && p < all[i].base + all[i].size;
	pthread_rwlock_unlock(&lock);
	return found;
}

bool sl_range_clash(uint64_t p, uint64_t n, unsigned session)
{
	bool clash = false;

	pthread_rwlock_rdlock(&lock);
	for (size_t i = 0; i < count && !clash; i++)
		clash = all[i].base < p + n && p < all[i].base + all[i].size && all[i].home &&
			all[i].type != SL_RANGE_HOST && all[i].type != SL_RANGE_REGISTERED && sl_ctx_session(all[i].home) != session;
	pthread_rwlock_unlock(&lock);
	return clash;
}

bool sl_range_remove(uint64_t base, enum sl_range_type type, struct sl_range *out)
{
	bool found = false;
	size_t i;

	pthread_rwlock_wrlock(&lock);
	for (i = above(base); i-- && all[i].base == base;) {
		if (type && all[i].type != type)
			continue;
		if (out)
			*out = all[i];
		memmove(all + i, all + i + 1, (count - i - 1) * sizeof *all);
		count--;
		found = true;
		if (type == SL_RANGE_HOST || type == SL_RANGE_REGISTERED)
			filter_clear();
		break;
	}
	pthread_rwlock_unlock(&lock);
	return found;
}

bool sl_range_sync_memops(uint64_t p, bool on)
{
	struct sl_range *r;

	pthread_rwlock_wrlock(&lock);
	r = holder(p);
	if (r)
		r->sync_memops = on;
	pthread_rwlock_unlock(&lock);
	return r;
}

void sl_range_set_handle(uint64_t p, uint64_t handle)
{
	struct sl_range *r;

	pthread_rwlock_wrlock(&lock);
	r = holder(p);
	if (r)
		r->handle = handle;
	pthread_rwlock_unlock(&lock);
}

void sl_ranges_forget_handle(uint64_t handle)
{
	pthread_rwlock_wrlock(&lock);
	for (size_t i = 0; i < count; i++)
		if (all[i].handle == handle)
			all[i].handle = 0;
	pthread_rwlock_unlock(&lock);
}

void sl_ranges_drop(uint32_t ctx_id)
{
	size_t kept = 0;

	pthread_rwlock_wrlock(&lock);
	for (size_t i = 0; i < count; i++)
		if (all[i].ctx_id != ctx_id)
			all[kept++] = all[i];
		else
			sl_shared_close(all[i].memfd);
	count = kept;
	pthread_rwlock_unlock(&lock);
}
