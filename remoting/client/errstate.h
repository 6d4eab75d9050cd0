/*
 * Which errors the process has returned to the program, and which are pending.
 *
 * A sticky error of CUDA's ends all use of the process's contexts: from then on every call returns it. Any
 * other error of a one-way call stays with the worker until a wait returns it to the program
 * (remoting/worker/failures.go). This side remembers only that there is one, so that the shim answers no
 * wait by itself meanwhile.
 *
 *	state		a one-way call fails	a wait goes to the worker	a sticky error arrives
 *	clear		pending			clear				stuck
 *	pending		pending			clear				stuck
 *	stuck		stuck			stuck				stuck (the first error stays)
 *
 * The receiver thread writes, and any thread reads; all of it is atomic.
 */
#ifndef SLUICE_ERRSTATE_H
#define SLUICE_ERRSTATE_H

#include <stdbool.h>

#include "cuabi.h"

/* Reports whether the error is sticky in CUDA. */
bool sl_error_sticks(CUresult result);
/*
 * Notes the result of a call. It returns true for the first sticky error: the caller must then make sure that
 * no call is answered as if there were no error.
 */
bool sl_error_result(CUresult result);
/* Notes that a one-way call has failed in the worker. Returns what sl_error_result does. */
bool sl_error_oneway(CUresult result);
/* Returns the sticky error, or 0 if there is none. */
CUresult sl_sticky(void);
/* Reports whether a one-way call has failed and no wait has gone to the worker since. */
bool sl_error_pending(void);
/* Notes that a wait is about to go to the worker. Its answer includes the pending errors. */
void sl_error_collect(void);

#endif
