/*
 * The cache of compiled code that NVRTC finds through the driver.
 *
 * Natively the driver keeps what NVRTC has compiled in files of the user's, so that no program compiles again what
 * this user has compiled before. NVRTC asks for the cache by cuGetExportTable (da9151d3). The table's layout was
 * seen between NVRTC 13.0 and driver 580: it holds its size and six functions.
 *
 *	open	an entry, by what goes into the compilation
 *	lookup	its bytes, or CUDA_ERROR_NOT_FOUND
 *	store	its bytes
 *	free	bytes that lookup gave
 *	close	the entry
 *
 * Compilation runs in the program's process, so its cache is here too, in the folder where the driver's would be.
 */
#ifndef SLUICE_COMPILECACHE_H
#define SLUICE_COMPILECACHE_H

#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

struct sl_compiled;

/*
 * Opens the entry of a compilation. kind: what is made of the input, 1 machine code, 2 PTX. The other values go
 * into the key: options, the compiler's build, when it was built, the architecture, and a flag.
 */
CUresult sl_compiled_open(struct sl_compiled **out, uint32_t kind, const void *input, size_t n, const char *options, const char *build,
			  const char *built, uint32_t arch, uint32_t flag);
CUresult sl_compiled_close(struct sl_compiled *c);
/* The entry's bytes, which the caller gives to sl_compiled_free; NOT_FOUND if there is no whole file of them. */
CUresult sl_compiled_lookup(struct sl_compiled *c, uint64_t zero, void **data, uint32_t *n);
/* Keeps bytes for the next time. Failing to keep them is not an error of the program's. */
CUresult sl_compiled_store(struct sl_compiled *c, uint64_t zero, const void *data, size_t n);
CUresult sl_compiled_free(void *data);

#endif
