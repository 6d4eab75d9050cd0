/* See changes.h. */
#include "changes.h"

#include <string.h>

struct sl_changes sl_changes(const uint8_t *now, const uint8_t *was, size_t n, uint8_t *mask)
{
	struct sl_changes c = { 0 };

	memset(mask, 0, n / 8);
	for (size_t at = 0; at < n; at += 8) {
		if (!(at % 64) && !memcmp(now + at, was + at, 64)) {
			at += 64 - 8;
			continue;
		}
		for (unsigned i = 0; i < 8; i++)
			mask[at / 8] |= (uint8_t)((now[at + i] != was[at + i]) << i);
		if (!mask[at / 8])
			continue;
		if (!c.words++)
			c.from = at;
		c.to = at + 8;
	}
	return c;
}
