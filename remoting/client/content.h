/*
 * Content that the worker has stored: the pieces of large copies to the device that this user's programs have sent to the same owner
 * before need not be sent again. docs/protocol.md has the bytes, docs/design.md says when this is done.
 *
 * A copy goes piece by piece. Whether the worker has a piece is asked by its SHA-256, one at a time while the worker has none, and many at
 * a time once it had one: threads then hash the pieces that come next. A piece that the worker does not have is sent, and may be stored.
 *
 * Locks: sl_content.lock guards all fields of it but those that are said to be the owner's: of the one copy that has busy. It is held for a few
 * instructions only, and no other lock is taken meanwhile.
 */
#ifndef SLUICE_CONTENT_H
#define SLUICE_CONTENT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "wait.h"
#include "futex.h"
#include "wire.h"

#ifndef SL_CONTENT_PIECE
#define SL_CONTENT_PIECE SL_MAX_CONTENT
#endif
#define SL_CONTENT_LEAST SL_CONTENT_PIECE	/* bytes of a copy that are worth it */
#define SL_CONTENT_AHEAD 64		/* pieces that are hashed ahead */
#define SL_CONTENT_RANGES 4096		/* of the device's memory that copies went to */

struct sl_copy_in;
struct sl_peer;

struct sl_content_range { uint64_t from, to; };

struct sl_content {
	struct sl_peer *t;
	bool told;		/* SLUICE_CONTENT says that content is to be looked for, whatever the link; constant */
	unsigned most;		/* threads; constant */
	pthread_mutex_t lock;
	bool busy;

	/* The owner's. */
	int state;		/* whether it is of use: content.c */
	bool asking;		/* about one piece, by question */
	struct sl_question question;
	bool found;		/* the worker has had what it was asked for */
	unsigned misses;	/* questions in a row that found nothing */
	uint32_t rest;		/* pieces to send before the next question */
	unsigned slow;		/* pieces in a row whose hashing was too slow for the link */
	unsigned held;		/* pieces that were found and not copied: the worker keeps them open */
	struct wire_content_piece asked[SL_MAX_CONTENT_FIND]; /* of the last question */

	/* Where copies went to over a slow link, in order, none touching another. */
	struct sl_content_range *ranges;
	unsigned nranges;

	/* Pieces of the owner's copy from next to end wait for a thread to hash them. */
	const uint8_t *src;
	size_t n;		/* bytes of the copy */
	size_t next, end;
	unsigned hashing;	/* threads that read the program's memory */
	struct wire_content_piece piece[SL_CONTENT_AHEAD]; /* by their number modulo SL_CONTENT_AHEAD, once done */
	bool done[SL_CONTENT_AHEAD];
	unsigned threads;
	struct sl_cond work, change; /* there may be a piece to hash; one has been hashed */
};

/* What SLUICE_CONTENT and the worker's release allow a session whose frames go over a socket, or NULL. */
struct sl_content *sl_content_new(struct sl_peer *t);
void sl_content_free(struct sl_content *k);

/* One copy's. */
struct sl_content_way {
	struct sl_content *k;	/* NULL: its content is not looked at */
	const struct sl_copy_in *c;
	bool fresh;		/* no earlier copy went where it goes: it may be stored */
	bool shared;		/* other threads may read the program's memory */
	bool mine;		/* it is the owner of k */
	size_t first, known;	/* the last question was about these pieces */
	uint32_t found;		/* bit i: the worker has piece first + i */
};

/* Begins a copy of SL_CONTENT_LEAST bytes or more. shared: the program's memory is not protected. */
void sl_content_begin(struct sl_content_way *w, const struct sl_copy_in *c, bool shared);
/*
 * Called before the piece at offset `at` is sent, a multiple of SL_CONTENT_PIECE. Returns how many bytes from `at` on the worker copies from its store; 0: the caller
 * must send them. link: the link's rate in bytes a second, 0 if it is not known.
 */
size_t sl_content_copy(struct sl_content_way *w, size_t at, uint64_t link, CUresult *err);
/* Ends a copy. No thread reads c->src any more. */
void sl_content_end(struct sl_content_way *w);

#endif
