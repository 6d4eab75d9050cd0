/* Bytes over a stream socket, blocking or not, each time with an end. For both libraries. */
#ifndef SLUICE_EXCHANGE_H
#define SLUICE_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Sends n bytes before the deadline (of sl_now_ms); false with errno, ETIMEDOUT at the deadline. */
bool sl_send_all(int fd, const void *buf, size_t n, int64_t deadline);
/*
 * Receives n bytes likewise; ECONNRESET where the stream ends before them. The
 * first descriptor that comes with them is put into *got if that is negative,
 * others are closed; got may be NULL.
 */
bool sl_recv_all(int fd, void *buf, size_t n, int *got, int64_t deadline);

#endif
