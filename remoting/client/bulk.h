/*
 * Bulk connections: further connections of a session that carry nothing but the bytes of large copies; docs/protocol.md has the
 * bytes. bulk.c asks for them, makes them and ends them, bulkup.c sends what goes to the device, bulkdown.c receives what
 * comes from it. Each connection has a thread, which makes it, uses it, and ends with it.
 *
 * A session does not depend on them. Frames, which the program's threads send, say what is to be done with the bytes. If a
 * connection fails, its bytes are sent in frames.
 *
 * Locks: sl_bulk.lock guards all fields but those that are constant. It is held for a few instructions only, and no other
 * lock is taken meanwhile. Only a connection's own thread closes its descriptor, and not while up is set.
 */
#ifndef SLUICE_BULK_H
#define SLUICE_BULK_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec.h"
#include "connect.h"
#include "futex.h"
#include "wire.h"

struct sl_bulk_job;
struct sl_copy_in;
struct sl_peer;

struct sl_bulk_line {
	struct sl_peer *t;
	uint32_t direction;	/* SL_BULK_TO_* */
	struct sl_connection c;
	bool running;		/* it has a thread */
	bool up;
	unsigned failed;	/* consecutive failures */
	int64_t again;		/* ms, when it may be tried again */
};

struct sl_bulk {
	unsigned wants;		/* connections for each direction; constant */
	bool told;		/* SLUICE_BULK says how many; constant */
	pthread_mutex_t lock;
	uint32_t state;		/* what the worker has said: bulk.c */
	int64_t ask_again, ask_nap; /* ms */
	uint8_t key[16];	/* constant from here on once a connection is being made */
	uint32_t session;
	unsigned lines;		/* the same, as the worker allows it */
	struct sl_bulk_line line[2][SL_MAX_BULK];
	unsigned up[2];

	/* bulkup.c */
	struct sl_bulk_job *job;
	bool reserved;		/* for copies in the background */
	uint64_t number;	/* of the last part */
	struct sl_cond work, change; /* there may be something to send; something else has changed */

	/* bulkdown.c; atomic */
	uint32_t wrote;		/* futex: frames that the receiver has written to the program's memory */
	uint32_t wrote_waits;
};

/* What SLUICE_BULK and this machine allow a session whose frames go over a socket, or NULL. */
struct sl_bulk *sl_bulk_new(struct sl_peer *t);
void sl_bulk_free(struct sl_bulk *b);

/*
 * Whether a large copy can go by bulk connections. Asks the worker for the key, and starts connections if there are none. Does not
 * wait for a connection.
 */
bool sl_bulk_ready(struct sl_peer *t, uint32_t direction);
/* The same before a copy of n bytes from the device, whose frames have this head: the worker uses the connections that it has when it sends the bytes. */
void sl_bulk_download(const sl_buf *head, uint64_t n);

/* The receiver has written a DATA or HOST frame to the program's memory. */
void sl_bulk_wrote(struct sl_bulk *b);

/* Sends n bytes of a copy from at on in frames; last: the last frame says that a blocking copy ends with it. */
typedef CUresult sl_bulk_plain(void *arg, const struct sl_copy_in *c, size_t at, size_t n, bool last);

/*
 * Copies to the device. On return no thread reads c->src any more. False, and nothing is done, if no connection is up, or another copy has
 * them all. Bytes whose connection fails go by plain.
 */
bool sl_bulk_upload(const struct sl_copy_in *c, sl_bulk_plain *plain, void *arg, CUresult *err);
/* From now on the connections to the device are for copies in the background only; false if another one has them. True where there are none. */
bool sl_bulk_reserve(struct sl_peer *t);
void sl_bulk_release(struct sl_peer *t);

/* Shuts all connections down, because the session or the process ends. */
void sl_bulk_end(struct sl_peer *t);
/* In a forked child: closes the parent's connections. */
void sl_bulk_forked(struct sl_peer *t);

/* What follows is for the threads of connections. */

/* Uses a connection that is up; false if it failed. */
bool sl_bulk_send(struct sl_bulk_line *l);
bool sl_bulk_receive(struct sl_bulk_line *l);
/* The connection is not used any more. Called with the lock held. */
void sl_bulk_down(struct sl_bulk_line *l);

#ifndef SL_BULK_IDLE_MS
#define SL_BULK_IDLE_MS 10000	/* a connection that was not used for so long is closed */
#endif

#endif
