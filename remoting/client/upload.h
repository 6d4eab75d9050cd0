/* The bytes of a copy to the device, on their way to the worker. */
#ifndef SLUICE_UPLOAD_H
#define SLUICE_UPLOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "throughput.h"

struct sl_compressor;

/* A peer's, for uploads. All atomic: a number that a race has made wrong costs a block, not a byte. */
struct sl_uploads {
	struct sl_throughput throughput;
	bool compress;		/* the worker takes compressed copies; constant */
	struct sl_compressor *spare;
	uint32_t misses;	/* attempts in a row that brought nothing */
	uint32_t rest;		/* parts that are not tried */
	uint32_t waited, idle;	/* times when the link was busy, or was not, as the next compressed part was ready */
};

/* Sends n bytes at src for the device's memory at dst in the stream, whose id is given as well. told: the worker knows by the last frame that it ends a blocking copy. */
CUresult sl_upload(CUdeviceptr dst, const void *src, size_t n, CUstream s, uint32_t stream, bool told);

#endif
