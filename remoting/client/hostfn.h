/* Host functions in streams: those of the program, and those that the shim puts there for itself (hostfn.c). */
#ifndef SLUICE_HOSTFN_H
#define SLUICE_HOSTFN_H

#include <stdint.h>

#include "cuabi.h"

/* Host functions launched and not yet done, and the wait for all of them. */
unsigned sl_hostfns_open(void);
CUresult sl_hostfns_wait(void);
/* Waits for the shim's own copies and fills of host memory in streams. */
CUresult sl_hostfns_wait_inside(void);
/*
 * Runs f(arg, 0) in the order of the stream, on the thread of the shim's own functions. If earlier work in
 * the stream has failed, f(arg, error) is called instead. f must not call CUDA. If an error is returned, f is
 * not called.
 */
CUresult sl_hostfn_inside(CUstream s, void (*f)(void *arg, CUresult failed), void *arg);

/*
 * For the receiver thread: the stream has reached the host function. failed: an error before
 * it in its stream, so that it is not called. Neither blocks nor waits.
 */
void sl_on_hostfn(uint32_t id, CUresult failed);

#endif
