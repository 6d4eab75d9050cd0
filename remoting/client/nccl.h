/* What NCCL's library asks for that other code does not. */
#ifndef SLUICE_NCCL_H
#define SLUICE_NCCL_H

#include <stddef.h>

/* What page-locked memory is for. */
enum sl_host_use {
	SL_HOST_ANY,
	SL_HOST_NCCL_QUEUE,	/* work that NCCL's host writes before launches; its kernels read it */
	SL_HOST_NCCL_NETWORK,	/* NCCL's kernels and its network thread wait for each other there */
};

/* What n bytes of page-locked memory are for that the code at caller asks for. */
enum sl_host_use sl_nccl_use(const void *caller, size_t n);

#endif
