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
/* A call whose reply has not come. */
struct sl_waiter {
	struct sl_waiter *next;
	uint32_t call;
	uint32_t done;	/* futex */
	sl_reply *r;
};

/* A call that nobody waits for meanwhile. It must stay where it is until it has its answer. */
struct sl_question {
	struct sl_waiter w;
	sl_reply reply;
};

/* Sends. An error says that there will be no answer. */
CUresult sl_ask(uint16_t op, const sl_buf *b, struct sl_question *q);
/* Whether the answer has come: its result is reply's, and the caller calls sl_reply_free for it. */
bool sl_has_answer(const struct sl_question *q);

/* Adjusts the number of threads that wait for an event of a session: its receiver polls while there are any. */
void sl_expect(unsigned session, int threads);

#endif
