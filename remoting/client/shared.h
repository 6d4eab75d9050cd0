/*
 * Page-locked memory that a worker of this node shares. cuMemHostAlloc makes it a file in
 * memory, whose descriptor goes to the worker over the session's Unix socket when the first
 * copy or kernel needs it (HOST_SHARE). The worker has the driver lock the same pages.
 */
#ifndef SLUICE_SHARED_H
#define SLUICE_SHARED_H

#include <stdbool.h>
#include <stddef.h>

#include "cuabi.h"

/* Whether memory can be shared: one worker, on this node, which has not refused any. */
bool sl_shared_can(void);
/* Memory could not be shared, for that reason. No more memory is shared from now on; what is shared already stays so. */
void sl_shared_stop(CUresult why);
/* A new file in memory of n bytes; 0 if it cannot be shared, or is too small for that to pay. */
int sl_shared_new(size_t n);
/* Closes the descriptor of a file; its mappings stay. 0 means that there is none. */
void sl_shared_close(int memfd);
/* Sends the descriptor of a file of n bytes to the worker. The HOST_SHARE that names it has to be the next to follow. */
bool sl_shared_lend(int memfd, size_t n);

#endif
