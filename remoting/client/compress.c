/*
 * See compress.h. A block begins where the last one ended and goes on until a word finds its table full.
 * So blocks end where a channel of an image does. Where a table fills up soon, some bytes are sent plain, and the next attempt begins behind them.
 */
#include "compress.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

#define SLOT_BITS 13		/* many for few words: a search that goes on is a branch that nobody foresees */
#define SLOTS (1u << SLOT_BITS)
#define LEAST_WORDS 1024u		/* of a block with a table, if anything follows it */
#define STEP_LEAST (4u << 10)		/* bytes that are plain after an attempt that failed; each further one doubles it */
#define STEP_MOST (64u << 10)

/* The words of a block. */
struct palette {
	unsigned n;
	uint32_t word[SL_PALETTE_WORDS];
	uint16_t place[SL_PALETTE_WORDS];	/* in slot */
	uint16_t slot[SLOTS];			/* index + 1; 0: free */
};

static void forget(struct palette *p)
{
	for (unsigned i = 0; i < p->n; i++)
		p->slot[p->place[i]] = 0;
	p->n = 0;
}

/* The index of a word that is not where it is looked for first. The table is given it if it has it not; -1: it is full. */
static int __attribute__((noinline)) search(struct palette *p, uint32_t w, unsigned at)
{
	for (; p->slot[at]; at = (at + 1) % SLOTS)
		if (p->word[p->slot[at] - 1] == w)
			return p->slot[at] - 1;
	if (p->n == SL_PALETTE_WORDS)
		return -1;
	p->word[p->n] = w;
	p->place[p->n] = (uint16_t)at;
	p->slot[at] = (uint16_t)++p->n;
	return (int)p->n - 1;
}

static inline int index_of(struct palette *p, uint32_t w)
{
	unsigned at = (w * 0x9e3779b1u) >> (32 - SLOT_BITS), k = p->slot[at];

	return __builtin_expect(k && p->word[k - 1] == w, 1) ? (int)k - 1 : search(p, w, at);
}

/*
 * Writes the index of each word, up to the first that has no place in the table, and returns how many. Each word is read
 * once: the barrier keeps the compiler from reading it again when the program may have changed it.
 */
static size_t scan(struct palette *p, uint8_t *index, const uint8_t *src, size_t words)
{
	for (size_t i = 0; i < words; i++) {
		uint32_t w;
		int k;

		memcpy(&w, src + 4 * i, sizeof w);
		__asm__ volatile("" : "+r"(w));
		k = index_of(p, w);
		if (k < 0)
			return i;
		index[i] = (uint8_t)k;
	}
	return words;
}

static size_t put_block(uint8_t *dst, size_t size, uint16_t codec, uint16_t words)
{
	const struct wire_block b = { .size = (uint32_t)size, .codec = codec, .words = words };

	memcpy(dst, &b, sizeof b);
	return sizeof b;
}

static size_t put_plain(uint8_t *dst, const uint8_t *src, size_t n)
{
	size_t at = n ? put_block(dst, n, SL_BLOCK_PLAIN, 0) : 0;

	memcpy(dst + at, src, n);
	return at + n;
}

/* The block whose indices scan has written to dst + INDICES: its table comes in front of them, so they only ever move down. */
#define INDICES (sizeof(struct wire_block) + sizeof(uint32_t) * SL_PALETTE_WORDS)

static size_t put_palette(uint8_t *dst, const struct palette *p, size_t words)
{
	const uint8_t *index = dst + INDICES;
	size_t at = put_block(dst, words * 4, SL_BLOCK_PALETTE, (uint16_t)p->n);

	memcpy(dst + at, p->word, p->n * sizeof p->word[0]);
	at += p->n * sizeof p->word[0];
	if (p->n == 1)
		return at;
	if (p->n > SL_PALETTE_NIBBLES) {
		memmove(dst + at, index, words);
		return at + words;
	}
	for (size_t i = 0; i < words; i += 2)
		dst[at++] = (uint8_t)(index[i] | (i + 1 < words ? index[i + 1] << 4 : 0));
	return at;
}

struct sl_compressor {
	struct palette palette;
	uint8_t out[];
};

/* No block is longer than what it stands for by more than its header, and indices are written INDICES further on at first. */
#define ROOM(n) ((n) + 2 * INDICES)

struct sl_compressor *sl_compressor_new(size_t most)
{
	struct sl_compressor *c = malloc(sizeof *c + ROOM(most));

	if (c)
		memset(&c->palette, 0, sizeof c->palette);
	return c;
}

size_t sl_compress(struct sl_compressor *c, const uint8_t *src, size_t n, const uint8_t **to)
{
	struct palette *p = &c->palette;
	uint8_t *dst = c->out;
	size_t out = 0, plain = 0 /* where bytes begin that have not been put */, lost = 0, step = STEP_LEAST;

	*to = dst;
	for (size_t at = 0; n - at >= 4;) {
		size_t head = at > plain ? sizeof(struct wire_block) + (at - plain) : 0, words, skip;

		forget(p);
		words = scan(p, dst + out + head + INDICES, src + at, (n - at) / 4);
		if (words >= LEAST_WORDS || (words == (n - at) / 4 && words > 2 * p->n)) {
			put_plain(dst + out, src + plain, at - plain);
			out += head;
			out += put_palette(dst + out, p, words);
			at += words * 4;
			plain = at;
			step = STEP_LEAST;
			continue;
		}
		skip = step < n - at ? step : n - at;
		at += skip;
		lost += skip;
		step = step < STEP_MOST ? 2 * step : step;
		if (lost > n / 2)
			return 0;
	}
	if (out + sizeof(struct wire_block) + (n - plain) > n - n / 4)
		return 0;
	return out + put_plain(dst + out, src + plain, n - plain);
}
