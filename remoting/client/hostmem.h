/* Page-locked memory of the program (hostmem.c). */
#ifndef SLUICE_HOSTMEM_H
#define SLUICE_HOSTMEM_H

#include <stdbool.h>
#include <stddef.h>

#include "cuabi.h"

struct sl_range;

/* A size in whole pages; less than n if there is none. */
size_t sl_host_pages(size_t n);
/* Maps r->size bytes and adds the range, of which the caller has set what it is. */
CUresult sl_host_map(struct sl_range *r);
/* Frees memory whose range has been removed. Unless passed says that no stream uses it any more, it waits for streams that copy or fill host memory. */
void sl_host_end(const struct sl_range *r, bool passed);

#endif
