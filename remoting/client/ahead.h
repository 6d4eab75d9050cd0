/*
 * How many pages of a mirror are taken at a fault. Faults at successive pages take more each time.
 *
 * After waits a program mostly reads what it read after the waits before. Where that was most of a mirror, it is fetched in the
 * largest pieces from the first fault on. Such pieces hide what the program needs of them, so every so often a wait is followed
 * by a run from the beginning.
 */
#ifndef SLUICE_AHEAD_H
#define SLUICE_AHEAD_H

#include <stdbool.h>
#include <stddef.h>

enum { SL_AHEAD_MOST = 1024 };	/* pages; more only in mirrors of more than 4096 times that, which else have too many maps */

/* How far a run of faults has got. */
struct sl_ahead {
	size_t next, pages;
};

struct sl_habit {
	size_t fetched;		/* pages since the last wait */
	bool most;		/* of the mirror is needed */
	unsigned trusted;	/* waits since that was seen */
};

/* The end of the pages that are to be taken at a fault at page i, which may be beyond the mirror's; large: in the largest pieces. */
size_t sl_ahead(struct sl_ahead *a, size_t i, size_t pages, bool large);
/* After a wait: notes what the program has fetched since the last one. */
void sl_habit_learn(struct sl_habit *h, struct sl_ahead *fetch, size_t pages);

#endif
