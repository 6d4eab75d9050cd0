/*
 * Memory pools of the host. Their memory is page-locked memory of the program like cuMemHostAlloc's, which kernels reach in the
 * same way (mapped.h), so the worker has no such pool. An allocation is there at once, which is no later than its stream gets
 * there. A free takes effect when its stream gets there: a host function says so. The memory goes with the next call that
 * concerns the pool; until then it counts as reserved, as with the driver's pools, which keep it until a wait.
 *
 * The lock guards all pools. It is not held while anything is sent or waited for.
 */
#include "hostpool.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "hostfn.h"
#include "hostmem.h"
#include "ranges.h"
#include "stream.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Memory that the program has freed, and that its stream may still use. */
struct spare {
	struct spare *next;
	struct sl_range r;
	_Atomic bool reached;
};

struct sl_hostpool {
	void *link;
	struct sl_hostpool *next;
	void *handle;
	uint32_t id;
	bool destroyed;		/* it ends with its last allocation */
	unsigned live;		/* allocations, freed ones included until their memory goes */
	size_t most;		/* bytes, 0: no bound */
	CUmemAccess_flags access[SL_MAX_DEVICES];
	uint64_t attr[CU_MEMPOOL_ATTR_USED_MEM_HIGH + 1];
	struct spare *spares;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sl_pool pools = { .size = sizeof(struct sl_hostpool) };
static struct sl_hostpool *all, *default_pool, *current_pool;

struct sl_hostpool *sl_hostpool_of(CUmemoryPool pool)
{
	return sl_handle_state(SL_POOL, pool);
}

/* A new pool. The lock is held. */
static struct sl_hostpool *make(size_t most)
{
	struct sl_hostpool *p = sl_pool_get(&pools);

	if (!p)
		return NULL;
	memset(p, 0, sizeof *p);
	p->most = most;
	for (unsigned a = CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES; a <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES; a++)
		p->attr[a] = 1;
	p->id = sl_handle_new(SL_POOL, p, &p->handle);
	if (!p->id) {
		sl_pool_put(&pools, p);
		return NULL;
	}
	p->next = all;
	all = p;
	return p;
}

/* The pool that a range names, also if it has been destroyed. The lock is held. */
static struct sl_hostpool *owner(const struct sl_range *r)
{
	struct sl_hostpool *p = all;

	while (p && p->handle != r->pool)
		p = p->next;
	return p;
}

CUresult sl_hostpool_default(CUmemoryPool *pool, bool current)
{
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	if (!default_pool)
		default_pool = make(0);
	if (!current_pool)
		current_pool = default_pool;
	if (default_pool)
		*pool = current ? current_pool->handle : default_pool->handle;
	pthread_mutex_unlock(&lock);
	return default_pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sl_hostpool_set_current(struct sl_hostpool *p)
{
	pthread_mutex_lock(&lock);
	current_pool = p;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_create(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	static const unsigned char zero[sizeof props->reserved];
	struct sl_hostpool *p;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (memcmp(props->reserved, zero, sizeof zero))
		return CUDA_ERROR_INVALID_VALUE;
	if (props->handleTypes)
		return sl_refuse_with("cuMemPoolCreate", "a pool of host memory for other processes");
	if (props->usage)
		return sl_refuse_with("cuMemPoolCreate", "a pool of host memory for decompression");
	pthread_mutex_lock(&lock);
	p = make(props->maxSize);
	pthread_mutex_unlock(&lock);
	if (!p)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pool = p->handle;
	return CUDA_SUCCESS;
}

/* Ends a destroyed pool that has no memory any more. The lock is held. */
static void end_if_empty(struct sl_hostpool *p)
{
	struct sl_hostpool **at = &all;

	if (!p->destroyed || p->live)
		return;
	while (*at != p)
		at = &(*at)->next;
	*at = p->next;
	sl_pool_put(&pools, p);
}

/* Takes out what the streams have passed. The lock is held. */
static struct spare *take_passed(struct sl_hostpool *p)
{
	struct spare *passed = NULL;

	for (struct spare **at = &p->spares; *at;) {
		struct spare *s = *at;

		if (!atomic_load(&s->reached)) {
			at = &s->next;
			continue;
		}
		*at = s->next;
		s->next = passed;
		passed = s;
	}
	return passed;
}

/* The memory of an allocation has gone. The lock is held. */
static void gone(struct sl_hostpool *p, const struct sl_range *r)
{
	p->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] -= r->map_size;
	p->live--;
	end_if_empty(p);
}

/* Gives back the memory that the streams have passed. What that takes at the worker is forbidden in a capture. */
static void give_back(struct sl_hostpool *p)
{
	struct spare *passed;

	if (sl_capturing_any())
		return;
	pthread_mutex_lock(&lock);
	passed = take_passed(p);
	pthread_mutex_unlock(&lock);
	while (passed) {
		struct spare *s = passed;

		passed = s->next;
		sl_host_end(&s->r, true);
		pthread_mutex_lock(&lock);
		gone(p, &s->r);
		pthread_mutex_unlock(&lock);
		free(s);
	}
}

CUresult sl_hostpool_destroy(struct sl_hostpool *p)
{
	if (p == default_pool)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_handle_claim(SL_POOL, p->id))
		return CUDA_ERROR_INVALID_VALUE;
	give_back(p);
	pthread_mutex_lock(&lock);
	if (current_pool == p)
		current_pool = default_pool;
	sl_handle_free(SL_POOL, p->id);
	p->destroyed = true;
	end_if_empty(p);
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_trim(struct sl_hostpool *p)
{
	give_back(p);
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_get(struct sl_hostpool *p, CUmemPool_attribute attr, uint64_t *value)
{
	if (!attr || attr > CU_MEMPOOL_ATTR_USED_MEM_HIGH)
		return CUDA_ERROR_INVALID_VALUE;
	give_back(p);
	pthread_mutex_lock(&lock);
	*value = p->attr[attr];
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_set(struct sl_hostpool *p, CUmemPool_attribute attr, uint64_t value)
{
	CUresult err = CUDA_SUCCESS;

	pthread_mutex_lock(&lock);
	switch (attr) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		p->attr[attr] = value != 0;
		break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		p->attr[attr] = value;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		/* Only 0 is allowed: the mark restarts from the present amount, which is the attribute before it. */
		if (value)
			err = CUDA_ERROR_INVALID_VALUE;
		else
			p->attr[attr] = p->attr[attr - 1];
		break;
	default:
		err = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

static bool is_host(const CUmemLocation *at)
{
	return at->type == CU_MEM_LOCATION_TYPE_HOST;
}

static bool is_device(const CUmemLocation *at)
{
	return at->type == CU_MEM_LOCATION_TYPE_DEVICE && sl_dev(at->id);
}

static bool is_access(CUmemAccess_flags f)
{
	return f == CU_MEM_ACCESS_FLAGS_PROT_NONE || f == CU_MEM_ACCESS_FLAGS_PROT_READ || f == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

/* Access is remembered and not enforced: kernels reach page-locked memory. */
CUresult sl_hostpool_set_access(struct sl_hostpool *p, const CUmemAccessDesc *map, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const CUmemLocation *at = &map[i].location;

		if (!is_access(map[i].flags) || (!is_host(at) && at->type != CU_MEM_LOCATION_TYPE_DEVICE))
			return CUDA_ERROR_INVALID_VALUE;
		if (!is_host(at) && !is_device(at))
			return CUDA_ERROR_INVALID_DEVICE;
		/* The host keeps its own memory, as a device does. */
		if (is_host(at) && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_DEVICE;
	}
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++)
		if (!is_host(&map[i].location))
			p->access[map[i].location.id] = map[i].flags;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_access(struct sl_hostpool *p, CUmemAccess_flags *flags, const CUmemLocation *at)
{
	if (!is_host(at) && !is_device(at))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	*flags = is_host(at) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : p->access[at->id];
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

/* Counts an allocation of n bytes in size mapped ones; false if that is more than the pool may have. */
static bool count(struct sl_hostpool *p, size_t n, size_t size)
{
	uint64_t *reserved = &p->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT], *used = &p->attr[CU_MEMPOOL_ATTR_USED_MEM_CURRENT];
	bool ok;

	pthread_mutex_lock(&lock);
	ok = !p->destroyed && (!p->most || (size <= p->most && *reserved <= p->most - size));
	if (ok) {
		p->live++;
		*reserved += size;
		*used += n;
		if (p->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] < *reserved)
			p->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = *reserved;
		if (p->attr[CU_MEMPOOL_ATTR_USED_MEM_HIGH] < *used)
			p->attr[CU_MEMPOOL_ATTR_USED_MEM_HIGH] = *used;
	}
	pthread_mutex_unlock(&lock);
	return ok;
}

CUresult sl_hostpool_alloc(struct sl_hostpool *p, CUdeviceptr *ptr, size_t n, CUstream s)
{
	/* The memory is of no context, and outlives the current one. */
	struct sl_range r = { .type = SL_RANGE_HOST, .pool = p->handle, .size = n };
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (!err)
		sl_stream_of(s, &err);
	if (err)
		return err;
	if (sl_capturing_any() && sl_stream_captures(s))
		return sl_refuse_with("cuMemAllocFromPoolAsync", "a pool of host memory in a capture");
	give_back(p);
	r.dev = c->dev;
	r.map_size = sl_host_pages(n);
	if (!n) {
		*ptr = 0;
		return CUDA_SUCCESS;
	}
	if (r.map_size < n || !count(p, n, r.map_size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_host_map(&r);
	if (!err) {
		*ptr = r.base;
		return CUDA_SUCCESS;
	}
	pthread_mutex_lock(&lock);
	p->attr[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] -= n;
	gone(p, &r);
	pthread_mutex_unlock(&lock);
	return err;
}

static void reach(void *arg, CUresult failed)
{
	struct spare *s = arg;

	(void)failed; /* the stream does nothing more with the memory */
	atomic_store(&s->reached, true);
}

/* Notes that the program has freed an allocation, whose pool it returns. keep is what remains until the stream has passed, or NULL. */
static struct sl_hostpool *freed(const struct sl_range *r, struct spare *keep)
{
	struct sl_hostpool *p;

	pthread_mutex_lock(&lock);
	p = owner(r);
	p->attr[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] -= r->size;
	if (keep) {
		keep->next = p->spares;
		p->spares = keep;
	} else {
		gone(p, r);
	}
	pthread_mutex_unlock(&lock);
	return p;
}

static CUresult free_in_order(struct sl_range *r, CUstream s)
{
	struct spare *keep = calloc(1, sizeof *keep);
	CUresult err = keep ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	if (!err && sl_capturing_any() && sl_stream_captures(s))
		err = sl_refuse_with("cuMemFreeAsync", "memory of a host's pool in a capture");
	if (!err) {
		keep->r = *r;
		err = sl_hostfn_inside(s, reach, keep);
	}
	if (err) { /* it is still the program's */
		free(keep);
		return sl_range_add(r) ? CUDA_ERROR_OUT_OF_MEMORY : err;
	}
	give_back(freed(r, keep));
	return CUDA_SUCCESS;
}

CUresult sl_hostpool_free(CUdeviceptr p, CUstream s, bool in_order)
{
	struct sl_range r;

	/* If two threads free it, only one of them finds it. */
	if (!sl_range_remove(p, SL_RANGE_HOST, &r))
		return CUDA_ERROR_INVALID_VALUE;
	if (in_order)
		return free_in_order(&r, s);
	sl_host_end(&r, false);
	freed(&r, NULL);
	return CUDA_SUCCESS;
}
