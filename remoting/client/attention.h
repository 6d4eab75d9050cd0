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

/*
 * Polling pays for the next us microseconds, at most 5000. Not on a single processor, and for at most half of the
 * time if a worker announces turn after turn. *again belongs to the worker and starts at 0. False: the caller
 * should sleep.
 */
bool sl_attend(int64_t *again, uint32_t us);

/*
 * Pauses for a moment and returns true as long as it pays to poll again. *since is 0 when a wait begins. owed:
 * the program waits for an answer.
 */
bool sl_look(int64_t *since, bool owed);

#endif
