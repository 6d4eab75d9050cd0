#include "ipc.h"

#include <string.h>
#include <unistd.h>

int sl_ipc_get_mem(void *handle, uint64_t p)
{
	return CU(cuIpcGetMemHandle, handle, p);
}

int sl_ipc_open_mem(uint64_t *p, const void *handle, uint32_t flags)
{
	CUipcMemHandle h;
	CUdeviceptr d = 0;
	CUresult rc;

	memcpy(&h, handle, sizeof h);
	rc = CU(cuIpcOpenMemHandle_v2, &d, h, flags);
	*p = d;
	return rc;
}

int sl_ipc_close_mem(uint64_t p)
{
	return CU(cuIpcCloseMemHandle, p);
}

int sl_ipc_get_event(void *handle, uint64_t event)
{
	return CU(cuIpcGetEventHandle, handle, (CUevent)(uintptr_t)event);
}

int sl_ipc_open_event(uint64_t *event, const void *handle)
{
	CUipcEventHandle h;
	CUevent e = NULL;
	CUresult rc;

	memcpy(&h, handle, sizeof h);
	rc = CU(cuIpcOpenEventHandle, &e, h);
	*event = (uint64_t)(uintptr_t)e;
	return rc;
}

int sl_ipc_export(int *fd, uint64_t handle)
{
	return CU(cuMemExportToShareableHandle, fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

int sl_ipc_import(uint64_t *handle, int fd)
{
	CUmemGenericAllocationHandle h = 0;
	CUresult rc = CU(cuMemImportFromShareableHandle, &h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

	*handle = h;
	return rc;
}

int sl_ipc_retain(uint64_t *handle, uint64_t p)
{
	CUmemGenericAllocationHandle h = 0;
	CUresult rc = CU(cuMemRetainAllocationHandle, &h, (void *)(uintptr_t)p);

	*handle = h;
	return rc;
}

int sl_ipc_export_pool(int *fd, uint64_t pool)
{
	return CU(cuMemPoolExportToShareableHandle, fd, (CUmemoryPool)(uintptr_t)pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

int sl_ipc_import_pool(uint64_t *pool, int fd)
{
	CUmemoryPool p = NULL;
	CUresult rc = CU(cuMemPoolImportFromShareableHandle, &p, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);

	*pool = (uint64_t)(uintptr_t)p;
	return rc;
}

int sl_ipc_export_pointer(void *data, uint64_t p)
{
	return CU(cuMemPoolExportPointer, data, p);
}

int sl_ipc_import_pointer(uint64_t *p, uint64_t pool, const void *data)
{
	CUmemPoolPtrExportData d;
	CUdeviceptr q = 0;
	CUresult rc;

	memcpy(&d, data, sizeof d);
	rc = CU(cuMemPoolImportPointer, &q, (CUmemoryPool)(uintptr_t)pool, &d);
	*p = q;
	return rc;
}
