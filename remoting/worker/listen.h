/* Answers the system calls that a filter of mode Log holds up. */
#ifndef SLUICE_LISTEN_H
#define SLUICE_LISTEN_H

/*
 * Starts a thread that waits for the filter's listener on ready, allows each call and writes the number of each that it has
 * not seen yet to seen, as an int. Returns 0 or an error number.
 */
int sl_listen(int ready, int seen);

#endif
