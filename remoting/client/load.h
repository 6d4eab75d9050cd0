/* Loading modules, for the export tables; and what it shares with linking (load.c). */
#ifndef SLUICE_LOAD_H
#define SLUICE_LOAD_H

#include "cuabi.h"
#include "fatbin.h"

/* Loads what nvcc's wrapper or a bare container holds as a module of the current context. */
CUresult sl_module_load(CUmodule *out, const void *image, unsigned njit, CUjit_option *opt, void **val);

/* Sends an image to a session, addressed as in an sl_buf, so that it can be named by its SHA-256. */
CUresult sl_image_upload(uint8_t to, uint32_t to_ctx, const struct sl_image *image, const uint8_t sha[32]);
/* Reads a file whole. A NUL, which *size does not count, follows the contents, for PTX. */
CUresult sl_slurp(const char *name, char **data, size_t *size);

#endif
