/* The map of address ranges against a plain list, and reservations with mappings inside. */
#include "ranges.h"
#include "ctx.h"
#include "session.h"
#include "test.h"

/* What the rest of the shim would say. */
unsigned sl_sessions = 1;
uint32_t sl_ctx_cur(void) { return 0; }
void sl_shared_close(int memfd) { (void)memfd; }
unsigned sl_ctx_session(uint32_t id) { return id; }

#define MAX 300

static struct sl_range model[MAX];
static int count;

static struct sl_range *model_find(uint64_t p)
{
	for (int i = 0; i < count; i++)
		if (p - model[i].base < model[i].size)
			return &model[i];
	return NULL;
}

static void random_ranges(void)
{
	uint64_t seed = 42;

	for (int round = 0; round < 200000; round++) {
		unsigned what = next_random(&seed) % 10;
		uint64_t p = 0x7f0000000000 + (uint64_t)(next_random(&seed) % 4096) * 512 + next_random(&seed) % 512;
		struct sl_range got, *want;

		if (what < 2 && count < MAX) {
			struct sl_range r = { .base = p, .size = 1 + next_random(&seed) % 4096, .type = SL_RANGE_DEVICE, .dev = round };
			bool clash = false;

			for (int i = 0; i < count; i++)
				clash |= r.base < model[i].base + model[i].size && model[i].base < r.base + r.size;
			if (clash)
				continue;
			CHECK(!sl_range_add(&r));
			model[count++] = r;
		} else if (what == 2 && count) {
			int i = (int)(next_random(&seed) % (unsigned)count);

			CHECK(!sl_range_remove(model[i].base, SL_RANGE_HOST, NULL), "removed as what it is not");
			CHECK(sl_range_remove(model[i].base, SL_RANGE_DEVICE, &got) && got.dev == model[i].dev);
			model[i] = model[--count];
		} else {
			want = model_find(p);
			CHECK(sl_range_find(p, &got) == (want != NULL), "%llx", (unsigned long long)p);
			CHECK(!want || (got.base == want->base && got.size == want->size && got.dev == want->dev));
		}
	}
}

static void nested(void)
{
	struct sl_range va = { .base = 0x100000, .size = 0x100000, .type = SL_RANGE_VA };
	struct sl_range got;

	CHECK(!sl_range_add(&va));
	for (uint64_t i = 0; i < 8; i += 2) {
		struct sl_range m = { .base = 0x100000 + i * 0x1000, .size = 0x1000, .type = SL_RANGE_MAPPED };

		CHECK(!sl_range_add(&m));
	}
	CHECK(sl_range_find(0x100000, &got) && got.type == SL_RANGE_MAPPED);
	CHECK(sl_range_find(0x101000, &got) && got.type == SL_RANGE_VA);
	CHECK(sl_range_find(0x106fff, &got) && got.type == SL_RANGE_MAPPED && got.base == 0x106000);
	CHECK(sl_range_find(0x1fffff, &got) && got.type == SL_RANGE_VA);
	CHECK(!sl_range_find(0x200000, &got) && !sl_range_find(0xfffff, &got));
	CHECK(sl_range_remove(0x100000, SL_RANGE_MAPPED, NULL) && sl_range_find(0x100000, &got) && got.type == SL_RANGE_VA);
	CHECK(sl_range_remove(0x100000, SL_RANGE_VA, NULL) && !sl_range_find(0x100000, &got));
}

static void contexts(void)
{
	struct sl_range a = { .base = 0x1000, .size = 16, .type = SL_RANGE_HOST, .ctx_id = 1 };
	struct sl_range b = { .base = 0x2000, .size = 16, .type = SL_RANGE_DEVICE, .ctx_id = 2 }, got;

	CHECK(!sl_range_add(&a) && !sl_range_add(&b));
	CHECK(sl_range_find(0x1000, &got) && got.buffer_id);
	sl_ranges_drop(1);
	CHECK(!sl_range_find(0x1000, &got) && sl_range_find(0x200f, &got) && !sl_range_find(0x2010, &got));
	sl_ranges_drop(2);
}

int main(void)
{
	nested();
	contexts();
	random_ranges();
	printf("test_ranges: ok\n");
	return 0;
}
