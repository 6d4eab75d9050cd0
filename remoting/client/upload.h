/* The bytes of a copy to the device, on their way to the worker. */
#ifndef SLUICE_UPLOAD_H
#define SLUICE_UPLOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "throughput.h"

struct sl_compressor;
struct sl_peer;

/* What a peer knows of its uploads. The fields are atomic, without a lock: a race may cost one block's compression, but never a byte. */
struct sl_uploads {
	struct sl_throughput throughput;
	bool compress;		/* the worker takes compressed copies; constant */
	struct sl_compressor *spare;
	uint64_t rate;		/* bytes a second of the last large copy; 0: there was none */
	uint32_t misses;	/* consecutive attempts that saved nothing */
	uint32_t rest;		/* parts to send before the next attempt */
	uint64_t given, carried_out; /* bytes of copies while host functions may be called: those that were sent, and those that the worker has read and executed */
	uint32_t waited, idle;	/* how often the link was busy, or idle, when the next compressed part was ready */
};

/* A copy to the device, and the way it goes. */
struct sl_copy_in {
	struct sl_peer *t;
	uint32_t ctx;		/* at that peer */
	bool blocking;		/* the last frame tells the worker that a blocking copy ends with it */
	uint32_t stream;
	uint64_t dst;
	const uint8_t *src;
	size_t n;
};

/*
 * Copies n bytes at src to the device's memory at dst in stream s, whose id is stream. The bytes have left src on return, unless later says
 * that src may be read after that. blocking: the last frame says that a blocking copy ends with it.
 */
CUresult sl_upload(CUdeviceptr dst, const void *src, size_t n, CUstream s, uint32_t stream, bool blocking, bool later);
/* Sends a copy, and notes how fast that went. Its memory is not protected meanwhile. */
CUresult sl_upload_now(const struct sl_copy_in *c);

/*
 * Comes before n bytes of a copy to the device at dst are sent in a frame. While host functions may be called, the worker must find the end of one
 * in what it can read ahead of a copy that waits for it: so this waits until it has carried out enough of the copies before. Called without a lock
 * that the ends of host functions need, or the receiver.
 */
void sl_upload_comes(struct sl_peer *t, uint64_t dst, size_t n);

/*
 * Around what reads n bytes of the program's memory at p with a lock held, or on another thread: neither can wait until memory that is
 * protected (mirror.h) may be read. False: it may be protected, and is to be copied first.
 */
bool sl_upload_reads(const void *p, size_t n);
void sl_upload_has_read(void);
/*
 * From the return of stop to go nothing is read that way, nor by copies in the background: around code that protects the program's memory.
 * The caller holds no lock that a reader, the end of a host function or the receiver may need.
 */
void sl_upload_stop(void);
void sl_upload_go(void);

#endif
