/* The payload of a frame: written into a growing buffer, read front to back from a reply. */
#ifndef SLUICE_CODEC_H
#define SLUICE_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

/* A function on the way of each launch: some calls there cost more than what they do. */
#define SL_HOT static inline __attribute__((always_inline))

/* A growing byte buffer for one outgoing frame; small ones stay on the stack. */
typedef struct sl_buf {
	uint8_t *p;
	size_t n, cap;
	bool failed;	/* out of memory while encoding */
	bool mixed;	/* the call names handles or addresses of several owners */
	uint8_t to;	/* session it goes to, + 1; 0: the current context's */
	uint32_t to_ctx;/* the context it then goes with */
	uint8_t inl[1024];
} sl_buf;

static inline void sl_buf_init(sl_buf *b)
{
	b->p = b->inl;
	b->n = 0;
	b->cap = sizeof b->inl;
	b->failed = b->mixed = false;
	b->to = 0;
	b->to_ctx = 0;
}

void sl_buf_free(sl_buf *b);
/* Room for n more bytes, or NULL when memory ran out (then failed is set). */
uint8_t *sl_buf_grow(sl_buf *b, size_t n);

static inline uint8_t *sl_buf_room(sl_buf *b, size_t n)
{
	if (__builtin_expect(b->n + n <= b->cap, 1)) {
		uint8_t *p = b->p + b->n;

		b->n += n;
		return p;
	}
	return sl_buf_grow(b, n);
}

static inline void sl_put_bytes(sl_buf *b, const void *p, size_t n)
{
	uint8_t *d = sl_buf_room(b, n);

	if (d && n)
		__builtin_memcpy(d, p, n);
}

static inline void sl_put_u8(sl_buf *b, uint8_t v) { sl_put_bytes(b, &v, 1); }
static inline void sl_put_u16(sl_buf *b, uint16_t v) { sl_put_bytes(b, &v, 2); }
static inline void sl_put_u32(sl_buf *b, uint32_t v) { sl_put_bytes(b, &v, 4); }
static inline void sl_put_u64(sl_buf *b, uint64_t v) { sl_put_bytes(b, &v, 8); }
static inline void sl_put_f32(sl_buf *b, float v) { sl_put_bytes(b, &v, 4); }
/* A message of wire.h: sl_put(&b, struct wire_copy_out, .src = src, .size = n). */
#define sl_put(b, type, ...) sl_put_bytes(b, &(type){ __VA_ARGS__ }, sizeof(type))
/* u32 length and bytes; NULL is length SL_NULL_STRING. */
void sl_put_str(sl_buf *b, const char *s);

/* A reply's payload, read front to back; reading past its end sets bad. */
typedef struct sl_reply {
	uint8_t *data;
	size_t n, off;
	CUresult result;
	bool bad;
	uint8_t session; /* that answered */
	uint8_t inl[512];
} sl_reply;

void sl_reply_free(sl_reply *r);
void sl_get_bytes(sl_reply *r, void *p, size_t n);
/* The next n bytes in place, or NULL when there are fewer. */
const uint8_t *sl_get_ref(sl_reply *r, size_t n);

static inline uint16_t sl_get_u16(sl_reply *r) { uint16_t v = 0; sl_get_bytes(r, &v, 2); return v; }
static inline uint32_t sl_get_u32(sl_reply *r) { uint32_t v = 0; sl_get_bytes(r, &v, 4); return v; }
static inline uint64_t sl_get_u64(sl_reply *r) { uint64_t v = 0; sl_get_bytes(r, &v, 8); return v; }

#endif
