/*
 * Lossless compression of bytes on their way to the device: blocks with a table of at most 256 words of 32 bits and an
 * index for each word. Images whose values were bytes have at most 256 values in each channel, whatever they were
 * normalised to; masks, one-hot labels and zeroes have fewer. docs/protocol.md, "Copies", has the form; the worker's
 * side is remoting/wire/compress.go. Nothing is shared, and there is no lock.
 */
#ifndef SLUICE_COMPRESS_H
#define SLUICE_COMPRESS_H

#include <stddef.h>
#include <stdint.h>

struct sl_compressor;

/* For at most so many bytes at once; NULL: no memory. free() ends it. */
struct sl_compressor *sl_compressor_new(size_t most);

/*
 * Makes blocks that stand for the n bytes at src, and returns how many bytes these are: at most 3/4 of n, at *to until the
 * next call. 0: that is not possible, or would take too long to find out. The program may change src meanwhile: each
 * word that arrives is then one that was there at some time during the call, if the program writes whole words.
 */
size_t sl_compress(struct sl_compressor *c, const uint8_t *src, size_t n, const uint8_t **to);

#endif
