#include "pointers.h"
#include "ctx.h"
#include "mapped.h"

#include <string.h>

/*
 * Blocks that were found and are to be looked at in turn; of a list that is longer than this at any one time the rest is
 * not followed.
 */
enum { FOUND = 64 };

struct found {
	struct sl_range r[FOUND];
	unsigned n;
};

/* Maps the block that has address v. It is left alone if it cannot be mapped: nothing says that a kernel follows v. */
static void reach(uint64_t v, struct found *f)
{
	struct sl_range r;
	uint64_t known = v;

	if (!sl_locked_maybe(v) || sl_mapped_twin(&known) || !sl_range_find(v, &r) || r.type != SL_RANGE_HOST)
		return;
	if (!sl_mapped_found(v, &r) && r.size <= SL_POINTERS_MOST && f->n < FOUND)
		f->r[f->n++] = r;
}

static void look(const uint8_t *p, size_t n, struct found *f)
{
	uint64_t least = atomic_load(&sl_locked_least), span = atomic_load(&sl_locked_span), v;

	for (size_t i = 0; i + 8 <= n; i += 8) {
		memcpy(&v, p + i, 8);
		if (__builtin_expect(v - least < span, 0))
			reach(v, f);
	}
}

void sl_pointers_slow(const uint8_t *p, size_t n)
{
	struct found f = { .n = 0 };

	look(p, n, &f);
	while (f.n) {
		struct sl_range r = f.r[--f.n];

		look((const uint8_t *)(uintptr_t)r.base, r.size, &f);
	}
}
