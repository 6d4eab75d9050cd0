/* Calls that are not answered: send and go on. */
#ifndef SLUICE_SEND_H
#define SLUICE_SEND_H

#include "codec.h"

/* Returns an error only if the session is dead. */
CUresult sl_oneway(uint16_t op, const sl_buf *b);
/*
 * A frame whose payload is head followed by n bytes at data, sent from there
 * without a copy when large; the caller may reuse data on return.
 */
CUresult sl_oneway_bulk(uint16_t op, const sl_buf *head, const void *data, size_t n);
struct sl_copy_in;
/* The same for a frame of a copy to the device, whose way is known. */
CUresult sl_oneway_copy(const struct sl_copy_in *c, uint16_t op, const sl_buf *head, const void *data, size_t n);
/* Whether the worker that a request goes to is of a release without that operation. */
bool sl_worker_lacks(const sl_buf *b, uint16_t op);

struct sl_peer;
/* Appends a one-way frame that is no call of the program's, for the sender to send. Waits for nothing; false where it would have to. */
bool sl_send_soon(struct sl_peer *t, uint16_t op, const void *p, uint32_t n);

#endif
