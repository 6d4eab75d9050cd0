/*
 * Deliveries: memory of the program that DATA frames may be written to. A delivery
 * ends, and its id is free, with its last frame or when it is dropped.
 */
#ifndef SLUICE_DELIVERY_H
#define SLUICE_DELIVERY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

uint32_t sl_delivery_new(void *dst, size_t n);
/* Packed rows of width bytes, h rows a slice, d slices, scattered by pitch and slice bytes. */
uint32_t sl_delivery_new_3d(void *dst, size_t pitch, size_t slice, size_t width, size_t h, size_t d);
/* Waits until it ended; 0 or the session's error. */
CUresult sl_delivery_wait(uint32_t id);
/* Ends it. No thread writes to its memory any more on return. */
void sl_delivery_drop(uint32_t id);
/* Waits until no open delivery writes to [p, p+n); 0 or the session's error. */
CUresult sl_delivery_wait_range(const void *p, size_t n);
/* Waits until those have ended that are open when it is called; 0 or the session's error. */
CUresult sl_delivery_wait_all(void);
/* Deliveries not yet ended. */
unsigned sl_deliveries_open(void);

/* What follows is for the receiver thread. */

struct sl_delivery {
	uint8_t *dst;
	uint64_t n;	/* packed bytes */
	uint64_t pitch, slice, width, h;	/* width 0: linear */
	uint32_t busy;
	uint32_t gen;
	bool ending;	/* nobody may begin to write */
};

/* The open delivery of an id; false if there is none (any more). */
bool sl_delivery_find(uint32_t id, struct sl_delivery *out);
/* Wakes all threads that wait for a delivery, because the session has ended. */
void sl_delivery_wake(void);

/* What follows is for the threads of bulk connections, which write beside the receiver. */

/* Lies on the stack of a thread that writes. */
struct sl_writer {
	struct sl_writer *next;
	uint32_t id;
	int fd;		/* the thread reads from it; shut down if the delivery ends meanwhile */
};

enum sl_write {
	SL_WRITE_GO,		/* sl_delivery_written follows */
	SL_WRITE_NONE,		/* there is no such delivery (any more) */
	SL_WRITE_BEYOND,	/* it is smaller */
};

/* Before n bytes are written to a delivery from off on. */
enum sl_write sl_delivery_write(struct sl_writer *w, uint32_t id, uint64_t off, uint64_t n, struct sl_delivery *out);
void sl_delivery_written(struct sl_writer *w);
/* Ends what such threads write, since the session has ended. */
void sl_delivery_settle(void);

#endif
