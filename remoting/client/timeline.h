/*
 * The trace of this process's sessions, where SLUICE_TIMELINE names a folder: what each worker says goes into a file there, as
 * it comes. sluice trace makes a timeline of such files. Nothing is asked for without the variable.
 */
#ifndef SLUICE_TIMELINE_H
#define SLUICE_TIMELINE_H

#include <stdbool.h>
#include <stdint.h>

struct sl_peer;

/* Asks each worker for the trace. Called once, when the sessions have begun. */
void sl_timeline_begin(void);
/* A TRACE frame's bytes. Called by the receiver of t. */
void sl_timeline_add(struct sl_peer *t, const uint8_t *p, uint32_t n, bool last);
/* Has the workers end their traces, and waits a while for the rest. Called as the process ends. */
void sl_timeline_end(void);

#endif
