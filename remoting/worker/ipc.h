/* Handles that pass between processes, as the driver has them (ipc.go). Handles of memory and events have 64 bytes. */
#ifndef SLUICE_IPC_H
#define SLUICE_IPC_H

#include "driver.h"

int sl_ipc_get_mem(void *handle, uint64_t p);
int sl_ipc_open_mem(uint64_t *p, const void *handle, uint32_t flags);
int sl_ipc_close_mem(uint64_t p);
int sl_ipc_get_event(void *handle, uint64_t event);
int sl_ipc_open_event(uint64_t *event, const void *handle);
int sl_ipc_export(int *fd, uint64_t handle);
/* The descriptor stays the caller's. */
int sl_ipc_import(uint64_t *handle, int fd);
int sl_ipc_retain(uint64_t *handle, uint64_t p);
int sl_ipc_export_pool(int *fd, uint64_t pool);
int sl_ipc_import_pool(uint64_t *pool, int fd);
int sl_ipc_export_pointer(void *data, uint64_t p);
int sl_ipc_import_pointer(uint64_t *p, uint64_t pool, const void *data);

#endif
