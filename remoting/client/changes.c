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

bool sl_changes_clash(const uint8_t *mine, const uint8_t *theirs, const uint8_t *was, size_t n)
{
	if (!memcmp(theirs, was, n) || !memcmp(theirs, mine, n))
		return false;
	for (size_t at = 0; at < n; at++)
		if (mine[at] != was[at] && theirs[at] != was[at] && mine[at] != theirs[at])
			return true;
	return false;
}

bool sl_zeroes(const uint8_t *p, size_t n)
{
	return !p[0] && !memcmp(p, p + 1, n - 1);
}
