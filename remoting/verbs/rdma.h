/*
 * A stream of bytes in both directions over a reliable connection of verbs (InfiniBand, RoCE, para-virtual devices), beside a TCP socket
 * that both sides have, and over which they tell each other their cards. The socket stays open: its end is the stream's.
 *
 * Each side has a ring in memory that the other writes to. A write says by its immediate value how many bytes it has brought; an
 * immediate of 0 says that the writer has read further in its own ring: how far stands in the control in front of the other's
 * ring. So a side may write as long as the other's ring has room and the other has receives posted.
 *
 * The peer may write anything into the ring and its control at any time. Bytes are therefore copied out before they are looked at, and
 * a count out of range is the end of the stream.
 */
#ifndef SLUICE_RDMA_H
#define SLUICE_RDMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "wire.h"

struct sl_rdma;

/*
 * Opens the device whose port has the local address of the TCP socket; of InfiniBand devices, whose ports have none, the first with an
 * active port. only names the one device to take, as in /sys/class/infiniband, or is NULL. NULL: why says why there is none. The socket
 * stays the caller's.
 */
struct sl_rdma *sl_rdma_open(int sock, const char *only, char *why, size_t cap);
/* Destroys it. No other thread may be in a call of it. r may be NULL. */
void sl_rdma_free(struct sl_rdma *r);
/* In a forked child: closes what the parent has. */
void sl_rdma_forked(struct sl_rdma *r);

/* What the other side has to know. A card with qpn 0 says that there is no device. */
void sl_rdma_card(const struct sl_rdma *r, struct wire_verbs_card *card);
/* Connects to the side of that card. False: why says why that is impossible. */
bool sl_rdma_join(struct sl_rdma *r, const struct wire_verbs_card *card, char *why, size_t cap);
/* Sends the other side a sign of life. */
bool sl_rdma_greet(struct sl_rdma *r);
/* Waits until the other side's has come and everything sent has arrived; false after ms milliseconds or if the connection does not work. */
bool sl_rdma_met(struct sl_rdma *r, int ms);
/* The device and its port, for messages. */
const char *sl_rdma_name(const struct sl_rdma *r);

/* Writes at least one byte of iov. -1: errno is ETIMEDOUT after ms milliseconds, or says what has ended the stream. One caller at a time. */
ssize_t sl_rdma_write(struct sl_rdma *r, const struct iovec *iov, int n, int ms);
/*
 * Reads at least one byte; 0 at the end. -1: errno is EAGAIN if nothing has come within ms milliseconds, or says what has ended the
 * stream. One caller at a time.
 */
ssize_t sl_rdma_read(struct sl_rdma *r, void *buf, size_t n, int ms);
/* Waits until a read would not block; false after ms milliseconds. */
bool sl_rdma_readable(struct sl_rdma *r, int ms);
/* Waits until everything written has arrived in the other side's memory; false if it has not after ms milliseconds. */
bool sl_rdma_flush(struct sl_rdma *r, int ms);
/* Writes the last n bytes and waits until they have arrived; false if they have not at the deadline, of sl_now_ms. */
bool sl_rdma_last(struct sl_rdma *r, const void *p, size_t n, int64_t deadline);

#endif
