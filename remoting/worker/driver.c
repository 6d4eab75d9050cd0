#define _GNU_SOURCE
#define SL_FN_NAMES
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

void *sl_fn[SL_FN_COUNT];

int sl_driver_open(const char *path, char *err, size_t errlen)
{
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	int i;

	if (!h) {
		snprintf(err, errlen, "%s", dlerror());
		return -1;
	}
	for (i = 0; i < SL_FN_COUNT; i++) /* a number that is not used any more has no name */
		if (sl_fn_names[i])
			sl_fn[i] = dlsym(h, sl_fn_names[i]);
	/* Drivers that lack a newer name have the function by its old one. */
	if (!sl_fn[FN_cuEventElapsedTime_v2])
		sl_fn[FN_cuEventElapsedTime_v2] = sl_fn[FN_cuEventElapsedTime];
	if (!sl_fn[FN_cuInit] || !sl_fn[FN_cuLaunchKernel]) {
		snprintf(err, errlen, "%s has no cuInit or cuLaunchKernel", path);
		return -1;
	}
	return 0;
}

int sl_has(int fn)
{
	return fn >= 0 && fn < SL_FN_COUNT && sl_fn[fn];
}

int sl_init(void)
{
	return CU(cuInit, 0);
}

int sl_driver_version(int *v)
{
	return CU(cuDriverGetVersion, v);
}

int sl_device_count(int *n)
{
	return CU(cuDeviceGetCount, n);
}

int sl_device_attr(int *v, uint32_t attr, int dev)
{
	return CU(cuDeviceGetAttribute, v, attr, dev);
}

int sl_device_name(char *name, int len, int dev)
{
	return CU(cuDeviceGetName, name, len, dev);
}

int sl_device_uuid(void *uuid, int dev)
{
	int rc = CU(cuDeviceGetUuid_v2, uuid, dev);

	if (rc == CUDA_ERROR_NOT_SUPPORTED)
		rc = CU(cuDeviceGetUuid, uuid, dev);
	return rc;
}

int sl_device_mem(uint64_t *bytes, int dev)
{
	size_t n = 0;
	int rc = CU(cuDeviceTotalMem_v2, &n, dev);

	*bytes = n;
	return rc;
}

int sl_device_pci(char *id, int len, int dev)
{
	return CU(cuDeviceGetPCIBusId, id, len, dev);
}

int sl_tex1d(uint64_t *width, int dev)
{
	size_t w = 0;
	int rc = CU(cuDeviceGetTexture1DLinearMaxWidth, &w, CU_AD_FORMAT_UNSIGNED_INT8, 1, dev);

	*width = w;
	return rc;
}

int sl_granularity(uint64_t *g, int dev, uint32_t which)
{
	CUmemAllocationProp prop;
	size_t n = 0;
	int rc;

	memset(&prop, 0, sizeof prop);
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop.location.id = dev;
	rc = CU(cuMemGetAllocationGranularity, &n, &prop, which);
	*g = n;
	return rc;
}

int sl_ctx_limit(uint64_t *v, uint32_t limit)
{
	size_t n = 0;
	int rc = CU(cuCtxGetLimit, &n, limit);

	*v = n;
	return rc;
}

int sl_ctx_prio(int *least, int *greatest)
{
	return CU(cuCtxGetStreamPriorityRange, least, greatest);
}

int sl_ctx_retain(uint64_t *ctx, int dev)
{
	return CU(cuDevicePrimaryCtxRetain, (CUcontext *)ctx, dev);
}

int sl_ctx_release(int dev)
{
	return CU(cuDevicePrimaryCtxRelease_v2, dev);
}

int sl_ctx_set(uint64_t ctx)
{
	return CU(cuCtxSetCurrent, (CUcontext)ctx);
}

int sl_ctx_sync(void)
{
	return CU(cuCtxSynchronize);
}

/*
 * The driver puts a new context on the thread's stack of contexts. It is taken off again: with two on the stack, making none
 * current (cuCtxSetCurrent) would make the one below current, and a call without a context would run in that.
 */
int sl_ctx_create(uint64_t *ctx, uint32_t flags, int dev)
{
	CUcontext popped;
	int rc = CU(cuCtxCreate_v2, (CUcontext *)ctx, flags, dev);

	if (!rc)
		(void)CU(cuCtxPopCurrent_v2, &popped);
	return rc;
}

int sl_ctx_destroy(uint64_t ctx)
{
	return CU(cuCtxDestroy_v2, (CUcontext)ctx);
}

int sl_mem_info(uint64_t *free_, uint64_t *total)
{
	size_t f = 0, t = 0;
	int rc = CU(cuMemGetInfo_v2, &f, &t);

	*free_ = f;
	*total = t;
	return rc;
}

int sl_mem_alloc(uint64_t *p, uint64_t n)
{
	CUdeviceptr d = 0;
	int rc = CU(cuMemAlloc_v2, &d, n);

	*p = d;
	return rc;
}

int sl_mem_free(uint64_t p)
{
	return CU(cuMemFree_v2, p);
}

int sl_pool_reserved(uint64_t pool, uint64_t *n)
{
	return CU(cuMemPoolGetAttribute, (CUmemoryPool)pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, n);
}

int sl_pool_used(uint64_t pool, uint64_t *n)
{
	return CU(cuMemPoolGetAttribute, (CUmemoryPool)pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, n);
}

int sl_pool_set(uint64_t pool, uint32_t attr, uint64_t *v)
{
	return CU(cuMemPoolSetAttribute, (CUmemoryPool)pool, attr, v);
}

int sl_ctx_set_limit(uint32_t limit, uint64_t v)
{
	return CU(cuCtxSetLimit, limit, v);
}

int sl_capture_mode(CUstreamCaptureMode *mode)
{
	return CU(cuThreadExchangeStreamCaptureMode, mode);
}

/* A kernel without a body, in a form that every driver since CUDA 9 compiles. */
static const char empty_ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty()\n{\n\tret;\n}\n";

int sl_compile(void)
{
	CUmodule m;
	int rc = CU(cuModuleLoadData, &m, empty_ptx);

	if (!rc)
		CU(cuModuleUnload, m);
	return rc;
}

int sl_max_clusters(int *n, uint64_t fn, CUlaunchConfig *cfg, CUlaunchAttribute *attrs, uint32_t nattrs, int potential)
{
	cfg->attrs = attrs;
	cfg->numAttrs = nattrs;
	if (potential)
		return CU(cuOccupancyMaxPotentialClusterSize, n, (CUfunction)fn, cfg);
	return CU(cuOccupancyMaxActiveClusters, n, (CUfunction)fn, cfg);
}

int sl_potential_block(int *grid, int *block, uint64_t fn, uint64_t smem, int limit, uint32_t flags)
{
	return CU(cuOccupancyMaxPotentialBlockSizeWithFlags, grid, block, (CUfunction)fn, NULL, smem, limit, flags);
}

int sl_pinned_alloc(void **p, uint64_t n)
{
	return CU(cuMemHostAlloc, p, n, 1 /* CU_MEMHOSTALLOC_PORTABLE */);
}

int sl_pinned_free(void *p)
{
	return CU(cuMemFreeHost, p);
}

int sl_host_register(void *p, uint64_t n)
{
	return CU(cuMemHostRegister_v2, p, n, CU_MEMHOSTREGISTER_PORTABLE);
}

int sl_host_unregister(void *p)
{
	return CU(cuMemHostUnregister, p);
}

int sl_host_map(void **p, uint64_t at, uint64_t n, int fd)
{
	int how = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
	void *want = (void *)(uintptr_t)at, *got;
	CUdeviceptr there = 0;
	int rc = CUDA_ERROR_NOT_SUPPORTED;

	*p = NULL;
	got = mmap(want, n, PROT_READ | PROT_WRITE, how | MAP_FIXED_NOREPLACE, fd, 0);
	if (got == MAP_FAILED)
		return errno == ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_NOT_SUPPORTED;
	if (got == want) { /* kernels before 4.17 take the address as a hint */
		rc = CU(cuMemHostRegister_v2, got, n, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
		if (!rc) {
			rc = CU(cuMemHostGetDevicePointer_v2, &there, got, 0);
			if (!rc && there == at) {
				*p = got;
				return 0;
			}
			CU(cuMemHostUnregister, got);
			rc = rc ? rc : CUDA_ERROR_NOT_SUPPORTED;
		}
	}
	munmap(got, n);
	return rc;
}

/* What the driver may still use stays mapped: an error of another kind, as that of a context that failed, says nothing. */
int sl_host_unmap(void *p, uint64_t n)
{
	int r = CU(cuMemHostUnregister, p);

	if (r && r != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)	/* its context is gone, which has unregistered it */
		return r;
	munmap(p, n);
	return 0;
}

int sl_stream_sync(uint64_t s)
{
	return CU(cuStreamSynchronize, (CUstream)s);
}

int sl_stream_create(uint64_t *s, uint32_t flags)
{
	return CU(cuStreamCreate, (CUstream *)s, flags);
}

int sl_stream_destroy(uint64_t s)
{
	return CU(cuStreamDestroy_v2, (CUstream)s);
}

int sl_stream_query(uint64_t s)
{
	return CU(cuStreamQuery, (CUstream)s);
}

int sl_stream_capturing(uint64_t s, uint32_t *status)
{
	CUstreamCaptureStatus st = 0;
	int rc = CU(cuStreamIsCapturing, (CUstream)s, &st);

	*status = st;
	return rc;
}

int sl_stream_blocking(uint64_t s)
{
	unsigned flags = 0;

	return CU(cuStreamGetFlags, (CUstream)s, &flags) || !(flags & CU_STREAM_NON_BLOCKING);
}

int sl_event_create(uint64_t *e, uint32_t flags)
{
	return CU(cuEventCreate, (CUevent *)e, flags);
}

int sl_event_destroy(uint64_t e)
{
	return CU(cuEventDestroy_v2, (CUevent)e);
}

int sl_event_record(uint64_t e, uint64_t s)
{
	return CU(cuEventRecord, (CUevent)e, (CUstream)s);
}

int sl_event_query(uint64_t e)
{
	return CU(cuEventQuery, (CUevent)e);
}

int sl_event_sync(uint64_t e)
{
	return CU(cuEventSynchronize, (CUevent)e);
}

int sl_htod(uint64_t dst, const void *src, uint64_t n, uint64_t stream)
{
	return CU(cuMemcpyHtoDAsync_v2, dst, src, n, (CUstream)stream);
}

int sl_dtoh(void *dst, uint64_t src, uint64_t n, uint64_t stream)
{
	return CU(cuMemcpyDtoHAsync_v2, dst, src, n, (CUstream)stream);
}

int sl_copy3d(const struct sl_box *b, void *host, int in, uint64_t stream)
{
	CUDA_MEMCPY3D c;

	memset(&c, 0, sizeof c);
	c.WidthInBytes = b->w;
	c.Height = b->h;
	c.Depth = b->d;
	if (in) {
		c.srcMemoryType = CU_MEMORYTYPE_HOST;
		c.srcHost = host;
		c.srcPitch = b->w;
		c.srcHeight = b->h;
		c.dstMemoryType = b->memtype;
		c.dstXInBytes = b->x;
		c.dstY = b->y;
		c.dstZ = b->z;
		c.dstLOD = b->lod;
		if (b->memtype == CU_MEMORYTYPE_ARRAY) {
			c.dstArray = (CUarray)b->ptr;
		} else {
			c.dstDevice = b->ptr;
			c.dstPitch = b->pitch;
			c.dstHeight = b->height;
		}
	} else {
		c.dstMemoryType = CU_MEMORYTYPE_HOST;
		c.dstHost = host;
		c.dstPitch = b->w;
		c.dstHeight = b->h;
		c.srcMemoryType = b->memtype;
		c.srcXInBytes = b->x;
		c.srcY = b->y;
		c.srcZ = b->z;
		c.srcLOD = b->lod;
		if (b->memtype == CU_MEMORYTYPE_ARRAY) {
			c.srcArray = (CUarray)b->ptr;
		} else {
			c.srcDevice = b->ptr;
			c.srcPitch = b->pitch;
			c.srcHeight = b->height;
		}
	}
	return CU(cuMemcpy3DAsync_v2, &c, (CUstream)stream);
}

void **sl_extra(void *extra[5], const void *params, size_t *size)
{
	extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
	extra[1] = (void *)params;
	extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
	extra[3] = size;
	extra[4] = CU_LAUNCH_PARAM_END;
	return *size ? extra : NULL;
}

_Static_assert(sizeof(struct wire_launch_attr) == sizeof(CUlaunchAttribute), "layout of a launch attribute");

int sl_launch(uint64_t fn, uint64_t stream, const uint8_t *p)
{
	struct wire_launch l;
	uint8_t aligned[4096] __attribute__((aligned(16)));
	const uint8_t *params = p + sizeof l;
	size_t size;
	void *extra[5];
	CUlaunchConfig cfg;
	CUlaunchAttribute few[8], *attrs = few;
	int rc, n;

	memcpy(&l, p, sizeof l);
	size = l.nparam;
	/*
	 * The driver copies the buffer. A library that interposes on the driver may
	 * load the parameters where they lie, and expect them aligned, which the
	 * frame does not promise.
	 */
	if (size <= sizeof aligned && ((uintptr_t)params & 15)) {
		memcpy(aligned, params, size);
		params = aligned;
	}
	if (!l.nattrs && !(l.flags & SL_LAUNCH_COOPERATIVE))
		return CU(cuLaunchKernel, (CUfunction)fn, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1],
			  l.block[2], l.shared, (CUstream)stream, NULL, sl_extra(extra, params, &size));

	n = l.nattrs;
	if (n + 1 > 8) {
		attrs = malloc((n + 1) * sizeof *attrs);
		if (!attrs)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	memcpy(attrs, p + sizeof l + size, n * sizeof *attrs);
	if (l.flags & SL_LAUNCH_COOPERATIVE) {
		/* cuLaunchCooperativeKernel takes no packed buffer; cuLaunchKernelEx does. */
		memset(&attrs[n], 0, sizeof *attrs);
		attrs[n].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
		attrs[n].value.cooperative = 1;
		n++;
	}
	memset(&cfg, 0, sizeof cfg);
	cfg.gridDimX = l.grid[0];
	cfg.gridDimY = l.grid[1];
	cfg.gridDimZ = l.grid[2];
	cfg.blockDimX = l.block[0];
	cfg.blockDimY = l.block[1];
	cfg.blockDimZ = l.block[2];
	cfg.sharedMemBytes = l.shared;
	cfg.hStream = (CUstream)stream;
	cfg.attrs = attrs;
	cfg.numAttrs = n;
	rc = CU(cuLaunchKernelEx, &cfg, (CUfunction)fn, NULL, sl_extra(extra, params, &size));
	if (attrs != few)
		free(attrs);
	return rc;
}

int sl_module_load(uint64_t *m, const void *image, uint32_t n, const uint32_t *opt, void **val)
{
	return CU(cuModuleLoadDataEx, (CUmodule *)m, image, n, (CUjit_option *)opt, val);
}

int sl_library_load(uint64_t *l, const void *image, uint32_t n, const uint32_t *opt, void **val)
{
	return CU(cuLibraryLoadData, (CUlibrary *)l, image, (CUjit_option *)opt, val, n, NULL, NULL, 0);
}

/* A driver without libraries loads the image as a module. */
int sl_linked_module_load(uint64_t *m, uint64_t *l, const void *image, uint32_t n, const uint32_t *opt, void **val)
{
	int rc = sl_library_load(l, image, n, opt, val);

	if (rc == CUDA_ERROR_NOT_SUPPORTED) {
		*l = 0;
		return sl_module_load(m, image, n, opt, val);
	}
	if (!rc && (rc = CU(cuLibraryGetModule, (CUmodule *)m, (CUlibrary)*l))) {
		CU(cuLibraryUnload, (CUlibrary)*l);
		*l = 0;
	}
	return rc;
}

int sl_library_kernels(uint64_t lib, uint64_t *k, uint32_t max, uint32_t *n)
{
	unsigned int have = 0;
	int rc = CU(cuLibraryGetKernelCount, &have, (CUlibrary)lib);

	*n = have;
	if (rc || !max)
		return rc;
	if (have > max)
		have = *n = max;
	return CU(cuLibraryEnumerateKernels, (CUkernel *)k, have, (CUlibrary)lib);
}

int sl_module_functions(uint64_t mod, uint64_t *f, uint32_t max, uint32_t *n)
{
	unsigned int have = 0;
	int rc = CU(cuModuleGetFunctionCount, &have, (CUmodule)mod);

	*n = have;
	if (rc || !max)
		return rc;
	if (have > max)
		have = *n = max;
	return CU(cuModuleEnumerateFunctions, (CUfunction *)f, have, (CUmodule)mod);
}

int sl_kernel_name(uint64_t k, const char **name)
{
	return CU(cuKernelGetName, name, (CUkernel)k);
}

int sl_function_name(uint64_t f, const char **name)
{
	return CU(cuFuncGetName, name, (CUfunction)f);
}

int sl_library_kernel(uint64_t *k, uint64_t lib, const char *name)
{
	return CU(cuLibraryGetKernel, (CUkernel *)k, (CUlibrary)lib, name);
}

int sl_module_function(uint64_t *f, uint64_t mod, const char *name)
{
	return CU(cuModuleGetFunction, (CUfunction *)f, (CUmodule)mod, name);
}

int sl_kernel_function(uint64_t *f, uint64_t k)
{
	return CU(cuKernelGetFunction, (CUfunction *)f, (CUkernel)k);
}

int sl_kernel_attr(int *v, uint32_t attr, uint64_t k, int dev)
{
	return CU(cuKernelGetAttribute, v, attr, (CUkernel)k, dev);
}

int sl_function_attr(int *v, uint32_t attr, uint64_t f)
{
	return CU(cuFuncGetAttribute, v, attr, (CUfunction)f);
}

int sl_kernel_param(uint64_t k, uint64_t i, uint64_t *off, uint64_t *size)
{
	size_t o = 0, n = 0;
	int rc = CU(cuKernelGetParamInfo, (CUkernel)k, i, &o, &n);

	*off = o;
	*size = n;
	return rc;
}

int sl_function_param(uint64_t f, uint64_t i, uint64_t *off, uint64_t *size)
{
	size_t o = 0, n = 0;
	int rc = CU(cuFuncGetParamInfo, (CUfunction)f, i, &o, &n);

	*off = o;
	*size = n;
	return rc;
}

/* A pipe whose reading end never blocks. */
static int print_pipe(int p[2])
{
	if (pipe2(p, O_CLOEXEC))
		return -errno;
	fcntl(p[0], F_SETFL, O_NONBLOCK);
	fcntl(p[1], F_SETPIPE_SZ, 1 << 20);
	return 0;
}

int sl_stdout_pipe(void)
{
	static char buf[256 << 10];
	int p[2], rc = print_pipe(p);

	if (rc)
		return rc;
	/* The driver prints through stdio: full buffers are written, and the rest when we flush. */
	if (dup2(p[1], 1) < 0)
		return -errno;
	close(p[1]);
	setvbuf(stdout, buf, _IOFBF, sizeof buf);
	return p[0];
}

/* Only the stdio stream of standard error is replaced: descriptor 2 stays for the last words of a crash. */
int sl_stderr_pipe(void)
{
	static char buf[64 << 10];
	int p[2], rc = print_pipe(p);
	FILE *f;

	if (rc)
		return rc;
	f = fdopen(p[1], "w");
	if (!f)
		return -errno;
	setvbuf(f, buf, _IOFBF, sizeof buf);
	stderr = f;
	return p[0];
}

void sl_print_flush(void)
{
	fflush(stdout);
	fflush(stderr);
}
