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
 * Connects to one of the owners, counted from 0, and says HELLO (kind SL_SESSION_COMPUTE
 * or SL_SESSION_OBSERVE): over the lease's socket that SLUICE_SOCKET names, else straight to
 * an address in SLUICE_WORKER (tcp:HOST:PORT or unix:PATH, several with commas).
 * On success *fd is a connected socket right behind WELCOME, and *owners, if not
 * NULL, how many there are. shm may be NULL; else shared memory is offered to a
 * worker on this node, and *shm is its descriptor, or -1 where frames go over the
 * socket.
 */
CUresult sl_connect(uint32_t kind, unsigned owner, int *fd, struct sl_snapshot *snap, int *shm, unsigned *owners);

#endif
