/*
 * Checkpoints by the driver would be the worker's process. A program can ask for its own state, which is always that it runs.
 */
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "entry.h"
#include "gen.h"

#define RUNNING 0 /* CU_PROCESS_STATE_RUNNING */

CUresult sl_cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	if (!state)
		return CUDA_ERROR_INVALID_VALUE;
	if (pid == getpid()) {
		*state = RUNNING;
		return CUDA_SUCCESS;
	}
	if (pid <= 0 || (kill(pid, 0) && errno == ESRCH))
		return CUDA_ERROR_OPERATING_SYSTEM;
	return sl_refuse_with("cuCheckpointProcessGetState", "another process");
}
