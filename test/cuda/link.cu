/*
 * Code that a program brings as text: compiled and linked by the driver, as a linked image, a module or a
 * library. What the compiler and the linker say is in the program's own buffers. Without arguments it links; with a way of loading and
 * "print", "assert" or "trap" it runs a kernel that does so.
 */
#include "check.h"

#include <cuda.h>
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#define HEAD ".version 6.0\n.target sm_70\n.address_size 64\n"

/* Kernels that call a function of another text and count in a variable of it. */
static const char kernels[] = HEAD
	".extern .func (.param .b32 r) link_mix(.param .b32 x);\n"
	".extern .global .u32 link_count;\n"
	".visible .entry link_fill(.param .u64 v)\n{\n"
	".reg .u64 %v, %o;\n.reg .u32 %t, %b, %n, %i, %x;\n"
	"ld.param.u64 %v, [v];\n"
	"mov.u32 %t, %tid.x;\nmov.u32 %b, %ctaid.x;\nmov.u32 %n, %ntid.x;\nmad.lo.u32 %i, %b, %n, %t;\n"
	"{\n.param .b32 a;\n.param .b32 r;\nst.param.b32 [a], %i;\ncall.uni (r), link_mix, (a);\nld.param.b32 %x, [r];\n}\n"
	"mul.wide.u32 %o, %i, 4;\nadd.u64 %v, %v, %o;\nst.global.u32 [%v], %x;\n"
	"atom.global.add.u32 %x, [link_count], 1;\n"
	"ret;\n}\n";
static const char functions[] = HEAD
	".visible .global .u32 link_count;\n"
	".visible .func (.param .b32 r) link_mix(.param .b32 x)\n{\n"
	".reg .u32 %x;\nld.param.b32 %x, [x];\nmad.lo.u32 %x, %x, 3, 7;\nst.param.b32 [r], %x;\nret;\n}\n";
/* The closing brace is missing. */
static const char wrong[] = HEAD ".visible .entry link_fill(.param .u64 v)\n{\nret;\n";

/* What kernels print and assert. The text says "link: printed by a kernel". */
static const char speaks[] = HEAD
	".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"
	".extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 s);\n"
	".global .align 1 .b8 link_text[29] = {108, 105, 110, 107, 58, 32, 112, 114, 105, 110, 116, 101, 100, 32, 98, 121, 32, 97, 32,"
	" 107, 101, 114, 110, 101, 108, 10, 0, 0, 0};\n"
	".global .align 1 .b8 link_file[8] = {108, 105, 110, 107, 46, 99, 117, 0};\n"
	".visible .entry link_print()\n{\n.reg .u64 %f, %a;\nmov.u64 %f, link_text;\ncvta.global.u64 %f, %f;\nmov.u64 %a, 0;\n"
	"{\n.param .b64 f;\n.param .b64 a;\n.param .b32 r;\nst.param.b64 [f], %f;\nst.param.b64 [a], %a;\ncall.uni (r), vprintf, (f, a);\n}\nret;\n}\n"
	".visible .entry link_assert()\n{\n.reg .u64 %f, %n;\n.reg .u32 %l;\nmov.u64 %f, link_file;\ncvta.global.u64 %f, %f;\nmov.u32 %l, 42;\nmov.u64 %n, 1;\n"
	"{\n.param .b64 m;\n.param .b64 f;\n.param .b32 l;\n.param .b64 n;\n.param .b64 s;\nst.param.b64 [m], %f;\nst.param.b64 [f], %f;\n"
	"st.param.b32 [l], %l;\nst.param.b64 [n], %f;\nst.param.b64 [s], %n;\ncall.uni __assertfail, (m, f, l, n, s);\n}\nret;\n}\n"
	".visible .entry link_trap()\n{\ntrap;\n}\n";

static void *driver;

#define CU(f) ((decltype(&f))find(#f))
/* Names that cuda.h defines as others. */
#define STRING(s) #s
#define NEW(f) ((decltype(&f))find(STRING(f)))

static void *find(const char *name)
{
	void *f = dlsym(driver, name);

	REQUIRE(f, "%s", name);
	return f;
}

#define OK(call) REQUIRE((call) == CUDA_SUCCESS, "an error of the driver")

/* The options that give a program its logs. */
struct logs {
	char info[4096], error[4096];
	CUjit_option opt[6];
	void *val[6];
};

static void ask(struct logs *l, size_t room)
{
	static const CUjit_option opt[6] = { CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
					     CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE, CU_JIT_WALL_TIME };

	memset(l, '#', sizeof *l);
	memcpy(l->opt, opt, sizeof opt);
	l->val[0] = l->info;
	l->val[1] = l->val[3] = (void *)room;
	l->val[2] = l->error;
	l->val[4] = (void *)1;
	l->val[5] = NULL;
}

/* A log's size is its length, or all of its buffer. */
static void sized(const struct logs *l, size_t room)
{
	size_t info = (size_t)l->val[1], error = (size_t)l->val[3];

	REQUIRE(info == strlen(l->info) || (info == room && strlen(l->info) == room - 1), "%zu bytes in a log of %zu", strlen(l->info), info);
	REQUIRE(error == strlen(l->error) || (error == room && strlen(l->error) == room - 1), "%zu bytes in a log of %zu", strlen(l->error), error);
}

static void said(const struct logs *l, const char *word)
{
	float ms;

	sized(l, sizeof l->error);
	REQUIRE(strstr(l->error, word), "'%s' is not in '%s'", word, l->error);
	memcpy(&ms, &l->val[5], sizeof ms);
	REQUIRE(ms > 0, "the time is %g", ms);
}

static CUlinkState linker(struct logs *l)
{
	CUlinkState s;

	if (l)
		ask(l, sizeof l->info);
	OK(NEW(cuLinkCreate)(l ? 6 : 0, l ? l->opt : NULL, l ? l->val : NULL, &s));
	if (l)
		REQUIRE(!l->info[0] && !l->error[0] && !l->val[1] && !l->val[3], "the logs are not empty");
	return s;
}

static CUresult add(CUlinkState s, const char *text, const char *name)
{
	return NEW(cuLinkAddData)(s, CU_JIT_INPUT_PTX, (void *)text, strlen(text) + 1, name, 0, NULL, NULL);
}

static int sum_of(CUmodule m, int *count)
{
	CUfunction f;
	CUdeviceptr p;
	size_t bytes;
	int *v, h[256], sum = 0;
	void *args[] = { &v };

	CHECK(cudaMalloc(&v, sizeof h));
	OK(CU(cuModuleGetFunction)(&f, m, "link_fill"));
	OK(CU(cuLaunchKernel)(f, 4, 1, 1, 64, 1, 1, 0, NULL, args, NULL));
	CHECK(cudaMemcpy(h, v, sizeof h, cudaMemcpyDeviceToHost));
	CHECK(cudaFree(v));
	for (int i = 0; i < 256; i++)
		sum += h[i];
	OK(NEW(cuModuleGetGlobal)(&p, &bytes, m, "link_count"));
	REQUIRE(bytes == sizeof *count, "%zu bytes", bytes);
	CHECK(cudaMemcpy(count, (void *)p, sizeof *count, cudaMemcpyDeviceToHost));
	return sum;
}

static void *linked(CUlinkState s)
{
	void *image;
	size_t size;

	OK(CU(cuLinkComplete)(s, &image, &size));
	REQUIRE(size > 64 && !memcmp(image, "\177ELF", 4), "a linked image of %zu bytes", size);
	return image;
}

/* From a file, and in the other order. */
static void from_file(void)
{
	char name[] = "/tmp/linkXXXXXX";
	int fd = mkstemp(name), count;
	CUlinkState s = linker(NULL);
	CUmodule m;

	REQUIRE(fd >= 0 && write(fd, functions, sizeof functions) == (ssize_t)sizeof functions, "%s", name);
	close(fd);
	OK(NEW(cuLinkAddFile)(s, CU_JIT_INPUT_PTX, name, 0, NULL, NULL));
	unlink(name);
	REQUIRE(NEW(cuLinkAddFile)(s, CU_JIT_INPUT_PTX, name, 0, NULL, NULL) == CUDA_ERROR_FILE_NOT_FOUND, "a file that is gone");
	OK(add(s, kernels, "kernels"));
	OK(CU(cuModuleLoadData)(&m, linked(s)));
	OK(CU(cuLinkDestroy)(s));
	REQUIRE(sum_of(m, &count) == 99712 && count == 256, "%d", count);
	OK(CU(cuModuleUnload)(m));
}

/* Every way in which a compiler's error is told. */
static void errors(void)
{
	CUlinkState s;
	CUmodule m;
	void *image;
	size_t size;
	struct logs l;

	s = linker(&l);
	REQUIRE(add(s, wrong, "wrong") == CUDA_ERROR_INVALID_PTX, "a text that is wrong");
	said(&l, "line");
	OK(CU(cuLinkDestroy)(s));

	s = linker(&l);
	OK(add(s, kernels, "kernels"));
	REQUIRE(CU(cuLinkComplete)(s, &image, &size) == CUDA_ERROR_UNKNOWN, "a function that is missing");
	said(&l, "link_mix");
	OK(CU(cuLinkDestroy)(s));

	s = linker(NULL);
	REQUIRE(NEW(cuLinkAddData)(s, CU_JIT_INPUT_PTX, NULL, 9, "none", 0, NULL, NULL) == CUDA_ERROR_INVALID_VALUE, "no data");
	REQUIRE(NEW(cuLinkAddData)(s, CU_JIT_INPUT_CUBIN, (void *)wrong, sizeof wrong, "wrong", 0, NULL, NULL) == CUDA_ERROR_INVALID_IMAGE, "no cubin");
	OK(CU(cuLinkDestroy)(s));

	ask(&l, sizeof l.info);
	REQUIRE(CU(cuModuleLoadDataEx)(&m, wrong, 6, l.opt, l.val) == CUDA_ERROR_INVALID_PTX, "a text that is wrong");
	said(&l, "line");
#if CUDA_VERSION >= 12000
	CUlibrary lib;
	CUkernel k;

	ask(&l, sizeof l.info); /* a library's kernels have the error */
	OK(CU(cuLibraryLoadData)(&lib, wrong, l.opt, l.val, 6, NULL, NULL, 0));
	said(&l, "line");
	for (int i = 0; i < 2; i++)
		REQUIRE(CU(cuLibraryGetKernel)(&k, lib, "link_fill") == CUDA_ERROR_INVALID_PTX, "a kernel of a text that is wrong");
	OK(CU(cuLibraryUnload)(lib));
#endif
	ask(&l, 8);
	REQUIRE(CU(cuModuleLoadDataEx)(&m, wrong, 6, l.opt, l.val) == CUDA_ERROR_INVALID_PTX, "a text that is wrong");
	sized(&l, 8);
}

static int run_link(void)
{
	CUlinkState s;
	CUmodule m, n;
	int sum, count, again;
	struct logs l;
	void *image;

	s = linker(&l);
	OK(add(s, kernels, "kernels"));
	OK(add(s, functions, NULL));
	image = linked(s);
	said(&l, "");
	REQUIRE(l.info[0], "nothing is told");
	OK(CU(cuModuleLoadData)(&m, image));
	OK(CU(cuModuleLoadData)(&n, image));
	OK(CU(cuLinkDestroy)(s));
	sum = sum_of(m, &count);
	sum_of(n, &again);
	REQUIRE(count == 256 && again == 256, "modules share a variable: %d, %d", count, again);
	OK(CU(cuModuleUnload)(m));
	OK(CU(cuModuleUnload)(n));
	from_file();
	errors();
	printf("link: sum %d, count %d\n", sum, count);
	return pass();
}

/* A kernel of the text that speaks, loaded in one of the ways. */
static CUfunction speaker(const char *way, const char *name)
{
	CUlinkState s;
	CUfunction f;
	CUmodule m;

	if (!strcmp(way, "linked")) {
		s = linker(NULL);
		OK(add(s, speaks, "speaks"));
		OK(CU(cuModuleLoadData)(&m, linked(s)));
		OK(CU(cuLinkDestroy)(s));
#if CUDA_VERSION >= 12000
	} else if (!strcmp(way, "library")) {
		CUlibrary lib;
		CUkernel k;

		OK(CU(cuLibraryLoadData)(&lib, speaks, NULL, NULL, 0, NULL, NULL, 0));
		OK(CU(cuLibraryGetKernel)(&k, lib, name));
		return (CUfunction)k;
#endif
	} else {
		OK(CU(cuModuleLoadData)(&m, speaks));
	}
	OK(CU(cuModuleGetFunction)(&f, m, name));
	return f;
}

static int run_speaker(const char *way, const char *what)
{
	bool asserts = !strcmp(what, "assert"), prints = !strcmp(what, "print");
	const char *name = asserts ? "link_assert" : prints ? "link_print" : "link_trap";
	FILE *f = tmpfile();
	int fd = asserts ? 2 : 1, kept = dup(fd);
	char line[512] = "";
	cudaError_t err;

	OK(CU(cuLaunchKernel)(speaker(way, name), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	REQUIRE(f && dup2(fileno(f), fd) == fd, "a file for descriptor %d", fd);
	err = cudaDeviceSynchronize();
	fflush(NULL);
	dup2(kept, fd);
	rewind(f);
	if (!fgets(line, sizeof line, f) && (asserts || prints))
		line[0] = 0;
	printf("link: %s, %s, %s\n", what, cudaGetErrorName(err), asserts ? (strstr(line, "link.cu:42") ? "named" : "not named") : prints && !strcmp(line, "link: printed by a kernel\n") ? "said" : "nothing said");
	return pass();
}

int main(int argc, char **argv)
{
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	REQUIRE(driver, "libcuda.so.1");
	CHECK(cudaFree(0));
	return argc > 2 ? run_speaker(argv[1], argv[2]) : run_link();
}
