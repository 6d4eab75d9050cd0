/*
 * Modules and libraries. An image goes to the worker once: it is named by its
 * SHA-256, and only if the worker's node does not have it are the parts that fit
 * the lease's devices sent (fatbin.c). The reply lists the kernels, so that
 * looking one up is answered here; binding a kernel's id to its name is a
 * one-way frame sent when a program first asks for it.
 *
 * Locking: a module's lock guards its table of kernels and globals. Modules and
 * kernels come from pools whose memory stays, see handles.h.
 */
#include "module.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fatbin.h"
#include "sha256.h"

#define CHUNK (1u << 20)

static struct sl_pool modules = { .size = sizeof(struct sl_module) };

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

static struct sl_kernel *insert(struct sl_module *m, const char *name)
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

/* Libraries belong to no context: every session has one of its own, by the same ids. */
static unsigned copies(const struct sl_module *m)
{
	return m->library ? sl_sessions : 1;
}

/* Where a frame about a module, or about the i-th copy of a library, goes. */
static void address(sl_buf *b, const struct sl_module *m, unsigned i)
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
	for (unsigned i = 0; i < copies(m) && !err; i++) {
		sl_buf b;

		sl_buf_init(&b);
		address(&b, m, i);
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
	if (!k && m->listed) {
		pthread_mutex_unlock(&m->lock);
		return CUDA_ERROR_NOT_FOUND;
	}
	if (!k) {
		k = insert(m, name);
	}
	ask = k && !m->listed && !atomic_load(&k->id);
	err = k ? bind_kernel(m, k) : CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&m->lock);
	/* Where the worker could not list the kernels, a name has to be tried. */
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

/* --- loading --- */

static void module_clear(struct sl_module *m)
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
	m->nkernels = m->nslots = 0;
	m->listed = false;
	while (m->globals) {
		struct sl_global *g = m->globals;

		m->globals = g->next;
		sl_range_remove(g->ptr, SL_RANGE_DEVICE, NULL);
		free(g);
	}
}

static CUresult take_names(struct sl_module *m, sl_reply *r, uint32_t n)
{
	size_t text = 0, start = r->off;

	if (n == SL_NOT_LISTED)
		return CUDA_SUCCESS;
	if (n > r->n / 2)
		return CUDA_ERROR_UNKNOWN;
	for (uint32_t i = 0; i < n; i++) {
		uint16_t len = sl_get_u16(r);

		if (!sl_get_ref(r, len) || r->bad)
			return CUDA_ERROR_UNKNOWN;
		text += len + 1u;
	}
	m->text = malloc(text + 1);
	m->names = calloc(n + 1, sizeof *m->names);
	if (!m->text || !m->names)
		return CUDA_ERROR_OUT_OF_MEMORY;
	r->off = start;
	text = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint16_t len = sl_get_u16(r);

		m->names[i] = m->text + text;
		sl_get_bytes(r, m->names[i], len);
		m->names[i][len] = 0;
		text += len + 1u;
		if (!insert(m, m->names[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->listed = true;
	return CUDA_SUCCESS;
}

static bool is_log(CUjit_option o) { return o == CU_JIT_INFO_LOG_BUFFER || o == CU_JIT_ERROR_LOG_BUFFER; }
/* Hints by pointer are left out: without them everything is kept, which is right. */
static bool is_carried(CUjit_option o)
{
	return !(o >= CU_JIT_REFERENCED_KERNEL_NAMES && o <= CU_JIT_OPTIMIZE_UNUSED_DEVICE_VARIABLES) &&
	       o != CU_JIT_GLOBAL_SYMBOL_COUNT && o != CU_JIT_WALL_TIME;
}

/* Counts the options that are sent, or refuses them. */
static CUresult count_jit(unsigned n, const CUjit_option *opt, uint32_t *sent)
{
	static uint8_t once;

	*sent = 0;
	for (unsigned i = 0; i < n; i++) {
		if (opt[i] >= CU_JIT_NUM_OPTIONS)
			return CUDA_ERROR_INVALID_VALUE;
		if (opt[i] == CU_JIT_GLOBAL_SYMBOL_NAMES || opt[i] == CU_JIT_GLOBAL_SYMBOL_ADDRESSES)
			return sl_refuse("module loading with global symbol addresses", &once);
		*sent += is_carried(opt[i]);
	}
	return CUDA_SUCCESS;
}

/* Options are numbers, or buffers for a log, which the worker has of its own. */
static void put_jit(sl_buf *b, unsigned n, const CUjit_option *opt, void *const *val)
{
	for (unsigned i = 0; i < n; i++)
		if (is_carried(opt[i]))
			sl_put(b, struct wire_jit_option, .option = opt[i], .value = is_log(opt[i]) ? 0 : (uint64_t)(uintptr_t)val[i]);
}

/* One log into the program's buffer, its length into the option that gave the buffer's size. */
static void take_log(sl_reply *r, uint32_t len, CUjit_option buffer, CUjit_option size, unsigned n, const CUjit_option *opt, void **val)
{
	const uint8_t *text = sl_get_ref(r, len);
	char *to = NULL;
	size_t cap = 0, m = 0;

	for (unsigned i = 0; i < n; i++) {
		if (opt[i] == buffer)
			to = val[i];
		if (opt[i] == size)
			cap = (uint32_t)(uintptr_t)val[i];
	}
	if (text && to && cap) {
		m = len < cap - 1 ? len : cap - 1;
		memcpy(to, text, m);
		to[m] = 0;
	}
	for (unsigned i = 0; i < n; i++) {
		if (opt[i] == size)
			val[i] = (void *)(uintptr_t)m;
		if (opt[i] == CU_JIT_WALL_TIME)
			val[i] = NULL;
	}
}

static void take_logs(sl_reply *r, unsigned n, const CUjit_option *opt, void **val)
{
	struct wire_jit_logs logs;

	if (!n || r->n - r->off < sizeof logs)
		return;
	sl_get_bytes(r, &logs, sizeof logs);
	take_log(r, logs.ninfo, CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, n, opt, val);
	take_log(r, logs.nerror, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, n, opt, val);
}

static CUresult upload(const struct sl_module *m, unsigned copy, const struct sl_image *image, const uint8_t sha[32])
{
	struct wire_image_chunk head = { .total = image->size };
	uint8_t *bounce = NULL;
	CUresult err = CUDA_SUCCESS;

	memcpy(head.sum, sha, sizeof head.sum);
	if (image->nparts > 1 && !(bounce = malloc(CHUNK)))
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t off = 0; off < image->size && !err; head.offset = off += CHUNK) {
		size_t n = image->size - off < CHUNK ? image->size - off : CHUNK;
		const void *from = bounce;
		sl_buf b;

		if (bounce)
			sl_image_copy(image, off, bounce, n);
		else
			from = image->parts[0].p + off;
		sl_buf_init(&b);
		address(&b, m, copy);
		sl_put_bytes(&b, &head, sizeof head);
		err = sl_oneway_bulk(CTL_IMAGE_CHUNK, &b, from, n);
		sl_buf_free(&b);
	}
	free(bounce);
	return err;
}

static CUresult request(struct sl_module *m, unsigned copy, const struct sl_image *image, const uint8_t sha[32], unsigned n, CUjit_option *opt, void **val)
{
	struct wire_image_load head = { .size = image->size, .id = m->id, .library = m->library };
	struct wire_image_load_reply list = { 0 };
	uint32_t noptions;
	CUresult err;
	sl_reply r = { 0 };
	sl_buf b;

	sl_buf_init(&b);
	address(&b, m, copy);
	err = count_jit(n, opt, &noptions);
	if (!err) {
		head.noptions = noptions;
		memcpy(head.sum, sha, sizeof head.sum);
		sl_put_bytes(&b, &head, sizeof head);
		put_jit(&b, n, opt, val);
		err = sl_wait(CTL_IMAGE_LOAD, &b, &r);
		if (!err) {
			sl_get_bytes(&r, &list, sizeof list);
			err = r.bad ? CUDA_ERROR_UNKNOWN : copy ? CUDA_SUCCESS : take_names(m, &r, list.nkernels);
			if (!err && !copy)
				take_logs(&r, n, opt, val);
		} else if (err > 0) {
			take_logs(&r, n, opt, val);
		}
		sl_reply_free(&r);
	}
	sl_buf_free(&b);
	return err;
}

/* Takes a library out of the first n sessions. */
static CUresult unload_copies(const struct sl_module *m, unsigned n)
{
	CUresult err = CUDA_SUCCESS;

	for (unsigned i = 0; m->library && i < n; i++) {
		CUresult e;
		sl_buf b;

		sl_buf_init(&b);
		address(&b, m, i);
		sl_put_u32(&b, m->id);
		e = sl_oneway(SL_OP_cuLibraryUnload, &b);
		sl_buf_free(&b);
		err = err ? err : e;
	}
	return err;
}

static unsigned device_ccs(const struct sl_ctx *c, struct sl_cc *cc)
{
	unsigned n = 0;

	for (int d = c ? c->dev : 0; d < sl_dev_count(); d++) {
		cc[n].major = sl_dev(d)->cc_major;
		cc[n++].minor = sl_dev(d)->cc_minor;
		if (c)
			break;
	}
	return n;
}

/* Loads an image as a module of the current context, or as a library of the process. */
static CUresult load(bool library, void **out, const void *code, size_t known_size, unsigned n, CUjit_option *opt, void **val)
{
	struct sl_cc cc[SL_MAX_DEVICES];
	struct sl_image image;
	struct sl_sha256 s;
	struct sl_module *m;
	struct sl_ctx *c = NULL;
	uint8_t sha[32];
	CUresult err = CUDA_SUCCESS;
	void *h;

	if (!out || !code || (n && (!opt || !val)))
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!library)
		err = sl_ctx_use(&c);
	if (err)
		return err;
	(void)known_size;
	if (!sl_image_open(code, cc, device_ccs(c, cc), &image))
		return CUDA_ERROR_INVALID_IMAGE;
	if (image.size > SL_MAX_IMAGE) {
		sl_log(SL_ERROR, "a module image of %zu bytes is not supported: the largest has %u; see docs/limits.md", image.size, SL_MAX_IMAGE);
		sl_image_free(&image);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	sl_sha256_init(&s);
	for (unsigned i = 0; i < image.nparts; i++)
		sl_sha256_add(&s, image.parts[i].p, image.parts[i].n);
	sl_sha256_end(&s, sha);

	m = sl_pool_get(&modules);
	if (!m) {
		sl_image_free(&image);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->library = library;
	m->parent = NULL;
	m->ctx_id = c ? atomic_load(&c->id) : 0;
	m->dev = c ? c->dev : 0;
	m->id = sl_handle_new(library ? SL_LIBRARY : SL_MODULE, NULL, &h);
	err = m->id ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	for (unsigned i = 0; i < copies(m) && !err; i++) {
		err = request(m, i, &image, sha, n, opt, val);
		if (err == SL_RESULT_NOT_IN_STORE) {
			err = upload(m, i, &image, sha);
			if (!err)
				err = request(m, i, &image, sha, n, opt, val);
			if (err < 0)
				err = CUDA_ERROR_UNKNOWN;
		}
		if (err)
			unload_copies(m, i);
	}
	sl_image_free(&image);
	if (err) {
		module_clear(m);
		sl_handle_free(library ? SL_LIBRARY : SL_MODULE, m->id);
		sl_pool_put(&modules, m);
		return err;
	}
	sl_handle_set_state(library ? SL_LIBRARY : SL_MODULE, h, m);
	*out = h;
	return CUDA_SUCCESS;
}

/* A file's contents, with a NUL after them for PTX. */
static CUresult slurp(const char *name, char **data, size_t *size)
{
	int fd = open(name, O_RDONLY | O_CLOEXEC);
	size_t n = 0, cap = 1 << 16;
	char *p;

	if (fd < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	p = malloc(cap);
	while (p) {
		ssize_t got = read(fd, p + n, cap - n - 1);

		if (got <= 0) {
			close(fd);
			p[n] = 0;
			*data = p;
			*size = n;
			if (got == 0)
				return CUDA_SUCCESS;
			free(p);
			return CUDA_ERROR_OPERATING_SYSTEM;
		}
		n += (size_t)got;
		if (cap - n < 4096) {
			char *q = realloc(p, cap *= 2);

			if (!q)
				break;
			p = q;
		}
	}
	free(p);
	close(fd);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult load_file(bool library, void **out, const char *name, unsigned n, CUjit_option *opt, void **val)
{
	char *data;
	size_t size;
	CUresult err;

	if (!out || !name)
		return CUDA_ERROR_INVALID_VALUE;
	err = slurp(name, &data, &size);
	if (err)
		return err;
	/* Shorter than any header: nothing to read beyond. */
	err = size < 16 ? CUDA_ERROR_INVALID_IMAGE : load(library, out, data, size, n, opt, val);
	free(data);
	return err;
}

CUresult sl_module_load(CUmodule *out, const void *image, unsigned njit, CUjit_option *opt, void **val)
{
	return load(false, (void **)out, image, 0, njit, opt, val);
}

CUresult sl_cuModuleLoadData(CUmodule *module, const void *image)
{
	return sl_module_load(module, image, 0, NULL, NULL);
}

CUresult sl_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n, CUjit_option *options, void **values)
{
	return sl_module_load(module, image, n, options, values);
}

CUresult sl_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
	return sl_module_load(module, fatCubin, 0, NULL, NULL);
}

CUresult sl_cuModuleLoad(CUmodule *module, const char *fname)
{
	return load_file(false, (void **)module, fname, 0, NULL, NULL);
}

static CUresult library_options(const CUlibraryOption *opt, void *const *val, unsigned n)
{
	static uint8_t once;

	if (n && !opt)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n; i++) {
		const CUlibraryHostUniversalFunctionAndDataTable *t = val ? val[i] : NULL;

		if (opt[i] >= CU_LIBRARY_NUM_OPTIONS)
			return CUDA_ERROR_INVALID_VALUE;
		if (opt[i] == CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE && t && (t->functionWindowSize || t->dataWindowSize))
			return sl_refuse("cuLibraryLoadData with a universal function table", &once);
	}
	return CUDA_SUCCESS;
}

CUresult sl_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jitValues, unsigned int njit,
			      CUlibraryOption *opt, void **optValues, unsigned int nopt)
{
	CUresult err = library_options(opt, optValues, nopt);

	return err ? err : load(true, (void **)library, code, 0, njit, jit, jitValues);
}

CUresult sl_cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jit, void **jitValues, unsigned int njit,
				  CUlibraryOption *opt, void **optValues, unsigned int nopt)
{
	CUresult err = library_options(opt, optValues, nopt);

	return err ? err : load_file(true, (void **)library, fileName, njit, jit, jitValues);
}

static void module_gone(struct sl_module *m)
{
	sl_handle_free(m->library ? SL_LIBRARY : SL_MODULE, m->id);
	module_clear(m);
	for (int d = 0; d < SL_MAX_DEVICES; d++) {
		struct sl_module *a = m->as_module[d];

		m->as_module[d] = NULL;
		if (a)
			module_gone(a);
	}
	sl_pool_put(&modules, m);
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
	err = sl_sessions == 1 ? fw_cuLibraryUnload(library) : unload_copies(m, sl_sessions);
	module_gone(m);
	return err;
}

static void drop_module(uint32_t id, void *state, void *arg)
{
	struct sl_module *m = state;

	if (m && m->ctx_id == *(uint32_t *)arg && !m->parent && sl_handle_claim(SL_MODULE, id))
		module_gone(m);
}

/* Libraries live on; what they had in the context does not. */
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
		sl_range_remove(x->ptr, SL_RANGE_DEVICE, NULL);
		free(x);
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
	*count = m->nkernels;
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

/* A library as a module of the current context; the same each time. */
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
	a = sl_pool_get(&modules);
	id = a ? sl_handle_new(SL_MODULE, NULL, &h) : 0;
	err = id ? fw_cuLibraryGetModule(id, library) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_MODULE, id);
		sl_pool_put(&modules, a);
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

/* Addresses of globals do not change while the module lives in a context. */
static CUresult global(struct sl_module *m, void *h, CUdeviceptr *dptr, size_t *bytes, const char *name)
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
		err = m->library ? fw_cuLibraryGetGlobal(&p, &n, h, name) : fw_cuModuleGetGlobal_v2(&p, &n, h, name);
		if (!err && sl_sessions > 1 && sl_range_clash(p, n, sl_ctx_session(ctx_id)))
			err = sl_refuse("a module's variable at an address that another owner's device uses", &once);
		g = err ? NULL : malloc(sizeof *g + strlen(name) + 1);
		if (g) {
			g->ctx_id = ctx_id;
			g->ptr = p;
			g->size = n;
			strcpy(g->name, name);
			g->next = m->globals;
			m->globals = g;
			range.base = p;
			range.size = n;
			range.ctx_id = ctx_id;
			range.dev = c->dev;
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
	return global(sl_handle_state(SL_MODULE, hmod), hmod, dptr, bytes, name);
}

CUresult sl_cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return global(sl_handle_state(SL_LIBRARY, library), library, dptr, bytes, name);
}

CUresult sl_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}
