/* Events (event.c). */
#ifndef SLUICE_EVENT_H
#define SLUICE_EVENT_H

#include <stdint.h>

#include "cuabi.h"

/* An event will be recorded by something other than cuEventRecord. */
void sl_event_external(CUevent e);
/* A new event of the current context, which ask makes at the worker under the id. */
CUresult sl_event_new(CUevent *h, unsigned flags, CUresult (*ask)(uint32_t id, void *arg), void *arg);
/* Forgets the events of a context that is going. */
void sl_events_drop(uint32_t ctx_id);

/* For the receiver thread: these wait for no more than a lock that is held for a few instructions. */

/* A record of the event is complete. */
void sl_on_event(uint32_t id, uint32_t generation);
/* The worker could not wait for the event: the next query must ask it. */
void sl_on_event_error(uint32_t id);

#endif
