/*
 * What an address that a program passes as an operand of a copy or a fill is.
 *
 * With unified addressing page-locked host memory may stand wherever a device address may; pageable
 * memory may stand for host memory only. The driver decides by the address, whatever the function is
 * called: cuMemcpyHtoD takes a device address as its source, cuMemsetD8 page-locked memory. The rules
 * here are those that a driver was seen to keep (test/cuda/randomcalls.c).
 */
#ifndef SLUICE_OPERAND_H
#define SLUICE_OPERAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

enum sl_place {
	SL_NOWHERE,	/* NULL */
	SL_DEVICE,	/* device memory, or the twin of mapped host memory (mapped.h) */
	SL_LOCKED,	/* page-locked host memory */
	SL_PAGEABLE,	/* other host memory */
};

struct sl_operand {
	enum sl_place place;
	uint64_t p;	/* the address: of the twin where there is one */
	bool twin;
	bool shadowed;	/* SL_DEVICE, and the program may have other memory there */
	size_t room;	/* bytes from p to the end of its range; SIZE_MAX if that is not known */
};

/*
 * Classifies p, of which n bytes are used. device says that the function asks for device memory: an
 * address that nobody here knows is then asked for at the worker, which costs a round trip, and is
 * SL_PAGEABLE if the worker's driver does not know it as the device's either.
 */
struct sl_operand sl_operand(uint64_t p, size_t n, bool device);

/*
 * For generated calls that take device memory alone: *err becomes INVALID_VALUE for an address that is
 * not the device's, and NOT_SUPPORTED, logged by the function's name, for page-locked host memory.
 */
void sl_operand_check(uint64_t p, const char *function, CUresult *err);
void sl_operand_check_CUDA_MEMSET_NODE_PARAMS(const CUDA_MEMSET_NODE_PARAMS *p, const char *function, CUresult *err);
void sl_operand_check_CUstreamBatchMemOpParams(const CUstreamBatchMemOpParams *p, const char *function, CUresult *err);

#endif
