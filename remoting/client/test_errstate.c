/* The memory of errors: its table of states, and that exactly one of several threads has to close the gate. */
#include <pthread.h>
#include <stdatomic.h>

#include "errstate.h"
#include "test.h"

static _Atomic int firsts;

static void *stick(void *result)
{
	if (sl_error_oneway((CUresult)(uintptr_t)result))
		atomic_fetch_add(&firsts, 1);
	return NULL;
}

int main(void)
{
	static const CUresult sticks[] = {
		CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_CONTAINED, CUDA_ERROR_ILLEGAL_ADDRESS,
		CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_ASSERT, CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ILLEGAL_INSTRUCTION,
		CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_FAILED,
		CUDA_ERROR_TENSOR_MEMORY_LEAK,
	};
	static const CUresult passes[] = {
		CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_READY, CUDA_ERROR_NOT_SUPPORTED,
		CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
	};
	pthread_t t[sizeof sticks / sizeof *sticks];
	CUresult first;

	for (unsigned i = 0; i < sizeof sticks / sizeof *sticks; i++)
		CHECK(sl_error_sticks(sticks[i]), "%d", sticks[i]);
	for (unsigned i = 0; i < sizeof passes / sizeof *passes; i++)
		CHECK(!sl_error_sticks(passes[i]), "%d", passes[i]);

	/* clear, pending, clear */
	CHECK(!sl_sticky() && !sl_error_pending());
	CHECK(!sl_error_result(CUDA_ERROR_INVALID_VALUE) && !sl_error_pending());
	CHECK(!sl_error_oneway(CUDA_ERROR_INVALID_VALUE) && sl_error_pending() && !sl_sticky());
	sl_error_collect();
	CHECK(!sl_error_pending());

	/* stuck, for good */
	for (unsigned i = 0; i < sizeof sticks / sizeof *sticks; i++)
		pthread_create(&t[i], NULL, stick, (void *)(uintptr_t)sticks[i]);
	for (unsigned i = 0; i < sizeof sticks / sizeof *sticks; i++)
		pthread_join(t[i], NULL);
	first = sl_sticky();
	CHECK(atomic_load(&firsts) == 1 && first);
	CHECK(!sl_error_result(CUDA_ERROR_ASSERT) && !sl_error_oneway(CUDA_ERROR_INVALID_VALUE) && sl_sticky() == first);
	sl_error_collect();
	CHECK(sl_sticky() == first);
	puts("errstate: ok");
	return 0;
}
