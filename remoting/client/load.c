/*
 * Loading an image as a module or a library. An image goes to the worker once: it is
 * named by its SHA-256, and the parts that fit the lease's devices (fatbin.c) are sent
 * only if the worker's node does not have it. The reply lists the kernels. A library
 * belongs to no context, so each owner of the lease gets a copy.
 *
 * Locking: none. A module that is being loaded is known to its thread alone.
 */
#include "load.h"
#include "codec.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "fatbin.h"
#include "gen.h"
#include "handles.h"
#include "jit.h"
#include "log.h"
#include "module.h"
#include "send.h"
#include "sha256.h"
#include "wait.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK (1u << 20)

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
		if (!sl_module_insert(m, m->names[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->listed = true;
	m->nlisted = n;
	return CUDA_SUCCESS;
}

CUresult sl_image_upload(uint8_t to, uint32_t to_ctx, const struct sl_image *image, const uint8_t sha[32])
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
		b.to = to;
		b.to_ctx = to_ctx;
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
	struct sl_jit jit;
	CUresult err;
	sl_reply r = { 0 };
	sl_buf b;

	sl_buf_init(&b);
	sl_module_address(&b, m, copy);
	sl_jit_open(&jit, n, opt, val);
	err = sl_jit_count(n, opt, val, &noptions);
	if (!err) {
		head.noptions = noptions;
		memcpy(head.sum, sha, sizeof head.sum);
		sl_put_bytes(&b, &head, sizeof head);
		sl_jit_put(&b, n, opt, val);
		err = sl_wait(CTL_IMAGE_LOAD, &b, &r);
		if (!err) {
			sl_get_bytes(&r, &list, sizeof list);
			err = r.bad ? CUDA_ERROR_UNKNOWN : copy ? CUDA_SUCCESS : take_names(m, &r, list.nkernels);
			if (!err && !copy)
				sl_jit_take(&jit, &r);
		} else if (err > 0) {
			sl_jit_take(&jit, &r);
		}
		sl_reply_free(&r);
	}
	sl_buf_free(&b);
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
static CUresult load(bool library, void **out, const void *code, unsigned n, CUjit_option *opt, void **val)
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
	if (!sl_image_open(code, cc, device_ccs(c, cc), &image))
		return CUDA_ERROR_INVALID_IMAGE;
	if (image.size > SL_MAX_IMAGE) {
		sl_log(SL_ERROR, "a module image of %zu bytes is not supported: the limit is %u; see docs/limits.md", image.size, SL_MAX_IMAGE);
		sl_image_free(&image);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	sl_sha256_init(&s);
	for (unsigned i = 0; i < image.nparts; i++)
		sl_sha256_add(&s, image.parts[i].p, image.parts[i].n);
	sl_sha256_end(&s, sha);

	m = sl_pool_get(&sl_modules);
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
	for (unsigned i = 0; i < sl_module_copies(m) && !err; i++) {
		err = request(m, i, &image, sha, n, opt, val);
		if (err == SL_RESULT_NOT_IN_STORE) {
			sl_buf where;

			sl_buf_init(&where);
			sl_module_address(&where, m, i);
			err = sl_image_upload(where.to, where.to_ctx, &image, sha);
			if (!err)
				err = request(m, i, &image, sha, n, opt, val);
			if (err < 0)
				err = CUDA_ERROR_UNKNOWN;
		}
		if (err)
			sl_module_unload(m, i);
	}
	sl_image_free(&image);
	if (err) {
		sl_module_clear(m);
		sl_handle_free(library ? SL_LIBRARY : SL_MODULE, m->id);
		sl_pool_put(&sl_modules, m);
		return err;
	}
	sl_handle_set_state(library ? SL_LIBRARY : SL_MODULE, h, m);
	*out = h;
	return CUDA_SUCCESS;
}

CUresult sl_slurp(const char *name, char **data, size_t *size)
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
	err = sl_slurp(name, &data, &size);
	if (err)
		return err;
	/* Shorter than any header: there is nothing to parse. */
	err = size < 16 ? CUDA_ERROR_INVALID_IMAGE : load(library, out, data, n, opt, val);
	free(data);
	return err;
}

CUresult sl_module_load(CUmodule *out, const void *image, unsigned njit, CUjit_option *opt, void **val)
{
	return load(false, (void **)out, image, njit, opt, val);
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

	return err ? err : load(true, (void **)library, code, njit, jit, jitValues);
}

CUresult sl_cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jit, void **jitValues, unsigned int njit,
				  CUlibraryOption *opt, void **optValues, unsigned int nopt)
{
	CUresult err = library_options(opt, optValues, nopt);

	return err ? err : load_file(true, (void **)library, fileName, njit, jit, jitValues);
}
