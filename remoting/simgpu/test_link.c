/* Compiling and linking: results and logs are those of the driver of CUDA 13.0 on an H100. */
#include "testing.h"

struct logs {
	char info[400], error[400];
	CUjit_option opt[6];
	void *val[6];
};

static void ask(struct logs *l, size_t room)
{
	*l = (struct logs){
		.info = "old", .error = "old",
		.opt = { CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
			 CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE, CU_JIT_WALL_TIME },
		.val = { NULL, (void *)room, NULL, (void *)room, (void *)1, NULL },
	};
	l->val[0] = l->info;
	l->val[2] = l->error;
}

static CUresult add(CUlinkState s, CUjitInputType type, const void *p, size_t n)
{
	return cuLinkAddData_v2(s, type, (void *)(uintptr_t)p, n, "input", 0, NULL, NULL);
}

static CUresult add_ptx(CUlinkState s, const char *text) { return add(s, CU_JIT_INPUT_PTX, text, strlen(text) + 1); }

static const char head[] = ".version 7.0\n.target sm_52\n";

static const char *text(const char *rest)
{
	static char all[4][2000];
	static int i;

	i = (i + 1) % 4;
	snprintf(all[i], sizeof(all[i]), "%s%s", head, rest);
	return all[i];
}

static void t_link(void)
{
	CUlinkState s;
	CUfunction f;
	struct logs l;
	CUmodule m;
	void *image = NULL, *again = NULL;
	size_t size = 0;
	float ms;

	IS(cuLinkCreate_v2(0, NULL, NULL, &s), CUDA_ERROR_NOT_INITIALIZED);
	CU(cuInit(0));
	IS(cuLinkCreate_v2(0, NULL, NULL, &s), CUDA_ERROR_INVALID_CONTEXT);
	begin();
	ask(&l, sizeof(l.info));
	CU(cuLinkCreate_v2(6, l.opt, l.val, &s));
	CHECK(!l.info[0] && !l.error[0] && !l.val[1] && !l.val[3]);
	IS(add_ptx(s, text(".extern .func (.param .b32 r) mix(.param .b32 x);\n.visible .entry _Z4nonev() { call.uni (r), mix, (x); }")), CUDA_SUCCESS);
	CHECK(l.info[0] && strlen(l.info) == (size_t)l.val[1]);
	IS(add_ptx(s, text(".visible .func (.param .b32 r) mix(.param .b32 x) { ret; }")), CUDA_SUCCESS);
	IS(add_ptx(s, text("{")), CUDA_ERROR_INVALID_PTX);
	CHECK(strstr(l.error, "line 3") && strlen(l.error) == (size_t)l.val[3]);
	IS(cuLinkComplete(s, &image, &size), CUDA_SUCCESS);
	memcpy(&ms, &l.val[5], sizeof(ms));
	CHECK(ms > 0 && size > 64);
	IS(cuLinkComplete(s, &again, &size), CUDA_ERROR_INVALID_HANDLE);
	IS(add_ptx(s, text("")), CUDA_ERROR_INVALID_VALUE);
	CU(cuModuleLoadData(&m, image));
	CU(cuLinkDestroy(s));
	IS(cuLinkDestroy(s), CUDA_ERROR_INVALID_HANDLE);
	IS(cuModuleGetFunction(&f, m, "_Z4nonev"), CUDA_SUCCESS);
	IS(cuModuleGetFunction(&f, m, "_Z5sleepi"), CUDA_ERROR_NOT_FOUND);
}

static void t_refused(void)
{
	const char garbage[64] = "this is no code at all";
	CUjit_option opt[] = { CU_JIT_ERROR_LOG_BUFFER, CU_JIT_NUM_OPTIONS };
	void *val[] = { NULL, NULL }, *image;
	char log[8];
	CUlinkState s;
	struct logs l;
	size_t size;

	begin();
	IS(cuLinkCreate_v2(0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	IS(cuLinkCreate_v2(2, NULL, NULL, &s), CUDA_ERROR_INVALID_VALUE);
	IS(cuLinkCreate_v2(1, opt + 1, val, &s), CUDA_ERROR_INVALID_VALUE);
	val[0] = log;
	IS(cuLinkCreate_v2(1, opt, val, &s), CUDA_ERROR_INVALID_VALUE);
	ask(&l, 8);
	CU(cuLinkCreate_v2(6, l.opt, l.val, &s));
	IS(add(s, CU_JIT_INPUT_PTX, NULL, 9), CUDA_ERROR_INVALID_VALUE);
	IS(add(s, CU_JIT_INPUT_PTX, garbage, 0), CUDA_ERROR_INVALID_VALUE);
	IS(add(s, 99, garbage, sizeof(garbage)), CUDA_ERROR_INVALID_VALUE);
	IS(add(s, CU_JIT_INPUT_CUBIN, garbage, sizeof(garbage)), CUDA_ERROR_INVALID_IMAGE);
	IS(add(s, CU_JIT_INPUT_FATBINARY, garbage, sizeof(garbage)), CUDA_SUCCESS);
	IS(add(s, CU_JIT_INPUT_LIBRARY, garbage, sizeof(garbage)), CUDA_ERROR_UNKNOWN);
	IS(add(s, CU_JIT_INPUT_OBJECT, garbage, sizeof(garbage)), CUDA_ERROR_UNKNOWN);
	IS(add(s, CU_JIT_INPUT_NVVM, garbage, sizeof(garbage)), CUDA_ERROR_JIT_COMPILER_NOT_FOUND);
	IS(cuLinkAddData_v2(s, CU_JIT_INPUT_PTX, (void *)head, sizeof(head), "x", 6, l.opt, l.val), CUDA_ERROR_INVALID_VALUE);
	IS(add_ptx(s, text(".extern .func away(.param .b64 p);\n.visible .entry _Z4nonev() { call.uni away, (p); }")), CUDA_SUCCESS);
	IS(cuLinkComplete(s, &image, &size), CUDA_ERROR_UNKNOWN);
	CHECK(l.val[3] == (void *)8 && strlen(l.error) == 7);
	CU(cuLinkDestroy(s));
}

static void t_load(void)
{
	unsigned int n = 1;
	struct logs l;
	CUlibrary lib;
	CUkernel k;
	CUmodule m;

	begin();
	ask(&l, sizeof(l.info));
	IS(cuModuleLoadDataEx(&m, text("\n/* { */ // {\n}"), 6, l.opt, l.val), CUDA_ERROR_INVALID_PTX);
	CHECK(strstr(l.error, "line 5") && !l.info[0] && !l.val[1]);
	ask(&l, sizeof(l.info));
	IS(cuModuleLoadDataEx(&m, text(".visible .entry _Z4nonev() { }"), 6, l.opt, l.val), CUDA_SUCCESS);
	CHECK(!l.error[0] && l.info[0]);

	/* Of a library that is told with its kernels. */
	ask(&l, sizeof(l.info));
	IS(cuLibraryLoadData(&lib, text("{"), l.opt, l.val, 6, NULL, NULL, 0), CUDA_SUCCESS);
	CHECK(strstr(l.error, "line 3"));
	IS(cuLibraryGetKernelCount(&n, lib), CUDA_SUCCESS);
	CHECK(n == 0);
	IS(cuLibraryGetKernel(&k, lib, "_Z4nonev"), CUDA_ERROR_INVALID_PTX);
	IS(cuLibraryGetModule(&m, lib), CUDA_ERROR_INVALID_PTX);
	IS(cuLibraryUnload(lib), CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ .name = "link", .fn = t_link },
		{ .name = "refused", .fn = t_refused },
		{ .name = "load", .fn = t_load },
		{ .name = NULL },
	};

	return run_tests(tests, argc, argv);
}
