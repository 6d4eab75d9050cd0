/*
 * The connection to one owner's worker, shared by session.c (which makes and ends it),
 * send.c, wait.c and receive.c.
 *
 * Locks, in the order they are taken: order (who may append to the ring; gives all calls
 * of all threads one order), then drain (who may write to the socket), then wait_lock (the
 * waiting callers; held for a few instructions only), or the lock of bulk.h. The ring's head is written under
 * order and its tail under drain; both are read under either. Only the receiver thread
 * reads the socket, and only it wakes waiting callers: a thread that finds the session
 * broken shuts the socket down, which ends the receiver, which wakes all callers.
 */
#ifndef SLUICE_PEER_H
#define SLUICE_PEER_H

#include <pthread.h>
#include <sys/uio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "background.h"
#include "codec.h"
#include "futex.h"
#include "shmring.h"
#include "upload.h"
#include "wire.h"

#define SL_RING (1u << 20)	/* bytes of the ring, unless the session outlives its connection: then SL_PIECE_WINDOW */
#define SL_RXBUF (64u << 10)	/* bytes of the receiver's buffer */
#define SL_WAIT_BUCKETS 64
#define SL_OTHER_RELEASE "a worker of another release"
#define SL_MIXED "devices of several owners" /* what one call cannot name */

struct sl_bulk;
struct sl_rdma;
struct sl_content;
struct sl_waiter;

struct sl_peer {
	int fd;
	unsigned index;
	uint32_t keepalive_ms;
	uint32_t first;		/* its first device among all */
	struct sl_shm *shm;	/* NULL: the socket carries the frames */
	struct sl_rdma *rdma;	/* NULL: the socket carries the frames; it goes with the connection that it was agreed on for, under drain */
	struct sl_resume *again; /* NULL: the session ends with its connection; see resume.h */
	uint8_t *lacks;		/* see sl_connection */
	struct sl_uploads uploads;
	struct sl_bulk *bulk;	/* NULL: the session has no bulk connections; see bulk.h */
	struct sl_content *content; /* NULL: nothing is known by its content; see content.h */

	/* send.c */
	pthread_mutex_t order, drain;
	uint8_t *ring;
	size_t ring_size;	/* a power of two */
	uint64_t head, tail;	/* with again, tail is what the worker has received */
	uint32_t sender_sleeps;	/* futex */
	struct sl_background background;

	/* wait.c */
	uint32_t call;		/* number of the last waiting call; under order */
	pthread_mutex_t wait_lock;
	struct sl_waiter *waiting[SL_WAIT_BUCKETS];
	struct sl_waiters waiters;	/* see attention.h */

	/* receive.c: used by the receiver thread alone */
	int64_t attend_again;
	uint8_t *rx;
	size_t rx_at, rx_n;
	uint64_t bytes_in;
};

extern struct sl_peer sl_peers[SL_MAX_OWNERS];

/* Ends the session with that error; the first reason counts. */
void sl_die(CUresult error, const char *why);
/* Whether sl_die has ended it: nothing can be sent any more. */
bool sl_broken(void);

/* Starts a thread of the shim's, which nobody waits for. False: it could not be started. */
bool sl_thread_start(void *(*f)(void *), void *arg);
/* The threads of a peer; arg is the struct sl_peer. */
void *sl_sender(void *arg);
void *sl_receiver(void *arg);
/* With shared memory only: waits for the end of the socket, which no other thread would notice. */
void *sl_watcher(void *arg);

/* The peer that a call goes to; *ctx becomes the id of the current context at that peer. */
struct sl_peer *sl_peer_route(const sl_buf *b, uint32_t *ctx);
/* Sends a frame of payload a, then b, or keeps it behind a copy (background.h). Called with order held, which it may give up meanwhile. */
CUresult sl_send_frame(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb);
/* Sends frames that were kept behind a copy. Called with order held. */
void sl_send_kept(struct sl_peer *t, const uint8_t *p, size_t n);
/* Sends all of the parts, which it changes; false with errno. Called with drain held. */
bool sl_send_parts(struct sl_peer *t, struct iovec *iov, int n);
/* Receives some bytes from the socket; 0 at the end, -1 with errno. */
ssize_t sl_socket_read(struct sl_peer *t, void *p, size_t n);
/* Writes what the ring holds to the socket. */
void sl_drain(struct sl_peer *t);

/* Takes the caller that waits for a call out of the table; NULL if there is none. */
struct sl_waiter *sl_waiter_take(struct sl_peer *t, uint32_t call);
/* Where the reply of a taken caller goes. */
sl_reply *sl_waiter_reply(struct sl_waiter *w);
/* Wakes a taken caller. */
void sl_waiter_wake(struct sl_waiter *w);
/* Wakes all callers, with the error that the session has ended with. */
void sl_waiters_end(struct sl_peer *t);
/* A turn of this session begins in us microseconds: wakes threads that wait for a reply, so that they poll for it. */
void sl_waiters_attend(struct sl_peer *t, uint32_t us);

#endif
