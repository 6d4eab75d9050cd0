/* A thread that looks for changes to memory that a running kernel may be waiting for (poller.c). */
#ifndef SLUICE_POLLER_H
#define SLUICE_POLLER_H

enum sl_poll { SL_POLL_NOTHING, SL_POLL_FOUND, SL_POLL_STOP };

/*
 * Calls look about every millisecond from now on until it says to stop, and every ten when
 * neither it has found anything nor sl_poller_work has been called for two seconds. It is the
 * same look each time, on one thread.
 */
void sl_poller_start(enum sl_poll (*look)(void));
/* Work was sent that may wait for such memory. */
void sl_poller_work(void);

#endif
