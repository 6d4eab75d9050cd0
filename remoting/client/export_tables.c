/*
 * cuGetExportTable: the tables of functions by which CUDA's own libraries find
 * each other through the driver. A table's first word is its size in bytes; every
 * slot we do not serve holds a function that says NOT_SUPPORTED, so that nothing
 * jumps to zero. Everything is static and answered in this process. What is known
 * of the tables, and from where, is in docs/protocol.md.
 */
#include "core.h"

#include <string.h>
#include <unistd.h>

#include "integrity.h"
#include "module.h"

static CUresult not_supported(void)
{
	return CUDA_ERROR_NOT_SUPPORTED;
}

static void nothing(void)
{
}

#define NS ((void *)not_supported)
#define NOP ((void *)nothing)
#define SIZE(words) ((void *)(uintptr_t)((words) * 8))

/* --- 6bd5fb6c: what the runtime itself needs --- */

static CUresult rt_load(CUmodule *out, const void *wrapper)
{
	return sl_module_load(out, wrapper, 0, NULL, NULL);
}

/* The primary context's handle; asking for it makes nothing. */
static CUresult rt_primary(CUcontext *out, CUdevice dev)
{
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	*out = sl_ctx_primary_handle(dev);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult rt_load_arrays(CUmodule *out, const void *wrapper, void *a, void *b, uint32_t n)
{
	return a || b || n ? CUDA_ERROR_NOT_SUPPORTED : sl_module_load(out, wrapper, 0, NULL, NULL);
}

static CUresult rt_load_container(const void *container, CUmodule *out, void *a, void *b, uint32_t n)
{
	return a || b || n ? CUDA_ERROR_NOT_SUPPORTED : sl_module_load(out, container, 0, NULL, NULL);
}

static CUresult rt_compilers(void)
{
	return CUDA_SUCCESS;
}

static void *const runtime[13] = {
	SIZE(13), (void *)rt_load, (void *)rt_primary, NS, NS, NS, (void *)rt_load_arrays, NOP,
	(void *)rt_load_container, NS, NULL, NS, (void *)rt_compilers,
};

/* --- a094798c: hooks for tools; the buffers say that no tool is there --- */

static void hooks_flags(void **buf, size_t *n)
{
	static uint32_t flags[1024];

	*buf = flags;
	*n = sizeof flags / sizeof flags[0];
}

static void hooks_small(void **buf, size_t *n)
{
	static uint32_t flags[14];

	*buf = flags;
	*n = sizeof flags / sizeof flags[0];
}

static void *const hooks[7] = { SIZE(7), NOP, (void *)hooks_flags, NOP, NOP, NOP, (void *)hooks_small };

/* --- 42d85a81: the current context, once more --- */

static CUresult tls_context(CUcontext *out)
{
	CUresult err;

	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = NULL;
	err = sl_cuCtxGetCurrent(out);
	return !err && !*out ? CUDA_ERROR_INVALID_CONTEXT : err;
}

static void *const tls[4] = { SIZE(3), NS, (void *)tls_context, NULL };

/* --- c693336e: context-local storage; no size word, the rest callable --- */

static void *const local[38] = {
	(void *)sl_local_put, (void *)sl_local_delete, (void *)sl_local_get,
	NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS,
	NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NULL,
};

/* --- 263e8860: context checks --- */

static CUresult check_context(CUcontext ctx, uint32_t *r1, void **r2)
{
	(void)ctx;
	(void)r2;
	if (r1)
		*r1 = 0;
	return CUDA_SUCCESS;
}

static uint32_t check_zero(void)
{
	return 0;
}

static void *const checks[15] = {
	SIZE(15), NS, (void *)check_context, (void *)check_zero, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS, NS,
};

/* --- d4082055: is this the driver it says it is --- */

static void *const integrity[3];

static CUresult integrity_check(uint32_t version, uint64_t seconds, uint8_t out[16])
{
	struct sl_integrity_device dev[SL_MAX_DEVICES];
	struct sl_integrity in = { .version = version, .seconds = seconds };
	int n = sl_initialized() ? sl_dev_count() : 0, driver = 0;

	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	sl_cuDriverGetVersion(&driver);
	in.driver = (uint32_t)driver;
	in.pid = (uint32_t)getpid();
	in.thread = (uint32_t)(uintptr_t)pthread_self();
	in.table_runtime = (uint64_t)(uintptr_t)runtime;
	in.table_check = (uint64_t)(uintptr_t)integrity;
	in.function = (uint64_t)(uintptr_t)integrity_check;
	for (int i = 0; i < n; i++) {
		memcpy(dev[i].uuid, sl_dev(i)->uuid, 16);
		dev[i].domain = (uint32_t)sl_dev_attr(i, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
		dev[i].bus = (uint32_t)sl_dev_attr(i, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
		dev[i].device = (uint32_t)sl_dev_attr(i, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
	}
	sl_integrity_answer(&in, dev, (unsigned)n, out);
	return CUDA_SUCCESS;
}

static CUresult integrity_enable(int on)
{
	(void)on;
	return CUDA_SUCCESS;
}

static void *const integrity[3] = { SIZE(3), (void *)integrity_check, (void *)integrity_enable };

/* --- 21318c60: who is this context, who is this stream --- */

static CUresult id_device(CUcontext ctx, CUdevice *out)
{
	return sl_cuCtxGetDevice_v2(out, ctx);
}

static CUresult id_context(CUcontext ctx, uint64_t *id)
{
	unsigned long long v;
	CUresult err = id ? sl_cuCtxGetId(ctx, &v) : CUDA_ERROR_INVALID_VALUE;

	if (!err)
		*id = v;
	return err;
}

/* A private stream is the public one, the two default streams kept apart. */
static CUresult id_stream(CUcontext ctx, void *stream, uint64_t *id)
{
	unsigned long long v;
	CUresult err = id ? sl_cuStreamGetId(stream, &v) : CUDA_ERROR_INVALID_VALUE;

	(void)ctx;
	if (!err)
		*id = v;
	return err;
}

static CUresult id_private(CUcontext ctx, CUstream s, void **out, int per_thread)
{
	CUresult err = CUDA_SUCCESS;

	(void)ctx;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!s)
		s = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
	if (s != CU_STREAM_LEGACY && s != CU_STREAM_PER_THREAD)
		sl_stream_id_only(s, &err);
	if (!err)
		*out = s;
	return err;
}

#define NS8 NS, NS, NS, NS, NS, NS, NS, NS
static void *const identity[93] = {
	SIZE(93), NS, NS, (void *)id_device, (void *)id_context, NS, NS, NS, /* 0-7 */
	NS8, NS8, NS8,							 /* 8-31 */
	NS, NS, NS, NS, NS, NS, NS, (void *)id_stream,			 /* 32-39 */
	NS8,								 /* 40-47 */
	NS, NS, NS, (void *)id_private, NS, NS, NS, NS,			 /* 48-55 */
	NS8, NS8, NS8, NS8, NS, NS, NS, NS, NS,				 /* 56-92 */
};

/* --- which table is which --- */

static const struct {
	uint8_t uuid[16];
	const void *table;
} tables[] = {
	{ { 0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9 }, runtime },
	{ { 0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66 }, hooks },
	{ { 0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc }, tls },
	{ { 0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93 }, local },
	{ { 0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e }, checks },
	{ { 0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2 }, integrity },
	{ { 0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2 }, identity },
};

CUresult sl_cuGetExportTable(const void **ppTable, const CUuuid *id)
{
	const uint8_t *u = (const uint8_t *)id;

	if (!ppTable)
		return CUDA_ERROR_INVALID_VALUE;
	*ppTable = NULL;
	if (!id)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < sizeof tables / sizeof tables[0]; i++) {
		if (!memcmp(tables[i].uuid, u, 16)) {
			*ppTable = tables[i].table;
			return CUDA_SUCCESS;
		}
	}
	sl_log(SL_DEBUG, "export table %02x%02x%02x%02x is not served", u[0], u[1], u[2], u[3]);
	return CUDA_ERROR_INVALID_VALUE;
}
