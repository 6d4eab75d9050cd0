/* Pieces of compared memory: what was changed comes over, and what looks like a flag comes last. */
#include "piece.h"
#include "test.h"

#include <signal.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static uint64_t *memory;	/* two pages; the flag is the first word of the first, the data is in the second */
static uint64_t flag_before_data, equal_before_data;
static struct sl_piece piece;

/* The second page was written to: what does the flag say, and what is the page's first word to be equal to? */
static void data_written(int sig)
{
	(void)sig;
	flag_before_data = memory[0];
	memcpy(&equal_before_data, piece.equal + PAGE, sizeof equal_before_data);
	mprotect(memory + WORDS, PAGE, PROT_READ | PROT_WRITE);
}

/* The other side changed these words to these values. A frame is about no more than what is between them. */
static void changed(struct sl_piece *p, const unsigned *words, unsigned n, uint64_t value)
{
	static uint8_t mask[2 * WORDS];
	static uint64_t bytes[2 * WORDS];
	unsigned first = words[0], last = words[n - 1];

	memset(mask, 0, sizeof mask);
	for (unsigned i = 0; i < n; i++) {
		mask[words[i]] = 0xff;
		bytes[words[i]] = value;
	}
	sl_piece_change(p, p->lo + 8 * first, p->lo + 8 * (last + 1), mask + first, (const uint8_t *)(bytes + first));
	for (unsigned i = 0; i < n; i++)
		CHECK(memory[words[i]] == value, "word %u", words[i]);
}

/* The last word of the data was found together with the flag, the others before. The flag comes last, wherever it is. */
static void rest_of_data(struct sl_piece *p)
{
	const unsigned most[] = { WORDS + 1, WORDS + 2, WORDS + 3, WORDS + 4 };
	const unsigned rest[] = { 0, WORDS + 5 }, whole[] = { 0, WORDS + 1, WORDS + 2 };

	for (uint64_t round = 1; round < 4; round++) {
		changed(p, most, 4, round);
		mprotect(memory + WORDS, PAGE, PROT_READ);
		flag_before_data = round;
		changed(p, rest, 2, round);
		CHECK(flag_before_data == round - 1, "round %d: the flag was written before the rest of the data", (int)round);
	}
	mprotect(memory + WORDS, PAGE, PROT_READ);
	changed(p, whole, 3, 4);
	CHECK(flag_before_data == 3, "the flag was written before the data");
}

/*
 * A word that comes over is noted before it is there. So the program's answer differs from what is noted, even if it is what was there before, and even while
 * the word's change goes on.
 */
static void noted_first(struct sl_piece *p)
{
	const unsigned word[] = { WORDS };
	static struct sl_part t;

	t.lo = p->lo;
	changed(p, word, 1, 0);
	CHECK(sl_piece_same(p) && !sl_piece_take(p, &t));
	mprotect(memory + WORDS, PAGE, PROT_READ);
	changed(p, word, 1, 1);
	CHECK(equal_before_data == 1, "the word is there before it is noted");
	CHECK(sl_piece_same(p));
	memory[WORDS] = 0;
	CHECK(!sl_piece_same(p), "the program's answer is not found");
	CHECK(sl_piece_take(p, &t) && sl_piece_same(p));
}

/* What the program has changed is found once, and what the other side has changed is not found at all. */
static void taken(struct sl_piece *p)
{
	static struct sl_part t;

	t.lo = p->lo;
	CHECK(!sl_piece_take(p, &t), "what came from the other side counts as changed here");
	memory[7] = 99;
	CHECK(sl_piece_take(p, &t) && t.c.from == 7 * 8 && t.c.to == 8 * 8 && t.mask[7] == 1);
	CHECK(!sl_piece_take(p, &t), "a change is found twice");
}

/* A piece has its own bytes alone of the words at its ends. */
static void ends(void)
{
	uint64_t words[3] = { 0, 0, 0 }, all[3] = { ~0ull, ~0ull, ~0ull };
	const uint8_t mask[3] = { 0xff, 0xff, 0xff };
	struct sl_piece p;

	CHECK(sl_piece_init(&p, (uint64_t)(uintptr_t)words + 3, 17, true));
	sl_piece_change(&p, p.lo, p.hi, mask, (const uint8_t *)all);
	CHECK(words[0] == 0xffffffffff000000 && words[1] == ~0ull && words[2] == 0xffffffff);
	sl_piece_free(&p);
}

int main(void)
{
	struct sl_piece *p = &piece;

	memory = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	sigaction(SIGSEGV, &(struct sigaction){ .sa_handler = data_written }, NULL);
	CHECK(sl_piece_init(p, (uint64_t)(uintptr_t)memory, 2 * PAGE, true));
	rest_of_data(p);
	taken(p);
	noted_first(p);
	sl_piece_free(p);
	ends();
	printf("ok\n");
	return 0;
}
