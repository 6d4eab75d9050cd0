/*
 * The one way to a worker, for the CUDA shim and the NVML shim: finding it, HELLO,
 * and its WELCOME.
 */
#ifndef SLUICE_CONNECT_H
#define SLUICE_CONNECT_H

#include "snapshot.h"
#include "wire.h"

#define SL_WHY 600

struct sl_ask {
	uint32_t kind;		/* SL_SESSION_COMPUTE or SL_SESSION_OBSERVE */
	unsigned owner;		/* one of the lease's owners, counted from 0 */
	int patience_ms;	/* for each step: see sl_connect */
	int64_t until;		/* no step goes on after that time of sl_now_ms; 0: there is no such time */
	bool shm;		/* offer shared memory to a worker on this node */
	bool resume;		/* offer to make a lost connection again */
	bool rdma;		/* offer RDMA */
	bool compress;		/* offer to compress copies */
	bool quiet;		/* log no failure as an error: it will be tried again */
	char *why;		/* SL_WHY bytes, which take instead of the log why a step failed; NULL: none */
};

struct sl_connection {
	int fd;			/* blocking, right behind WELCOME */
	int shm;		/* descriptor of the shared memory; -1: frames go over fd */
	unsigned owners;	/* how many owners the lease has */
	bool resumable;		/* the connection can be made again when it is lost, with again */
	struct wire_resumable again;
	uint8_t *lacks;		/* operations that the worker does not know, for sl_forms_lack; NULL: it knows all. The caller frees it */
};

/* Outcomes. All but SL_CONNECTED have been logged, and nothing is left open. */
enum sl_connected {
	SL_CONNECTED,
	SL_NO_ADDRESS,	/* no address of a worker is configured, or none of them is usable */
	SL_UNREACHABLE,	/* nobody answers there */
	SL_BROKEN,	/* what answers is not a worker, or it failed, or it is busy */
	SL_MISMATCH,	/* the worker is of another version */
	SL_DENIED,	/* the lease has ended, or is another user's */
	SL_NO_ROOM,	/* the worker does not have that much memory free */
	SL_NO_MEMORY,	/* this process has no memory left */
};

/*
 * Connects over the lease's socket that SLUICE_SOCKET names, otherwise directly to an
 * address in SLUICE_WORKER (tcp:HOST:PORT or unix:PATH, several separated by commas).
 * The environment wins over sluice.conf; an empty variable counts as unset.
 *
 * Reaching a tcp: address may take patience_ms; reaching a unix: address or the
 * lease's socket, SL_LEASE_PATIENCE_MS. The answer of the lease's socket, WELCOME and
 * the descriptor of the shared memory may take patience_ms each. A connection of a
 * compute session that is lost before WELCOME has come is made anew, for up to
 * SL_LEASE_PATIENCE_MS. If it has begun a session, the worker ends that soon.
 */
enum sl_connected sl_connect(const struct sl_ask *ask, struct sl_connection *c, struct sl_snapshot *snap);

/*
 * Makes the lost connection of a session again, the way that sl_connect has gone. c->fd is the socket, and is there as soon as
 * it is dialled. Of the outcomes SL_DENIED alone is final. reason says why there is no connection, or is empty.
 */
enum sl_connected sl_connect_again(const struct sl_ask *ask, uint32_t session, const struct wire_attach *attach, uint32_t keepalive_ms,
				   struct sl_connection *c, struct wire_attached *answer, char *reason, size_t cap);

/*
 * Makes a bulk connection of a session, the same way. c->fd is the socket, whose reads and writes have keepalive_ms as their
 * limit, and is there as soon as it is dialled. reason says why there is none, or is empty.
 */
enum sl_connected sl_connect_bulk(const struct sl_ask *ask, uint32_t session, const struct wire_bulk_key *key, uint32_t keepalive_ms,
				  struct sl_connection *c, char *reason, size_t cap);

extern const uint8_t sl_fingerprint[32];

#endif
