/* See area.h. The lock is held while the worker is asked, and is the first that is taken. */
#include "area.h"
#include "codec.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "log.h"
#include "ranges.h"
#include "route.h"
#include "send.h"
#include "shared.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>

#define PAGE ((uint64_t)4096)

struct area {
	struct area *next;	/* by address */
	uint64_t base, n, delta;
	unsigned users;
	uint32_t ctx_id;
};

static struct area *areas;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void unmap(uint64_t there)
{
	sl_buf b;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_unmap, .address = there);
	sl_oneway(CTL_HOST_UNMAP, &b);
	sl_buf_free(&b);
}

static CUresult ask(uint64_t base, uint64_t n, bool move, int memfd, uint64_t *there)
{
	struct wire_host_map_reply at = { 0 };
	sl_reply r;
	sl_buf b;
	CUresult err;

	if (memfd && !sl_shared_lend(memfd, n))
		return CUDA_ERROR_NOT_SUPPORTED;
	sl_buf_init(&b);
	/* A HOST_SHARE has the same form. */
	sl_put(&b, struct wire_host_map, .address = base, .size = n, .move = move);
	err = sl_wait(memfd ? CTL_HOST_SHARE : CTL_HOST_MAP, &b, &r);
	sl_get_bytes(&r, &at, sizeof at);
	if (!err && (r.bad || (!move && at.address != base)))
		err = CUDA_ERROR_UNKNOWN;
	*there = at.address;
	sl_reply_free(&r);
	sl_buf_free(&b);
	return err;
}

/* Other addresses are the device's from now on: this process must not use them, and a question about one is answered. */
static CUresult note_moved(uint64_t there, uint64_t n)
{
	if (!sl_guard_reserve(there, n))
		return CUDA_ERROR_NOT_SUPPORTED;
	return sl_range_here((struct sl_range){ .base = there, .size = n, .type = SL_RANGE_DEVICE });
}

static CUresult map(uint64_t base, uint64_t n, bool move, int memfd, struct area **at)
{
	struct area *a = calloc(1, sizeof *a);
	uint64_t there;
	CUresult err;

	if (!a)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = ask(base, n, move, memfd, &there);
	if (!err && there != base) {
		err = note_moved(there, n);
		if (err)
			unmap(there);
		else
			sl_log(SL_INFO, "the worker uses the addresses of %llu bytes of host memory: kernels have them at others", (unsigned long long)n);
	}
	if (err) {
		free(a);
		return err;
	}
	*a = (struct area){ .next = *at, .base = base, .n = n, .delta = there - base, .ctx_id = sl_current_ctx_id() };
	*at = a;
	return CUDA_SUCCESS;
}

static void drop(struct area **at)
{
	struct area *a = *at;

	*at = a->next;
	unmap(a->base + a->delta);
	if (a->delta)
		sl_range_remove(a->base + a->delta, SL_RANGE_DEVICE, NULL);
	free(a);
}

/* Ends the areas within [lo, hi) that nobody uses. */
static void sweep(uint64_t lo, uint64_t hi)
{
	for (struct area **at = &areas; *at && (*at)->base < hi;) {
		if ((*at)->users || (*at)->base + (*at)->n <= lo)
			at = &(*at)->next;
		else
			drop(at);
	}
}

/* Whether what is in [lo, hi) already can be used with more at the same addresses; *any: there is something. */
static CUresult look(uint64_t lo, uint64_t hi, bool *any)
{
	*any = false;
	for (const struct area *a = areas; a && a->base < hi; a = a->next) {
		if (a->base + a->n <= lo)
			continue;
		*any = true;
		if (sl_ctx_session(a->ctx_id) != sl_ctx_session(sl_current_ctx_id()) || a->delta)
			return CUDA_ERROR_NOT_SUPPORTED;
	}
	return CUDA_SUCCESS;
}

/* Maps what is not there yet of [lo, hi). */
static CUresult fill(uint64_t lo, uint64_t hi, bool move, int memfd)
{
	struct area **at = &areas;
	CUresult err = CUDA_SUCCESS;

	while (lo < hi && !err) {
		uint64_t to = hi;

		while (*at && (*at)->base + (*at)->n <= lo)
			at = &(*at)->next;
		if (*at && (*at)->base <= lo) {
			lo = (*at)->base + (*at)->n;
			continue;
		}
		if (*at && (*at)->base < hi)
			to = (*at)->base;
		err = map(lo, to - lo, move, memfd, at);
	}
	return err;
}

CUresult sl_area_hold(uint64_t p, size_t n, int memfd, struct sl_area_use *u)
{
	uint64_t lo = p & ~(PAGE - 1), hi = (p + n + PAGE - 1) & ~(PAGE - 1);
	CUresult err;
	bool any;

	pthread_mutex_lock(&lock);
	err = look(lo, hi, &any);
	if (!err)
		err = memfd && any ? CUDA_ERROR_NOT_SUPPORTED : fill(lo, hi, !any && sl_sessions == 1, memfd);
	*u = (struct sl_area_use){ .base = lo, .n = hi - lo, .fresh = !any };
	for (struct area *a = areas; !err && a && a->base < hi; a = a->next) {
		if (a->base + a->n <= lo)
			continue;
		a->users++;
		u->delta = a->delta;
	}
	if (err)
		sweep(lo, hi);
	pthread_mutex_unlock(&lock);
	if (!memfd && (err == CUDA_ERROR_OUT_OF_MEMORY || err == CUDA_ERROR_NOT_SUPPORTED))
		sl_log(SL_WARN, "kernels cannot reach %zu bytes of host memory: %s; see docs/limits.md", n,
		       err == CUDA_ERROR_OUT_OF_MEMORY ? "the owner has no more for this session" : "the owner uses their address");
	return err;
}

void sl_area_release(const struct sl_area_use *u)
{
	pthread_mutex_lock(&lock);
	for (struct area *a = areas; a && a->base < u->base + u->n; a = a->next)
		if (a->base + a->n > u->base)
			a->users--;
	sweep(u->base, u->base + u->n);
	pthread_mutex_unlock(&lock);
}
