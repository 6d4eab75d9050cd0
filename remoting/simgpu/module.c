/*
 * Images, modules, libraries, kernels and functions. An image is only read for
 * what it is (wrapper, container, cubin, PTX), whether it has code for this
 * GPU, and which twins it names; nothing in it is run.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define WRAPPER_MAGIC 0x466243b1U
#define CONTAINER_MAGIC 0xba55ed50U
#define CONTAINER_MAGIC_OLD 0x1ee55a01U
#define FLAG_COMPRESSED 0xb000U		/* old, LZ4, zstd */
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

/* True when name stands in s as a whole word. */
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
	for (size_t i = 0; i < sim.ntwins; i++)
		if (!im->twin[i])
			im->twin[i] = names(s, sim.twins[i]->k->name);
	for (size_t i = 0; i < sim.nglobals; i++)
		if (!im->global[i])
			im->global[i] = names(s, sim.globals[i]->name);
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

static CUresult elf_image(struct image *im, const char *p)
{
	struct span s = { p, 0 };
	unsigned int sm;

	if (p[4] != 2 || get16(p + 18) != 190)
		return CUDA_ERROR_INVALID_IMAGE;
	s.n = elf_size(p);
	if (!s.n)
		return CUDA_ERROR_INVALID_IMAGE;
	/* the architecture moved up a byte with the ABI version CUDA 13 brought */
	sm = (unsigned char)p[8] >= 8 ? get32(p + 48) >> 8 & 0xffff : get32(p + 48) & 0xff;
	if (sm && !runs(2, sm))
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	im->sm = sm ? (int)sm : sim.cfg.sm;
	scan(im, &s);
	return CUDA_SUCCESS;
}

static CUresult ptx_image(struct image *im, const char *p)
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
	return CUDA_SUCCESS;
}

/* One file of a container. */
struct entry {
	int kind;
	unsigned int sm;
	bool compressed;
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
	e->compressed = (get64(p + 40) & FLAG_COMPRESSED) != 0;
	e->s.p = p + head;
	e->s.n = payload;
	*at += head + payload;
	return true;
}

/* As the driver chooses: the newest cubin that runs here, or else the newest PTX. */
static CUresult container_image(struct image *im, const char *p)
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
	for (at = 0; entry_next(p + head, size, &at, &e, &r);) {
		if (e.kind != kind || e.sm != best)
			continue;
		if (e.compressed)
			im->all = true;
		else
			scan(im, &e.s);
	}
	return r;
}

static void image_unref(struct image *im)
{
	if (--im->refs)
		return;
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

static CUresult image_load(const void *data, struct image **out)
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
	if (get32(p) == WRAPPER_MAGIC) {
		p = (const char *)(uintptr_t)get64(p + 8);
		if (!p || (get32(p) != CONTAINER_MAGIC && get32(p) != CONTAINER_MAGIC_OLD)) {
			image_unref(im);
			return CUDA_ERROR_INVALID_IMAGE;
		}
	}
	if (get32(p) == CONTAINER_MAGIC || get32(p) == CONTAINER_MAGIC_OLD)
		r = container_image(im, p);
	else if (!memcmp(p, "\177ELF", 4))
		r = elf_image(im, p);
	else
		r = textual(p) ? ptx_image(im, p) : CUDA_ERROR_INVALID_IMAGE;
	if (r) {
		image_unref(im);
		return r;
	}
	if (im->all) {	/* what is compressed may hold any of them */
		memset(im->twin, 1, sim.ntwins * sizeof(*im->twin));
		memset(im->global, 1, sim.nglobals * sizeof(*im->global));
	}
	*out = im;
	return CUDA_SUCCESS;
}

/* The index of a twin the image holds, or -1. */
static long image_twin(const struct image *im, const char *name)
{
	for (size_t i = 0; i < sim.ntwins; i++)
		if (im->twin[i] && !strcmp(sim.twins[i]->k->name, name))
			return (long)i;
	return -1;
}

static unsigned int image_count(const struct image *im)
{
	unsigned int n = 0;

	for (size_t i = 0; i < sim.ntwins; i++)
		n += im->twin[i];
	return n;
}

/* modules */

void module_unref(struct module *m)
{
	if (!--m->refs)
		free(m);
}

/* Under the lock; queued launches of it have ended. Graph nodes may keep the struct. */
void module_destroy(struct module *m)
{
	if (m->lib)
		for (size_t i = 0; i < m->lib->nmodules; i++)
			if (m->lib->modules[i] == m)
				m->lib->modules[i] = m->lib->modules[--m->lib->nmodules];
	for (size_t i = 0; i < sim.nglobals; i++)
		if (m->global[i])
			mem_free(m->global[i]);
	for (size_t i = 0; i < sim.ntwins; i++)
		if (m->funcs[i])
			obj_del(m->funcs[i]);
	free(m->global);
	free(m->funcs);
	m->global = NULL;
	m->funcs = NULL;
	image_unref(m->image);
	state_uncharge(m->obj.ctx->dev, m->overhead);
	m->gone = true;
	obj_forget(m);
	module_unref(m);
}

static CUresult module_new(struct ctx *c, struct image *im, struct library *lib, struct module **out)
{
	struct module *m;
	CUresult r = CUDA_SUCCESS;

	if (!state_charge(c->dev, sim.cfg.module_mem))
		return CUDA_ERROR_OUT_OF_MEMORY;
	m = obj_new(K_MODULE, c, sizeof(*m));
	if (!m) {
		state_uncharge(c->dev, sim.cfg.module_mem);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->overhead = sim.cfg.module_mem;
	m->image = im;
	m->refs = 1;
	im->refs++;
	m->global = xcalloc(sim.nglobals, sizeof(*m->global));
	m->funcs = xcalloc(sim.ntwins, sizeof(*m->funcs));
	for (size_t i = 0; i < sim.nglobals && !r; i++) {
		const struct sim_global *g = sim.globals[i];

		if (!im->global[i])
			continue;
		r = mem_alloc(c, c->dev, A_DEVICE, NULL, g->size, &m->global[i]);
		if (r)
			break;
		if (g->init)
			memcpy((void *)(uintptr_t)m->global[i]->base, g->init, g->size);
		else
			memset((void *)(uintptr_t)m->global[i]->base, 0, g->size);
	}
	if (r) {
		module_destroy(m);
		return r;
	}
	if (lib) {
		m->lib = lib;
		lib->modules = xgrow(lib->modules, lib->nmodules + 1, &lib->capmodules, sizeof(*lib->modules));
		lib->modules[lib->nmodules++] = m;
	}
	*out = m;
	return CUDA_SUCCESS;
}

static CUresult load(CUmodule *out, const void *data)
{
	struct image *im;
	struct module *m;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = capture_unsafe();
	if (!r)
		r = image_load(data, &im);
	if (r)
		return sim_leave(r);
	r = module_new(c, im, NULL, &m);
	image_unref(im);
	if (!r)
		*out = HANDLE(CUmodule, m);
	return sim_leave(r);
}

/* There is no compiler, so logs are empty and took no time. */
static void jit_outputs(unsigned int n, const CUjit_option *opt, void **val)
{
	for (unsigned int i = 0; i < n && opt && val; i++) {
		float zero = 0;

		if (opt[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || opt[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
			val[i] = NULL;
		else if (opt[i] == CU_JIT_WALL_TIME)
			memcpy(&val[i], &zero, sizeof(zero));
	}
}

API CUresult cuModuleLoadData(CUmodule *out, const void *data) { return load(out, data); }
API CUresult cuModuleLoadFatBinary(CUmodule *out, const void *data) { return load(out, data); }

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *data, unsigned int n, CUjit_option *opt, void **val)
{
	CUresult r = n && (!opt || !val) ? CUDA_ERROR_INVALID_VALUE : load(out, data);

	if (!r)
		jit_outputs(n, opt, val);
	return r;
}

API CUresult cuModuleUnload(CUmodule h)
{
	struct module *m;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	m = obj_get(h, K_MODULE);
	if (!m || m->lib)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	ctx_wait(m->obj.ctx);
	if (obj_get(h, K_MODULE) == m)
		module_destroy(m);
	return sim_leave(c->sticky);
}

API CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!mode)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*mode = CU_MODULE_LAZY_LOADING;
	return sim_leave(CUDA_SUCCESS);
}

static struct func *module_func(struct module *m, size_t i)
{
	struct func *f = m->funcs[i];

	if (f)
		return f;
	f = obj_new(K_FUNC, m->obj.ctx, sizeof(*f));
	if (!f)
		return NULL;
	f->module = m;
	f->twin = sim.twins[i];
	f->max_dyn = 48 << 10;
	f->carveout = -1;
	m->funcs[i] = f;
	return f;
}

/* Enters with a module of a usable context. */
static CUresult enter_module(CUmodule h, struct module **m)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*m = obj_get(h, K_MODULE);
	return *m ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule h, const char *name)
{
	struct module *m;
	struct func *f;
	CUresult r = enter_module(h, &m);
	long i;

	if (r)
		return r;
	if (!out || !name)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	i = image_twin(m->image, name);
	if (i < 0)
		return sim_leave(CUDA_ERROR_NOT_FOUND);
	f = module_func(m, (size_t)i);
	if (!f)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*out = HANDLE(CUfunction, f);
	return sim_leave(CUDA_SUCCESS);
}

static CUresult global(struct module *m, const char *name, CUdeviceptr *p, size_t *n)
{
	if (!name || (!p && !n))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < sim.nglobals; i++) {
		if (!m->global[i] || strcmp(sim.globals[i]->name, name))
			continue;
		if (p)
			*p = m->global[i]->base;
		if (n)
			*n = m->global[i]->size;
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *n, CUmodule h, const char *name)
{
	struct module *m;
	CUresult r = enter_module(h, &m);

	return r ? r : sim_leave(global(m, name, p, n));
}

API CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule h)
{
	struct module *m;
	CUresult r = enter_module(h, &m);

	if (r)
		return r;
	if (!count)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*count = image_count(m->image);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuModuleEnumerateFunctions(CUfunction *out, unsigned int n, CUmodule h)
{
	struct module *m;
	CUresult r = enter_module(h, &m);
	unsigned int k = 0;

	if (r)
		return r;
	if (!out && n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < sim.ntwins && k < n; i++) {
		struct func *f = m->image->twin[i] ? module_func(m, i) : NULL;

		if (f)
			out[k++] = HANDLE(CUfunction, f);
	}
	return sim_leave(CUDA_SUCCESS);
}

/* libraries */

API CUresult cuLibraryLoadData(CUlibrary *out, const void *data, CUjit_option *jopt, void **jval, unsigned int nj,
			       CUlibraryOption *lopt, void **lval, unsigned int nl)
{
	struct library *l;
	struct image *im;
	CUresult r = sim_enter();

	(void)lval;
	if (r)
		return r;
	if (!out || (nj && !jopt) || (nl && !lopt))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = image_load(data, &im);
	if (r)
		return sim_leave(r);
	l = obj_new(K_LIBRARY, NULL, sizeof(*l));
	if (!l) {
		image_unref(im);
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	}
	l->image = im;
	l->kernels = xcalloc(sim.ntwins, sizeof(*l->kernels));
	jit_outputs(nj, jopt, jval);
	*out = HANDLE(CUlibrary, l);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLibraryUnload(CUlibrary h)
{
	struct library *l;
	CUresult r = sim_enter();

	if (r)
		return r;
	l = obj_get(h, K_LIBRARY);
	if (!l)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	obj_forget(l);
	while (l->nmodules) {
		struct module *m = l->modules[l->nmodules - 1];

		ctx_wait(m->obj.ctx);
		if (l->nmodules && l->modules[l->nmodules - 1] == m)
			module_destroy(m);
	}
	for (size_t i = 0; i < sim.ntwins; i++)
		if (l->kernels[i])
			obj_del(l->kernels[i]);
	image_unref(l->image);
	free(l->kernels);
	free(l->modules);
	free(l);
	return sim_leave(CUDA_SUCCESS);
}

static struct kernel *library_kernel(struct library *l, size_t i)
{
	struct kernel *k = l->kernels[i];

	if (k)
		return k;
	k = obj_new(K_KERNEL, NULL, sizeof(*k));
	if (!k)
		return NULL;
	k->lib = l;
	k->index = i;
	k->twin = sim.twins[i];
	for (int d = 0; d < SIM_MAX_DEV; d++) {
		k->max_dyn[d] = 48 << 10;
		k->carveout[d] = -1;
	}
	l->kernels[i] = k;
	return k;
}

static CUresult enter_library(CUlibrary h, struct library **l)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*l = obj_get(h, K_LIBRARY);
	return *l ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary h, const char *name)
{
	struct library *l;
	struct kernel *k;
	CUresult r = enter_library(h, &l);
	long i;

	if (r)
		return r;
	if (!out || !name)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	i = image_twin(l->image, name);
	if (i < 0)
		return sim_leave(CUDA_ERROR_NOT_FOUND);
	k = library_kernel(l, (size_t)i);
	if (!k)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*out = HANDLE(CUkernel, k);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary h)
{
	struct library *l;
	CUresult r = enter_library(h, &l);

	if (r)
		return r;
	if (!count)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*count = image_count(l->image);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLibraryEnumerateKernels(CUkernel *out, unsigned int n, CUlibrary h)
{
	struct library *l;
	CUresult r = enter_library(h, &l);
	unsigned int k = 0;

	if (r)
		return r;
	if (!out && n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < sim.ntwins && k < n; i++) {
		struct kernel *kn = l->image->twin[i] ? library_kernel(l, i) : NULL;

		if (kn)
			out[k++] = HANDLE(CUkernel, kn);
	}
	return sim_leave(CUDA_SUCCESS);
}

/* The library's module in context c, made when first asked for. */
static CUresult library_module(struct library *l, struct ctx *c, struct module **m)
{
	for (size_t i = 0; i < l->nmodules; i++) {
		if (l->modules[i]->obj.ctx == c) {
			*m = l->modules[i];
			return CUDA_SUCCESS;
		}
	}
	return module_new(c, l->image, l, m);
}

static CUresult enter_library_ctx(CUlibrary h, struct module **m)
{
	struct library *l;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	l = obj_get(h, K_LIBRARY);
	r = l ? library_module(l, c, m) : CUDA_ERROR_INVALID_HANDLE;
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

API CUresult cuLibraryGetModule(CUmodule *out, CUlibrary h)
{
	struct module *m;
	CUresult r = enter_library_ctx(h, &m);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUmodule, m);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLibraryGetGlobal(CUdeviceptr *p, size_t *n, CUlibrary h, const char *name)
{
	struct module *m;
	CUresult r = enter_library_ctx(h, &m);

	return r ? r : sim_leave(global(m, name, p, n));
}

API CUresult cuLibraryGetManaged(CUdeviceptr *p, size_t *n, CUlibrary h, const char *name)
{
	struct module *m;
	CUresult r = enter_library_ctx(h, &m);

	(void)p, (void)n, (void)name;
	return r ? r : sim_leave(CUDA_ERROR_NOT_FOUND);	/* twins declare no managed variables */
}

static CUresult kernel_func(struct kernel *k, struct ctx *c, struct func **out)
{
	struct module *m;
	struct func *f;
	CUresult r = library_module(k->lib, c, &m);

	if (r)
		return r;
	f = module_func(m, k->index);
	if (!f)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!f->kernel) {
		f->kernel = k;
		f->max_dyn = k->max_dyn[c->dev];
	}
	*out = f;
	return CUDA_SUCCESS;
}

/* A function, or a kernel cast to one, for a launch in context c. */
CUresult func_get(struct ctx *c, const void *handle, struct func **out)
{
	struct func *f = obj_get(handle, K_FUNC);
	struct kernel *k;

	if (f) {
		*out = f;
		return f->obj.ctx == c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
	}
	k = obj_get(handle, K_KERNEL);
	return k ? kernel_func(k, c, out) : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuKernelGetFunction(CUfunction *out, CUkernel h)
{
	struct kernel *k;
	struct func *f;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	k = obj_get(h, K_KERNEL);
	if (!k || !out)
		return sim_leave(k ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
	r = kernel_func(k, c, &f);
	if (!r)
		*out = HANDLE(CUfunction, f);
	return sim_leave(r);
}
