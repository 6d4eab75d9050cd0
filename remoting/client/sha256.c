/* See sha256.h. */
#include "sha256.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static const uint32_t k[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t ror(uint32_t x, int n)
{
	return x >> n | x << (32 - n);
}

static void blocks_portable(uint32_t *h, const uint8_t *p, size_t n)
{
	for (; n; n--, p += 64) {
		uint32_t w[64], v[8];

		for (int i = 0; i < 16; i++)
			w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
		for (int i = 16; i < 64; i++) {
			uint32_t a = w[i - 15], b = w[i - 2];

			w[i] = w[i - 16] + w[i - 7] + (ror(a, 7) ^ ror(a, 18) ^ a >> 3) + (ror(b, 17) ^ ror(b, 19) ^ b >> 10);
		}
		memcpy(v, h, sizeof v);
		for (int i = 0; i < 64; i++) {
			uint32_t s1 = ror(v[4], 6) ^ ror(v[4], 11) ^ ror(v[4], 25);
			uint32_t ch = (v[4] & v[5]) ^ (~v[4] & v[6]);
			uint32_t t1 = v[7] + s1 + ch + k[i] + w[i];
			uint32_t s0 = ror(v[0], 2) ^ ror(v[0], 13) ^ ror(v[0], 22);
			uint32_t maj = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);

			v[7] = v[6];
			v[6] = v[5];
			v[5] = v[4];
			v[4] = v[3] + t1;
			v[3] = v[2];
			v[2] = v[1];
			v[1] = v[0];
			v[0] = t1 + s0 + maj;
		}
		for (int i = 0; i < 8; i++)
			h[i] += v[i];
	}
}

#if defined(__x86_64__)
/* The state lives in two registers, as ABEF and CDGH; each step does two rounds. */
__attribute__((target("sha,sse4.1,ssse3"))) static void blocks_ni(uint32_t *h, const uint8_t *p, size_t n)
{
	const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
	__m128i t = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)h), 0xb1);
	__m128i cdgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(h + 4)), 0x1b);
	__m128i abef = _mm_alignr_epi8(t, cdgh, 8);

	cdgh = _mm_blend_epi16(cdgh, t, 0xf0);
	for (; n; n--, p += 64) {
		__m128i abef0 = abef, cdgh0 = cdgh, w[4];

#pragma GCC unroll 4
		for (int i = 0; i < 4; i++)
			w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(p + 16 * i)), swap);
#pragma GCC unroll 16 /* w in registers */
		for (int i = 0; i < 16; i++) {
			__m128i m = _mm_add_epi32(w[i & 3], _mm_loadu_si128((const __m128i *)(k + 4 * i)));

			cdgh = _mm_sha256rnds2_epu32(cdgh, abef, m);
			abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(m, 0x0e));
			if (i < 12) {
				/* Words 4i+16.. from the four groups in flight. */
				__m128i x = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);

				x = _mm_add_epi32(x, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
				w[i & 3] = _mm_sha256msg2_epu32(x, w[(i + 3) & 3]);
			}
		}
		abef = _mm_add_epi32(abef, abef0);
		cdgh = _mm_add_epi32(cdgh, cdgh0);
	}
	t = _mm_shuffle_epi32(abef, 0x1b);
	cdgh = _mm_shuffle_epi32(cdgh, 0xb1);
	_mm_storeu_si128((__m128i *)h, _mm_blend_epi16(t, cdgh, 0xf0));
	_mm_storeu_si128((__m128i *)(h + 4), _mm_alignr_epi8(cdgh, t, 8));
}

static bool have_ni(void)
{
	static int known;
	unsigned a, b, c, d;

	if (!known) {
		known = 1;
		if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && b & (1u << 29) && __get_cpuid(1, &a, &b, &c, &d) &&
		    c & (1u << 9) && c & (1u << 19))
			known = 2;
	}
	return known == 2;
}
#endif

static void blocks(struct sl_sha256 *s, const uint8_t *p, size_t n)
{
#if defined(__x86_64__)
	if (!s->portable && have_ni()) {
		blocks_ni(s->h, p, n);
		return;
	}
#endif
	blocks_portable(s->h, p, n);
}

void sl_sha256_init(struct sl_sha256 *s)
{
	static const uint32_t start[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
					   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };

	memset(s, 0, sizeof *s);
	memcpy(s->h, start, sizeof start);
}

void sl_sha256_add(struct sl_sha256 *s, const void *data, size_t n)
{
	const uint8_t *p = data;
	size_t have = s->n % 64, m;

	s->n += n;
	if (have) {
		m = n < 64 - have ? n : 64 - have;
		memcpy(s->block + have, p, m);
		p += m;
		n -= m;
		if (have + m < 64)
			return;
		blocks(s, s->block, 1);
	}
	blocks(s, p, n / 64);
	memcpy(s->block, p + n / 64 * 64, n % 64);
}

void sl_sha256_end(struct sl_sha256 *s, uint8_t out[32])
{
	uint64_t bits = s->n * 8;
	size_t have = s->n % 64;

	s->block[have++] = 0x80;
	if (have > 56) {
		memset(s->block + have, 0, 64 - have);
		blocks(s, s->block, 1);
		have = 0;
	}
	memset(s->block + have, 0, 56 - have);
	for (int i = 0; i < 8; i++)
		s->block[56 + i] = (uint8_t)(bits >> (56 - 8 * i));
	blocks(s, s->block, 1);
	for (int i = 0; i < 32; i++)
		out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}
