/*
 * Reads a message front to back, without trusting it: reading past the end gives zeroes and sets
 * bad. For both libraries.
 */
#ifndef SLUICE_READER_H
#define SLUICE_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct sl_reader {
	const uint8_t *p;
	size_t n, off;
	bool bad;
};

static inline void sl_read(struct sl_reader *r, void *to, size_t n)
{
	memset(to, 0, n);
	if (r->bad || n > r->n - r->off) {
		r->bad = true;
		return;
	}
	memcpy(to, r->p + r->off, n);
	r->off += n;
}

/* The text of a fixed field: up to its NUL, as printable ASCII, always terminated. */
static inline void sl_text(char *to, size_t cap, const void *from, size_t n)
{
	const char *s = from;
	size_t i;

	for (i = 0; i < n && i + 1 < cap && s[i]; i++)
		to[i] = s[i] >= 0x20 && s[i] < 0x7f ? s[i] : '?';
	to[i] = 0;
}

#endif
