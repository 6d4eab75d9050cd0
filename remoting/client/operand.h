/*
 * Classifies the addresses that a program passes as operands of copies and fills.
 *
 * With unified addressing, page-locked host memory is allowed wherever a device address is. Pageable
 * memory is allowed only as a host operand. The driver decides by the address and not by the function's
 * name: cuMemcpyHtoD accepts a device address as its source, and cuMemsetD8 accepts page-locked memory.
 * The rules here are those that NVIDIA's driver was observed to follow (test/cuda/randomcalls.c).
 */
#ifndef SLUICE_OPERAND_H
#define SLUICE_OPERAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"

enum sl_place {
	SL_NULL,	/* NULL */
	SL_DEVICE,	/* device memory, or the twin of mapped host memory (mapped.h) */
	SL_LOCKED,	/* page-locked host memory */
	SL_PAGEABLE,	/* other host memory */
};

struct sl_operand {
	enum sl_place place;
	uint64_t p;	/* the address; the twin's if the memory has one */
	bool twin;	/* kernels reach this host memory (mapped.h) */
	bool shadowed;	/* SL_DEVICE, but the program may have other memory at the same address */
	size_t room;	/* bytes from p to the end of its range; SIZE_MAX if that is not known */
};

/*
 * Classifies p, of which n bytes are used. device says that the function expects device memory. An
 * address that the shim does not know is then looked up at the worker, which costs a round trip. It is
 * SL_PAGEABLE if the worker's driver does not know it as a device address either.
 */
struct sl_operand sl_operand(uint64_t p, size_t n, bool device);

/*
 * Checks an operand of a generated call that takes device memory only. *err becomes INVALID_VALUE for an
 * address that is not the device's. It becomes NOT_SUPPORTED for page-locked host memory, and the log
 * names the function.
 */
void sl_operand_check(uint64_t p, const char *function, CUresult *err);
void sl_operand_check_CUDA_MEMSET_NODE_PARAMS(const CUDA_MEMSET_NODE_PARAMS *p, const char *function, CUresult *err);
void sl_operand_check_CUstreamBatchMemOpParams(const CUstreamBatchMemOpParams *p, const char *function, CUresult *err);

#endif
