/*
 * agent: allocates and frees device memory as told, one command a line on stdin, one answer a line
 * on stdout, so that a test can drive several sessions against a model. All calls are the driver's,
 * found by name at run time. Answers begin with the CUresult.
 *
 *	mem N		cuMemAlloc of N bytes		-> RESULT
 *	pitch W H	cuMemAllocPitch			-> RESULT PITCH
 *	array W H	cuArrayCreate of W x H floats	-> RESULT
 *	pool N		cuMemAllocAsync, synchronised	-> RESULT
 *	managed N	cuMemAllocManaged		-> RESULT
 *	host N		cuMemHostAlloc, freed at once	-> RESULT
 *	ipc I		cuIpcGetMemHandle of the I-th allocation	-> RESULT HANDLE in hexadecimal digits
 *	open HANDLE	cuIpcOpenMemHandle		-> RESULT
 *	forge N SEED HANDLE	opens N forgeries of a handle	-> RESULT OPENED OTHER, where OTHER counts results
 *			but CUDA_ERROR_INVALID_HANDLE, INVALID_VALUE and INVALID_CONTEXT
 *	vmm N		cuMemCreate of N bytes, to be exported	-> RESULT
 *	export I	cuMemExportToShareableHandle of the I-th allocation	-> RESULT DESCRIPTOR
 *	import PID FD	cuMemImportFromShareableHandle of a process's descriptor	-> RESULT
 *	xpool N		a pool to be exported, and N bytes of it	-> RESULT DESCRIPTOR
 *	xptr I		cuMemPoolExportPointer of the I-th allocation	-> RESULT DATA in hexadecimal digits
 *	ipool PID FD	cuMemPoolImportFromShareableHandle	-> RESULT
 *	iptr DATA	cuMemPoolImportPointer, of the pool imported last	-> RESULT
 *	get I		reads the first word of the I-th allocation	-> RESULT WORD
 *	set I N		writes it			-> RESULT
 *	poolof L T	cuMemGetMemPool of location type L and allocation type T	-> RESULT 1 if it is the device's
 *	luid		cuDeviceGetLuid			-> RESULT
 *	free I		free the I-th allocation	-> RESULT
 *	trim		give the pool's memory back	-> RESULT
 *	info		cuMemGetInfo			-> RESULT FREE TOTAL
 *	image N		cuModuleLoadData of an ELF file of N bytes that is no image	-> RESULT
 *
 * Allocations are numbered from 0 in the order of success.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct array_descriptor { size_t w, h; int format; unsigned int channels; };
struct location { int type, id; };
struct allocation_prop {
	int type, handle_types;
	struct location location;
	void *win32;
	struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};

enum kind { NONE, MEM, ARRAY, POOL, VMM, OPENED };

struct handle { unsigned char b[64]; };

struct allocation { enum kind kind; unsigned long long handle; };

static struct allocation *held;
static unsigned int nheld;
static void *cu;

static void *entry(const char *name)
{
	void *f = dlsym(cu, name);

	if (!f) {
		fprintf(stderr, "agent: %s\n", dlerror());
		exit(1);
	}
	return f;
}

#define F(name, types) ((int (*) types)entry(#name))

static void hold(int rc, enum kind kind, unsigned long long handle)
{
	if (rc)
		return;
	held = realloc(held, (nheld + 1) * sizeof(*held));
	held[nheld].kind = kind;
	held[nheld++].handle = handle;
}

/* Gives back what the pool holds beyond its allocations. */
static int trim(void)
{
	void *pool;
	int rc = F(cuDeviceGetDefaultMemPool, (void **, int))(&pool, 0);

	return rc ? rc : F(cuMemPoolTrimTo, (void *, size_t))(pool, 0);
}

/* The file's table of sections is at its end; what lies between takes no memory. */
static int image(size_t n)
{
	Elf64_Ehdr *e = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	void *module;
	int rc;

	if (e == MAP_FAILED) {
		perror("agent: mmap");
		exit(1);
	}
	memcpy(e->e_ident, ELFMAG, SELFMAG);
	e->e_ident[EI_CLASS] = ELFCLASS64;
	e->e_machine = 190; /* CUDA */
	e->e_shentsize = sizeof(Elf64_Shdr);
	e->e_shnum = 1;
	e->e_shoff = n - sizeof(Elf64_Shdr);
	rc = F(cuModuleLoadData, (void **, const void *))(&module, e);
	munmap(e, n);
	return rc;
}

static int release(unsigned int i)
{
	struct allocation a = held[i];

	held[i].kind = NONE;
	switch (a.kind) {
	case MEM:
		return F(cuMemFree_v2, (unsigned long long))(a.handle);
	case ARRAY:
		return F(cuArrayDestroy, (void *))((void *)(uintptr_t)a.handle);
	case POOL: {
		int rc = F(cuMemFreeAsync, (unsigned long long, void *))(a.handle, NULL);

		if (!rc)
			rc = F(cuStreamSynchronize, (void *))(NULL);
		return rc ? rc : trim();
	}
	case VMM:
		return F(cuMemRelease, (unsigned long long))(a.handle);
	case OPENED:
		return F(cuIpcCloseMemHandle, (unsigned long long))(a.handle);
	default:
		return 1;
	}
}

static struct handle parse_handle(const char *text)
{
	struct handle h = { { 0 } };
	unsigned int b;

	for (int i = 0; i < 64 && sscanf(text + 2 * i, "%2x", &b) == 1; i++)
		h.b[i] = (unsigned char)b;
	return h;
}

static unsigned long long next_random(unsigned long long *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

/* Opens what looks more or less like a handle: all of it made up, its beginning, its middle, some bits. The handle itself is among them. */
static void forge(unsigned long long n, unsigned long long seed, struct handle of, size_t *opened, size_t *other)
{
	unsigned long long s = seed * 0x9e3779b97f4a7c15ull | 1;

	for (unsigned long long i = 0; i < n; i++) {
		unsigned long long d = 0;
		struct handle h = of;
		int rc;

		switch (next_random(&s) % 6) {
		case 0:
			for (int k = 0; k < 64; k++)
				h.b[k] = (unsigned char)next_random(&s);
			break;
		case 1:
			for (int k = 0; k < 16; k++)
				h.b[k] = (unsigned char)next_random(&s);
			break;
		case 2: /* whose it is */
			h.b[16] = (unsigned char)next_random(&s);
			h.b[next_random(&s) % 16] ^= 1;
			break;
		case 3: /* what it is */
			h.b[20] = (unsigned char)(next_random(&s) % 7);
			h.b[next_random(&s) % 16] ^= 0x80;
			break;
		case 4:
			for (unsigned long long k = 1 + next_random(&s) % 3; k; k--)
				h.b[next_random(&s) % 64] ^= (unsigned char)(1u << next_random(&s) % 8);
			break;
		default:
			break;
		}
		rc = F(cuIpcOpenMemHandle_v2, (unsigned long long *, struct handle, unsigned int))(&d, h, 1);
		*opened += !rc;
		*other += rc && rc != 400 && rc != 1 && rc != 201;
	}
}

static int open_handle(const char *text)
{
	unsigned long long d = 0;
	struct handle h = parse_handle(text);
	int rc;

	rc = F(cuIpcOpenMemHandle_v2, (unsigned long long *, struct handle, unsigned int))(&d, h, 1);
	hold(rc, OPENED, d);
	return rc;
}

struct pool_props {
	int type, handle_types;
	struct location location;
	void *win32;
	size_t max;
	unsigned short usage;
	unsigned char reserved[54];
};

static void *imported;

/* A pool of its own, an allocation of it, and the pool's descriptor. */
static int export_pool(size_t n, int *fd)
{
	struct pool_props props = { .type = 1, .handle_types = 1, .location = { 1, 0 } };
	unsigned long long d = 0;
	void *pool;
	int rc = F(cuMemPoolCreate, (void **, const struct pool_props *))(&pool, &props);

	if (!rc)
		rc = F(cuMemAllocFromPoolAsync, (unsigned long long *, size_t, void *, void *))(&d, n, pool, NULL);
	hold(rc, POOL, d);
	return rc ? rc : F(cuMemPoolExportToShareableHandle, (void *, void *, int, unsigned long long))(fd, pool, 1, 0);
}

static int import_pool(unsigned long long pid, unsigned long long fd)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%llu/fd/%llu", pid, fd);
	return F(cuMemPoolImportFromShareableHandle, (void **, void *, int, unsigned long long))(&imported, (void *)(intptr_t)open(path, O_RDONLY | O_CLOEXEC), 1, 0);
}

static int import_pointer(const char *text)
{
	struct handle h = parse_handle(text);
	unsigned long long d = 0;
	int rc;

	rc = F(cuMemPoolImportPointer, (unsigned long long *, void *, void *))(&d, imported, &h);
	hold(rc, POOL, d);
	return rc;
}

static int import_from(unsigned long long pid, unsigned long long fd)
{
	unsigned long long h = 0;
	char path[64];
	int own, rc;

	snprintf(path, sizeof(path), "/proc/%llu/fd/%llu", pid, fd);
	own = open(path, O_RDONLY | O_CLOEXEC);
	rc = F(cuMemImportFromShareableHandle, (unsigned long long *, void *, int))(&h, (void *)(intptr_t)own, 1);
	hold(rc, VMM, h);
	return rc;
}

int main(void)
{
	char line[256];
	void *ctx, *arr;
	int rc;

	cu = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cu) {
		fprintf(stderr, "agent: %s\n", dlerror());
		return 1;
	}
	rc = F(cuInit, (unsigned int))(0);
	if (!rc)
		rc = F(cuDevicePrimaryCtxRetain, (void **, int))(&ctx, 0);
	if (!rc)
		rc = F(cuCtxSetCurrent, (void *))(ctx);
	printf("%d\n", rc);
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		char what[16] = "";
		unsigned long long a = 0, b = 0, d = 0;
		size_t x = 0, y = 0;

		sscanf(line, "%15s %llu %llu", what, &a, &b);
		if (!strcmp(what, "mem")) {
			rc = F(cuMemAlloc_v2, (unsigned long long *, size_t))(&d, a);
			hold(rc, MEM, d);
		} else if (!strcmp(what, "pitch")) {
			rc = F(cuMemAllocPitch_v2, (unsigned long long *, size_t *, size_t, size_t, unsigned int))(&d, &x, a, b, 4);
			hold(rc, MEM, d);
		} else if (!strcmp(what, "array")) {
			struct array_descriptor desc = { a, b, 0x20, 1 };

			rc = F(cuArrayCreate_v2, (void **, const struct array_descriptor *))(&arr, &desc);
			hold(rc, ARRAY, (uintptr_t)arr);
		} else if (!strcmp(what, "pool")) {
			rc = F(cuMemAllocAsync, (unsigned long long *, size_t, void *))(&d, a, NULL);
			if (!rc)
				rc = F(cuStreamSynchronize, (void *))(NULL);
			hold(rc, POOL, d);
		} else if (!strcmp(what, "managed")) {
			rc = F(cuMemAllocManaged, (unsigned long long *, size_t, unsigned int))(&d, a, 1);
			hold(rc, MEM, d);
		} else if (!strcmp(what, "host")) {
			void *p;

			rc = F(cuMemHostAlloc, (void **, size_t, unsigned int))(&p, a, 2);
			if (!rc)
				rc = F(cuMemFreeHost, (void *))(p);
		} else if (!strcmp(what, "xpool")) {
			int fd = -1;

			rc = export_pool(a, &fd);
			x = (size_t)fd;
		} else if (!strcmp(what, "ipool")) {
			rc = import_pool(a, b);
		} else if (!strcmp(what, "iptr")) {
			rc = import_pointer(line + strlen("iptr "));
		} else if (!strcmp(what, "ipc") || !strcmp(what, "xptr")) {
			struct handle h = { { 0 } };

			if (!strcmp(what, "xptr"))
				rc = a < nheld ? F(cuMemPoolExportPointer, (void *, unsigned long long))(&h, held[a].handle) : 1;
			else
				rc = a < nheld ? F(cuIpcGetMemHandle, (void *, unsigned long long))(&h, held[a].handle) : 1;
			printf("%d ", rc);
			for (int i = 0; i < 64; i++)
				printf("%02x", h.b[i]);
			printf("\n");
			fflush(stdout);
			continue;
		} else if (!strcmp(what, "open")) {
			rc = open_handle(line + strlen("open "));
		} else if (!strcmp(what, "forge")) {
			char text[129] = "";

			sscanf(line, "%*s %*s %*s %128s", text);
			forge(a, b, parse_handle(text), &x, &y);
			rc = 0;
		} else if (!strcmp(what, "export")) {
			int fd = -1;

			rc = a < nheld ? F(cuMemExportToShareableHandle, (void *, unsigned long long, int, unsigned long long))(&fd, held[a].handle, 1, 0) : 1;
			x = (size_t)fd;
		} else if (!strcmp(what, "import")) {
			rc = import_from(a, b);
		} else if (!strcmp(what, "get")) {
			unsigned int word = 0;

			rc = a < nheld ? F(cuMemcpyDtoH_v2, (void *, unsigned long long, size_t))(&word, held[a].handle, sizeof(word)) : 1;
			x = word;
		} else if (!strcmp(what, "set")) {
			unsigned int word = (unsigned int)b;

			rc = a < nheld ? F(cuMemcpyHtoD_v2, (unsigned long long, const void *, size_t))(held[a].handle, &word, sizeof(word)) : 1;
		} else if (!strcmp(what, "poolof")) {
			struct location at = { (int)a, 0 };
			void *pool = NULL, *own = NULL;

			rc = F(cuMemGetMemPool, (void **, struct location *, int))(&pool, &at, (int)b);
			x = !rc && !F(cuDeviceGetMemPool, (void **, int))(&own, 0) && pool == own;
		} else if (!strcmp(what, "luid")) {
			char luid[8];
			unsigned int mask;

			rc = F(cuDeviceGetLuid, (char *, unsigned int *, int))(luid, &mask, 0);
		} else if (!strcmp(what, "vmm")) {
			struct allocation_prop prop = { .type = 1, .handle_types = 1, .location = { 1, 0 } };

			rc = F(cuMemCreate, (unsigned long long *, size_t, const struct allocation_prop *, unsigned long long))(&d, a, &prop, 0);
			hold(rc, VMM, d);
		} else if (!strcmp(what, "free")) {
			rc = a < nheld ? release(a) : 1;
			/* frees are not answered; this is, and comes after them */
			if (!rc)
				rc = F(cuMemGetInfo_v2, (size_t *, size_t *))(&x, &y);
		} else if (!strcmp(what, "trim")) {
			rc = trim();
		} else if (!strcmp(what, "image")) {
			rc = image(a);
		} else if (!strcmp(what, "info")) {
			rc = F(cuMemGetInfo_v2, (size_t *, size_t *))(&x, &y);
		} else {
			fprintf(stderr, "agent: unknown command %s", line);
			return 1;
		}
		printf("%d %zu %zu\n", rc, x, y);
		fflush(stdout);
	}
	return 0;
}
