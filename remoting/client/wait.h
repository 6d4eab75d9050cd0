/* Calls that wait for their reply. */
#ifndef SLUICE_WAIT_H
#define SLUICE_WAIT_H

#include "codec.h"

/*
 * Sends, and waits for the reply. The return value is the reply's result (CUresult,
 * or a negative number that some control operations define), or the session's
 * error. r may be NULL; otherwise the caller calls sl_reply_free, whatever was returned.
 */
CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r);
/* Adjusts the number of threads that wait for an event of a session: its receiver polls while there are any. */
void sl_expect(unsigned session, int threads);

#endif
