/*
 * Modules, libraries, kernels and functions; image.c reads what they are made of.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* modules */

void module_unref(struct module *m)
{
	if (!--m->refs)
		free(m);
}

/* Called with the lock held; queued launches of it have ended. Graph nodes may keep the struct. */
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
	for (size_t i = 0; i < m->image->ntexnames; i++)
		if (m->texrefs[i])
			texref_free(m->texrefs[i]);
	free(m->global);
	free(m->funcs);
	free(m->texrefs);
	m->global = NULL;
	m->funcs = NULL;
	m->texrefs = NULL;
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
	m->texrefs = xcalloc(im->ntexnames, sizeof(*m->texrefs));
	for (size_t i = 0; i < sim.nglobals && !r; i++) {
		const struct sim_global *g = sim.globals[i];

		if (!im->global[i])
			continue;
		r = mem_alloc(c, c->dev, g->managed ? A_MANAGED : A_DEVICE, NULL, g->size, &m->global[i]);
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

static CUresult load(CUmodule *out, const void *data, struct jit *j)
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
		r = image_load(data, j, &im);
	jit_time(j);
	if (r)
		return sim_leave(r);
	r = module_new(c, im, NULL, &m);
	image_unref(im);
	if (!r)
		*out = HANDLE(CUmodule, m);
	return sim_leave(r);
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *data, unsigned int n, CUjit_option *opt, void **val)
{
	struct jit j;
	CUresult r = jit_open(&j, n, opt, val);

	return r ? r : load(out, data, &j);
}

API CUresult cuModuleLoadData(CUmodule *out, const void *data) { return cuModuleLoadDataEx(out, data, 0, NULL, NULL); }
API CUresult cuModuleLoadFatBinary(CUmodule *out, const void *data) { return cuModuleLoadDataEx(out, data, 0, NULL, NULL); }

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
	struct jit j;
	CUresult broken = CUDA_SUCCESS, r = sim_enter();

	(void)lval;
	if (r)
		return r;
	if (!out || (nl && !lopt))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = jit_open(&j, nj, jopt, jval);
	if (!r)
		r = image_load(data, &j, &im);
	if (r == CUDA_ERROR_INVALID_PTX) {	/* that is told with its kernels */
		struct jit none = { 0 };

		broken = r;
		r = image_load(".version 1.0\n.target sm_10\n", &none, &im);
	}
	if (r)
		return sim_leave(r);
	jit_time(&j);
	l = obj_new(K_LIBRARY, NULL, sizeof(*l));
	if (!l) {
		image_unref(im);
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	}
	l->image = im;
	l->broken = broken;
	l->kernels = xcalloc(sim.ntwins, sizeof(*l->kernels));
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
		return sim_leave(l->broken ? l->broken : CUDA_ERROR_NOT_FOUND);
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

/* The library's module in context c, made on first use. */
static CUresult library_module(struct library *l, struct ctx *c, struct module **m)
{
	if (l->broken)
		return l->broken;
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

	if (r)
		return r;
	for (size_t i = 0; name && i < sim.nglobals; i++)
		if (m->global[i] && m->global[i]->akind == A_MANAGED && !strcmp(sim.globals[i]->name, name))
			return sim_leave(global(m, name, p, n));
	return sim_leave(CUDA_ERROR_NOT_FOUND);
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
