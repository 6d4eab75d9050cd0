/*
 * Modules and libraries that load.c has loaded: their kernels by name, their variables,
 * and how they end. The worker has listed the kernels, so a lookup by name is answered
 * here; a kernel's id is bound to its name by a one-way frame when a program first asks
 * for it.
 *
 * Locking: a module's lock guards its table of kernels and globals. Modules and kernels
 * come from pools whose memory stays, see handles.h.
 */
#include "module.h"
#include "background.h"
#include "codec.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "kernel.h"
#include "log.h"
#include "mirror.h"
#include "ranges.h"
#include "send.h"
#include "session.h"

#include <stdlib.h>
#include <string.h>

struct sl_pool sl_modules = { .size = sizeof(struct sl_module) };

static uint32_t hash(const char *s)
{
	uint32_t h = 2166136261u;

	while (*s)
		h = (h ^ (uint8_t)*s++) * 16777619u;
	return h;
}

/* --- the table of kernels; callers hold the module's lock --- */

static struct sl_kernel **slot_of(struct sl_module *m, const char *name)
{
	uint32_t i = hash(name) & (m->nslots - 1);

	while (m->kernel[i] && strcmp(m->kernel[i]->name, name))
		i = (i + 1) & (m->nslots - 1);
	return &m->kernel[i];
}

static bool grow(struct sl_module *m)
{
	uint32_t n = m->nslots ? m->nslots * 2 : 16;
	struct sl_kernel **old = m->kernel, **new = calloc(n, sizeof *new);
	uint32_t was = m->nslots;

	if (!new)
		return false;
	m->kernel = new;
	m->nslots = n;
	for (uint32_t i = 0; i < was; i++)
		if (old[i])
			*slot_of(m, old[i]->name) = old[i];
	free(old);
	return true;
}

struct sl_kernel *sl_module_insert(struct sl_module *m, const char *name)
{
	struct sl_kernel **s, *k;

	if ((m->nkernels + 1) * 4 > m->nslots * 3 && !grow(m))
		return NULL;
	s = slot_of(m, name);
	if (*s)
		return *s;
	k = sl_kernel_new(m, name);
	if (!k)
		return NULL;
	*s = k;
	m->nkernels++;
	return k;
}

static struct sl_kernel *find(struct sl_module *m, const char *name)
{
	return m->nslots ? *slot_of(m, name) : NULL;
}

unsigned sl_module_copies(const struct sl_module *m)
{
	return m->library ? sl_sessions : 1;
}

void sl_module_address(sl_buf *b, const struct sl_module *m, unsigned i)
{
	if (sl_sessions == 1)
		return;
	b->to = (uint8_t)((m->library ? i : sl_ctx_session(m->ctx_id)) + 1);
	b->to_ctx = m->library ? 0 : m->ctx_id;
}

/* Gives a kernel its id and tells the worker. */
static CUresult bind_kernel(struct sl_module *m, struct sl_kernel *k)
{
	CUresult err = CUDA_SUCCESS;
	uint32_t id;
	void *h;
	size_t n = strlen(k->name);

	if (atomic_load(&k->id))
		return CUDA_SUCCESS;
	if (n >= SL_BIND_MODULE)
		return CUDA_ERROR_NOT_FOUND;
	id = sl_handle_new(SL_KERNEL, k, &h);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (unsigned i = 0; i < sl_module_copies(m) && !err; i++) {
		sl_buf b;

		sl_buf_init(&b);
		sl_module_address(&b, m, i);
		/* The ids of modules and libraries overlap: a bit tells which it is. */
		sl_put(&b, struct wire_kernel_bind, .kernel = id, .image = m->id,
		       .length = (uint16_t)(n | (m->library ? 0 : SL_BIND_MODULE)));
		sl_put_bytes(&b, k->name, n);
		err = sl_oneway(CTL_KERNEL_BIND, &b);
		sl_buf_free(&b);
	}
	if (err) {
		sl_handle_free(SL_KERNEL, id);
		return err;
	}
	atomic_store(&k->id, id);
	return CUDA_SUCCESS;
}

CUresult sl_module_kernel(struct sl_module *m, const char *name, struct sl_kernel **out)
{
	struct sl_kernel_info *info;
	struct sl_kernel *k;
	CUresult err;
	bool ask = false;

	if (m->parent)
		return sl_module_kernel(m->parent, name, out);
	pthread_mutex_lock(&m->lock);
	k = find(m, name);
	if (!k && m->nlisted) {
		pthread_mutex_unlock(&m->lock);
		return CUDA_ERROR_NOT_FOUND;
	}
	if (!k) {
		k = sl_module_insert(m, name);
	}
	/* A library that could not be compiled has an empty list, and an error for each name. */
	ask = k && !m->nlisted && !atomic_load(&k->id);
	err = k ? bind_kernel(m, k) : CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&m->lock);
	/* If the worker has listed none, ask whether there is one of that name. */
	if (!err && ask) {
		err = sl_kernel_info(k, m->library ? 0 : m->dev, &info);
		if (err) {
			pthread_mutex_lock(&m->lock);
			sl_handle_free(SL_KERNEL, atomic_exchange(&k->id, 0));
			pthread_mutex_unlock(&m->lock);
			err = err == CUDA_ERROR_INVALID_HANDLE ? CUDA_ERROR_NOT_FOUND : err;
		}
	}
	*out = k;
	return err;
}

/* --- unloading --- */

/* Of a module that is gone. */
static void forget_global(struct sl_global *g)
{
	if (g->managed)
		sl_mirror_variable_end(g->ptr, g->size);
	sl_range_remove(g->ptr, SL_RANGE_DEVICE, NULL);
	free(g);
}

void sl_module_clear(struct sl_module *m)
{
	for (uint32_t i = 0; i < m->nslots; i++)
		if (m->kernel[i])
			sl_kernel_free(m->kernel[i]);
	free(m->kernel);
	free(m->names);
	free(m->text);
	m->kernel = NULL;
	m->names = NULL;
	m->text = NULL;
	m->nlisted = m->nkernels = m->nslots = 0;
	m->listed = false;
	while (m->globals) {
		struct sl_global *g = m->globals;

		m->globals = g->next;
		forget_global(g);
	}
}

CUresult sl_module_unload(const struct sl_module *m, unsigned n)
{
	CUresult err = CUDA_SUCCESS;

	for (unsigned i = 0; m->library && i < n; i++) {
		CUresult e;
		sl_buf b;

		sl_buf_init(&b);
		sl_module_address(&b, m, i);
		sl_put_u32(&b, m->id);
		e = sl_oneway(SL_OP_cuLibraryUnload, &b);
		sl_buf_free(&b);
		err = err ? err : e;
	}
	return err;
}

static void module_gone(struct sl_module *m)
{
	sl_handle_free(m->library ? SL_LIBRARY : SL_MODULE, m->id);
	sl_module_clear(m);
	for (int d = 0; d < SL_MAX_DEVICES; d++) {
		struct sl_module *a = m->as_module[d];

		m->as_module[d] = NULL;
		if (a)
			module_gone(a);
	}
	sl_pool_put(&sl_modules, m);
}

CUresult sl_cuModuleUnload(CUmodule hmod)
{
	struct sl_module *m = sl_handle_state(SL_MODULE, hmod);
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	if (m->parent)
		return CUDA_ERROR_NOT_PERMITTED;
	if (!sl_handle_claim(SL_MODULE, sl_handle_bare(hmod)))
		return CUDA_ERROR_INVALID_HANDLE;
	err = fw_cuModuleUnload(hmod);
	module_gone(m);
	return err;
}

CUresult sl_cuLibraryUnload(CUlibrary library)
{
	struct sl_module *m = sl_handle_state(SL_LIBRARY, library);
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!m || !sl_handle_claim(SL_LIBRARY, sl_handle_bare(library)))
		return CUDA_ERROR_INVALID_HANDLE;
	err = sl_sessions == 1 ? fw_cuLibraryUnload(library) : sl_module_unload(m, sl_sessions);
	module_gone(m);
	return err;
}

static void drop_module(uint32_t id, void *state, void *arg)
{
	struct sl_module *m = state;

	if (m && m->ctx_id == *(uint32_t *)arg && !m->parent && sl_handle_claim(SL_MODULE, id))
		module_gone(m);
}

/* Libraries stay; what they had in the context does not. */
static void drop_library(uint32_t id, void *state, void *arg)
{
	struct sl_module *m = state;
	uint32_t ctx_id = *(uint32_t *)arg;
	struct sl_global **g;

	(void)id;
	if (!m)
		return;
	pthread_mutex_lock(&m->lock);
	for (g = &m->globals; *g;) {
		struct sl_global *x = *g;

		if (x->ctx_id != ctx_id) {
			g = &x->next;
			continue;
		}
		*g = x->next;
		forget_global(x);
	}
	for (int d = 0; d < SL_MAX_DEVICES; d++) {
		if (m->as_module[d] && m->as_module[d]->ctx_id == ctx_id) {
			module_gone(m->as_module[d]);
			m->as_module[d] = NULL;
		}
	}
	pthread_mutex_unlock(&m->lock);
}

void sl_modules_drop(uint32_t ctx_id)
{
	sl_handle_each(SL_MODULE, drop_module, &ctx_id);
	sl_handle_each(SL_LIBRARY, drop_library, &ctx_id);
}

/* --- what is in them --- */

CUresult sl_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	struct sl_module *m = sl_handle_state(SL_MODULE, hmod);
	struct sl_kernel *k;
	CUresult err;

	if (!hfunc || !name)
		return CUDA_ERROR_INVALID_VALUE;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	err = sl_module_kernel(m, name, &k);
	if (!err)
		*hfunc = m->parent ? sl_kernel_function(atomic_load(&k->id)) : sl_handle_value(SL_KERNEL, atomic_load(&k->id));
	return err;
}

CUresult sl_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	struct sl_module *m = sl_handle_state(SL_LIBRARY, library);
	struct sl_kernel *k;
	CUresult err;

	if (!pKernel || !name)
		return CUDA_ERROR_INVALID_VALUE;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	err = sl_module_kernel(m, name, &k);
	if (!err)
		*pKernel = sl_handle_value(SL_KERNEL, atomic_load(&k->id));
	return err;
}

static CUresult kernel_count(struct sl_module *m, unsigned *count)
{
	static uint8_t once;

	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	if (m->parent)
		m = m->parent;
	if (!m->listed)
		return sl_refuse("counting the kernels of an image that the worker's driver cannot list", &once);
	*count = m->nlisted;
	return CUDA_SUCCESS;
}

static CUresult enumerate(struct sl_module *m, void **out, unsigned n)
{
	struct sl_module *from;
	unsigned count = 0;
	CUresult err = kernel_count(m, &count);

	if (err)
		return err;
	if (n && !out)
		return CUDA_ERROR_INVALID_VALUE;
	from = m->parent ? m->parent : m;
	for (unsigned i = 0; i < n && i < count && !err; i++) {
		struct sl_kernel *k;

		err = sl_module_kernel(from, from->names[i], &k);
		if (!err)
			out[i] = m->parent ? (void *)sl_kernel_function(atomic_load(&k->id)) :
					     sl_handle_value(SL_KERNEL, atomic_load(&k->id));
	}
	return err;
}

CUresult sl_cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)
{
	return kernel_count(sl_handle_state(SL_LIBRARY, lib), count);
}

CUresult sl_cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int n, CUlibrary lib)
{
	return enumerate(sl_handle_state(SL_LIBRARY, lib), (void **)kernels, n);
}

CUresult sl_cuModuleGetFunctionCount(unsigned int *count, CUmodule mod)
{
	return kernel_count(sl_handle_state(SL_MODULE, mod), count);
}

CUresult sl_cuModuleEnumerateFunctions(CUfunction *functions, unsigned int n, CUmodule mod)
{
	return enumerate(sl_handle_state(SL_MODULE, mod), (void **)functions, n);
}

/* The module that stands for a library in the current context; the same each time. */
CUresult sl_cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
	struct sl_module *m = sl_handle_state(SL_LIBRARY, library), *a;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t id;
	void *h;

	if (!pMod)
		return CUDA_ERROR_INVALID_VALUE;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	if (err)
		return err;
	pthread_mutex_lock(&m->lock);
	a = m->as_module[c->dev];
	if (a && a->ctx_id == atomic_load(&c->id)) {
		*pMod = sl_handle_value(SL_MODULE, a->id);
		pthread_mutex_unlock(&m->lock);
		return CUDA_SUCCESS;
	}
	a = sl_pool_get(&sl_modules);
	id = a ? sl_handle_new(SL_MODULE, NULL, &h) : 0;
	err = id ? fw_cuLibraryGetModule(id, library) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_MODULE, id);
		sl_pool_put(&sl_modules, a);
	} else {
		a->id = id;
		a->library = false;
		a->parent = m;
		a->ctx_id = atomic_load(&c->id);
		a->dev = c->dev;
		sl_handle_set_state(SL_MODULE, h, a);
		m->as_module[c->dev] = a;
		*pMod = h;
	}
	pthread_mutex_unlock(&m->lock);
	return err;
}

/* The address of a variable that nobody has asked for yet; *managed is set if it is the program's, too. */
static CUresult find_global(struct sl_module *m, void *h, const char *name, CUdeviceptr *p, size_t *n, bool *managed)
{
	uint64_t is = 0;
	CUresult err;

	if (*managed)
		err = fw_cuLibraryGetManaged(p, n, h, name);
	else
		err = m->library ? fw_cuLibraryGetGlobal(p, n, h, name) : fw_cuModuleGetGlobal_v2(p, n, h, name);
	if (err || !*n)
		return err;
	*managed |= !fw_cuPointerGetAttribute(&is, CU_POINTER_ATTRIBUTE_IS_MANAGED, *p) && (uint32_t)is;
	if (!*managed)
		return CUDA_SUCCESS;
	sl_background_stop();
	err = sl_guard_reserve(*p, *n) ? sl_mirror_variable(*p, *n) : CUDA_ERROR_NOT_SUPPORTED;
	sl_background_go();
	if (err) /* as it has no other way of learning it, the program is about to die */
		sl_log(SL_ERROR, "the managed variable %s is not reached by the program, error %d: %s", name, err,
		       err == CUDA_ERROR_NOT_SUPPORTED ? "other memory of the program is at its address" : "out of memory");
	return err;
}

/* Addresses of globals do not change while the module lives in a context. */
static CUresult global(struct sl_module *m, void *h, CUdeviceptr *dptr, size_t *bytes, const char *name, bool managed)
{
	struct sl_range range = { .type = SL_RANGE_DEVICE };
	static uint8_t once;
	struct sl_global *g;
	CUdeviceptr p = 0;
	size_t n = 0;
	struct sl_ctx *c;
	uint32_t ctx_id;
	CUresult err = sl_ctx_use(&c);

	if (!name || (!dptr && !bytes))
		return CUDA_ERROR_INVALID_VALUE;
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	if (err)
		return err;
	ctx_id = atomic_load(&c->id);
	pthread_mutex_lock(&m->lock);
	for (g = m->globals; g; g = g->next)
		if (g->ctx_id == ctx_id && !strcmp(g->name, name))
			break;
	if (!g) {
		err = find_global(m, h, name, &p, &n, &managed);
		if (!err && sl_sessions > 1 && sl_range_clash(p, n, sl_ctx_session(ctx_id)))
			err = sl_refuse("a module's variable at an address that another owner's device uses", &once);
		g = err ? NULL : malloc(sizeof *g + strlen(name) + 1);
		if (g) {
			g->ctx_id = ctx_id;
			g->ptr = p;
			g->size = n;
			g->managed = managed;
			strcpy(g->name, name);
			g->next = m->globals;
			m->globals = g;
			range.base = p;
			range.size = n;
			range.ctx_id = ctx_id;
			range.dev = c->dev;
			range.managed = managed;
			sl_range_add(&range);
		} else if (!err) {
			err = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (g) {
		if (dptr)
			*dptr = g->ptr;
		if (bytes)
			*bytes = g->size;
	}
	pthread_mutex_unlock(&m->lock);
	return err;
}

CUresult sl_cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
	return global(sl_handle_state(SL_MODULE, hmod), hmod, dptr, bytes, name, false);
}

CUresult sl_cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return global(sl_handle_state(SL_LIBRARY, library), library, dptr, bytes, name, false);
}

struct managed_ask {
	CUdeviceptr *dptr;
	size_t *bytes;
	CUlibrary library;
	const char *name;
};

static CUresult get_managed(void *arg)
{
	const struct managed_ask *a = arg;

	return global(sl_handle_state(SL_LIBRARY, a->library), a->library, a->dptr, a->bytes, a->name, true);
}

/* A program looks at its managed variables before it has a context: then the first device's has them. */
CUresult sl_cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	struct managed_ask a = { dptr, bytes, library, name };
	CUcontext primary, current = NULL;
	CUresult err = sl_cuCtxGetCurrent(&current);

	if (err || current)
		return err ? err : get_managed(&a);
	err = sl_cuDevicePrimaryCtxRetain(&primary, 0);
	return err ? err : sl_ctx_with(sl_ctx_of(primary), get_managed, &a);
}

/* Libraries are loaded without a table of universal functions (load.c), so there are none. */
CUresult sl_cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library, const char *symbol)
{
	(void)fptr, (void)symbol;
	return sl_handle_state(SL_LIBRARY, library) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sl_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}
