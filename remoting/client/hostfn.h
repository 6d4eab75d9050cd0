/* Host functions in streams: those of the program, and those that the shim puts there for itself (hostfn.c). */
#ifndef SLUICE_HOSTFN_H
#define SLUICE_HOSTFN_H

#include <stdbool.h>
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
 * Functions in graphs, by the ids that the worker knows them by; 0 if memory ran out. graph says whose worker
 * that is. They exist until the worker says that nothing has them any more. The one inside runs as
 * sl_hostfn_inside's does, and gone(arg) on the same thread at its end. An object's is never called:
 * destroy(arg) is called on the thread of the program's functions at its end, when its handle ends as well.
 */
uint32_t sl_hostfn_in_graph(CUhostFn fn, void *arg, CUgraph graph);
uint32_t sl_hostfn_inside_graph(void (*f)(void *arg, CUresult failed), void *arg, void (*gone)(void *), CUgraph graph);
uint32_t sl_hostfn_object(CUhostFn destroy, void *arg, uint32_t object);
/* No graph got it: it ends. */
void sl_hostfn_unused(uint32_t id);
/* A function's argument, and in *fn the function if it is the program's. */
void *sl_hostfn_of(uint32_t id, CUhostFn *fn);
/* Whether any graph may call a function of this process. */
bool sl_hostfns_in_graphs(void);

/* For the receiver thread: nothing has the function any more. */
void sl_on_hostfn_gone(uint32_t id);

/*
 * For the receiver thread: the stream has reached the host function. failed: an error before
 * it in its stream, so that it is not called. Neither blocks nor waits.
 */
void sl_on_hostfn(uint32_t id, CUresult failed);

#endif
