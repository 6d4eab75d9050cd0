/*
 * The library through its door, without a worker: what can be asked before cuInit,
 * the rules of cuGetProcAddress, the export tables, and errors that come in order.
 */
#include <dlfcn.h>

#include "cuabi.h"
#include "test.h"

static void *lib;
static CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
static CUresult (*table)(const void **, const CUuuid *);

static void *sym(const char *name)
{
	void *p = dlsym(lib, name);

	CHECK(p, "%s is not exported", name);
	return p;
}

/* The name at a version must be the export of that symbol. */
static void is(const char *name, int version, cuuint64_t flags, const char *symbol)
{
	CUdriverProcAddressQueryResult status = 9;
	void *p;

	CHECK(get(name, &p, version, flags, &status) == CUDA_SUCCESS && status == CU_GET_PROC_ADDRESS_SUCCESS, "%s@%d", name, version);
	CHECK(p == sym(symbol), "%s@%d flags %llu is not %s", name, version, (unsigned long long)flags, symbol);
}

static void names(void)
{
	CUdriverProcAddressQueryResult status = 9;
	void *p = &status;

	is("cuMemAlloc", 3020, 0, "cuMemAlloc_v2");
	is("cuMemAlloc", 13000, 1, "cuMemAlloc_v2");
	is("cuMemAlloc", 2000, 0, "cuMemAlloc");
	is("cuCtxCreate", 12050, 0, "cuCtxCreate_v4");
	is("cuCtxCreate", 12040, 0, "cuCtxCreate_v3");
	is("cuCtxCreate", 3020, 0, "cuCtxCreate_v2");
	is("cuCtxGetDevice", 12090, 0, "cuCtxGetDevice");
	is("cuCtxGetDevice", 13000, 0, "cuCtxGetDevice_v2");
	is("cuGetProcAddress", 11030, 0, "cuGetProcAddress");
	is("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2");
	is("cuStreamGetCaptureInfo", 12030, 2, "cuStreamGetCaptureInfo_v3_ptsz");
	is("cuStreamGetCaptureInfo", 11040, 2, "cuStreamGetCaptureInfo_v2_ptsz");
	is("cuMemcpyHtoD", 13000, 2, "cuMemcpyHtoD_v2_ptds");
	is("cuMemcpyHtoD", 13000, 1, "cuMemcpyHtoD_v2");
	is("cuLaunchKernel", 13000, 2, "cuLaunchKernel_ptsz");
	is("cuMemFree", 13000, 2, "cuMemFree_v2");
	is("cuGetExportTable", 13000, 0, "cuGetExportTable");

	CHECK(get("cuNoSuchThing", &p, 13000, 0, &status) == CUDA_ERROR_NOT_FOUND && !p && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
	CHECK(get("cuMemAlloc_v2", &p, 13000, 0, &status) == CUDA_ERROR_NOT_FOUND, "a suffixed name is no name");
	p = &status;
	CHECK(get("cuLibraryLoadData", &p, 11080, 0, &status) == CUDA_ERROR_NOT_FOUND && !p && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
	CHECK(get("", NULL, 13000, 0, NULL) == CUDA_ERROR_NOT_FOUND);
	CHECK(get("cuInit", NULL, 13000, 0, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(get(NULL, &p, 13000, 0, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(get("cuInit", &p, 13000, 3, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(get("cuInit", &p, 13000, 0, NULL) == CUDA_SUCCESS && p == sym("cuInit"));
}

static const void *ask(const char *uuid)
{
	const void *t = &lib;
	CUuuid id;

	for (int i = 0; i < 16; i++) {
		unsigned v;

		CHECK(sscanf(uuid + 2 * i, "%2x", &v) == 1);
		id.bytes[i] = (char)v;
	}
	if (!table(&t, &id))
		return t;
	CHECK(!t);
	return NULL;
}

static void tables(void)
{
	static const struct { const char *uuid; uintptr_t words; } sized[] = {
		{ "6bd5fb6c5bf4e74a8987d93912fd9df9", 13 }, { "a094798c2e742e7493f20800200c0a66", 7 },
		{ "42d85a8123f6cb478298f6e78a3aecdc", 3 },  { "263e88607cd2614392f6bbd5006dfa7e", 15 },
		{ "d4082055bde6704b8d34ba123c66e1f2", 3 },  { "21318c60971432488ca641ff7324c8f2", 93 },
	};
	void *const *t;
	void *buf = NULL;
	size_t n = 0;
	uint8_t out[16];

	for (unsigned i = 0; i < sizeof sized / sizeof sized[0]; i++) {
		t = ask(sized[i].uuid);
		CHECK(t && (uintptr_t)t[0] == sized[i].words * 8, "%s", sized[i].uuid);
		/* slot 10 of the runtime's own table is empty in the driver too */
		for (uintptr_t w = 1; w < sized[i].words; w++)
			CHECK(t[w] || (!i && w == 10), "%s slot %zu is empty", sized[i].uuid, (size_t)w);
	}
	t = ask("c693336e1121df11a8c368f355d89593");
	CHECK(t && t[0] && t[1] && t[2]);
	CHECK(!ask("f8cff95121468b4eb9e2fb469e7c0dd9") && !ask("00000000000000000000000000000000"));

	t = ask("a094798c2e742e7493f20800200c0a66");
	((void (*)(void **, size_t *))t[2])(&buf, &n);
	CHECK(buf && n > 0x1df && !*(uint32_t *)buf);
	((void (*)(void **, size_t *))t[6])(&buf, &n);
	CHECK(buf && n >= 14 && !*(uint32_t *)buf);
	t = ask("d4082055bde6704b8d34ba123c66e1f2");
	CHECK(!((CUresult(*)(uint32_t, uint64_t, uint8_t *))t[1])(13000, 1, out));
	CHECK(!strcmp(hex(out, 16), "5c67cb031c184133e8d14c1faa83d38e"));
	t = ask("6bd5fb6c5bf4e74a8987d93912fd9df9");
	CHECK(!((CUresult(*)(void))t[12])() && ((CUresult(*)(void))t[3])() == CUDA_ERROR_NOT_SUPPORTED);
}

static void before_init(void)
{
	CUresult (*version)(int *) = sym("cuDriverGetVersion");
	CUresult (*error_name)(CUresult, const char **) = sym("cuGetErrorName");
	CUresult (*error_string)(CUresult, const char **) = sym("cuGetErrorString");
	CUresult (*count)(int *) = sym("cuDeviceGetCount");
	CUresult (*init)(unsigned) = sym("cuInit");
	const char *s;
	int v;

	CHECK(!version(&v) && v == 13000 && version(NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(!error_name(700, &s) && !strcmp(s, "CUDA_ERROR_ILLEGAL_ADDRESS") && !error_string(700, &s) && *s);
	CHECK(!error_name(0, &s) && !strcmp(s, "CUDA_SUCCESS") && !error_name(999, &s) && !strcmp(s, "CUDA_ERROR_UNKNOWN"));
	CHECK(error_name(12345, &s) == CUDA_ERROR_INVALID_VALUE && !s);
	CHECK(count(&v) == CUDA_ERROR_NOT_INITIALIZED);
	/* nobody said where a worker is: a machine without a device */
	CHECK(init(1) == CUDA_ERROR_INVALID_VALUE);
	CHECK(init(0) == CUDA_ERROR_NO_DEVICE && init(0) == CUDA_ERROR_NO_DEVICE);
	CHECK(count(&v) != CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
	unsetenv("SLUICE_WORKER");
	CHECK(argc == 2);
	lib = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	CHECK(lib, "%s", dlerror());
	get = sym("cuGetProcAddress_v2");
	table = sym("cuGetExportTable");
	names();
	tables();
	before_init();
	printf("test_entry: ok\n");
	return 0;
}
