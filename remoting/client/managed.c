/*
 * Managed memory: device memory that the program has at the same address (mirror.h).
 * It is charged like any device memory, and a page of it is one side's at a time. Small
 * blocks share slabs, since a page must not have two owners.
 *
 * Advice, prefetching and attaching to a stream have no effect: pages go where they are touched.
 */
#include "background.h"
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "mirror.h"
#include "ranges.h"
#include "route.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE SL_MIRROR_PAGE
#define SLAB ((size_t)2 << 20)
#define SLAB_PAGES (SLAB / PAGE)

/* What the program has said of a block. */
struct advice {
	int preferred, prefetched;	/* CUdevice, CU_DEVICE_CPU or CU_DEVICE_INVALID */
	uint16_t accessed_by;		/* a bit for each device */
	bool by_cpu, read_mostly;
};

struct managed {
	struct managed *next;
	uint64_t base;
	size_t n;
	struct slab *slab;	/* NULL: memory of its own */
	CUdeviceptr own;
	uint32_t ctx_id;
	struct advice advice;
};

struct slab {
	struct slab *next;
	uint64_t base;		/* of the first page */
	CUdeviceptr own;
	uint32_t ctx_id;
	unsigned used;
	bool taken[SLAB_PAGES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct managed *blocks[4096];	/* by their first pages */
static struct slab *slabs;

static struct managed **chain(uint64_t base)
{
	return &blocks[base / PAGE % (sizeof blocks / sizeof *blocks)];
}

static size_t whole_pages(size_t n)
{
	return (n + PAGE - 1) / PAGE * PAGE;
}

/* Device memory of n bytes from a page's beginning on, which nothing else of this process has. */
static CUresult take(size_t n, CUdeviceptr *own, uint64_t *base)
{
	CUresult err = sl_device_alloc(own, n);

	if (!err && *own % PAGE) {
		fw_cuMemFree_v2(*own);
		err = sl_device_alloc(own, n + PAGE);
	}
	if (err)
		return err;
	*base = whole_pages(*own);
	if (sl_guard_reserve(*own, *base + n - *own)) {
		sl_guard_joins(*base, false);
		return CUDA_SUCCESS;
	}
	fw_cuMemFree_v2(*own);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* A run of free pages in a slab, SLAB_PAGES if there is none. */
static size_t gap(const struct slab *s, size_t pages)
{
	for (size_t i = 0, free_ones = 0; i < SLAB_PAGES; i++) {
		free_ones = s->taken[i] ? 0 : free_ones + 1;
		if (free_ones == pages)
			return i + 1 - pages;
	}
	return SLAB_PAGES;
}

static CUresult take_of_slab(struct managed *m, size_t pages)
{
	size_t at = SLAB_PAGES;
	struct slab *s;

	for (s = slabs; s; s = s->next) {
		if (s->ctx_id == m->ctx_id && SLAB_PAGES - s->used >= pages && (at = gap(s, pages)) < SLAB_PAGES)
			break;
	}
	if (!s) {
		CUresult err;

		s = calloc(1, sizeof *s);
		err = s ? take(SLAB, &s->own, &s->base) : CUDA_ERROR_OUT_OF_MEMORY;
		if (err) {
			free(s);
			return err;
		}
		s->ctx_id = m->ctx_id;
		s->next = slabs;
		slabs = s;
		at = 0;
	}
	memset(s->taken + at, true, pages);
	s->used += (unsigned)pages;
	m->slab = s;
	m->base = s->base + at * PAGE;
	return CUDA_SUCCESS;
}

/* Returns a block's pages to their slab, or its memory to the device; gone: its context is, and the device's memory with it. */
static void give_back(struct managed *m, bool gone)
{
	struct slab *s = m->slab, **at;
	size_t pages = whole_pages(m->n) / PAGE;

	/* The addresses stay the device's; what was there is forgotten. */
	madvise((void *)(uintptr_t)m->base, pages * PAGE, MADV_DONTNEED);
	mprotect((void *)(uintptr_t)m->base, pages * PAGE, PROT_NONE);
	if (!s) {
		if (!gone)
			fw_cuMemFree_v2(m->own);
		return;
	}
	memset(s->taken + (m->base - s->base) / PAGE, false, pages);
	s->used -= (unsigned)pages;
	if (s->used)
		return;
	for (at = &slabs; *at != s; at = &(*at)->next)
		;
	*at = s->next;
	if (!gone)
		fw_cuMemFree_v2(s->own);
	free(s);
}

/* Makes the block the program's too, and notes its range. */
static CUresult begin(struct managed *m, const struct sl_ctx *c)
{
	struct sl_range r = { .base = m->base, .size = m->n, .type = SL_RANGE_DEVICE, .ctx_id = m->ctx_id, .dev = c->dev, .managed = true,
			      .sync_memops = true };
	CUresult err;

	sl_background_stop();
	err = sl_mirror_managed(m->base, m->n);
	sl_background_go();

	if (!err && sl_range_add(&r)) {
		sl_mirror_drop(m->base, false);
		err = CUDA_ERROR_OUT_OF_MEMORY;
	}
	return err;
}

CUresult sl_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	struct managed *m;
	struct sl_ctx *c;
	CUresult err;

	if (!dptr || !bytesize || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_ctx_use(&c);
	if (err)
		return err;
	m = bytesize < (size_t)1 << 46 ? calloc(1, sizeof *m) : NULL;
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*m = (struct managed){ .n = bytesize, .ctx_id = atomic_load(&c->id),
			       .advice = { .preferred = CU_DEVICE_INVALID, .prefetched = CU_DEVICE_INVALID } };
	pthread_mutex_lock(&lock);
	if (bytesize <= SLAB / 2)
		err = take_of_slab(m, whole_pages(bytesize) / PAGE);
	else
		err = take(whole_pages(bytesize), &m->own, &m->base);
	if (!err) {
		err = begin(m, c);
		if (err)
			give_back(m, false);
	}
	if (!err) {
		*dptr = m->base;
		m->next = *chain(m->base);
		*chain(m->base) = m;
	} else {
		free(m);
	}
	pthread_mutex_unlock(&lock);
	return err;
}

/* Takes a block out of the list that at points into. */
static void drop(struct managed **at, bool gone)
{
	struct managed *m = *at;

	*at = m->next;
	if (!gone)
		sl_mirror_drop(m->base, false);
	give_back(m, gone);
	free(m);
}

static CUresult free_there(void *p)
{
	struct managed **at;
	CUresult err;

	/* The driver waits before it frees, and pages of a slab are the next block's at once. */
	err = fw_cuCtxSynchronize();
	pthread_mutex_lock(&lock);
	for (at = chain(*(uint64_t *)p); *at && (*at)->base != *(uint64_t *)p; at = &(*at)->next)
		;
	if (*at)
		drop(at, false);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_managed_free(const struct sl_range *r)
{
	struct sl_ctx *there = sl_ptr_ctx_slow(r->base);
	uint64_t base = r->base;

	return there ? sl_ctx_with(there, free_there, &base) : free_there(&base);
}

void sl_managed_drop_ctx(uint32_t ctx_id)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
		for (struct managed **at = &blocks[i]; *at;) {
			if ((*at)->ctx_id == ctx_id)
				drop(at, true);
			else
				at = &(*at)->next;
		}
	}
	pthread_mutex_unlock(&lock);
}

/* --- advice --- */

/* The block that has [p, p+n), or NULL. The lock is held. */
static struct managed *find(uint64_t p, size_t n)
{
	struct managed *m;
	struct sl_range r;

	if (!sl_range_find(p, &r) || !r.managed || n > whole_pages(r.size) - (p - r.base))
		return NULL;
	for (m = *chain(r.base); m && m->base != r.base; m = m->next)
		;
	return m;
}

static bool known(int device)
{
	return device == CU_DEVICE_CPU || sl_dev(device);
}

static CUresult advise(uint64_t p, size_t n, CUmem_advise what, int device)
{
	struct managed *m;
	CUresult err = CUDA_SUCCESS;

	pthread_mutex_lock(&lock);
	m = n ? find(p, n) : NULL;
	if (!m || (what > CU_MEM_ADVISE_UNSET_READ_MOSTLY && what != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION && !known(device))) {
		err = m ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
		pthread_mutex_unlock(&lock);
		return err;
	}
	switch (what) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY:
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
		m->advice.read_mostly = what == CU_MEM_ADVISE_SET_READ_MOSTLY;
		break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
		m->advice.preferred = what == CU_MEM_ADVISE_SET_PREFERRED_LOCATION ? device : CU_DEVICE_INVALID;
		break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY:
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
		if (device == CU_DEVICE_CPU)
			m->advice.by_cpu = what == CU_MEM_ADVISE_SET_ACCESSED_BY;
		else if (what == CU_MEM_ADVISE_SET_ACCESSED_BY)
			m->advice.accessed_by |= (uint16_t)(1u << device);
		else
			m->advice.accessed_by &= (uint16_t)~(1u << device);
		break;
	default:
		err = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

/* The device of a location; CU_DEVICE_INVALID if it is none that there is. */
static int place(CUmemLocation l)
{
	switch (l.type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		return l.id;
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return CU_DEVICE_CPU;
	default:
		return CU_DEVICE_INVALID;
	}
}

CUresult sl_cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
{
	return advise(devPtr, count, advice, device);
}

CUresult sl_cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
	return advise(devPtr, count, advice, place(location));
}

static CUresult prefetch(uint64_t p, size_t n, int device, CUstream s)
{
	CUresult err = CUDA_SUCCESS;
	struct managed *m;

	sl_stream_id(s, &err);
	if (err)
		return err;
	if (!known(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	m = n ? find(p, n) : NULL;
	if (m)
		m->advice.prefetched = device;
	pthread_mutex_unlock(&lock);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sl_cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
	return prefetch(devPtr, count, dstDevice, hStream);
}

CUresult sl_cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : prefetch(devPtr, count, place(location), hStream);
}

static CUresult accessed_by(const struct advice *a, int *list, size_t n)
{
	size_t at = 0;

	for (int d = 0; d < 16 && at < n; d++)
		if (a->accessed_by & 1u << d)
			list[at++] = d;
	if (a->by_cpu && at < n)
		list[at++] = CU_DEVICE_CPU;
	while (at < n)
		list[at++] = CU_DEVICE_INVALID;
	return CUDA_SUCCESS;
}

static CUresult range_attribute(void *data, size_t size, CUmem_range_attribute what, const struct advice *a)
{
	int v;

	switch (what) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
		v = a->read_mostly;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
		v = a->preferred;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
		v = a->prefetched;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
		return size && !(size % sizeof v) ? accessed_by(a, data, size / sizeof v) : CUDA_ERROR_INVALID_VALUE;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
		v = what == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE ? a->preferred : a->prefetched;
		v = v == CU_DEVICE_INVALID ? CU_MEM_LOCATION_TYPE_INVALID : v == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
		v = what == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID ? a->preferred : a->prefetched;
		v = v < 0 ? 0 : v;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (size != sizeof v)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(data, &v, sizeof v);
	return CUDA_SUCCESS;
}

CUresult sl_cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes, CUdeviceptr devPtr,
				    size_t count)
{
	CUresult err = CUDA_SUCCESS;
	struct managed *m;

	if (!data || !dataSizes || !attributes || !numAttributes || !count)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	m = find(devPtr, count);
	if (!m)
		err = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < numAttributes && !err; i++)
		err = data[i] ? range_attribute(data[i], dataSizes[i], attributes[i], &m->advice) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr, size_t count)
{
	return sl_cuMemRangeGetAttributes(&data, &dataSize, &attribute, 1, devPtr, count);
}

CUresult sl_cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
{
	CUresult err = CUDA_SUCCESS;
	struct managed *m;

	sl_stream_id(hStream, &err);
	if (err)
		return err;
	if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	m = find(dptr, 1);
	if (m && (m->base != dptr || (length && length != m->n)))
		m = NULL;
	pthread_mutex_unlock(&lock);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
