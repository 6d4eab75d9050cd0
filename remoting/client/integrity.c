/*
 * MD2 (RFC 1319) inside HMAC (RFC 2104, block size 16), over what this library has
 * told the runtime: versions, process, thread, table addresses, the clock that the
 * caller passes, and the devices. Nothing here is cached, because a fork changes
 * the process id.
 */
#include "integrity.h"

#include <string.h>

struct md2 {
	uint8_t state[16], sum[16], block[16];
	unsigned have;
};

/* The permutation of RFC 1319, from the digits of pi. */
static const uint8_t pi[256] = {
	41, 46, 67, 201, 162, 216, 124, 1, 61, 54, 84, 161, 236, 240, 6, 19, 98, 167, 5, 243, 192, 199, 115, 140, 152, 147,
	43, 217, 188, 76, 130, 202, 30, 155, 87, 60, 253, 212, 224, 22, 103, 66, 111, 24, 138, 23, 229, 18, 190, 78, 196, 214,
	218, 158, 222, 73, 160, 251, 245, 142, 187, 47, 238, 122, 169, 104, 121, 145, 21, 178, 7, 63, 148, 194, 16, 137, 11, 34,
	95, 33, 128, 127, 93, 154, 90, 144, 50, 39, 53, 62, 204, 231, 191, 247, 151, 3, 255, 25, 48, 179, 72, 165, 181, 209,
	215, 94, 146, 42, 172, 86, 170, 198, 79, 184, 56, 210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4, 241, 69, 157,
	112, 89, 100, 113, 135, 32, 134, 91, 207, 101, 230, 45, 168, 2, 27, 96, 37, 173, 174, 176, 185, 246, 28, 70, 97, 105,
	52, 64, 126, 15, 85, 71, 163, 35, 221, 81, 175, 58, 195, 92, 249, 206, 186, 197, 234, 38, 44, 83, 13, 110, 133, 40, 132,
	9, 211, 223, 205, 244, 65, 129, 77, 82, 106, 220, 55, 200, 108, 193, 171, 250, 36, 225, 123, 8, 12, 189, 177, 74, 120,
	136, 149, 139, 227, 99, 232, 109, 233, 203, 213, 254, 59, 0, 29, 57, 242, 239, 183, 14, 102, 88, 208, 228, 166, 119, 114,
	248, 235, 117, 75, 10, 49, 68, 80, 180, 143, 237, 31, 26, 219, 153, 141, 51, 159, 17, 131, 20,
};

static void absorb(struct md2 *m, const uint8_t *b)
{
	uint8_t x[48], l = m->sum[15], t = 0;

	for (int i = 0; i < 16; i++) {
		x[i] = m->state[i];
		x[16 + i] = b[i];
		x[32 + i] = m->state[i] ^ b[i];
	}
	for (int round = 0; round < 18; round++) {
		for (int i = 0; i < 48; i++)
			t = x[i] ^= pi[t];
		t = (uint8_t)(t + round);
	}
	memcpy(m->state, x, 16);
	for (int i = 0; i < 16; i++)
		l = m->sum[i] ^= pi[b[i] ^ l];
}

static void add(struct md2 *m, const void *p, size_t n)
{
	const uint8_t *b = p;

	while (n--) {
		m->block[m->have++] = *b++;
		if (m->have == 16) {
			absorb(m, m->block);
			m->have = 0;
		}
	}
}

static void end(struct md2 *m, uint8_t out[16])
{
	uint8_t pad = (uint8_t)(16 - m->have), sum[16];

	for (unsigned n = pad; n; n--)
		add(m, &pad, 1);
	memcpy(sum, m->sum, sizeof sum);
	add(m, sum, sizeof sum);
	memcpy(out, m->state, 16);
}

void sl_md2(const void *p, size_t n, uint8_t out[16])
{
	struct md2 m = { .have = 0 };

	add(&m, p, n);
	end(&m, out);
}

static void add32(struct md2 *m, uint32_t v)
{
	const uint8_t b[4] = { (uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24) };

	add(m, b, sizeof b);
}

static void add64(struct md2 *m, uint64_t v)
{
	add32(m, (uint32_t)v);
	add32(m, (uint32_t)(v >> 32));
}

void sl_integrity_answer(const struct sl_integrity *in, const struct sl_integrity_device *dev, unsigned ndev, uint8_t out[16])
{
	static const uint8_t key[16] = { 0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
					 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f };
	static const uint8_t fixed[16] = { 0x5c, 0x67, 0xcb, 0x03, 0x1c, 0x18, 0x41, 0x33,
					   0xe8, 0xd1, 0x4c, 0x1f, 0xaa, 0x83, 0xd3, 0x8e };
	struct md2 inner = { .have = 0 }, outer = { .have = 0 };
	uint8_t pad[16], digest[16];

	if (in->version % 10 < 2) {
		memcpy(out, fixed, sizeof fixed);
		if (in->version % 10 == 1)
			out[7] = 0x18;
		return;
	}
	for (int i = 0; i < 16; i++)
		pad[i] = key[i] ^ 0x36;
	add(&inner, pad, sizeof pad);
	add32(&inner, in->driver);
	add32(&inner, in->version);
	add32(&inner, in->pid);
	add32(&inner, in->thread);
	add64(&inner, in->table_runtime);
	add64(&inner, in->table_check);
	add64(&inner, in->function);
	add64(&inner, in->seconds);
	for (unsigned d = 0; d < ndev; d++) {
		add(&inner, dev[d].uuid, 16);
		add32(&inner, dev[d].domain);
		add32(&inner, dev[d].bus);
		add32(&inner, dev[d].device);
	}
	end(&inner, digest);
	for (int i = 0; i < 16; i++)
		pad[i] = key[i] ^ 0x5c;
	add(&outer, pad, sizeof pad);
	add(&outer, digest, sizeof digest);
	end(&outer, out);
}
