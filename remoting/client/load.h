/* Loading modules, for the export tables. */
#ifndef SLUICE_LOAD_H
#define SLUICE_LOAD_H

#include "cuabi.h"

/* Loads what nvcc's wrapper or a bare container holds as a module of the current context. */
CUresult sl_module_load(CUmodule *out, const void *image, unsigned njit, CUjit_option *opt, void **val);

#endif
