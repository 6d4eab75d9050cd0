/*
 * Finding the worker and shaking hands, for the CUDA shim and the NVML shim.
 */
#ifndef SLUICE_CONNECT_H
#define SLUICE_CONNECT_H

#include "session.h"

/*
 * A setting: from the environment, else from sluice.conf beside this library
 * (KEY=VALUE lines), which is how a container is told. NULL if neither has it.
 */
const char *sl_config(const char *key);

/*
 * Connects to SLUICE_WORKER and says HELLO (kind 1 compute, 2 observe). On
 * success *fd is a connected socket right behind WELCOME. shm may be NULL; else
 * shared memory is offered to a worker behind a Unix socket, and *shm is its
 * descriptor, or -1 where frames go over the socket.
 */
CUresult sl_connect(uint32_t kind, int *fd, struct sl_snapshot *snap, int *shm);

#endif
