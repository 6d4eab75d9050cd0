/*
 * Copies to the device in the background: asynchronous ones from page-locked memory, of SL_BACKGROUND_LEAST bytes and more. The
 * call returns, and a thread of the session's sends the bytes, as CUDA's copy engine would read them. All frames that come later are
 * kept until it has, so the worker gets everything in the order of the calls, and knows nothing of this. A program
 * whose GPU has work goes on submitting more while a copy is on its way; over a slow link that is most of the time.
 *
 * That a host function has ended is not kept, since the GPU waits for it, nor is what the program has written to host memory that kernels
 * reach and that is compared (mapped.h): it comes before work that was called earlier, as on a GPU that reads the program's own memory.
 * While memory is mirrored, which may become protected at any time, nothing is copied in the background.
 *
 * The fields of struct sl_background are guarded by the peer's order lock. The thread does not hold it while it writes a copy to the
 * socket. It needs no lock that others hold while they take the order lock, or wait for it.
 */
#ifndef SLUICE_BACKGROUND_H
#define SLUICE_BACKGROUND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "futex.h"
#include "wire.h"

#define SL_BACKGROUND_LEAST (1u << 20)

struct sl_copy_in;
struct sl_kept;
struct sl_peer;

struct sl_background {
	bool open;		/* a copy is under way or waits, or frames do; read without the lock, too */
	bool running;		/* there is a thread */
	struct sl_kept *first, *last; /* copies and frames in their order */
	const struct sl_copy_in *now; /* being sent */
	size_t frames, copies;	/* bytes that are kept; bytes of copies that have not been sent */
	uint64_t taken, sent;	/* copies; read without the lock, too */
	struct sl_cond work, moved; /* there is something to do; something was done */
};

/* Takes a copy over, or returns false: the caller sends it. Waits while too many bytes of earlier copies have not been sent. */
bool sl_background_copy(const struct sl_copy_in *c);

/* Waits until no copy reads [p, p+n) any more. */
void sl_background_wait(const void *p, size_t n);

/* Waits until all copies that have been taken so far were sent. The program may change what they have read. */
void sl_background_sent(void);

/*
 * How many copies have been taken, if frames of the program's threads that are sent from now on are kept behind the last of them, and whether
 * one of so many has not been sent. Then no such frame has left the process, and what it asks for is not complete. 0 means that nothing is
 * known, as always with several owners.
 */
uint64_t sl_background_taken(void);
bool sl_background_unsent(uint64_t taken);

/*
 * From stop to go no copy is taken, and from the return of stop on nothing is kept: around what gives kernels host memory. Called without a
 * lock that the ends of host functions need, or the receiver.
 */
void sl_background_stop(void);
void sl_background_go(void);

/*
 * Keeps a frame behind the copies, and waits for room before. False if nothing is kept any more: the caller sends it. Called with order
 * held, which it gives up while it waits.
 */
bool sl_background_keep(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb);
/* The same without waiting. False if there is no room. Called with order held, while copies are open. */
bool sl_background_keep_soon(struct sl_peer *t, const struct wire_request *h, const void *p, size_t n);

#endif
