/*
 * Virtual memory management. Memory is a memfd of its own, charged when it is
 * created; a reservation is address space without access; mapping puts one into the
 * other, so that two mappings of one memory show the same bytes. Pointer attributes
 * are here too, for all kinds of memory.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

static CUresult prop_check(const CUmemAllocationProp *p)
{
	if (!p || p->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	if (p->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	return dev_check(p->location.id);
}

API CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *prop,
					   CUmemAllocationGranularity_flags opt)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	r = prop_check(prop);
	if (!r && (!n || opt > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*n = GRANULE;
	return sim_leave(r);
}

static struct alloc *reserved_at(uint64_t p, size_t n)
{
	for (struct alloc *a = sim.reserved; a; a = a->next)
		if (p >= a->base && n <= a->size && p - a->base <= a->size - n)
			return a;
	return NULL;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t n, size_t align, CUdeviceptr hint, unsigned long long flags)
{
	CUresult r = sim_enter();
	uint64_t base, end;
	struct alloc *a;
	char *p;

	if (r)
		return r;
	if (!out || !n || n % GRANULE || flags || (align & (align - 1)) || n > 1ULL << 46 || align > 1ULL << 40)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (align < GRANULE)
		align = GRANULE;
	p = MAP_FAILED;
	if (hint && hint % align == 0) {	/* a hint: anywhere will do */
		p = mmap((void *)(uintptr_t)hint, n, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
		if (p != MAP_FAILED && (uintptr_t)p != hint) {
			munmap(p, n);
			p = MAP_FAILED;
		}
	}
	if (p == MAP_FAILED) {
		p = mmap(NULL, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
		base = ROUND_UP((uintptr_t)p, align);
		end = (uintptr_t)p + n + align;
		if (base > (uintptr_t)p)
			munmap(p, base - (uintptr_t)p);
		if (end > base + n)
			munmap((void *)(uintptr_t)(base + n), end - base - n);
		p = (char *)(uintptr_t)base;
	}
	a = xcalloc(1, sizeof(*a));
	a->akind = A_RESERVED;
	a->base = (uintptr_t)p;
	a->size = n;
	a->next = sim.reserved;
	sim.reserved = a;
	*out = a->base;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemAddressFree(CUdeviceptr p, size_t n)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	for (struct alloc **at = &sim.reserved; *at; at = &(*at)->next) {
		struct alloc *a = *at;

		if (a->base != p || a->size != n)
			continue;
		if (!range_free(p, n))
			return sim_leave(CUDA_ERROR_INVALID_VALUE);	/* still mapped */
		*at = a->next;
		munmap((void *)(uintptr_t)p, n);
		free(a);
		return sim_leave(CUDA_SUCCESS);
	}
	return sim_leave(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t n, const CUmemAllocationProp *prop,
			 unsigned long long flags)
{
	CUresult r = sim_enter();
	struct vmem *v;
	char name[32];

	if (r)
		return r;
	r = prop_check(prop);
	if (!r && (!out || !n || n % GRANULE || flags))
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r && (prop->requestedHandleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
		r = CUDA_ERROR_NOT_SUPPORTED;
	if (!r && (n > sim.cfg.mem || alloc_must_fail() || !state_charge(prop->location.id, n)))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r)
		return sim_leave(r);
	v = obj_new(K_VMEM, NULL, sizeof(*v));
	if (v) {
		snprintf(name, sizeof(name), SIM_VMEM "%d", state_phys(prop->location.id));
		v->fd = memfd_create(name, MFD_CLOEXEC);
		if (v->fd >= 0 && !ftruncate(v->fd, (off_t)n)) {
			v->dev = prop->location.id;
			v->size = n;
			v->refs = 1;
			v->prop = *prop;
			*out = v->obj.handle;
			return sim_leave(CUDA_SUCCESS);
		}
		if (v->fd >= 0)
			close(v->fd);
		obj_del(v);
	}
	state_uncharge(prop->location.id, n);
	return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
}

/* Memory lives as long as its handle or a mapping does. */
static void vmem_put(struct vmem *v)
{
	if (v->refs || v->maps)
		return;
	close(v->fd);
	if (!v->imported)
		state_uncharge(v->dev, v->size);
	obj_del(v);
}

CUresult enter_vmem(CUmemGenericAllocationHandle h, struct vmem **v)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*v = obj_get_id(h, K_VMEM);
	return *v && (*v)->refs ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
	struct vmem *v;
	CUresult r = enter_vmem(h, &v);

	if (r)
		return r;
	v->refs--;
	vmem_put(v);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *p)
{
	CUresult r = sim_enter();
	struct alloc *a;

	if (r)
		return r;
	a = mem_find((uintptr_t)p);
	if (!out || !a || a->akind != A_MAPPED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	a->vmem->refs++;
	*out = a->vmem->obj.handle;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h)
{
	struct vmem *v;
	CUresult r = enter_vmem(h, &v);

	if (r)
		return r;
	if (!prop)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*prop = v->prop;
	return sim_leave(CUDA_SUCCESS);
}

/* Mapped, but without access until cuMemSetAccess. */
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags)
{
	struct vmem *v;
	struct alloc *a;
	CUresult r = enter_vmem(h, &v);

	if (r)
		return r;
	if (flags || !n || p % GRANULE || n % GRANULE || offset || n != v->size || !reserved_at(p, n) ||
	    !range_free(p, n))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (mmap((void *)(uintptr_t)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, v->fd, (off_t)offset) == MAP_FAILED)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	a = range_add(NULL, A_MAPPED, p, n);
	a->dev = v->dev;
	a->vmem = v;
	a->vmem_off = offset;
	a->accessible = false;
	v->maps++;
	return sim_leave(CUDA_SUCCESS);
}

/* The mappings that exactly cover [p, p + n), or false. */
static bool covered(uint64_t p, size_t n, size_t *first, size_t *count)
{
	size_t i = range_at(p), at = i;
	uint64_t end = p + n;

	if (!n || end < p)
		return false;
	while (p < end) {
		if (i == sim.nrange || sim.range[i]->akind != A_MAPPED || sim.range[i]->base != p)
			return false;
		p += sim.range[i++]->size;
	}
	*first = at;
	*count = i - at;
	return p == end;
}

/* Waits for the work that may use the mappings of [p, p+n), as covered says which; work that is queued meanwhile may not. */
static bool wait_without(CUdeviceptr p, size_t n, size_t *at, size_t *count)
{
	for (size_t i = 0; i < *count; i++)
		sim.range[*at + i]->accessible = false;
	all_wait();
	return covered(p, n, at, count);
}

API CUresult cuMemUnmap(CUdeviceptr p, size_t n)
{
	CUresult r = sim_enter();
	size_t at, count;

	if (r)
		return r;
	if (!covered(p, n, &at, &count))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!wait_without(p, n, &at, &count))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (mmap((void *)(uintptr_t)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
	while (count--) {
		struct alloc *a = sim.range[at];
		struct vmem *v = a->vmem;

		range_del(a);
		v->maps--;
		vmem_put(v);
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *desc, size_t count)
{
	CUresult r = sim_enter();
	bool on = false;
	size_t at, maps;
	uint32_t access;

	if (r)
		return r;
	if (!desc || !count || !covered(p, n, &at, &maps))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; !r && i < maps; i++) {
		access = sim.range[at + i]->access;
		r = access_set(&access, sim.range[at + i]->dev, desc, count);
		on = on || access;
	}
	if (r)
		return sim_leave(r);
	if (!on && !wait_without(p, n, &at, &maps))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (mprotect((void *)(uintptr_t)p, n, on ? PROT_READ | PROT_WRITE : PROT_NONE))
		return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
	for (size_t i = 0; i < maps; i++) {
		struct alloc *a = sim.range[at + i];

		access_set(&a->access, a->dev, desc, count);
		a->accessible = a->access != 0;
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *where, CUdeviceptr p)
{
	CUresult r = sim_enter();
	struct alloc *a;

	if (r)
		return r;
	a = mem_find(p);
	if (!flags || !where || where->type != CU_MEM_LOCATION_TYPE_DEVICE || dev_check(where->id) || !a ||
	    a->akind != A_MAPPED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = access_of(a->access, where->id);
	return sim_leave(CUDA_SUCCESS);
}

/* pointer attributes */

static CUresult attribute(void *out, CUpointer_attribute attr, uint64_t p)
{
	struct alloc *a = mem_find(p);
	bool host = a && (a->akind == A_HOST || a->akind == A_REGISTERED);

	if (attr == CU_POINTER_ATTRIBUTE_MAPPED && (a || reserved_at(p, 1))) {
		*(int *)out = a && a->accessible;
		return CUDA_SUCCESS;
	}
	if (!a) {
		struct alloc *res = reserved_at(p, 1);

		if (!res || (attr != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR && attr != CU_POINTER_ATTRIBUTE_RANGE_SIZE))
			return CUDA_ERROR_INVALID_VALUE;
		a = res;
	}
	switch (attr) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		if (a->akind == A_MAPPED || a->akind == A_POOL)
			*(CUcontext *)out = NULL;
		else
			*(CUcontext *)out = a->ctx ? HANDLE(CUcontext, a->ctx) : NULL;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned int *)out = host ? 1 : 2; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = p; break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!host && a->akind != A_MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)out = (void *)(uintptr_t)p;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)out = a->sync_memops; break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = a->id; break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)out = a->akind == A_MANAGED; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = a->dev; break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)out = a->akind == A_DEVICE; break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = a->base; break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = a->size; break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = 0; break;
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)out = 0; break;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned int *)out = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; break;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(CUmemoryPool *)out = a->pool ? HANDLE(CUmemoryPool, a->pool) : NULL;
		break;
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = a->size; break;
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)out = a->base; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = a->id; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attr, CUdeviceptr p)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	return sim_leave(out ? attribute(out, attr, p) : CUDA_ERROR_INVALID_VALUE);
}

/* Of many attributes those that do not apply are zero, and the call succeeds. */
static void attribute_none(void *out, CUpointer_attribute attr)
{
	switch (attr) {
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = -2; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_MAPPED:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: memset(out, 0, 4); break;
	default: memset(out, 0, 8); break;
	}
}

API CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attrs, void **out, CUdeviceptr p)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!n || !attrs || !out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (unsigned int i = 0; i < n; i++)
		if (!out[i] || !attrs[i] || attrs[i] > CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE)
			return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (unsigned int i = 0; i < n; i++)
		if (attribute(out[i], attrs[i], p))
			attribute_none(out[i], attrs[i]);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuPointerSetAttribute(const void *v, CUpointer_attribute attr, CUdeviceptr p)
{
	CUresult r = sim_enter();
	struct alloc *a;

	if (r)
		return r;
	a = mem_find(p);
	if (!v || !a || attr != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	a->sync_memops = *(const unsigned int *)v != 0;
	return sim_leave(CUDA_SUCCESS);
}
