/*
 * Flow: one side compares its bytes with those that both last had, and sends what differs; the other writes that. A thread or a
 * kernel may be looking meanwhile, and may take a word for a flag which says that others have been written. So words are read
 * until two readings agree, and are written in an order that puts what looks like a flag last.
 */
#include "piece.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
	READS = 8,	/* how often memory that changes is read, at most, until two readings are the same */
	TURNS = 5,	/* of the order in which changed words are written */
};

bool sl_piece_init(struct sl_piece *p, uint64_t at, size_t n, bool fresh)
{
	size_t room;

	*p = (struct sl_piece){ .p = at, .n = n, .lo = at & ~7ull, .hi = (at + n + 7) & ~7ull };
	room = (p->hi - p->lo + 63) / 64 * 64;
	p->equal = calloc(1, room);
	p->last = calloc(1, room / 8);
	if (!p->equal || !p->last) {
		sl_piece_free(p);
		return false;
	}
	for (size_t i = 0; !fresh && i < p->hi - p->lo; i++)
		p->equal[i] = (uint8_t)~((const uint8_t *)(uintptr_t)p->lo)[i];
	return true;
}

void sl_piece_free(struct sl_piece *p)
{
	free(p->equal);
	free(p->last);
	p->equal = p->last = NULL;
}

/* Clears the mask's bits for bytes of a word that do not belong to the piece. */
static uint8_t mask_own(const struct sl_piece *p, uint64_t word, uint8_t mask)
{
	if (word < p->p)
		mask &= (uint8_t)(0xff << (p->p - word));
	if (word + 8 > p->p + p->n)
		mask &= (uint8_t)(0xff >> (word + 8 - (p->p + p->n)));
	return mask;
}

bool sl_piece_take(const struct sl_piece *p, struct sl_part *t)
{
	const void *live = (const void *)(uintptr_t)t->lo;
	size_t n = p->hi - t->lo < SL_PIECE_PART ? p->hi - t->lo : SL_PIECE_PART;
	uint8_t *equal = p->equal + (t->lo - p->lo);
	bool some;

	if (!memcmp(live, equal, n))
		return false;
	/* Two equal readings are what was there at one time: a flag in them comes with the data that was written before the flag. */
	for (unsigned i = 0; i < READS && (!i || memcmp(t->bytes, live, n)); i++) {
		memcpy(t->bytes, live, n);
		atomic_thread_fence(memory_order_acquire);
	}
	memcpy(t->bytes + n, equal + n, (n + 63) / 64 * 64 - n);
	t->c = sl_changes(t->bytes, equal, (n + 63) / 64 * 64, t->mask);
	some = t->c.words;
	if (some && t->lo + t->c.from < p->p)
		t->mask[t->c.from / 8] = mask_own(p, t->lo + t->c.from, t->mask[t->c.from / 8]);
	if (some && t->lo + t->c.to > p->p + p->n)
		t->mask[t->c.to / 8 - 1] = mask_own(p, t->lo + t->c.to - 8, t->mask[t->c.to / 8 - 1]);
	memcpy(equal, t->bytes, n);
	return some;
}

/* Writes those bytes of a word whose bits are set, in one store: a thread that polls the word sees all of them or none. */
static void put_word(uint64_t at, uint64_t v, uint8_t bits)
{
	uint64_t *word = (uint64_t *)(uintptr_t)at, mask = 0, was = __atomic_load_n(word, __ATOMIC_RELAXED);

	for (unsigned i = 0; i < 8; i++)
		if (bits >> i & 1)
			mask |= (uint64_t)0xff << 8 * i;
	while (!__atomic_compare_exchange_n(word, &was, (was & ~mask) | (v & mask), false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
}

/*
 * Returns the turn in which a changed word is written. It is word k of the n words of this change, and word i of all words of the
 * piece; last is indexed by the latter. A word whose neighbours on both sides have changed, too, has turn 0, one with one such
 * neighbour turn 1 (the one before) or 2 (the one behind). A word without any is most likely a flag, and has turn 4. But if the last
 * change included a neighbour, the word more likely completes data that was half written then, and has turn 3. The worker uses the
 * same order (mergeTurns in hostwatch.go).
 */
static unsigned turn_of(const uint8_t *mask, size_t k, size_t n, const uint8_t *last, size_t i, size_t all)
{
	unsigned turn = (k && mask[k - 1] ? 0 : 2) + (k + 1 < n && mask[k + 1] ? 0 : 1);

	return turn == 3 && !(i && last[i - 1]) && !(i + 1 < all && last[i + 1]) ? 4 : turn;
}

void sl_piece_change(struct sl_piece *p, uint64_t from, uint64_t to, const uint8_t *mask, const uint8_t *bytes)
{
	size_t first = (from - p->lo) / 8, n = (to - from) / 8, all = (p->hi - p->lo) / 8;

	for (unsigned turn = 0; turn < TURNS; turn++)
		for (size_t k = 0; k < n; k++) {
			uint8_t bits = mask_own(p, from + 8 * k, mask[k]), *equal = p->equal + (from + 8 * k - p->lo);
			uint64_t v;

			if (!bits || turn_of(mask, k, n, p->last, first + k, all) != turn)
				continue;
			memcpy(&v, bytes + 8 * k, 8);
			/* First this: what the program writes as soon as it sees the word differs from it (sl_piece_same). */
			for (unsigned i = 0; i < 8; i++)
				if (bits >> i & 1)
					equal[i] = bytes[8 * k + i];
			put_word(from + 8 * k, v, bits);
		}
	memset(p->last + p->last_from, 0, p->last_to - p->last_from);
	for (size_t k = 0; k < n; k++)
		p->last[first + k] = mask[k] != 0;
	p->last_from = first;
	p->last_to = first + n;
}
