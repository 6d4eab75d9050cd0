/*
 * What the process has been told of errors, and still has to tell.
 *
 * An error that CUDA makes stick ends all further use of the process's contexts: from then on every call
 * returns it. Any other error of a one-way call is kept by the worker until a wait tells the program of it
 * (remoting/worker/failures.go); what is kept here is only that there is one, so that no wait is answered
 * here meanwhile.
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
/* Notes the result of a call. True if it is the first that sticks: no call may be answered as if all were well any more. */
bool sl_error_result(CUresult result);
/* Notes that a one-way call has failed in the worker. As sl_error_result. */
bool sl_error_oneway(CUresult result);
/* The error that sticks, 0 if there is none. */
CUresult sl_sticky(void);
/* Whether a one-way call failed and no wait has gone to the worker since. */
bool sl_error_untold(void);
/* A wait is about to go to the worker, which answers it with what there is to tell. */
void sl_error_telling(void);

#endif
