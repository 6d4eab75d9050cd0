/*
 * Encoding into and decoding from the payload of a frame.
 */
#include <stdlib.h>
#include <string.h>

#include "codec.h"
#include "wire.h"

uint8_t *sl_buf_grow(sl_buf *b, size_t n)
{
	size_t cap = b->cap * 2;
	uint8_t *p;

	if (b->failed || n > SL_MAX_PAYLOAD || b->n + n > SL_MAX_PAYLOAD) {
		b->failed = true;
		return NULL;
	}
	while (cap < b->n + n)
		cap *= 2;
	p = b->p == b->inl ? malloc(cap) : realloc(b->p, cap);
	if (!p) {
		b->failed = true;
		return NULL;
	}
	if (b->p == b->inl)
		memcpy(p, b->inl, b->n);
	b->p = p;
	b->cap = cap;
	p += b->n;
	b->n += n;
	return p;
}

void sl_buf_free(sl_buf *b)
{
	if (b->p != b->inl)
		free(b->p);
}

void sl_put_str(sl_buf *b, const char *s)
{
	size_t n = s ? strlen(s) : 0;

	sl_put_u32(b, s ? (uint32_t)n : SL_NULL_STRING);
	sl_put_bytes(b, s, n);
}

const uint8_t *sl_get_ref(sl_reply *r, size_t n)
{
	const uint8_t *p;

	if (r->bad || n > r->n - r->off) {
		r->bad = true;
		return NULL;
	}
	p = r->data + r->off;
	r->off += n;
	return p;
}

void sl_get_bytes(sl_reply *r, void *p, size_t n)
{
	const uint8_t *s = sl_get_ref(r, n);

	if (s)
		memcpy(p, s, n);
}

void sl_reply_free(sl_reply *r)
{
	if (r->data != r->inl)
		free(r->data);
	r->data = r->inl;
	r->n = r->off = 0;
}
