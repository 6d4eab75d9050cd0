/* What has changed between two states of some memory. */
#ifndef SLUICE_CHANGES_H
#define SLUICE_CHANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sl_changes {
	size_t from, to;	/* bytes that changed lie in [from, to), in whole words of 8 bytes; none if from == to */
	size_t words;		/* that changed */
};

/*
 * Compares n bytes, a multiple of 64, and fills in n / 8 bytes of mask: bit i of byte k
 * says that byte 8 k + i is not what it was.
 */
struct sl_changes sl_changes(const uint8_t *now, const uint8_t *was, size_t n, uint8_t *mask);

/* Whether both sides have changed a byte, to different values. */
bool sl_changes_clash(const uint8_t *mine, const uint8_t *theirs, const uint8_t *was, size_t n);
bool sl_zeroes(const uint8_t *p, size_t n);

#endif
