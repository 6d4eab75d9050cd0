/* What processes of a program share (ipc.c). */
#ifndef SLUICE_IPC_H
#define SLUICE_IPC_H

#include <stdatomic.h>
#include <stdbool.h>

#include "cuabi.h"

extern _Atomic bool sl_ipc_shares;

/* Whether another process may see this one's device memory. */
static inline bool sl_ipc_any(void)
{
	return __builtin_expect(atomic_load_explicit(&sl_ipc_shares, memory_order_relaxed), 0);
}

/*
 * Waits until the worker's driver has been given all calls made so far. The calls of two processes have no common
 * order but what the processes tell each other, so what one of them tells of must have been given to the driver.
 */
CUresult sl_ipc_fence(void);

#endif
