/* Values that programs keep with a context, with a destructor each (ctxlocal.c). */
#ifndef SLUICE_CTXLOCAL_H
#define SLUICE_CTXLOCAL_H

#include "cuabi.h"

struct sl_ctx;

CUresult sl_local_put(CUcontext ctx, void *key, void *value, void (*dtor)(CUcontext, void *, void *));
CUresult sl_local_delete(CUcontext ctx, void *key);
CUresult sl_local_get(void **value, CUcontext ctx, void *key);
/* Runs the destructors of a dying context. */
void sl_local_drop(struct sl_ctx *c);

#endif
