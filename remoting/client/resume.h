/*
 * A session that outlives its connection, on the client's side; docs/protocol.md, "Lost
 * connections", has the bytes.
 *
 * The peer's ring keeps what has been sent until the worker has said that it has it: tail
 * moves by the worker's word alone, and sent is how far the ring has been written to the
 * present connection. Large payloads go through the ring, too. The receiver thread takes
 * pieces apart; when the connection is lost, which a sender tells it by shutting the socket down,
 * it makes a new one and puts it in the place of the old, under the same number. Meanwhile
 * senders fill the ring, then wait.
 *
 * Locks: key, left and the raw bytes belong to the receiver; sent and cut are under drain.
 */
#ifndef SLUICE_RESUME_H
#define SLUICE_RESUME_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct sl_peer;
struct sl_connection;

/* Makes a peer's session outlive its connection, as the worker has offered. False: no memory. */
bool sl_resume_start(struct sl_peer *t, const struct sl_connection *c);
void sl_resume_drop(struct sl_peer *t);

/* Whether the sender has something to send. Needs no lock. */
bool sl_resume_pending(struct sl_peer *t);
/* Sends what has not been sent. Called with drain held. */
void sl_resume_send(struct sl_peer *t);
/* Waits until the ring has room for n bytes, or the session has ended. Called with order held. */
void sl_resume_room(struct sl_peer *t, size_t n);

/* Receives some bytes of the stream of frames; -1 when the session has ended, which has been told. */
ssize_t sl_resume_read(struct sl_peer *t, void *p, size_t n);

/* Tells the worker that the process ends; false if there is no connection, or the worker's machine has not taken that by the deadline. */
bool sl_resume_bye(struct sl_peer *t, int64_t deadline);
/* In a forked child: closes what the parent was dialling. */
void sl_resume_forked(struct sl_peer *t);

/* How often connections were lost, and for how many milliseconds in all. */
struct sl_pauses {
	uint64_t number, ms;
};
extern struct sl_pauses sl_pauses;

#endif
