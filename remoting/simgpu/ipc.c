/*
 * Memory and events of one process that others open. Memory lies in a process's own arena until a
 * handle is asked for; then the granules that hold it move into the heap of the machine's file
 * (state.c), and are mapped from there at the addresses that they had. Events have their counts
 * of records there from the beginning. Memory of cuMemCreate is a file of its own, whose
 * descriptor is the handle.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

#define IPC_MAGIC 0x31637069U

enum { OF_MEMORY, OF_EVENT, OF_POINTER };

/* What a handle holds; the driver's handles have 64 bytes. */
struct ipc {
	uint32_t magic, number;
	int32_t pid;
	uint32_t kind;
	uint64_t secret[2];
	uint64_t offset, size;		/* of the allocation in its region */
	uint64_t pool;			/* that it is of: its identity */
};
_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle) && sizeof(struct ipc) <= sizeof(CUipcEventHandle), "a handle");

/* Granules of this process that lie in the heap, and memory of others that it has opened. */
struct region {
	uint64_t base, size, serial;
	int share, opens;
	bool foreign;
	struct ipc handle;		/* foreign: what it was opened by */
	struct region *next;
};

static struct region *regions;

static struct region *region_at(uint64_t base, bool foreign)
{
	for (struct region *r = regions; r; r = r->next)
		if (r->foreign == foreign && base - r->base < r->size)
			return r;
	return NULL;
}

static void region_del(struct region *r)
{
	struct region **at = &regions;

	while (*at != r)
		at = &(*at)->next;
	*at = r->next;
	free(r);
}

static struct region *region_new(uint64_t base, uint64_t size, int share, bool foreign)
{
	struct region *r = xcalloc(1, sizeof(*r));

	r->base = base;
	r->size = size;
	r->share = share;
	r->foreign = foreign;
	r->opens = 1;
	r->next = regions;
	regions = r;
	return r;
}

bool ipc_freed(uint64_t base)
{
	struct region *r = region_at(base, false);

	if (!r)
		return false;
	if (mmap((void *)(uintptr_t)base, r->size, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
		abort();
	state_share_drop(r->share, true);
	region_del(r);
	return true;
}

uint64_t ipc_device(uint64_t p)
{
	struct region *r = region_at(p, true);

	return r ? r->base + r->size : 0;
}

/* Moves granules into the heap. No work may be under way. */
static struct region *region_move(uint64_t base, uint64_t size)
{
	int share = state_share_new(size);
	void *p;

	if (share < 0)
		return NULL;
	p = state_share_map(share, NULL);
	if (p) {
		memcpy(p, (void *)(uintptr_t)base, size);
		munmap(p, size);
		p = state_share_map(share, (void *)(uintptr_t)base);
	}
	if (!p) {
		state_share_drop(share, true);
		return NULL;
	}
	return region_new(base, size, share, false);
}

/* The handle of an allocation, in 64 bytes. That of a pool's needs no context, as the pool is of none. */
static CUresult give_handle(void *out, CUdeviceptr p, enum akind akind, uint32_t kind)
{
	struct ipc h = { .magic = IPC_MAGIC, .pid = getpid(), .kind = kind };
	struct region *r;
	struct alloc *a;
	struct ctx *c;
	CUresult rc = akind == A_POOL ? sim_enter() : sim_enter_ctx(&c);
	uint64_t base, size;

	if (rc)
		return rc;
	all_wait();
	a = mem_find(p);
	if (!out || !a || a->akind != akind || a->freeing)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (akind == A_POOL && (a->base != p || !a->pool->identity))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	base = a->slab ? a->slab->base : a->base;
	size = a->slab ? GRANULE : a->charge;
	r = region_at(base, false);
	if (!r)
		r = region_move(base, size);
	if (!r)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	h.number = (uint32_t)r->share;
	memcpy(h.secret, state_share(r->share)->secret, sizeof(h.secret));
	h.offset = a->base - base;
	h.size = a->size;
	h.pool = a->pool ? a->pool->identity : 0;
	memset(out, 0, sizeof(CUipcMemHandle));
	memcpy(out, &h, sizeof(h));
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p) { return give_handle(out, p, A_DEVICE, OF_MEMORY); }

/* Memory of a context's, or of a pool's: then c is NULL. */
static CUresult open_memory(CUdeviceptr *out, const struct ipc *h, struct ctx *c, struct pool *pool)
{
	struct sim_share *e;
	struct region *r;
	struct alloc *a;
	void *p;

	for (r = regions; r; r = r->next)
		if (r->foreign && !memcmp(&r->handle, h, sizeof(*h))) {
			r->opens++;
			*out = r->base + h->offset;
			return CUDA_SUCCESS;
		}
	e = state_share_open(h->number, h->secret);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!e->size || h->offset >= e->size || h->size > e->size - h->offset) {
		state_share_drop((int)h->number, false);
		return CUDA_ERROR_INVALID_VALUE;
	}
	p = state_share_map((int)h->number, NULL);
	if (!p) {
		state_share_drop((int)h->number, false);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r = region_new((uintptr_t)p, e->size, (int)h->number, true);
	r->handle = *h;
	*out = r->base + h->offset;
	a = range_add(c, A_SHARED, *out, h->size);
	if (pool) {
		a->dev = pool->dev;
		a->pool = pool;
		pool->live++;
	}
	r->serial = a->id;
	return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)
{
	struct ipc h;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	memcpy(&h, &handle, sizeof(h));
	if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || h.magic != IPC_MAGIC || h.kind != OF_MEMORY)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (h.pid == getpid())
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	return sim_leave(open_memory(out, &h, c, NULL));
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle h, unsigned int flags) { return cuIpcOpenMemHandle_v2(out, h, flags); }

void ipc_unmap(struct alloc *a)
{
	struct region *r = region_at(a->base, true);

	munmap((void *)(uintptr_t)r->base, r->size);
	state_share_drop(r->share, false);
	region_del(r);
}

void ipc_close(struct alloc *a)
{
	struct pool *pool = a->pool;

	ipc_unmap(a);
	range_del(a);
	if (pool && !--pool->live && pool->destroyed)
		obj_del(pool);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	struct alloc *a;
	struct region *r;
	struct ctx *c;
	CUresult rc = sim_enter_ctx(&c);

	if (rc)
		return rc;
	a = mem_find(p);
	r = region_at(p, true);
	if (!a || !r || a->akind != A_SHARED || a->pool || a->base != p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (--r->opens)
		return sim_leave(CUDA_SUCCESS);
	all_wait();
	a = mem_find(p);
	if (!a || a->akind != A_SHARED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	ipc_close(a);
	return sim_leave(CUDA_SUCCESS);
}

/* events */

/*
 * A file in /dev/shm that driver 580 keeps for each process with events that others may open, and that they open by its name. Here
 * it holds nothing, but it must be there, with SLUICE_SIM_SHM.
 */
static bool shared_file(pid_t pid, int how)
{
	char path[64];
	int fd;

	if (!getenv("SLUICE_SIM_SHM"))
		return true;
	snprintf(path, sizeof(path), "/dev/shm/simgpu.shm.%x.%x", getuid(), pid);
	fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | how, 0600);
	if (fd < 0)
		return false;
	close(fd);
	return true;
}

API CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent event)
{
	struct ipc h = { .magic = IPC_MAGIC, .pid = getpid(), .kind = OF_EVENT };
	CUresult r = sim_enter();
	struct event *e;

	if (r)
		return r;
	e = obj_get(event, K_EVENT);
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!e || !e->share || e->opened)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	if (!shared_file(getpid(), O_CREAT))
		return sim_leave(CUDA_ERROR_MAP_FAILED);
	h.number = (uint32_t)(e->share - 1);
	memcpy(h.secret, state_share(e->share - 1)->secret, sizeof(h.secret));
	memset(out, 0, sizeof(*out));
	memcpy(out, &h, sizeof(h));
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
	struct event *e;
	struct ipc h;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	memcpy(&h, &handle, sizeof(h));
	if (!out || h.magic != IPC_MAGIC || h.kind != OF_EVENT)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (h.pid == getpid())
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!shared_file(h.pid, 0))
		return sim_leave(CUDA_ERROR_MAP_FAILED);
	if (!state_share_open(h.number, h.secret))
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	e = obj_new(K_EVENT, c, sizeof(*e));
	if (!e) {
		state_share_drop((int)h.number, false);
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	}
	e->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
	e->share = (int)h.number + 1;
	e->opened = true;
	*out = HANDLE(CUevent, e);
	return sim_leave(CUDA_SUCCESS);
}

/* memory of cuMemCreate */

API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
					  unsigned long long flags)
{
	struct vmem *v;
	CUresult r = enter_vmem(handle, &v);
	int fd;

	if (r)
		return r;
	if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(v->prop.requestedHandleTypes & type))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	fd = fcntl(v->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
	*(int *)out = fd;
	return sim_leave(CUDA_SUCCESS);
}

/* The device of this process whose memory a descriptor is, or pool with its identity, by the names of such files; -1 if it is neither. */
static int file_device(int fd, const char *form, int fields, unsigned long long *identity)
{
	char path[64], name[128];
	ssize_t n;
	int number;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, name, sizeof(name) - 1);
	if (n <= 0)
		return -1;
	name[n] = 0;
	if (sscanf(name, form, &number, identity) != fields)
		return -1;
	for (int i = 0; i < sim.cfg.ndev; i++)
		if (state_phys(i) == number)
			return i;
	return -1;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os, CUmemAllocationHandleType type)
{
	CUresult r = sim_enter();
	int fd = (int)(intptr_t)os, dev;
	struct vmem *v;
	struct stat st;

	if (r)
		return r;
	dev = file_device(fd, "/memfd:" SIM_VMEM "%d", 1, NULL);
	if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (dev < 0 || fstat(fd, &st))
		return sim_leave(CUDA_ERROR_UNKNOWN);
	v = obj_new(K_VMEM, NULL, sizeof(*v));
	if (!v)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	v->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (v->fd < 0) {
		obj_del(v);
		return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
	}
	v->dev = dev;
	v->size = (uint64_t)st.st_size;
	v->refs = 1;
	v->imported = true;
	v->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	v->prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	v->prop.location.id = dev;
	*out = v->obj.handle;
	return sim_leave(CUDA_SUCCESS);
}

/* memory pools */

API CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags)
{
	CUresult r = sim_enter();
	struct pool *p;
	char name[64];
	int fd;

	if (r)
		return r;
	p = obj_get(pool, K_POOL);
	if (!out || flags || !p || p->destroyed || p->imported || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(p->props.handleTypes & type))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!p->identity)
		p->identity = (uint64_t)getpid() << 32 | (uint32_t)++sim.serial;
	snprintf(name, sizeof(name), SIM_POOL, state_phys(p->dev), (unsigned long long)p->identity);
	fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0)
		return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
	*(int *)out = fd;
	return sim_leave(CUDA_SUCCESS);
}

/* The pool of another process that this one has imported already. */
static struct pool *imported_pool(uint64_t identity)
{
	struct obj *o;

	for (size_t it = 0; (o = obj_next(&it, NULL));)
		if (o->kind == K_POOL && ((struct pool *)o)->imported && !((struct pool *)o)->destroyed && ((struct pool *)o)->identity == identity)
			return (struct pool *)o;
	return NULL;
}

API CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *os, CUmemAllocationHandleType type, unsigned long long flags)
{
	CUresult r = sim_enter();
	unsigned long long identity;
	struct pool *p;
	int dev;

	if (r)
		return r;
	if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	dev = file_device((int)(intptr_t)os, "/memfd:" SIM_POOL, 2, &identity);
	if (dev < 0)
		return sim_leave(CUDA_ERROR_UNKNOWN);
	p = imported_pool(identity);
	if (!p) {
		p = obj_new(K_POOL, NULL, sizeof(*p));
		if (!p)
			return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
		p->dev = dev;
		p->identity = identity;
		p->access = access_own(dev);
	}
	p->imported++;
	*out = HANDLE(CUmemoryPool, p);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr p) { return give_handle(out, p, A_POOL, OF_POINTER); }

API CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
	CUresult r = sim_enter();
	struct pool *p;
	struct ipc h;

	if (r)
		return r;
	p = obj_get(pool, K_POOL);
	if (!out || !data || !p || !p->imported)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(&h, data, sizeof(h));
	if (h.magic != IPC_MAGIC || h.kind != OF_POINTER || h.pool != p->identity || h.pid == getpid())
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = open_memory(out, &h, NULL, p);
	return sim_leave(r == CUDA_ERROR_INVALID_HANDLE ? CUDA_ERROR_INVALID_VALUE : r);
}
