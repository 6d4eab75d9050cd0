/*
 * TCP connections to workers. The addresses of a session's owner are kept from when it began: whoever makes its connection again
 * must not wait for a name server, which the same cut may keep from answering. The name is looked up again only after attempts
 * have failed for a while, now and then, and with more time left than a resolver takes.
 */
#ifndef SLUICE_DIAL_H
#define SLUICE_DIAL_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Each connects to HOST:PORT or [IPV6]:PORT by a deadline of sl_now_ms, and returns the socket, or -1 with errno.
 * The first looks the name up, and with keep has the addresses kept for that owner.
 */
int sl_dial(const char *where, unsigned owner, bool keep, int64_t deadline);
/* To the kept addresses. */
int sl_dial_beside(unsigned owner, int64_t deadline);
/* In place of a lost connection, for as long as attempts may go on: until that time, or 0 for without end. One thread for each owner. */
int sl_dial_again(const char *where, unsigned owner, int64_t deadline, int64_t until);
/* The session has gone on over the connection that sl_dial_again made. */
void sl_dial_made(unsigned owner);

/* How long attempts fail before the name is looked up again, and the time between two of these, in milliseconds. Variables for their test. */
extern int sl_look_again_ms, sl_look_every_ms;

#endif
