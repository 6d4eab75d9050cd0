/* See ahead.h. */
#include "ahead.h"

enum { FIRST = 16, TRUST = 16 };

size_t sl_ahead(struct sl_ahead *a, size_t i, size_t pages, bool large)
{
	size_t least = large ? SL_AHEAD_MOST : FIRST;
	size_t first = pages / 4096 > least ? pages / 4096 : least;
	size_t most = first > SL_AHEAD_MOST ? first : SL_AHEAD_MOST;

	a->pages = i != a->next || !a->pages ? first : a->pages < most ? a->pages * 2 : most;
	a->next = i + a->pages;
	return a->next;
}

void sl_habit_learn(struct sl_habit *h, struct sl_ahead *fetch, size_t pages)
{
	*fetch = (struct sl_ahead){ 0 };
	if (!h->fetched)
		return;
	if (!h->most || ++h->trusted == TRUST) {
		h->most = !h->most && h->fetched >= pages - pages / 4;
		h->trusted = 0;
	}
	h->fetched = 0;
}
