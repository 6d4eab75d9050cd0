/*
 * Images. An image is only read for its kind (wrapper, container, cubin, PTX),
 * whether it has code for this GPU, and which twins it names; nothing in it is run.
 * A cubin or PTX made to be linked is refused, as by the driver, unless it comes in
 * a list of objects, or to the linker (link.c).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define WRAPPER_MAGIC 0x466243b1U
#define CONTAINER_MAGIC 0xba55ed50U
#define CONTAINER_MAGIC_OLD 0x1ee55a01U
#define FLAG_COMPRESSED 0xb000U		/* old, LZ4, zstd */
#define FLAG_LZ4 0x2000U
#define IMAGE_MAX (4ULL << 30)

struct span { const char *p; size_t n; };

/* twins */

static void twin_layout(struct twin *t, const struct sim_kernel *k)
{
	uint32_t at = 0;

	t->k = k;
	t->offset = xcalloc(k->nparams, sizeof(*t->offset));
	t->size = xcalloc(k->nparams, sizeof(*t->size));
	for (uint32_t i = 0; i < k->nparams; i++) {
		uint32_t size = k->at ? k->params[2 * i + 1] : k->params[i];
		uint32_t align = size & -size;

		if (align > 8)
			align = 8;
		if (!align)
			align = 1;
		at = k->at ? k->params[2 * i] : ROUND_UP(at, align);
		t->offset[i] = at;
		t->size[i] = size;
		at += size;
		if (at > t->nbytes)
			t->nbytes = at;
	}
}

static CUresult twins_load(const char *path)
{
	void (*tables)(struct sim_tables *);
	struct sim_tables t = { 0 };
	static size_t cap, gcap;
	void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!so) {
		fprintf(stderr, "simgpu: twins %s: %s; see SLUICE_SIM_KERNELS\n", path, dlerror());
		return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
	}
	*(void **)&tables = dlsym(so, "sim_tables");
	if (tables)
		tables(&t);
	if (t.abi != SIM_ABI) {
		fprintf(stderr, "simgpu: twins %s: not built with this simkernel.h\n", path);
		return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
	}
	for (const struct sim_kernel *const *k = t.kernels; k < t.kernels_end; k++) {
		sim.twins = xgrow(sim.twins, sim.ntwins + 1, &cap, sizeof(*sim.twins));
		sim.twins[sim.ntwins] = xcalloc(1, sizeof(struct twin));
		twin_layout(sim.twins[sim.ntwins++], *k);
	}
	for (const struct sim_global *const *g = t.globals; g < t.globals_end; g++) {
		sim.globals = xgrow(sim.globals, sim.nglobals + 1, &gcap, sizeof(*sim.globals));
		sim.globals[sim.nglobals++] = *g;
	}
	return CUDA_SUCCESS;
}

CUresult twins_init(void)
{
	const char *list = getenv("SLUICE_SIM_KERNELS");
	char *copy, *save = NULL;
	CUresult r = CUDA_SUCCESS;

	if (!list || !*list)
		return fault_twins();
	copy = strdup(list);
	if (!copy)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (char *p = strtok_r(copy, ":", &save); p && !r; p = strtok_r(NULL, ":", &save))
		r = twins_load(p);
	free(copy);
	return r ? r : fault_twins();
}

/* images */

static bool wordc(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
}

/* True if s contains name as a whole word. */
static bool names(const struct span *s, const char *name)
{
	size_t len = strlen(name), left = s->n;
	const char *p = s->p;

	while (left >= len) {
		const char *q = memmem(p, left, name, len);

		if (!q)
			return false;
		if ((q == s->p || !wordc(q[-1])) && (q + len == s->p + s->n || !wordc(q[len])))
			return true;
		left -= (size_t)(q + 1 - p);
		p = q + 1;
	}
	return false;
}

static bool runs(int kind, unsigned int sm)
{
	unsigned int have = (unsigned int)sim.cfg.sm;

	return sm <= have && (kind == 1 || sm / 10 == have / 10);
}

static void scan(struct image *im, const struct span *s)
{
	if (im->gather) {
		text_add(im->gather, s->p, s->n);
		return;
	}
	for (size_t i = 0; i < sim.ntwins; i++)
		if (!im->twin[i])
			im->twin[i] = names(s, sim.twins[i]->k->name);
	for (size_t i = 0; i < sim.nglobals; i++)
		if (!im->global[i])
			im->global[i] = names(s, sim.globals[i]->name);
}

/* Of an input that cannot be read: it may name any twin. */
static void gather_all(struct image *im)
{
	im->gather->unread = true;
	for (size_t i = 0; i < sim.ntwins; i++)
		text_add(im->gather, sim.twins[i]->k->name, strlen(sim.twins[i]->k->name) + 1);
	for (size_t i = 0; i < sim.nglobals; i++)
		text_add(im->gather, sim.globals[i]->name, strlen(sim.globals[i]->name) + 1);
}

static uint64_t get64(const char *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static uint32_t get32(const char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint16_t get16(const char *p) { uint16_t v; memcpy(&v, p, 2); return v; }

static size_t elf_size(const char *p)
{
	uint64_t shoff = get64(p + 40), phoff = get64(p + 32), end = 64;
	unsigned int phsize = get16(p + 54), nph = get16(p + 56), shsize = get16(p + 58), nsh = get16(p + 60);

	if (shoff > IMAGE_MAX || phoff > IMAGE_MAX || (nsh && shsize < 64))
		return 0;
	if (nph && phoff + (uint64_t)nph * phsize > end)
		end = phoff + (uint64_t)nph * phsize;
	if (nsh && shoff + (uint64_t)nsh * shsize > end)
		end = shoff + (uint64_t)nsh * shsize;
	for (unsigned int i = 0; i < nsh; i++) {
		const char *s = p + shoff + (uint64_t)i * shsize;
		uint64_t off = get64(s + 24), size = get64(s + 32);

		if (get32(s + 4) == 8)		/* takes no room in the file */
			continue;
		if (off > IMAGE_MAX || size > IMAGE_MAX)
			return 0;
		if (off + size > end)
			end = off + size;
	}
	return end;
}

/* objects: it will be linked with others. */
static CUresult elf_image(struct image *im, const char *p, bool objects)
{
	struct span s = { p, 0 };
	unsigned int sm;

	if (p[4] != 2 || get16(p + 18) != 190)
		return CUDA_ERROR_INVALID_IMAGE;
	s.n = elf_size(p);
	if (!s.n)
		return CUDA_ERROR_INVALID_IMAGE;
	/* with the ABI version of CUDA 13 the architecture moved up a byte */
	if (get16(p + 16) == ET_REL && !objects)
		return CUDA_ERROR_INVALID_IMAGE;
	sm = (unsigned char)p[8] >= 8 ? get32(p + 48) >> 8 & 0xffff : get32(p + 48) & 0xff;
	if (sm && !runs(2, sm))
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	im->sm = sm ? (int)sm : sim.cfg.sm;
	scan(im, &s);
	return CUDA_SUCCESS;
}

/* The names of what PTX declares by a directive: .texref or .surfref. */
static void scan_refs(struct image *im, const char *p, const char *directive, bool surface)
{
	while ((p = strstr(p, directive))) {
		const char *from = p += strlen(directive);

		while (*from == ' ' || *from == '\t')
			from++;
		for (p = from; wordc(*p); p++)
			;
		if (p == from)
			continue;
		im->texnames = xgrow(im->texnames, im->ntexnames + 1, &im->captexnames, sizeof(*im->texnames));
		im->texnames[im->ntexnames++] = (struct refname){ strndup(from, (size_t)(p - from)), surface };
	}
}

static CUresult ptx_image(struct image *im, const char *p, struct jit *j)
{
	struct span s = { p, strlen(p) };
	const char *t;
	unsigned int sm = 0;

	if (!strstr(p, ".version"))
		return CUDA_ERROR_INVALID_IMAGE;
	t = strstr(p, ".target");
	if (!t || sscanf(t, ".target sm_%u", &sm) != 1)
		return CUDA_ERROR_INVALID_PTX;
	if (!runs(1, sm))
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	im->sm = sim.cfg.sm;
	scan(im, &s);
	if (im->gather)
		return ptx_check(s.p, s.n, j);
	scan_refs(im, p, ".texref", false);
	scan_refs(im, p, ".surfref", true);
	return ptx_check(s.p, s.n, j);
}

/* A length of 15 is continued in further bytes, which are added until one is not 255. */
static bool lz4_length(const unsigned char **in, const unsigned char *end, size_t *n)
{
	if (*n != 15)
		return true;
	while (*in < end) {
		*n += **in;
		if (*(*in)++ != 255)
			return true;
	}
	return false;
}

/* Decodes one LZ4 block (the project's doc/lz4_Block_format.md) of n bytes; NULL if it is not valid. */
static char *lz4(const char *data, size_t size, size_t n)
{
	const unsigned char *in = (const unsigned char *)data, *end = in + size;
	char *out = n && n / 255 <= size ? malloc(n) : NULL;
	size_t at = 0;

	while (out && in < end) {
		size_t lit = *in >> 4, match = *in & 15, back;

		in++;
		if (!lz4_length(&in, end, &lit) || lit > (size_t)(end - in) || lit > n - at)
			break;
		memcpy(out + at, in, lit);
		at += lit;
		in += lit;
		if (in == end && at == n)
			return out;
		if (end - in < 2)
			break;
		back = in[0] | (size_t)in[1] << 8;
		in += 2;
		if (!lz4_length(&in, end, &match) || !back || back > at || match + 4 > n - at)
			break;
		for (match += 4; match; match--, at++)
			out[at] = out[at - back];	/* may overlap */
	}
	free(out);
	return NULL;
}

/* One file of a container. */
struct entry {
	int kind;
	unsigned int sm;
	uint64_t flags, used, plain;
	const char *options;		/* of the compiler, in the rest of the header */
	size_t noptions;
	struct span s;
};

static bool entry_next(const char *files, uint64_t size, uint64_t *at, struct entry *e, CUresult *r)
{
	const char *p = files + *at;
	uint64_t payload;
	uint32_t head;

	if (size - *at < 64)
		return false;
	head = get32(p + 4);
	payload = get64(p + 8);
	if (head < 64 || head > size - *at || payload > size - *at - head) {
		*r = CUDA_ERROR_INVALID_IMAGE;
		return false;
	}
	e->kind = get16(p);
	e->sm = get32(p + 28);
	e->flags = get64(p + 40);
	e->used = get32(p + 16);
	e->plain = get64(p + 56);
	e->options = p + 64;
	e->noptions = head - 64;
	e->s.p = p + head;
	e->s.n = payload;
	*at += head + payload;
	return true;
}

/* Reads an entry that runs here. objects: it will be linked with others. */
static CUresult entry_image(struct image *im, const struct entry *e, bool objects)
{
	struct span s = e->s;
	char *plain = NULL;
	bool relocatable;

	if (e->flags & FLAG_LZ4 && e->used <= s.n) {
		plain = lz4(s.p, e->used, e->plain);
		if (!plain)
			return CUDA_ERROR_INVALID_IMAGE;
		s = (struct span){ plain, e->plain };
	}
	if (e->kind == 1)
		relocatable = memmem(e->options, e->noptions, "--compile-only", 14);
	else
		relocatable = s.n >= 64 && !memcmp(s.p, ELFMAG, SELFMAG) && get16(s.p + 16) == ET_REL;
	if (e->flags & FLAG_COMPRESSED && !plain)
		im->all = true;
	else
		scan(im, &s);
	free(plain);
	if (im->all && im->gather)
		gather_all(im);
	return relocatable && !objects ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

/* Chooses as the driver does: the newest cubin that runs here, or else the newest PTX. */
static CUresult container_image(struct image *im, const char *p, bool objects)
{
	size_t head = get16(p + 6);
	uint64_t size = get64(p + 8), at;
	CUresult r = CUDA_SUCCESS;
	unsigned int best = 0;
	struct entry e;
	int kind = 0;

	if (head < 16 || head > 4096 || size > IMAGE_MAX)
		return CUDA_ERROR_INVALID_IMAGE;
	for (at = 0; entry_next(p + head, size, &at, &e, &r);) {
		if ((e.kind != 1 && e.kind != 2) || !runs(e.kind, e.sm))
			continue;
		if (e.kind > kind || (e.kind == kind && e.sm > best)) {
			kind = e.kind;
			best = e.sm;
		}
	}
	if (r || !kind)
		return r ? r : CUDA_ERROR_NO_BINARY_FOR_GPU;
	im->sm = kind == 2 ? (int)best : sim.cfg.sm;
	for (at = 0; !r && entry_next(p + head, size, &at, &e, &r);)
		if (e.kind == kind && e.sm == best)
			r = entry_image(im, &e, objects);
	return r;
}

static bool container(const char *p)
{
	return p && (get32(p) == CONTAINER_MAGIC || get32(p) == CONTAINER_MAGIC_OLD);
}

/*
 * What nvcc registers. Version 2 is for a separately compiled program: its linked
 * image, which may have no code for this GPU, and a list of the objects, which are
 * then linked.
 */
static CUresult wrapper_image(struct image *im, const char *p)
{
	const char *data = (const char *)(uintptr_t)get64(p + 8);
	const char *const *objects = (const char *const *)(uintptr_t)get64(p + 16);
	CUresult r;

	if (!container(data))
		return CUDA_ERROR_INVALID_IMAGE;
	r = container_image(im, data, false);
	if (r != CUDA_ERROR_NO_BINARY_FOR_GPU || get32(p + 4) != 2 || !objects || !*objects)
		return r;
	r = CUDA_SUCCESS;
	for (; *objects && !r; objects++)
		r = container(*objects) ? container_image(im, *objects, true) : CUDA_ERROR_INVALID_IMAGE;
	return r;
}

void image_unref(struct image *im)
{
	if (--im->refs)
		return;
	for (size_t i = 0; i < im->ntexnames; i++)
		free(im->texnames[i].name);
	free(im->texnames);
	free(im->twin);
	free(im->global);
	free(im);
}

static bool textual(const char *p)
{
	for (int i = 0; i < 8; i++)
		if (!((p[i] >= 32 && p[i] < 127) || p[i] == '\n' || p[i] == '\t' || p[i] == '\r'))
			return false;
	return true;
}

CUresult image_load(const void *data, struct jit *j, struct image **out)
{
	const char *p = data;
	struct image *im;
	CUresult r;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	im = xcalloc(1, sizeof(*im));
	im->refs = 1;
	im->twin = xcalloc(sim.ntwins, sizeof(*im->twin));
	im->global = xcalloc(sim.nglobals, sizeof(*im->global));
	if (get32(p) == WRAPPER_MAGIC)
		r = wrapper_image(im, p);
	else if (container(p))
		r = container_image(im, p, false);
	else if (!memcmp(p, "\177ELF", 4))
		r = elf_image(im, p, false);
	else
		r = textual(p) ? ptx_image(im, p, j) : CUDA_ERROR_INVALID_IMAGE;
	if (r) {
		image_unref(im);
		return r;
	}
	if (im->all) {	/* a compressed part may hold any of them */
		memset(im->twin, 1, sim.ntwins * sizeof(*im->twin));
		memset(im->global, 1, sim.nglobals * sizeof(*im->global));
	}
	*out = im;
	return CUDA_SUCCESS;
}

/* The fat binaries in an object or an archive, each of which begins on a multiple of 8 bytes in its file. */
static CUresult embedded(struct image *im, const char *p, size_t n)
{
	CUresult r = CUDA_SUCCESS;

	for (size_t i = 0; i + 64 <= n && !r; i += 2)
		if (get32(p + i) == CONTAINER_MAGIC && get64(p + i + 8) < n - i) {
			r = container_image(im, p + i, true);
			i += get64(p + i + 8);
		}
	return r;
}

/*
 * Reads an input of the linker, which zeroes follow. What the driver says to garbage depends on what
 * it is told that it is.
 */
CUresult image_input(const char *p, size_t n, CUjitInputType type, struct jit *j, struct text *out)
{
	struct image im = { .gather = out };

	switch (type) {
	case CU_JIT_INPUT_CUBIN:
		return memcmp(p, ELFMAG, SELFMAG) ? CUDA_ERROR_INVALID_IMAGE : elf_image(&im, p, true);
	case CU_JIT_INPUT_PTX:
		return ptx_image(&im, p, j);
	case CU_JIT_INPUT_FATBINARY:
		return container(p) ? container_image(&im, p, true) : CUDA_SUCCESS;
	case CU_JIT_INPUT_OBJECT:
		return memcmp(p, ELFMAG, SELFMAG) ? CUDA_ERROR_UNKNOWN : embedded(&im, p, n);
	case CU_JIT_INPUT_LIBRARY:
		return memcmp(p, "!<arch>\n", 8) ? CUDA_ERROR_UNKNOWN : embedded(&im, p, n);
	default:
		return CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
	}
}

/* The index of a twin that the image names, or -1. */
long image_twin(const struct image *im, const char *name)
{
	for (size_t i = 0; i < sim.ntwins; i++)
		if (im->twin[i] && !strcmp(sim.twins[i]->k->name, name))
			return (long)i;
	return -1;
}

unsigned int image_count(const struct image *im)
{
	unsigned int n = 0;

	for (size_t i = 0; i < sim.ntwins; i++)
		n += im->twin[i];
	return n;
}
