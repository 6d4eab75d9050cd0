/* The receiver thread's side of deliveries; the program's side is in session.h. */
#ifndef SLUICE_DELIVERY_H
#define SLUICE_DELIVERY_H

#include "session.h"

struct sl_delivery {
	uint8_t *dst;
	uint64_t n;	/* packed bytes */
	uint64_t pitch, slice, width, h;	/* width 0: linear */
	uint32_t busy;
	uint32_t gen;
};

/* The open delivery of an id; false if there is none (any more). */
bool sl_delivery_find(uint32_t id, struct sl_delivery *out);
/* Wakes who waits for any delivery, because the session has ended. */
void sl_delivery_wake(void);

#endif
