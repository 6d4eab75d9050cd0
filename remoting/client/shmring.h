/*
 * Two byte rings in memory shared with a worker on the same node, instead of the
 * socket. The layout is in docs/protocol.md. The socket stays open: by its end each
 * side learns that the other is gone.
 */
#ifndef SLUICE_SHMRING_H
#define SLUICE_SHMRING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "attention.h"
#include "wire.h"

#define SL_SHM_SIZE (SL_SHM_DATA + 2 * SL_SHM_RING)

struct sl_shm;

/* Maps the worker's memory; NULL if fd is not such memory. Takes ownership of fd. */
struct sl_shm *sl_shm_attach(int fd);
/* Writes at least one byte of iov, or returns -1 with errno ETIMEDOUT or EPIPE. One caller at a time. */
ssize_t sl_shm_write(struct sl_shm *s, const struct iovec *iov, int n, int timeout_ms);
/*
 * Reads at least one byte into buf; 0 at the end, or -1 with errno ETIMEDOUT. One caller at a time. waiters is
 * what the session's receiver knows of who waits for these bytes.
 */
ssize_t sl_shm_read(struct sl_shm *s, void *buf, size_t n, const struct sl_waiters *waiters, int timeout_ms);
/* Ends both rings and wakes both sides. */
void sl_shm_close(struct sl_shm *s);

#endif
