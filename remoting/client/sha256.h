/* SHA-256 (FIPS 180-4), with the processor's own instructions where it has them. */
#ifndef SLUICE_SHA256_H
#define SLUICE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sl_sha256 {
	uint32_t h[8];
	uint64_t n;
	uint8_t block[64];
	bool portable; /* for tests: do not use the processor's instructions */
};

void sl_sha256_init(struct sl_sha256 *s);
void sl_sha256_add(struct sl_sha256 *s, const void *p, size_t n);
void sl_sha256_end(struct sl_sha256 *s, uint8_t out[32]);

#endif
