/*
 * Linking at run time. The worker's driver compiles and links; an input goes to the worker
 * as a module's image does, once, and the linked image comes back to the program. Native
 * drivers compile an input when it is added, so each call waits: its error and its logs are
 * there when it returns.
 *
 * Locking: none. As with the driver, a program does not use a link state in two threads
 * at a time. States come from a pool whose memory stays, see handles.h.
 */
#include "codec.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "jit.h"
#include "load.h"
#include "log.h"
#include "route.h"
#include "sha256.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>

struct link {
	void *link;
	uint32_t id;
	struct sl_jit jit; /* of cuLinkCreate: the program keeps its options until the end */
	void *image;	   /* linked */
	size_t size;
};

static struct sl_pool links = { .size = sizeof(struct link) };

/* Begins a frame to the session of a link state's context. */
static void begin(sl_buf *b, const struct link *l)
{
	sl_buf_init(b);
	sl_route(b, SL_LINK, sl_handle_value(SL_LINK, l->id));
}

CUresult sl_cuLinkCreate_v2(unsigned int n, CUjit_option *opt, void **val, CUlinkState *out)
{
	struct wire_link_create head = { 0 };
	sl_reply r = { 0 };
	struct sl_ctx *c;
	struct link *l;
	CUresult err;
	sl_buf b;
	void *h;

	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_jit_count(n, opt, val, &head.noptions);
	if (!err)
		err = sl_ctx_use(&c);
	if (err)
		return err;
	l = sl_pool_get(&links);
	if (!l)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*l = (struct link){ 0 };
	l->id = sl_handle_new(SL_LINK, l, &h);
	if (!l->id) {
		sl_pool_put(&links, l);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	sl_jit_open(&l->jit, n, opt, val);
	begin(&b, l);
	head.id = l->id;
	sl_put_bytes(&b, &head, sizeof head);
	sl_jit_put(&b, n, opt, val);
	err = sl_wait(CTL_LINK_CREATE, &b, &r);
	if (!err)
		sl_jit_take(&l->jit, &r);
	sl_reply_free(&r);
	sl_buf_free(&b);
	if (err) {
		sl_handle_free(SL_LINK, l->id);
		sl_pool_put(&links, l);
		return err;
	}
	*out = h;
	return CUDA_SUCCESS;
}

/* Asks the worker to add an input that it has already. */
static CUresult request(const struct link *l, const struct wire_link_add *head, const char *name, unsigned n, CUjit_option *opt, void **val)
{
	sl_reply r = { 0 };
	CUresult err;
	sl_buf b;

	begin(&b, l);
	sl_put_bytes(&b, head, sizeof *head);
	sl_jit_put(&b, n, opt, val);
	sl_put_bytes(&b, name, head->nname);
	err = sl_wait(CTL_LINK_ADD, &b, &r);
	if (err >= 0)
		sl_jit_take(&l->jit, &r);
	sl_reply_free(&r);
	sl_buf_free(&b);
	return err;
}

static CUresult add(struct link *l, CUjitInputType type, void *data, size_t size, const char *name, unsigned n, CUjit_option *opt, void **val)
{
	struct wire_link_add head = { .size = size, .id = l->id, .type = type };
	struct sl_image image = { .size = size, .nparts = 1, .parts = &image.one, .one = { data, size } };
	struct sl_sha256 s;
	CUresult err;
	sl_buf where;

	if (type >= CU_JIT_NUM_INPUT_TYPES || !data || !size)
		return CUDA_ERROR_INVALID_VALUE;
	if (size > SL_MAX_IMAGE) {
		sl_log(SL_ERROR, "an input of %zu bytes for the linker is not supported: the limit is %u; see docs/limits.md", size, SL_MAX_IMAGE);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	for (unsigned i = 0; i < n && opt; i++)
		if (opt[i] >= CU_JIT_WALL_TIME && opt[i] <= CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
			return CUDA_ERROR_INVALID_VALUE; /* the link state has the logs */
	err = sl_jit_count(n, opt, val, &head.noptions);
	if (err)
		return err;
	head.nname = name ? (uint32_t)strnlen(name, SL_MAX_LINK_NAME) : 0;
	sl_sha256_init(&s);
	sl_sha256_add(&s, data, size);
	sl_sha256_end(&s, head.sum);
	err = request(l, &head, name, n, opt, val);
	if (err == SL_RESULT_NOT_IN_STORE) {
		begin(&where, l);
		err = sl_image_upload(where.to, where.to_ctx, &image, head.sum);
		if (!err)
			err = request(l, &head, name, n, opt, val);
	}
	return err < 0 ? CUDA_ERROR_UNKNOWN : err;
}

CUresult sl_cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int n, CUjit_option *opt,
			     void **val)
{
	struct link *l = sl_handle_state(SL_LINK, state);

	return l ? add(l, type, data, size, name, n, opt, val) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sl_cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int n, CUjit_option *opt, void **val)
{
	struct link *l = sl_handle_state(SL_LINK, state);
	CUresult err;
	size_t size;
	char *data;

	if (!l)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!path)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_slurp(path, &data, &size);
	if (err)
		return err;
	err = add(l, type, data, size, path, n, opt, val);
	free(data);
	return err;
}

/* Reads the linked image. */
static CUresult fetch(const struct link *l, uint8_t *to, size_t size)
{
	CUresult err = CUDA_SUCCESS;
	size_t n;

	for (size_t at = 0; at < size && !err; at += n) {
		sl_reply r = { 0 };
		sl_buf b;

		n = size - at < SL_MAX_LINK_READ ? size - at : SL_MAX_LINK_READ;
		begin(&b, l);
		sl_put(&b, struct wire_link_read, .id = l->id, .offset = at, .size = n);
		err = sl_wait(CTL_LINK_READ, &b, &r);
		if (!err) {
			sl_get_bytes(&r, to + at, n);
			err = r.bad ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
		}
		sl_reply_free(&r);
		sl_buf_free(&b);
	}
	return err;
}

CUresult sl_cuLinkComplete(CUlinkState state, void **image, size_t *size)
{
	struct link *l = sl_handle_state(SL_LINK, state);
	struct wire_link_complete_reply done = { 0 };
	sl_reply r = { 0 };
	CUresult err;
	void *p;
	sl_buf b;

	if (!l)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!image)
		return CUDA_ERROR_INVALID_VALUE;
	begin(&b, l);
	sl_put(&b, struct wire_link_complete, .id = l->id);
	err = sl_wait(CTL_LINK_COMPLETE, &b, &r);
	sl_buf_free(&b);
	if (!err)
		sl_get_bytes(&r, &done, sizeof done);
	if (err >= 0)
		sl_jit_take(&l->jit, &r);
	if (!err && (r.bad || done.size > SL_MAX_IMAGE || l->image))
		err = CUDA_ERROR_UNKNOWN;
	sl_reply_free(&r);
	if (err)
		return err;
	/* An image may be given without its size to what loads it. */
	p = calloc(1, done.size + 64);
	err = p ? fetch(l, p, done.size) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		free(p);
		return err;
	}
	*image = l->image = p;
	l->size = done.size;
	if (size)
		*size = done.size;
	return CUDA_SUCCESS;
}

CUresult sl_cuLinkDestroy(CUlinkState state)
{
	struct link *l = sl_handle_state(SL_LINK, state);
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!l || !sl_handle_claim(SL_LINK, sl_handle_bare(state)))
		return CUDA_ERROR_INVALID_HANDLE;
	err = fw_cuLinkDestroy(state);
	free(l->image);
	sl_pool_put(&links, l);
	return err;
}
