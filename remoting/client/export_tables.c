/*
 * cuGetExportTable: tables of functions by which CUDA's own libraries find each
 * other through the driver. A table's first word is its size in bytes; a slot that
 * is not served holds a function that returns NOT_SUPPORTED, so that no call jumps
 * to address zero. Everything is static and answered in this process. What is known
 * of a table, seen between NVIDIA's libraries and a driver, is noted beside it.
 */
#include "compilecache.h"
#include "ctx.h"
#include "ctxlocal.h"
#include "device.h"
#include "gen.h"
#include "integrity.h"
#include "load.h"
#include "log.h"
#include "profiler.h"
#include "stream.h"
#include "waits.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One function for each slot not served, so that the log can name it. */
static CUresult unserved(const char *table, int slot)
{
	sl_log(SL_DEBUG, "export table %s: slot %d is not served", table, slot);
	return CUDA_ERROR_NOT_SUPPORTED;
}

#define SLOT(table, n) static CUresult ns_##table##_##n(void) { return unserved(#table, n); }

static void nothing(void)
{
}

#define NS(table, n) ((void *)ns_##table##_##n)
#define NOP ((void *)nothing)
#define SIZE(words) ((void *)(uintptr_t)((words) * 8))

/* --- 6bd5fb6c: what the runtime itself needs --- */

static CUresult rt_load(CUmodule *out, const void *wrapper)
{
	CUresult err = sl_module_load(out, wrapper, 0, NULL, NULL);

	sl_waits_take("(the runtime loads a module)");
	return err;
}

/* The primary context's handle; asking does not make the context. */
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
	return a || b || n ? CUDA_ERROR_NOT_SUPPORTED : rt_load(out, wrapper);
}

static CUresult rt_load_container(const void *container, CUmodule *out, void *a, void *b, uint32_t n)
{
	return a || b || n ? CUDA_ERROR_NOT_SUPPORTED : rt_load(out, container);
}

static CUresult rt_compilers(void)
{
	return CUDA_SUCCESS;
}

	SLOT(runtime, 3) SLOT(runtime, 4) SLOT(runtime, 5) SLOT(runtime, 9) SLOT(runtime, 11)
static void *const runtime[13] = {
	SIZE(13), (void *)rt_load, (void *)rt_primary, NS(runtime, 3), NS(runtime, 4), NS(runtime, 5),
	(void *)rt_load_arrays, NOP, (void *)rt_load_container, NS(runtime, 9), NULL, NS(runtime, 11), (void *)rt_compilers,
};

/* --- a094798c: hooks for tools; the buffers say that there is no tool --- */

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

	SLOT(tls, 1)
static void *const tls[3] = {
	SIZE(3), NS(tls, 1), (void *)tls_context,
};

/* --- c693336e: context-local storage; no size word, the rest callable --- */

	SLOT(local, 3) SLOT(local, 4) SLOT(local, 5) SLOT(local, 6) SLOT(local, 7) SLOT(local, 8) SLOT(local, 9)
	SLOT(local, 10) SLOT(local, 11) SLOT(local, 12) SLOT(local, 13) SLOT(local, 14) SLOT(local, 15)
	SLOT(local, 16) SLOT(local, 17) SLOT(local, 18) SLOT(local, 19) SLOT(local, 20) SLOT(local, 21)
	SLOT(local, 22) SLOT(local, 23) SLOT(local, 24) SLOT(local, 25) SLOT(local, 26) SLOT(local, 27)
	SLOT(local, 28) SLOT(local, 29) SLOT(local, 30) SLOT(local, 31) SLOT(local, 32) SLOT(local, 33)
	SLOT(local, 34) SLOT(local, 35) SLOT(local, 36)
static void *const local[38] = {
	(void *)sl_local_put, (void *)sl_local_delete, (void *)sl_local_get, NS(local, 3), NS(local, 4), NS(local, 5),
	NS(local, 6), NS(local, 7), NS(local, 8), NS(local, 9), NS(local, 10), NS(local, 11), NS(local, 12), NS(local, 13),
	NS(local, 14), NS(local, 15), NS(local, 16), NS(local, 17), NS(local, 18), NS(local, 19), NS(local, 20),
	NS(local, 21), NS(local, 22), NS(local, 23), NS(local, 24), NS(local, 25), NS(local, 26), NS(local, 27),
	NS(local, 28), NS(local, 29), NS(local, 30), NS(local, 31), NS(local, 32), NS(local, 33), NS(local, 34),
	NS(local, 35), NS(local, 36), NULL,
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

	SLOT(checks, 1) SLOT(checks, 4) SLOT(checks, 5) SLOT(checks, 6) SLOT(checks, 7) SLOT(checks, 8)
	SLOT(checks, 9) SLOT(checks, 10) SLOT(checks, 11) SLOT(checks, 12) SLOT(checks, 13) SLOT(checks, 14)
static void *const checks[15] = {
	SIZE(15), NS(checks, 1), (void *)check_context, (void *)check_zero, NS(checks, 4), NS(checks, 5), NS(checks, 6),
	NS(checks, 7), NS(checks, 8), NS(checks, 9), NS(checks, 10), NS(checks, 11), NS(checks, 12), NS(checks, 13),
	NS(checks, 14),
};

/* --- d4082055: the check that the driver is genuine --- */

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

/* --- 21318c60: identity of contexts and streams --- */

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

/* The private stream handle is the public one; the two default streams are kept apart. */
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

	SLOT(identity, 1) SLOT(identity, 2) SLOT(identity, 5) SLOT(identity, 6) SLOT(identity, 7) SLOT(identity, 8)
	SLOT(identity, 9) SLOT(identity, 10) SLOT(identity, 11) SLOT(identity, 12) SLOT(identity, 13)
	SLOT(identity, 14) SLOT(identity, 15) SLOT(identity, 16) SLOT(identity, 17) SLOT(identity, 18)
	SLOT(identity, 19) SLOT(identity, 20) SLOT(identity, 21) SLOT(identity, 22) SLOT(identity, 23)
	SLOT(identity, 24) SLOT(identity, 25) SLOT(identity, 26) SLOT(identity, 27) SLOT(identity, 28)
	SLOT(identity, 29) SLOT(identity, 30) SLOT(identity, 31) SLOT(identity, 32) SLOT(identity, 33)
	SLOT(identity, 34) SLOT(identity, 35) SLOT(identity, 36) SLOT(identity, 37) SLOT(identity, 38)
	SLOT(identity, 40) SLOT(identity, 41) SLOT(identity, 42) SLOT(identity, 43) SLOT(identity, 44)
	SLOT(identity, 45) SLOT(identity, 46) SLOT(identity, 47) SLOT(identity, 48) SLOT(identity, 49)
	SLOT(identity, 50) SLOT(identity, 52) SLOT(identity, 53) SLOT(identity, 54) SLOT(identity, 55)
	SLOT(identity, 56) SLOT(identity, 57) SLOT(identity, 58) SLOT(identity, 59) SLOT(identity, 60)
	SLOT(identity, 61) SLOT(identity, 62) SLOT(identity, 63) SLOT(identity, 64) SLOT(identity, 65)
	SLOT(identity, 66) SLOT(identity, 67) SLOT(identity, 68) SLOT(identity, 69) SLOT(identity, 70)
	SLOT(identity, 71) SLOT(identity, 72) SLOT(identity, 73) SLOT(identity, 74) SLOT(identity, 75)
	SLOT(identity, 76) SLOT(identity, 77) SLOT(identity, 78) SLOT(identity, 79) SLOT(identity, 80)
	SLOT(identity, 81) SLOT(identity, 82) SLOT(identity, 83) SLOT(identity, 84) SLOT(identity, 85)
	SLOT(identity, 86) SLOT(identity, 87) SLOT(identity, 88) SLOT(identity, 89) SLOT(identity, 90)
	SLOT(identity, 91) SLOT(identity, 92)
static void *const identity[93] = {
	SIZE(93), NS(identity, 1), NS(identity, 2), (void *)id_device, (void *)id_context, NS(identity, 5), NS(identity, 6),
	NS(identity, 7), NS(identity, 8), NS(identity, 9), NS(identity, 10), NS(identity, 11), NS(identity, 12),
	NS(identity, 13), NS(identity, 14), NS(identity, 15), NS(identity, 16), NS(identity, 17), NS(identity, 18),
	NS(identity, 19), NS(identity, 20), NS(identity, 21), NS(identity, 22), NS(identity, 23), NS(identity, 24),
	NS(identity, 25), NS(identity, 26), NS(identity, 27), NS(identity, 28), NS(identity, 29), NS(identity, 30),
	NS(identity, 31), NS(identity, 32), NS(identity, 33), NS(identity, 34), NS(identity, 35), NS(identity, 36),
	NS(identity, 37), NS(identity, 38), (void *)id_stream, NS(identity, 40), NS(identity, 41), NS(identity, 42),
	NS(identity, 43), NS(identity, 44), NS(identity, 45), NS(identity, 46), NS(identity, 47), NS(identity, 48),
	NS(identity, 49), NS(identity, 50), (void *)id_private, NS(identity, 52), NS(identity, 53), NS(identity, 54),
	NS(identity, 55), NS(identity, 56), NS(identity, 57), NS(identity, 58), NS(identity, 59), NS(identity, 60),
	NS(identity, 61), NS(identity, 62), NS(identity, 63), NS(identity, 64), NS(identity, 65), NS(identity, 66),
	NS(identity, 67), NS(identity, 68), NS(identity, 69), NS(identity, 70), NS(identity, 71), NS(identity, 72),
	NS(identity, 73), NS(identity, 74), NS(identity, 75), NS(identity, 76), NS(identity, 77), NS(identity, 78),
	NS(identity, 79), NS(identity, 80), NS(identity, 81), NS(identity, 82), NS(identity, 83), NS(identity, 84),
	NS(identity, 85), NS(identity, 86), NS(identity, 87), NS(identity, 88), NS(identity, 89), NS(identity, 90),
	NS(identity, 91), NS(identity, 92),
};

/* --- 1734dc26: cuBLASLt asks slot 4, and does without if that is refused --- */

SLOT(heuristic, 1) SLOT(heuristic, 2) SLOT(heuristic, 3) SLOT(heuristic, 4) SLOT(heuristic, 5) SLOT(heuristic, 6)
SLOT(heuristic, 7) SLOT(heuristic, 8) SLOT(heuristic, 9) SLOT(heuristic, 10) SLOT(heuristic, 11) SLOT(heuristic, 12)
SLOT(heuristic, 13) SLOT(heuristic, 14) SLOT(heuristic, 15) SLOT(heuristic, 16)
static void *const heuristic[17] = {
	SIZE(17), NS(heuristic, 1), NS(heuristic, 2), NS(heuristic, 3), NS(heuristic, 4), NS(heuristic, 5),
	NS(heuristic, 6), NS(heuristic, 7), NS(heuristic, 8), NS(heuristic, 9), NS(heuristic, 10), NS(heuristic, 11),
	NS(heuristic, 12), NS(heuristic, 13), NS(heuristic, 14), NS(heuristic, 15), NS(heuristic, 16),
};

/* --- 6e163fbe: functions of modules, asked for by cuFFT --- */

/*
 * Calls f with each function of a module, in the form that cuLaunchKernel takes, and its name;
 * returns their number.
 */
static int functions_each(CUcontext ctx, CUmodule module, void (*f)(void *, CUfunction, const char *, uint64_t, uint64_t, CUmodule), void *arg)
{
	unsigned n = 0;
	CUfunction *all;

	(void)ctx;
	if (!f || sl_cuModuleGetFunctionCount(&n, module) || !n || !(all = calloc(n, sizeof *all)))
		return 0;
	if (sl_cuModuleEnumerateFunctions(all, n, module))
		n = 0;
	for (unsigned i = 0; i < n; i++) {
		const char *name = NULL;

		if (!sl_cuFuncGetName(&name, all[i]))
			f(arg, all[i], name, 0, 0, module);
	}
	free(all);
	return (int)n;
}

SLOT(functions, 1) SLOT(functions, 2) SLOT(functions, 3) SLOT(functions, 4) SLOT(functions, 5)
SLOT(functions, 6) SLOT(functions, 8) SLOT(functions, 9) SLOT(functions, 10)
SLOT(functions, 11) SLOT(functions, 12) SLOT(functions, 13) SLOT(functions, 14) SLOT(functions, 15)
SLOT(functions, 16) SLOT(functions, 17) SLOT(functions, 18) SLOT(functions, 19) SLOT(functions, 20)
SLOT(functions, 21) SLOT(functions, 22) SLOT(functions, 23) SLOT(functions, 24) SLOT(functions, 25)
SLOT(functions, 26) SLOT(functions, 27) SLOT(functions, 28) SLOT(functions, 29) SLOT(functions, 30)
SLOT(functions, 31) SLOT(functions, 32) SLOT(functions, 33) SLOT(functions, 34) SLOT(functions, 35)
SLOT(functions, 36) SLOT(functions, 37) SLOT(functions, 38) SLOT(functions, 39) SLOT(functions, 40)
SLOT(functions, 41) SLOT(functions, 42) SLOT(functions, 43) SLOT(functions, 44) SLOT(functions, 45)
SLOT(functions, 46) SLOT(functions, 47) SLOT(functions, 48) SLOT(functions, 49) SLOT(functions, 50)
SLOT(functions, 51) SLOT(functions, 52) SLOT(functions, 53) SLOT(functions, 54) SLOT(functions, 55)
SLOT(functions, 56) SLOT(functions, 57) SLOT(functions, 58) SLOT(functions, 59) SLOT(functions, 60)
SLOT(functions, 61) SLOT(functions, 62) SLOT(functions, 63) SLOT(functions, 64) SLOT(functions, 65)
SLOT(functions, 66) SLOT(functions, 67) SLOT(functions, 68) SLOT(functions, 69) SLOT(functions, 70)
SLOT(functions, 71) SLOT(functions, 72) SLOT(functions, 73) SLOT(functions, 74) SLOT(functions, 75)
SLOT(functions, 76) SLOT(functions, 77) SLOT(functions, 78) SLOT(functions, 79) SLOT(functions, 80)
SLOT(functions, 81) SLOT(functions, 82) SLOT(functions, 83) SLOT(functions, 84) SLOT(functions, 85)
SLOT(functions, 86) SLOT(functions, 87) SLOT(functions, 88) SLOT(functions, 89) SLOT(functions, 90)
SLOT(functions, 91) SLOT(functions, 92) SLOT(functions, 93) SLOT(functions, 94) SLOT(functions, 95)
SLOT(functions, 96) SLOT(functions, 97) SLOT(functions, 98)
static void *const functions[99] = {
	SIZE(99), NS(functions, 1), NS(functions, 2), NS(functions, 3), NS(functions, 4), NS(functions, 5),
	NS(functions, 6), (void *)functions_each, NS(functions, 8), NS(functions, 9), NS(functions, 10), NS(functions, 11),
	NS(functions, 12), NS(functions, 13), NS(functions, 14), NS(functions, 15), NS(functions, 16), NS(functions, 17),
	NS(functions, 18), NS(functions, 19), NS(functions, 20), NS(functions, 21), NS(functions, 22), NS(functions, 23),
	NS(functions, 24), NS(functions, 25), NS(functions, 26), NS(functions, 27), NS(functions, 28), NS(functions, 29),
	NS(functions, 30), NS(functions, 31), NS(functions, 32), NS(functions, 33), NS(functions, 34), NS(functions, 35),
	NS(functions, 36), NS(functions, 37), NS(functions, 38), NS(functions, 39), NS(functions, 40), NS(functions, 41),
	NS(functions, 42), NS(functions, 43), NS(functions, 44), NS(functions, 45), NS(functions, 46), NS(functions, 47),
	NS(functions, 48), NS(functions, 49), NS(functions, 50), NS(functions, 51), NS(functions, 52), NS(functions, 53),
	NS(functions, 54), NS(functions, 55), NS(functions, 56), NS(functions, 57), NS(functions, 58), NS(functions, 59),
	NS(functions, 60), NS(functions, 61), NS(functions, 62), NS(functions, 63), NS(functions, 64), NS(functions, 65),
	NS(functions, 66), NS(functions, 67), NS(functions, 68), NS(functions, 69), NS(functions, 70), NS(functions, 71),
	NS(functions, 72), NS(functions, 73), NS(functions, 74), NS(functions, 75), NS(functions, 76), NS(functions, 77),
	NS(functions, 78), NS(functions, 79), NS(functions, 80), NS(functions, 81), NS(functions, 82), NS(functions, 83),
	NS(functions, 84), NS(functions, 85), NS(functions, 86), NS(functions, 87), NS(functions, 88), NS(functions, 89),
	NS(functions, 90), NS(functions, 91), NS(functions, 92), NS(functions, 93), NS(functions, 94), NS(functions, 95),
	NS(functions, 96), NS(functions, 97), NS(functions, 98),
};

/* --- da9151d3: NVRTC's cache of what it has compiled (compilecache.h) --- */

SLOT(compiled, 5)
static void *const compiled[7] = {
	SIZE(7), (void *)sl_compiled_open, (void *)sl_compiled_close, (void *)sl_compiled_lookup, (void *)sl_compiled_store, NS(compiled, 5),
	(void *)sl_compiled_free,
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
	{ { 0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca }, heuristic },
	{ { 0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e }, functions },
	{ { 0xda, 0x91, 0x51, 0xd3, 0x3a, 0xe6, 0xcc, 0x41, 0xa5, 0xc0, 0x4f, 0x26, 0xd5, 0x33, 0xe3, 0x28 }, compiled },
};

/* Tables that CUPTI and the tools built on it ask for. */
static const uint8_t tools[][16] = {
	{ 0x7c, 0xb6, 0x3f, 0x9b, 0x9c, 0xa4, 0x8e, 0x42, 0xa4, 0x84, 0xbe, 0xb6, 0x6e, 0x6a, 0xed, 0x7f },
	{ 0xd7, 0xbd, 0x8a, 0xf8, 0xe7, 0xac, 0xca, 0x4a, 0xbd, 0xbc, 0xfb, 0x1f, 0x1b, 0x3f, 0xcf, 0x33 },
	{ 0xa3, 0x17, 0x46, 0xd1, 0x54, 0x75, 0xef, 0x4e, 0xae, 0xb6, 0xdf, 0xb1, 0x47, 0x6a, 0xdd, 0x6c },
	{ 0xa6, 0xb1, 0xff, 0x99, 0xec, 0xc4, 0xc9, 0x4f, 0x92, 0xf9, 0x19, 0x28, 0x66, 0x3d, 0x55, 0x85 },
	{ 0x2c, 0x8e, 0x0a, 0xd8, 0x07, 0x10, 0xab, 0x4e, 0x90, 0xdd, 0x54, 0x71, 0x9f, 0xe5, 0xf7, 0x4b },
	{ 0x12, 0x7d, 0x48, 0x31, 0xee, 0x33, 0x57, 0x44, 0x97, 0x42, 0xb8, 0x44, 0x7b, 0x7a, 0x23, 0x64 },
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
	for (unsigned i = 0; i < sizeof tools / sizeof tools[0]; i++)
		if (!memcmp(tools[i], u, 16))
			sl_profiler_refused("a profiler (CUPTI)");
	sl_log(SL_DEBUG, "export table %02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x is not served", u[0], u[1], u[2], u[3], u[4],
	       u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
	return CUDA_ERROR_INVALID_VALUE;
}
