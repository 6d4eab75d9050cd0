/*
 * How long to look for the worker's next word before one sleeps for it.
 *
 * A thread that has just fallen asleep takes about 10 us to wake, one that has slept for milliseconds 50 to 500 us
 * (seen on a virtual machine with an H200), and from a reply to the next launch two of them do. CUDA's own library
 * looks for as long as it takes, where there are processors to spare; so threads that wait look for a while here.
 * And where a GPU is shared by turns, the worker says TURN a moment before one begins, or the GPU would stand idle
 * at the begin of each.
 */
#ifndef SLUICE_ATTENTION_H
#define SLUICE_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Looking pays from now on for so many us, at most 5000; not on a single processor, and no more than half of the time
 * for a worker that says so again and again. *again is the worker's, 0 at first. False: it had better sleep.
 */
bool sl_attend(int64_t *again, uint32_t us);

/* Pauses for a moment and says true as long as it pays to look again. *since is 0 when a wait begins; owed: the
 * program waits for an answer. */
bool sl_look(int64_t *since, bool owed);

#endif
