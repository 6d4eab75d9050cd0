/*
 * Protection domains and memory regions, and copies between a buffer of the simulator and memory that is named by keys.
 *
 * A copy holds the context's `regions` for reading, and looks its keys up each time: when dereg_mr has returned, nothing of the region
 * is read or written any more, whatever is under way.
 */
#include "simverbs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct vb_pd *ibv_alloc_pd(struct vb_context *c)
{
	struct vb_pd *pd;

	if (sim_stale(c)) {
		errno = ENODEV;
		return NULL;
	}
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->context = c;
	sim_count(c, &sim_context(c)->pds, 1);
	return pd;
}

int ibv_dealloc_pd(struct vb_pd *pd)
{
	struct sim_context *c = sim_context(pd->context);
	bool busy;

	if (sim_stale(pd->context))
		return 0;
	pthread_rwlock_rdlock(&c->regions);
	busy = pd->mrs;
	pthread_rwlock_unlock(&c->regions);
	pthread_mutex_lock(&c->lock);
	busy = busy || pd->qps;
	if (!busy)
		c->pds--;
	pthread_mutex_unlock(&c->lock);
	if (busy)
		return EBUSY;
	free(pd);
	return 0;
}

/* Unlike a device it looks only whether something is there, not whether it may be written. */
static bool mapped(void *addr, size_t length, size_t page)
{
	uintptr_t at = (uintptr_t)addr & ~(page - 1), end = (uintptr_t)addr + length;
	unsigned char seen[4096];

	for (; at < end; at += sizeof(seen) * page) {
		size_t n = end - at < sizeof(seen) * page ? end - at : sizeof(seen) * page;

		if (mincore((void *)at, n, seen) && errno == ENOMEM)
			return false;
	}
	return true;
}

static uint64_t pinned(const void *addr, size_t length, size_t page)
{
	uintptr_t first = (uintptr_t)addr & ~(page - 1), end = ((uintptr_t)addr + length + page - 1) & ~(page - 1);

	return end - first;
}

static _Atomic uint32_t next_key;

static void first_key(void)
{
	next_key = sim_random();
}

/* Keys differ from region to region for a long time, and a region's two from each other, unlike with some devices: an error is seen. */
static void name(struct sim_mr *mr)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, first_key);
	mr->vb.lkey = (next_key++ * 2654435761U) & 0x7fffffff;
	mr->vb.rkey = mr->vb.lkey | 0x80000000;
}

struct vb_mr *ibv_reg_mr(struct vb_pd *pd, void *addr, size_t length, int access)
{
	struct sim_context *c = sim_context(pd->context);
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct sim_mr *mr;
	bool fits;

	if (sim_stale(pd->context) || c->fail_reg_mr) {
		errno = sim_stale(pd->context) ? ENODEV : EIO;
		return NULL;
	}
	if (!length || (uintptr_t)addr + length < length || ((access & VB_ACCESS_REMOTE_WRITE) && !(access & VB_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	if (!mapped(addr, length, page)) {
		errno = EFAULT;
		return NULL;
	}
	pthread_mutex_lock(&c->lock);
	fits = pinned(addr, length, page) <= c->memlock - c->locked;
	if (fits)
		c->locked += pinned(addr, length, page);
	pthread_mutex_unlock(&c->lock);
	mr = fits ? calloc(1, sizeof(*mr)) : NULL;
	if (!mr) {
		errno = ENOMEM;
		return NULL;
	}
	mr->vb = (struct vb_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = length };
	mr->access = access;
	name(mr);
	pthread_rwlock_wrlock(&c->regions);
	mr->next = pd->mrs;
	pd->mrs = mr;
	pthread_rwlock_unlock(&c->regions);
	return &mr->vb;
}

int ibv_dereg_mr(struct vb_mr *vb)
{
	struct sim_context *c = sim_context(vb->context);
	struct sim_mr *mr = (struct sim_mr *)vb, **at = &vb->pd->mrs;

	if (sim_stale(vb->context))
		return 0;
	pthread_rwlock_wrlock(&c->regions);
	while (*at && *at != mr)
		at = &(*at)->next;
	if (!*at)
		sim_die("dereg_mr of what is no region");
	*at = mr->next;
	pthread_rwlock_unlock(&c->regions);
	pthread_mutex_lock(&c->lock);
	c->locked -= pinned(vb->addr, vb->length, (size_t)sysconf(_SC_PAGESIZE));
	pthread_mutex_unlock(&c->lock);
	free(mr);
	return 0;
}

/* With `regions` held. */
static bool granted(struct vb_pd *pd, const struct sim_area *a, const struct vb_sge *s)
{
	for (struct sim_mr *mr = pd->mrs; mr; mr = mr->next) {
		uint64_t first = (uintptr_t)mr->vb.addr;

		if ((a->remote ? mr->vb.rkey : mr->vb.lkey) != s->lkey)
			continue;
		return s->addr >= first && s->length <= mr->vb.length && s->addr - first <= mr->vb.length - s->length &&
		       (mr->access & a->access) == a->access;
	}
	return false;
}

/* Of what has no length neither key nor address is looked at. */
bool area_valid(struct vb_pd *pd, const struct sim_area *a)
{
	struct sim_context *c = sim_context(pd->context);
	bool ok = true;

	pthread_rwlock_rdlock(&c->regions);
	for (int i = 0; i < a->sges && ok; i++)
		ok = !a->list[i].length || granted(pd, a, &a->list[i]);
	pthread_rwlock_unlock(&c->regions);
	return ok;
}

/* n bytes from or to the area's byte `offset`; false if a key is not valid any more. What the area lacks is left out. */
bool area_copy(struct vb_pd *pd, const struct sim_area *a, uint64_t offset, void *buf, size_t n, bool into)
{
	struct sim_context *c = sim_context(pd->context);
	uint8_t *b = buf;
	bool ok = true;

	pthread_rwlock_rdlock(&c->regions);
	for (int i = 0; i < a->sges && n && ok; i++) {
		const struct vb_sge *s = &a->list[i];
		uint8_t *p = (uint8_t *)(uintptr_t)s->addr + offset;
		size_t part;

		if (offset >= s->length) {
			offset -= s->length;
			continue;
		}
		part = s->length - offset < n ? s->length - offset : n;
		ok = granted(pd, a, s);
		if (ok)
			memcpy(into ? p : b, into ? b : p, part);
		b += part;
		n -= part;
		offset = 0;
	}
	pthread_rwlock_unlock(&c->regions);
	return ok;
}
