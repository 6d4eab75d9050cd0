/*
 * Profiler control: no profiler can attach, so starting and stopping one do nothing. The first call logs that, at
 * warn: programs call these functions whether anybody measures them or not.
 */
#include "profiler.h"
#include "device.h"
#include "errlog.h"
#include "gen.h"
#include "log.h"
#include "session.h"

void sl_profiler_refused(const char *what)
{
	static uint8_t told;

	if (__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED) || sl_forked())
		return;
	sl_log(SL_WARN, "%s cannot see a GPU of another machine; sluice trace writes a timeline of its kernels, copies and waits, see docs/limits.md", what);
	sl_errlog("%s is not supported by Sluice: sluice trace writes a timeline of kernels, copies and waits", what);
}

CUresult sl_cuProfilerInitialize(const char *configFile, const char *outputFile, CUoutput_mode outputMode)
{
	(void)configFile;
	(void)outputFile;
	(void)outputMode;
	sl_profiler_refused("cuProfilerInitialize");
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sl_cuProfilerStart(void)
{
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	sl_profiler_refused("cuProfilerStart");
	return CUDA_SUCCESS;
}

CUresult sl_cuProfilerStop(void)
{
	return sl_initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
