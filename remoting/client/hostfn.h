/* Host functions in streams: the program's, and those that the shim has there itself (hostfn.c). */
#ifndef SLUICE_HOSTFN_H
#define SLUICE_HOSTFN_H

#include <stdint.h>

#include "cuabi.h"

/* Host functions launched and not yet done, and the wait for all of them. */
unsigned sl_hostfns_open(void);
CUresult sl_hostfns_wait(void);
/* Waits for the copies and fills of host memory that the shim itself has in streams. */
CUresult sl_hostfns_wait_inside(void);
/*
 * Runs f(arg, 0) in the order of the stream, on a thread of the shim's, beside those of the program's. When
 * work before it in the stream has failed, f(arg, error) is called instead. f must not call CUDA. If an error
 * is returned f is not called.
 */
CUresult sl_hostfn_inside(CUstream s, void (*f)(void *arg, CUresult failed), void *arg);

/*
 * For the receiver thread: the host function's turn has come. failed: it is not to be called,
 * because of this error before it in its stream. Neither blocks nor waits.
 */
void sl_on_hostfn(uint32_t id, CUresult failed);

#endif
