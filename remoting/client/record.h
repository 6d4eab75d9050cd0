/*
 * What the shim knows of an event's last record (record.c).
 *
 * A record has a generation, which the worker counts alike. The shim learns in three ways that it is complete: by the
 * worker's answer to a query or a wait, by an EVENT frame, and by a wait for its stream that covered it. Whether an EVENT
 * frame will come is the state `watch`:
 *
 *	SL_UNWATCHED	no: the next query asks the worker
 *	SL_ASKED	a query has asked. The frame comes if the answer is "not ready"
 *	SL_FOLLOWED	the record has asked itself, because the program waits for this event's records
 *
 *	SL_UNWATCHED -- sl_record_ask --> SL_ASKED
 *	any state    -- sl_record_made --> SL_FOLLOWED if the event is followed, else SL_UNWATCHED
 *	any state    -- sl_record_unwatch --> SL_UNWATCHED: the worker cannot send the frame
 *
 * Locks. A thread that records has `turn` from before the frame is sent until sl_record_end, so the generations of an
 * event go to the worker in their order. `lock` guards the fields, and is held for a few instructions: never while
 * anything is sent or waited for, so the receiver thread may take it. A look takes a record's fields together, so
 * they are always of one record. `complete` needs no lock: it only rises. It is also the futex of threads that wait.
 */
#ifndef SLUICE_RECORD_H
#define SLUICE_RECORD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum sl_watch { SL_UNWATCHED, SL_ASKED, SL_FOLLOWED };

struct sl_record {
	pthread_mutex_t turn, lock;

	/* the last record */
	uint32_t generation;
	uint32_t stream;	/* id, 0: the legacy stream */
	uint64_t seq;		/* the mark of that stream then; 0: unknown */
	uint64_t calls;		/* sl_calls() when it had been sent */
	uint64_t behind;	/* copies in the background that it stands behind: sl_background_taken() before it was sent */
	bool forward;		/* the shim cannot count it, because of a capture: always ask */
	bool external;		/* for good: graphs, launches or other processes record the event too: always ask */
	uint32_t fetched;	/* the generation after which mapped memory was fetched */

	enum sl_watch watch;
	uint64_t asked;		/* sl_waited when the worker was asked */
	bool follow;		/* records are to be followed */
	bool wanted;		/* the last record has been queried or waited for */

	_Atomic uint32_t complete;	/* the highest generation known to be complete */
	_Atomic uint32_t sleepers;	/* threads in sl_record_sleep */
};

/* Makes it that of a new event. The memory may have been another event's before, and is zero otherwise. */
void sl_record_reset(struct sl_record *r, bool external);
void sl_record_external(struct sl_record *r);

/* Takes the turn to record. */
void sl_record_begin(struct sl_record *r);

/* A record that has been sent. */
struct sl_made {
	uint32_t stream;
	uint64_t seq;
	uint64_t waited;	/* sl_waited */
	uint64_t behind;
	bool one_stream;	/* the worker can be asked to report it: it was made in one stream, outside of captures */
	bool forward;
	uint32_t generation;	/* the record's: sl_record_made says it */
};

/* Counts a record. True: the caller sends the request for its EVENT frame. */
bool sl_record_made(struct sl_record *r, struct sl_made *m);
/* Ends the turn. calls is sl_calls(), with those of the record itself; ignored unless made. */
void sl_record_end(struct sl_record *r, bool made, uint64_t calls);

/* The last record, as one look found it. */
struct sl_recorded {
	uint32_t generation, stream;
	uint64_t seq;
	uint64_t behind;	/* 0: nothing is known */
	bool complete;		/* it is known to be */
	bool ask;		/* only the worker knows */
	bool reported;		/* its EVENT frame will come, and no wait has completed since that was asked for */
	bool followed;
	bool newer;		/* calls have been made since */
};

/* Looks on behalf of a query or a wait. waited is sl_waited, calls is sl_calls(). */
struct sl_recorded sl_record_look(struct sl_record *r, uint64_t waited, uint64_t calls);

/* A query is about to ask the worker. Before, not after: the worker's word that it cannot report may arrive before the answer is read. */
void sl_record_ask(struct sl_record *r, uint32_t generation, uint64_t waited);
/* Later records are to be followed, or not. */
void sl_record_follow(struct sl_record *r, bool follow);
/* No EVENT frame will come. Wakes those that wait for one. */
void sl_record_unwatch(struct sl_record *r);

/* A record is complete, by an EVENT frame or by what else the shim can count. */
void sl_record_complete(struct sl_record *r, uint32_t generation);
/* The worker has answered that a record is complete. */
void sl_record_answered(struct sl_record *r, uint32_t generation);

/* Whether mapped memory need not be fetched again after that record, and that it has been fetched. */
bool sl_record_fetched(struct sl_record *r, uint32_t generation);
void sl_record_fetch(struct sl_record *r, uint32_t generation);

/* For a thread that waits for an EVENT frame. *seen is for sl_record_sleep, which sleeps for at most 1 ms. */
bool sl_record_done(struct sl_record *r, uint32_t generation, uint32_t *seen);
bool sl_record_followed(struct sl_record *r, uint32_t generation);
void sl_record_sleep(struct sl_record *r, uint32_t seen);

#endif
