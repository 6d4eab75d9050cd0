/* Having the frames of a session go over RDMA (remoting/verbs) instead of its TCP socket; docs/protocol.md, "RDMA", has the bytes. */
#ifndef SLUICE_RDMALINK_H
#define SLUICE_RDMALINK_H

#include <stdbool.h>

struct sl_peer;

/* Whether this process offers RDMA: SLUICE_RDMA is on or 1, or names a device; off, 0 and unset offer none. */
bool sl_rdma_offers(void);
/*
 * Answers the worker's card, right behind its welcome. t->rdma is set if RDMA works; the log says if not, and why. False: the connection
 * is lost.
 */
bool sl_rdma_agree(struct sl_peer *t);
/* Ends the use of RDMA. No other thread of this process may be using it. */
void sl_rdma_drop(struct sl_peer *t);

#endif
