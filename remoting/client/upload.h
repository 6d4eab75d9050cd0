/* The bytes of a copy to the device, on their way to the worker. */
#ifndef SLUICE_UPLOAD_H
#define SLUICE_UPLOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "throughput.h"

struct sl_compressor;

/* What a peer knows of its uploads. The fields are atomic, without a lock: a race may cost one block's compression, but never a byte. */
struct sl_uploads {
	struct sl_throughput throughput;
	bool compress;		/* the worker takes compressed copies; constant */
	struct sl_compressor *spare;
	uint32_t misses;	/* consecutive attempts that saved nothing */
	uint32_t rest;		/* parts to send before the next attempt */
	uint32_t waited, idle;	/* how often the link was busy, or idle, when the next compressed part was ready */
};

/* Sends n bytes at src to the device's memory at dst in stream s, whose id is stream. blocking: the last frame tells the worker that a blocking copy ends with it. */
CUresult sl_upload(CUdeviceptr dst, const void *src, size_t n, CUstream s, uint32_t stream, bool blocking);

#endif
