/* What NCCL's library asks for that other code does not. */
#ifndef SLUICE_NCCL_H
#define SLUICE_NCCL_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Whether page-locked memory of n bytes that this code asks for is where NCCL's kernels and its network thread would wait for each
 * other. That memory is refused, and the log says why: the kernels run in another machine, and the collective would not end.
 */
bool sl_nccl_network(const void *caller, size_t n);

#endif
