/* cuGetErrorName and cuGetErrorString for every code of CUDA 13.0. */
#include "gen.h"

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
#define E(n, t) { CUDA_##n, "CUDA_" #n, t }
	E(SUCCESS, "no error"),
	E(ERROR_INVALID_VALUE, "invalid argument"),
	E(ERROR_OUT_OF_MEMORY, "out of memory"),
	E(ERROR_NOT_INITIALIZED, "the driver has not been initialised"),
	E(ERROR_DEINITIALIZED, "the driver is shutting down"),
	E(ERROR_PROFILER_DISABLED, "profiling is disabled"),
	E(ERROR_PROFILER_NOT_INITIALIZED, "the profiler has not been initialised"),
	E(ERROR_PROFILER_ALREADY_STARTED, "the profiler runs already"),
	E(ERROR_PROFILER_ALREADY_STOPPED, "the profiler does not run"),
	E(ERROR_STUB_LIBRARY, "a stub of the driver library was loaded"),
	E(ERROR_CALL_REQUIRES_NEWER_DRIVER, "this call needs a newer driver"),
	E(ERROR_DEVICE_UNAVAILABLE, "the device is busy or cannot be had"),
	E(ERROR_NO_DEVICE, "no CUDA device was found"),
	E(ERROR_INVALID_DEVICE, "invalid device ordinal"),
	E(ERROR_DEVICE_NOT_LICENSED, "the device has no licence"),
	E(ERROR_INVALID_IMAGE, "the device image is invalid"),
	E(ERROR_INVALID_CONTEXT, "invalid device context"),
	E(ERROR_CONTEXT_ALREADY_CURRENT, "the context is current already"),
	E(ERROR_MAP_FAILED, "mapping failed"),
	E(ERROR_UNMAP_FAILED, "unmapping failed"),
	E(ERROR_ARRAY_IS_MAPPED, "the array is mapped"),
	E(ERROR_ALREADY_MAPPED, "the resource is mapped already"),
	E(ERROR_NO_BINARY_FOR_GPU, "no kernel image fits the device"),
	E(ERROR_ALREADY_ACQUIRED, "the resource is acquired already"),
	E(ERROR_NOT_MAPPED, "the resource is not mapped"),
	E(ERROR_NOT_MAPPED_AS_ARRAY, "the resource is not mapped as an array"),
	E(ERROR_NOT_MAPPED_AS_POINTER, "the resource is not mapped as a pointer"),
	E(ERROR_ECC_UNCORRECTABLE, "an uncorrectable memory error was found"),
	E(ERROR_UNSUPPORTED_LIMIT, "the device does not support this limit"),
	E(ERROR_CONTEXT_ALREADY_IN_USE, "the context is in use by another thread"),
	E(ERROR_PEER_ACCESS_UNSUPPORTED, "the devices cannot reach each other's memory"),
	E(ERROR_INVALID_PTX, "PTX compilation failed"),
	E(ERROR_INVALID_GRAPHICS_CONTEXT, "invalid graphics context"),
	E(ERROR_NVLINK_UNCORRECTABLE, "an uncorrectable NVLink error was found"),
	E(ERROR_JIT_COMPILER_NOT_FOUND, "the PTX compiler library was not found"),
	E(ERROR_UNSUPPORTED_PTX_VERSION, "the PTX was made by a newer toolchain than the driver knows"),
	E(ERROR_JIT_COMPILATION_DISABLED, "PTX compilation is disabled"),
	E(ERROR_UNSUPPORTED_EXEC_AFFINITY, "this execution affinity is not supported"),
	E(ERROR_UNSUPPORTED_DEVSIDE_SYNC, "the code synchronises on the device in a way that is not supported"),
	E(ERROR_CONTAINED, "a contained device error; the process must be restarted"),
	E(ERROR_INVALID_SOURCE, "the device kernel source is invalid"),
	E(ERROR_FILE_NOT_FOUND, "file not found"),
	E(ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "a shared object's symbol was not found"),
	E(ERROR_SHARED_OBJECT_INIT_FAILED, "a shared object failed to initialise"),
	E(ERROR_OPERATING_SYSTEM, "an operating system call failed"),
	E(ERROR_INVALID_HANDLE, "invalid resource handle"),
	E(ERROR_ILLEGAL_STATE, "the resource's state does not allow this"),
	E(ERROR_LOSSY_QUERY, "the answer would lose information"),
	E(ERROR_NOT_FOUND, "named symbol not found"),
	E(ERROR_NOT_READY, "the device is not ready"),
	E(ERROR_ILLEGAL_ADDRESS, "a kernel accessed an illegal address"),
	E(ERROR_LAUNCH_OUT_OF_RESOURCES, "the launch asks for too many resources"),
	E(ERROR_LAUNCH_TIMEOUT, "the kernel ran too long and was ended"),
	E(ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, "the launch uses an incompatible texturing mode"),
	E(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is enabled already"),
	E(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
	E(ERROR_PRIMARY_CONTEXT_ACTIVE, "the primary context is active; this cannot be set any more"),
	E(ERROR_CONTEXT_IS_DESTROYED, "the context has been destroyed"),
	E(ERROR_ASSERT, "a device-side assertion failed"),
	E(ERROR_TOO_MANY_PEERS, "no more peer mappings are possible"),
	E(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part of this host memory is registered already"),
	E(ERROR_HOST_MEMORY_NOT_REGISTERED, "this host memory is not registered"),
	E(ERROR_HARDWARE_STACK_ERROR, "the device's call stack is corrupt or overflowed"),
	E(ERROR_ILLEGAL_INSTRUCTION, "a kernel met an illegal instruction"),
	E(ERROR_MISALIGNED_ADDRESS, "a kernel accessed a misaligned address"),
	E(ERROR_INVALID_ADDRESS_SPACE, "a kernel used an address of the wrong memory space"),
	E(ERROR_INVALID_PC, "a kernel's program counter left its code"),
	E(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
	E(ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks for a cooperative launch"),
	E(ERROR_TENSOR_MEMORY_LEAK, "a kernel left tensor memory allocated"),
	E(ERROR_NOT_PERMITTED, "operation not permitted"),
	E(ERROR_NOT_SUPPORTED, "operation not supported"),
	E(ERROR_SYSTEM_NOT_READY, "the system is not ready to start CUDA work"),
	E(ERROR_SYSTEM_DRIVER_MISMATCH, "the driver's parts are of different versions"),
	E(ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "forward compatibility is not supported on this hardware"),
	E(ERROR_MPS_CONNECTION_FAILED, "no connection to the MPS server"),
	E(ERROR_MPS_RPC_FAILURE, "a call to the MPS server failed"),
	E(ERROR_MPS_SERVER_NOT_READY, "the MPS server takes no clients now"),
	E(ERROR_MPS_MAX_CLIENTS_REACHED, "the MPS server has no room for another client"),
	E(ERROR_MPS_MAX_CONNECTIONS_REACHED, "the MPS server has no room for another connection"),
	E(ERROR_MPS_CLIENT_TERMINATED, "the MPS client was ended by the server"),
	E(ERROR_CDP_NOT_SUPPORTED, "the module uses dynamic parallelism, which is not supported here"),
	E(ERROR_CDP_VERSION_MISMATCH, "the module mixes versions of dynamic parallelism"),
	E(ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted while a stream is capturing"),
	E(ERROR_STREAM_CAPTURE_INVALIDATED, "the capture failed through an earlier error"),
	E(ERROR_STREAM_CAPTURE_MERGE, "this would merge two independent captures"),
	E(ERROR_STREAM_CAPTURE_UNMATCHED, "the capture did not begin in this stream"),
	E(ERROR_STREAM_CAPTURE_UNJOINED, "the capture ends with unjoined work"),
	E(ERROR_STREAM_CAPTURE_ISOLATION, "a dependency crosses into or out of the capture"),
	E(ERROR_STREAM_CAPTURE_IMPLICIT, "the call implies a dependency on the legacy stream, which the capture forbids"),
	E(ERROR_CAPTURED_EVENT, "not permitted on an event last recorded in a capture"),
	E(ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture must end in the thread where it began"),
	E(ERROR_TIMEOUT, "the wait timed out"),
	E(ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the graph's changes do not fit its executable"),
	E(ERROR_EXTERNAL_DEVICE, "an external device failed"),
	E(ERROR_INVALID_CLUSTER_SIZE, "invalid cluster size"),
	E(ERROR_FUNCTION_NOT_LOADED, "the function is not loaded"),
	E(ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
	E(ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
	E(ERROR_KEY_ROTATION, "the operation met a key rotation; try again"),
	E(ERROR_UNKNOWN, "unknown error"),
#undef E
};

static int find(CUresult code)
{
	int lo = 0, hi = (int)(sizeof errors / sizeof errors[0]) - 1;

	while (lo <= hi) {
		int mid = (lo + hi) / 2;

		if (errors[mid].code == code)
			return mid;
		if (errors[mid].code < code)
			lo = mid + 1;
		else
			hi = mid - 1;
	}
	return -1;
}

CUresult sl_cuGetErrorName(CUresult error, const char **pStr)
{
	int i = find(error);

	if (!pStr)
		return CUDA_ERROR_INVALID_VALUE;
	*pStr = i < 0 ? NULL : errors[i].name;
	return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult sl_cuGetErrorString(CUresult error, const char **pStr)
{
	int i = find(error);

	if (!pStr)
		return CUDA_ERROR_INVALID_VALUE;
	*pStr = i < 0 ? NULL : errors[i].text;
	return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
