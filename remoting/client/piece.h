/* A piece of memory that the program and running kernels share by comparing it: what has changed on this side, and what has on the other. */
#ifndef SLUICE_PIECE_H
#define SLUICE_PIECE_H

#include "changes.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SL_PIECE_PART = (64 << 10) + 8 };	/* bytes that are compared at a time, in whole words of 8 bytes */

/* The bytes [p, p+n), and the whole words around them, [lo, hi). */
struct sl_piece {
	uint64_t p;
	size_t n;
	uint64_t lo, hi;
	uint8_t *equal;		/* the bytes that both sides last had: hi - lo, in a buffer of a multiple of 64 */
	uint8_t *last;		/* for each word, whether the last change by the other side included it */
	size_t last_from, last_to;	/* the words that may be set in last: [last_from, last_to) */
};

/* What has changed in the part of a piece from lo on: the bytes are copied here. The caller sets lo. */
struct sl_part {
	uint64_t lo;
	struct sl_changes c;
	uint8_t mask[(SL_PIECE_PART + 63) / 64 * 8], bytes[(SL_PIECE_PART + 63) / 64 * 64];
};

/* Fills in a piece; false if there is no memory for it. Fresh memory holds zeroes; of any other, each byte counts as changed. */
bool sl_piece_init(struct sl_piece *p, uint64_t at, size_t n, bool fresh);
void sl_piece_free(struct sl_piece *p);

/*
 * Reports whether the program has changed nothing. Meanwhile sl_piece_change may run: it sets equal first, so that memory which the program has written
 * since differs from it.
 */
static inline bool sl_piece_same(const struct sl_piece *p)
{
	const uint64_t *live = (const uint64_t *)(uintptr_t)p->lo, *equal = (const uint64_t *)(const void *)p->equal;

	return p->hi - p->lo == 8 ? *live == *equal : !memcmp(live, equal, p->hi - p->lo);
}

/* Finds what the program has changed in a part, which is equal from then on. Reports whether that is anything. */
bool sl_piece_take(const struct sl_piece *p, struct sl_part *t);

/* Writes what the other side has changed: the words from from to to that bits of the mask name, 8 bits for the bytes of each word. */
void sl_piece_change(struct sl_piece *p, uint64_t from, uint64_t to, const uint8_t *mask, const uint8_t *bytes);

#endif
