/* Text that kernels print, kept until the program synchronises. */
#ifndef SLUICE_PRINT_H
#define SLUICE_PRINT_H

#include <stdbool.h>
#include <stddef.h>

/* Keeps n bytes, at most 64 KiB, for stderr or stdout. */
void sl_print_add(bool to_stderr, const void *text, size_t n);
/* Writes what is kept; every wait does so on its way back. */
void sl_print_flush(void);

#endif
