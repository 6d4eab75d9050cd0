/*
 * The process's memory of errors: see errstate.h. The errors below are sticky in CUDA: the first of them ends all use
 * of the process's contexts, and every later call that needs a context returns it (sl_gate_slow, sl_ctx_use). Any other
 * error is returned once, by the call itself or, for a one-way call, by a later wait.
 */
#include "errstate.h"

#include <stdatomic.h>

static _Atomic CUresult sticky;
static _Atomic bool pending;

bool sl_error_sticks(CUresult result)
{
	switch (result) {
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_NVLINK_UNCORRECTABLE:
	case CUDA_ERROR_CONTAINED:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case CUDA_ERROR_ASSERT:
	case CUDA_ERROR_HARDWARE_STACK_ERROR:
	case CUDA_ERROR_ILLEGAL_INSTRUCTION:
	case CUDA_ERROR_MISALIGNED_ADDRESS:
	case CUDA_ERROR_INVALID_ADDRESS_SPACE:
	case CUDA_ERROR_INVALID_PC:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_TENSOR_MEMORY_LEAK:
		return true;
	default:
		return false;
	}
}

bool sl_error_result(CUresult result)
{
	CUresult none = CUDA_SUCCESS;

	return sl_error_sticks(result) && atomic_compare_exchange_strong(&sticky, &none, result);
}

bool sl_error_oneway(CUresult result)
{
	atomic_store(&pending, true);
	return sl_error_result(result);
}

CUresult sl_sticky(void)
{
	return atomic_load_explicit(&sticky, memory_order_relaxed);
}

bool sl_error_pending(void)
{
	return atomic_load_explicit(&pending, memory_order_relaxed);
}

void sl_error_collect(void)
{
	atomic_store_explicit(&pending, false, memory_order_relaxed);
}
