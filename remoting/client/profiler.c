/* Profiler control: no profiler can attach, so starting and stopping it do nothing. */
#include "device.h"
#include "gen.h"

CUresult sl_cuProfilerInitialize(const char *configFile, const char *outputFile, CUoutput_mode outputMode)
{
	(void)configFile;
	(void)outputFile;
	(void)outputMode;
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sl_cuProfilerStart(void)
{
	return sl_initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult sl_cuProfilerStop(void)
{
	return sl_initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
