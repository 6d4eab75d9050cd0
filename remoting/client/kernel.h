/* Kernels and functions: what the driver says of them, and the layout of their parameters (kernel.c). */
#ifndef SLUICE_KERNEL_H
#define SLUICE_KERNEL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "handles.h"

struct sl_module;
struct sl_legacy;

/* What the driver says of a kernel on one device. Constant, but for the values that the program sets. */
struct sl_kernel_info {
	uint32_t nparams;
	uint32_t param_bytes;
	uint32_t *offset, *size;
	uint32_t nattr;
	struct { int32_t result; _Atomic int32_t value; } attr[CU_FUNC_ATTRIBUTE_MAX];
};

struct sl_kernel {
	void *link;
	struct sl_module *owner;
	const char *name;
	_Atomic uint32_t id; /* 0 until a program looks it up */
	uint32_t cache_config;
	_Atomic(struct sl_kernel_info *) info[SL_MAX_DEVICES];
	pthread_mutex_t fetch;
	_Atomic(struct sl_legacy *) legacy; /* what cuLaunch uses */
};

/* The information of a kernel on a device, fetched once. */
CUresult sl_kernel_info(struct sl_kernel *k, int dev, struct sl_kernel_info **out);
struct sl_kernel *sl_kernel_new(struct sl_module *m, const char *name);
void sl_kernel_free(struct sl_kernel *k);

#define SL_FUNCTION_BIT 1u

static inline CUfunction sl_kernel_function(uint32_t id)
{
	return (CUfunction)(void *)((uintptr_t)sl_handle_value(SL_KERNEL, id) | SL_FUNCTION_BIT);
}

struct sl_launch_info {
	uint32_t id;
	uint32_t nparams;
	uint32_t param_bytes;
	const uint32_t *offset, *size;
	int max_threads, registers, shared_static, max_dynamic;
	bool cluster_required;
};
/* The layout of a kernel for launching on dev, fetched once. */
CUresult sl_kernel_layout(CUfunction f, int dev, struct sl_launch_info *out);

#endif
