/*
 * What mirror.c and mirrorsend.c share. Everything here is guarded by mirror.c's lock.
 */
#ifndef SLUICE_MIRRORS_H
#define SLUICE_MIRRORS_H

#include "ahead.h"
#include "mirror.h"

#define PAGE SL_MIRROR_PAGE

enum { STALE, SAME, WRITTEN };

/* A variable, or the part of one that is in a mirror. */
struct span {
	uint64_t p;
	size_t n;
};

struct mirror {
	uint64_t base;
	size_t n, pages;
	unsigned kind;		/* SL_MIRROR_... */
	bool gone;		/* the program has unmapped it */
	struct sl_other other;
	uint8_t *state;		/* of each page */
	uint8_t **was;		/* what each written page held; NULL: all of it is to be sent */
	bool raced;		/* a page was first written to while work may have run */
	size_t written, stale;	/* pages in these states */
	struct sl_ahead fetch, open;
	struct sl_habit habit;
	struct span *spans;	/* of the managed variables in it, which alone the device has; NULL: it has all */
	unsigned nspans;
};

extern bool sl_mirrors_busy;	/* work was submitted since the last wait */

static inline uint64_t address(const struct mirror *m, size_t page)
{
	return m->base + page * PAGE;
}

/* Bytes of the pages, of which the last may be less than a page. */
static inline size_t bytes(const struct mirror *m, size_t from, size_t to)
{
	return (to == m->pages ? m->n : to * PAGE) - from * PAGE;
}

/* End of the run of pages, from page from on and before page most, that are in its state. */
static inline size_t run(const struct mirror *m, size_t from, size_t most)
{
	size_t to = from + 1;

	while (to < most && m->state[to] == m->state[from])
		to++;
	return to;
}

/* The part of a span that lies in pages [from, to); empty if none does. */
static inline struct span within(const struct mirror *m, const struct span *s, size_t from, size_t to)
{
	uint64_t lo = address(m, from), hi = address(m, to);
	struct span in = { .p = s->p > lo ? s->p : lo };
	uint64_t end = s->p + s->n < hi ? s->p + s->n : hi;

	in.n = end > in.p ? end - in.p : 0;
	return in;
}

void sl_mirrors_protect(struct mirror *m, size_t from, size_t to, int prot);
void sl_mirrors_set(struct mirror *m, size_t from, size_t to, uint8_t state);

/* mirrorsend.c: sends what the program has written to, and notes it as the same. */
void sl_mirrors_send(struct mirror *m);
/* What [p, p+n) holds on the other side, until the next such call. */
CUresult sl_mirrors_read(const struct mirror *m, uint64_t p, size_t n, const uint8_t **got);
/* After a wait: as many clashes are looked for again. */
void sl_mirrors_waited(void);

#endif
