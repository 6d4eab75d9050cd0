/*
 * Device code images as programs hand them to the driver: how long they are, and
 * which parts of them a given device can use. The layouts are as published by the
 * makers of CUDA-compatible tools; see docs/protocol.md.
 */
#ifndef SLUICE_FATBIN_H
#define SLUICE_FATBIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

struct sl_part {
	const uint8_t *p;
	size_t n;
};

/* An image as it is to be sent: parts of the program's memory and headers made here, in order. */
struct sl_image {
	size_t size;
	unsigned nparts;
	struct sl_part *parts;
	struct sl_part one;
	uint8_t *heads; /* of containers put together here, and of a linked set */
};

struct sl_cc {
	int major, minor;
};

/*
 * Describes the image at p, trimmed to what at least one of the devices can use.
 * False if it is not an image. The memory at p must stay until sl_image_free.
 *
 * A separately compiled program registers its linked image together with the list of
 * the objects that it was linked from. The linked image is what runs. The objects go
 * along, as a linked set, only if the linked image lacks code made exactly for one
 * of the devices: the driver may then link the objects' PTX.
 */
bool sl_image_open(const void *p, const struct sl_cc *cc, unsigned ncc, struct sl_image *out);
void sl_image_free(struct sl_image *image);
/* Copies n bytes from offset on. */
void sl_image_copy(const struct sl_image *image, size_t offset, void *to, size_t n);

#endif
