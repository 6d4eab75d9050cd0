/* Keeps the errors: see errstate.h. */
#include "errstate.h"

#include <stdatomic.h>

static _Atomic CUresult sticky;
static _Atomic bool untold;

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
	atomic_store(&untold, true);
	return sl_error_result(result);
}

CUresult sl_sticky(void)
{
	return atomic_load_explicit(&sticky, memory_order_relaxed);
}

bool sl_error_untold(void)
{
	return atomic_load_explicit(&untold, memory_order_relaxed);
}

void sl_error_telling(void)
{
	atomic_store_explicit(&untold, false, memory_order_relaxed);
}
