/*
 * Which functions of the driver's interface waited for the worker, how often and how long: the table that
 * SLUICE_TRACE=1 prints when the process ends. Nothing is measured unless it is asked for.
 *
 * A part that waits calls sl_waits_begin and sl_waits_end around its wait, which adds to the thread's sum. The call
 * that the thread makes takes the sum when it returns (sl_left in entry.c, then sl_waits_take).
 */
#ifndef SLUICE_WAITS_H
#define SLUICE_WAITS_H

#include <stdbool.h>
#include <stdint.h>

extern bool sl_waits_on;

void sl_waits_start(void);

/* The time in ns; 0 if nothing is measured. */
int64_t sl_waits_begin(void);
/* asked: the wait is for the reply to a request, and counts as a round trip. */
void sl_waits_end(int64_t since, bool asked);
/* Notes what the calling thread has waited for since the last time. The name must live as long as the process. */
void sl_waits_take(const char *name);

/* Writes the table to stderr. */
void sl_waits_write(void);

#endif
