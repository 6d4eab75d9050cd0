/*
 * Which errors the process has been told of, and which it has yet to be told of.
 *
 * An error that CUDA makes stick ends all further use of the process's contexts: from then on every call
 * returns it. The worker keeps any other error of a one-way call until a wait returns it to the program
 * (remoting/worker/failures.go); kept here is only that there is one, so that no wait is answered here
 * meanwhile.
 *
 *	state		one-way call failed	a wait goes to the worker	sticky error comes
 *	clear		untold			clear				stuck
 *	untold		untold			clear				stuck
 *	stuck		stuck			stuck				stuck (the first counts)
 *
 * The receiver thread writes, any thread reads; all of it is atomic.
 */
#ifndef SLUICE_ERRSTATE_H
#define SLUICE_ERRSTATE_H

#include <stdbool.h>

#include "cuabi.h"

/* Whether CUDA makes this error stick. */
bool sl_error_sticks(CUresult result);
/*
 * Notes the result of a call. True if it is the first that sticks: then no call may be answered as
 * if there were no error.
 */
bool sl_error_result(CUresult result);
/* Notes that a one-way call has failed in the worker. Returns what sl_error_result does. */
bool sl_error_oneway(CUresult result);
/* The error that sticks, 0 if there is none. */
CUresult sl_sticky(void);
/* Whether a one-way call failed and no wait has gone to the worker since. */
bool sl_error_untold(void);
/* A wait is about to go to the worker, whose answer includes the errors yet to be told. */
void sl_error_telling(void);

#endif
