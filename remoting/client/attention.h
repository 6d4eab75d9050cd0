/*
 * How long a waiting thread polls for the worker's next frame before it sleeps.
 *
 * A thread that has just fallen asleep takes about 10 us to wake, one that has slept for milliseconds 50 to 500 us
 * (seen on a virtual machine with an H200), and between a reply and the next launch two threads have to wake.
 * CUDA's own library polls for as long as a wait takes, where there are processors to spare; so waiting threads
 * poll for a while here. Where a GPU is shared by turns, the worker announces each turn with a TURN frame just
 * before it begins, so that the threads are awake and the GPU is not idle at its start.
 */
#ifndef SLUICE_ATTENTION_H
#define SLUICE_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

/* How many processors this process may use. */
int sl_processors(void);

/*
 * Polling pays for the next us microseconds, at most 5000. Not on a single processor, and for at most half of the
 * time if a worker announces turn after turn. *again belongs to the worker and starts at 0. False: the caller
 * should sleep.
 */
bool sl_attend(int64_t *again, uint32_t us);

/*
 * What a session's receiver looks at to know whether polling pays: for as long as a thread waits, up to 2 ms, and after
 * an answer until the next call that waits is likely to have begun. A receiver that fell asleep between the two would
 * have to be woken by the next answer, which costs the program 15 us (seen there). The time between an answer and the
 * next such call is learned; beyond a millisecond a receiver sleeps. Zeroed memory is a session that has not begun.
 */
struct sl_waiters {
	uint32_t threads;	/* that wait for a reply or an event of this session */
	int64_t answered;	/* ns, when the last of them had its answer */
	int64_t linger;		/* ns, how long to look for the next one */
};

/* Adds to the number of threads that wait for an answer; a negative number subtracts. */
void sl_waiters_add(struct sl_waiters *w, int threads);
/* The receiver has had an answer. */
void sl_answered(struct sl_waiters *w);

/*
 * Pauses for a moment and returns true as long as it pays to poll again. *since is 0 when a wait begins. w is NULL
 * for a thread that waits for an answer itself.
 */
bool sl_look(int64_t *since, const struct sl_waiters *w);

#endif
