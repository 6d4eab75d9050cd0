/*
 * Memory and events that several processes have (CUDA's IPC). Each process has a session of its
 * own; the handle that one gives another is a token that the worker made, which another session
 * of the same lease turns into memory or an event. A token fills CUDA's 64-byte handles; where CUDA has
 * a file descriptor, the token lies in a file in memory, so that the descriptor may be passed on
 * like any other.
 *
 * CUDA's blocking calls are one-way here where nobody could tell. Another process can: so once
 * memory is shared, a blocking copy to the device ends with a wait, and so does each call on an
 * event of several processes.
 */
#define _GNU_SOURCE
#include "ipc.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "event.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "hostpool.h"
#include "memfd.h"
#include "ranges.h"
#include "route.h"
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

_Atomic bool sl_ipc_shares;

/* What the file behind a descriptor holds. */
struct token_file {
	char magic[16];
	CUipcMemHandle token;
};

static const char token_magic[16] = "sluice memory 1";

CUresult sl_ipc_fence(void)
{
	size_t ignored;

	return fw_cuCtxGetLimit(&ignored, CU_LIMIT_STACK_SIZE);
}

CUresult sl_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	struct sl_range r;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	if (!pHandle || !sl_range_find(dptr, &r) || r.type != SL_RANGE_DEVICE || r.managed)
		return CUDA_ERROR_INVALID_VALUE;
	atomic_store(&sl_ipc_shares, true);
	return fw_cuIpcGetMemHandle(pHandle, dptr);
}

/* Another process's memory, which the worker's driver of a session put at an address. */
static CUresult add_opened(const struct sl_range *r, unsigned session)
{
	static uint8_t once;

	/* The driver chose the address, and would choose it again. */
	if (sl_sessions > 1 && sl_range_clash(r->base, r->size, session))
		return sl_refuse("shared memory where another owner's addresses are", &once);
	sl_guard_reserve(r->base, r->size);
	return sl_range_add(r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult sl_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	struct sl_ctx *c;
	unsigned opens, left;
	size_t size;
	CUdeviceptr p;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	if (!pdptr)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuIpcOpenMemHandle_v2(&p, &size, &opens, &handle, Flags);
	if (err)
		return err;
	atomic_store(&sl_ipc_shares, true);
	if (opens == 1) {
		err = add_opened(&(struct sl_range){ .base = p, .size = size, .type = SL_RANGE_OPENED, .ctx_id = atomic_load(&c->id), .dev = c->dev },
				 sl_ctx_session(atomic_load(&c->id)));
		if (err) {
			fw_cuIpcCloseMemHandle(p, &left);
			return err;
		}
	}
	*pdptr = p;
	return CUDA_SUCCESS;
}

CUresult sl_cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	struct sl_range r;
	struct sl_ctx *c;
	unsigned left = 0;
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	err = sl_ctx_use(&c);
	if (err)
		return err;
	if (!sl_range_find(dptr, &r) || r.type != SL_RANGE_OPENED || r.base != dptr)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuIpcCloseMemHandle(dptr, &left);
	if (!err && !left)
		sl_range_remove(dptr, SL_RANGE_OPENED, &r);
	return err;
}

static CUresult ask_open(uint32_t id, void *handle)
{
	return fw_cuIpcOpenEventHandle(id, handle);
}

CUresult sl_cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle)
{
	if (!phEvent)
		return CUDA_ERROR_INVALID_VALUE;
	return sl_event_new(phEvent, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, ask_open, &handle);
}

/* A descriptor of a file that holds a token and cannot be changed; -1 on failure. */
static int token_to_fd(const CUipcMemHandle *token)
{
	struct token_file f = { .token = *token };
	int fd = (int)syscall(SYS_memfd_create, "cuda-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -1;
	memcpy(f.magic, token_magic, sizeof f.magic);
	if (write(fd, &f, sizeof f) != sizeof f || fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
		close(fd);
		return -1;
	}
	return fd;
}

static bool fd_to_token(int fd, CUipcMemHandle *token)
{
	struct {
		struct token_file f;
		char more;
	} b;

	if (pread(fd, &b, sizeof b, 0) != sizeof b.f || memcmp(b.f.magic, token_magic, sizeof b.f.magic))
		return false;
	*token = b.f.token;
	return true;
}

/* Puts the token that ask gets into a file, and its descriptor into *out. */
static CUresult export_token(void *out, CUmemAllocationHandleType type, unsigned long long flags,
			     CUresult (*ask)(CUipcMemHandle *token, void *of), void *of)
{
	CUipcMemHandle token;
	CUresult err;
	int fd;

	/* Nothing has been made with another type: the attributes say that there is none. */
	if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	err = ask(&token, of);
	if (err)
		return err;
	fd = token_to_fd(&token);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	atomic_store(&sl_ipc_shares, true);
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

/* Makes a handle of what ask makes of the token in a file. */
static CUresult import_token(int kind, void **out, void *os, CUmemAllocationHandleType type,
			     CUresult (*ask)(uint32_t id, const CUipcMemHandle *token))
{
	static uint8_t once;
	CUipcMemHandle token;
	uint32_t id;
	CUresult err;
	void *h;

	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return sl_refuse("handles of memory other than file descriptors", &once);
	if (!fd_to_token((int)(intptr_t)os, &token))
		return CUDA_ERROR_UNKNOWN; /* as the driver answers */
	id = sl_handle_new(kind, NULL, &h);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = ask(id, &token);
	if (err) {
		sl_handle_free(kind, id);
		return err;
	}
	atomic_store(&sl_ipc_shares, true);
	*out = h;
	return CUDA_SUCCESS;
}

static CUresult ask_export(CUipcMemHandle *token, void *handle)
{
	return fw_cuMemExportToShareableHandle(token, (CUmemGenericAllocationHandle)(uintptr_t)handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static CUresult ask_import(uint32_t id, const CUipcMemHandle *token)
{
	return fw_cuMemImportFromShareableHandle(id, token, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static CUresult ask_export_pool(CUipcMemHandle *token, void *pool)
{
	return fw_cuMemPoolExportToShareableHandle(token, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static CUresult ask_import_pool(uint32_t id, const CUipcMemHandle *token)
{
	return fw_cuMemPoolImportFromShareableHandle(id, token, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

CUresult sl_cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
					 unsigned long long flags)
{
	return export_token(shareableHandle, handleType, flags, ask_export, (void *)(uintptr_t)handle);
}

CUresult sl_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType)
{
	void *h;
	CUresult err = import_token(SL_MEMHANDLE, handle ? &h : NULL, osHandle, shHandleType, ask_import);

	if (!err)
		*handle = (CUmemGenericAllocationHandle)(uintptr_t)h;
	return err;
}

CUresult sl_cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags)
{
	if (sl_hostpool_of(pool))
		return CUDA_ERROR_INVALID_VALUE; /* it was not made for that */
	return export_token(handle_out, handleType, flags, ask_export_pool, pool);
}

CUresult sl_cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	return import_token(SL_POOL, (void **)pool_out, handle, handleType, ask_import_pool);
}

CUresult sl_cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
{
	struct sl_range r;

	if (!shareData_out || !sl_range_find(ptr, &r) || r.type != SL_RANGE_POOL || r.base != ptr)
		return CUDA_ERROR_INVALID_VALUE;
	atomic_store(&sl_ipc_shares, true);
	return fw_cuMemPoolExportPointer(shareData_out, ptr);
}

/* A pool's memory is of its device and of no context; none need be current, or exist. */
CUresult sl_cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)
{
	uint32_t ctx = sl_handle_ctx(SL_POOL, pool);
	unsigned opens, session = sl_ctx_session(ctx ? ctx : sl_ctx_cur());
	CUdeviceptr p;
	size_t size;
	CUresult err;
	int dev;

	if (!ptr_out || !shareData)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuMemPoolImportPointer(&p, &size, &opens, &dev, pool, shareData);
	if (err)
		return err;
	atomic_store(&sl_ipc_shares, true);
	if (opens == 1) {
		dev = sl_dev_of(session, dev);
		err = add_opened(&(struct sl_range){ .base = p, .size = size, .type = SL_RANGE_POOL, .pool = pool, .ctx_id = sl_ctx_cur(),
						     .home = dev < 0 ? 0 : (uint32_t)sl_dev_place(dev) + 1, .dev = dev }, session);
		if (err) {
			fw_cuMemFree_v2(p);
			return err;
		}
	}
	*ptr_out = p;
	return CUDA_SUCCESS;
}
