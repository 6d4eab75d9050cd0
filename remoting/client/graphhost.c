/*
 * What graphs have of this process: host nodes, copies from and to its memory, and user objects.
 *
 * Flow of a copy: this process and the worker have a block each, at one address (HOST_MAP). When the graph gets to a copy
 * to the device, a function of the shim's own packs the program's bytes into the block here and sends them to the block
 * there (HOST_WRITE), from which the GPU copies. Behind a copy from the device such a function fetches the block (HOST_READ)
 * and scatters it. So the program's memory is read and written when the graph gets there. The worker makes one node of the
 * two. The block ends with the function: when no graph has it any more.
 *
 * A block is its function's alone, which runs on one thread: there is no lock.
 */
#include "graphhost.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "hostfn.h"
#include "log.h"
#include "send.h"
#include "session.h"
#include "stream.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* --- host nodes --- */

CUresult sl_cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, const CUDA_HOST_NODE_PARAMS *p)
{
	uint32_t fn, id;
	CUresult err;
	void *h;

	if (!node || !p || !p->fn || (ndeps && !deps))
		return CUDA_ERROR_INVALID_VALUE;
	fn = sl_hostfn_in_graph(p->fn, p->userData, graph);
	id = fn ? sl_handle_new(SL_NODE, NULL, &h) : 0;
	err = id ? fw_cuGraphAddHostNode(id, graph, deps, ndeps, fn) : CUDA_ERROR_OUT_OF_MEMORY;
	if (!err) {
		*node = h;
		return CUDA_SUCCESS;
	}
	sl_handle_free(SL_NODE, id);
	sl_hostfn_unused(fn);
	return err;
}

CUresult sl_cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *p)
{
	CUDA_HOST_NODE_PARAMS got;
	CUresult err;
	uint32_t fn = 0;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuGraphHostNodeGetParams(node, &fn);
	if (err)
		return err;
	got.userData = sl_hostfn_of(fn, &got.fn);
	if (!got.fn)
		return CUDA_ERROR_INVALID_VALUE;
	*p = got;
	return CUDA_SUCCESS;
}

CUresult sl_cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *p)
{
	uint32_t fn;
	CUresult err;

	if (!p || !p->fn)
		return CUDA_ERROR_INVALID_VALUE;
	fn = sl_hostfn_in_graph(p->fn, p->userData, NULL);
	err = fn ? fw_cuGraphHostNodeSetParams(node, fn) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err)
		sl_hostfn_unused(fn);
	return err;
}

CUresult sl_cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS *p)
{
	uint32_t fn;
	CUresult err;

	if (!p || !p->fn)
		return CUDA_ERROR_INVALID_VALUE;
	fn = sl_hostfn_in_graph(p->fn, p->userData, NULL);
	err = fn ? fw_cuGraphExecHostNodeSetParams(exec, node, fn) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err)
		sl_hostfn_unused(fn);
	return err;
}

/* --- copies --- */

struct copy {
	CUDA_MEMCPY3D asked;	/* by the program */
	CUDA_MEMCPY3D c;	/* its sides in order */
	struct sl_ctx *ctx;
	uint32_t ctx_id;
	uint8_t *block;		/* packed rows; NULL if both sides are this process's */
	size_t n;
};

/* A row of one side. */
static uint8_t *src_row(const CUDA_MEMCPY3D *c, size_t y, size_t z)
{
	return (uint8_t *)(uintptr_t)c->srcHost + ((c->srcZ + z) * c->srcHeight + c->srcY + y) * c->srcPitch + c->srcXInBytes;
}

static uint8_t *dst_row(const CUDA_MEMCPY3D *c, size_t y, size_t z)
{
	return (uint8_t *)c->dstHost + ((c->dstZ + z) * c->dstHeight + c->dstY + y) * c->dstPitch + c->dstXInBytes;
}

static CUresult send_block(void *arg)
{
	struct copy *k = arg;
	CUresult err = CUDA_SUCCESS;

	for (size_t at = 0; at < k->n && !err; at += SL_MAX_COPY_IN) {
		size_t n = k->n - at < SL_MAX_COPY_IN ? k->n - at : SL_MAX_COPY_IN;
		sl_buf b;

		sl_buf_init(&b);
		sl_put(&b, struct wire_host_write, .dst = (uintptr_t)k->block + at);
		err = sl_oneway_bulk(CTL_HOST_WRITE, &b, k->block + at, n);
		sl_buf_free(&b);
	}
	return err;
}

static CUresult fetch_block(void *arg)
{
	struct copy *k = arg;
	CUresult err = CUDA_SUCCESS;

	for (size_t at = 0; at < k->n && !err; at += SL_MAX_COPY_IN) {
		size_t n = k->n - at < SL_MAX_COPY_IN ? k->n - at : SL_MAX_COPY_IN;
		sl_reply r;
		sl_buf b;

		sl_buf_init(&b);
		sl_put(&b, struct wire_host_read, .src = (uintptr_t)k->block + at, .size = n);
		err = sl_wait(CTL_HOST_READ, &b, &r);
		sl_get_bytes(&r, k->block + at, n);
		if (!err && r.bad)
			err = CUDA_ERROR_UNKNOWN;
		sl_reply_free(&r);
		sl_buf_free(&b);
	}
	return err;
}

/* The graph has got to the copy. On the thread of the shim's own functions. */
static void move(void *arg, CUresult failed)
{
	struct copy *k = arg;
	const CUDA_MEMCPY3D *c = &k->c;
	bool in = c->srcMemoryType == CU_MEMORYTYPE_HOST, out = c->dstMemoryType == CU_MEMORYTYPE_HOST;
	CUresult err = failed;

	if (!err && !in)
		err = sl_ctx_with(k->ctx, fetch_block, k);
	for (size_t z = 0, at = 0; z < c->Depth && !err; z++)
		for (size_t y = 0; y < c->Height; y++, at += c->WidthInBytes)
			memmove(out ? dst_row(c, y, z) : k->block + at, in ? src_row(c, y, z) : k->block + at, c->WidthInBytes);
	if (!err && !out)
		err = sl_ctx_with(k->ctx, send_block, k);
	if (err)
		sl_log(SL_ERROR, "a copy of host memory in a graph failed: error %d", err);
}

static CUresult unmap_there(void *arg)
{
	struct copy *k = arg;
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_unmap, .address = (uintptr_t)k->block);
	err = sl_oneway(CTL_HOST_UNMAP, &b);
	sl_buf_free(&b);
	return err;
}

/* No graph has the copy any more. */
static void drop(void *arg)
{
	struct copy *k = arg;

	if (k->block) {
		if (sl_handle_state_by_id(SL_CTX, k->ctx_id) == k->ctx)
			sl_ctx_with(k->ctx, unmap_there, k);
		munmap(k->block, k->n);
	}
	free(k);
}

static CUresult map_block(struct copy *k)
{
	CUresult err;
	size_t n;
	sl_buf b;

	if (__builtin_mul_overflow(k->c.WidthInBytes, k->c.Height, &n) || __builtin_mul_overflow(n, k->c.Depth, &n) || !n ||
	    n > SL_MAX_HOST_MAP)
		return CUDA_ERROR_OUT_OF_MEMORY;
	k->n = n;
	k->block = sl_guard_place((n + 4095) & ~(size_t)4095, 0);
	if (!k->block)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_host_map, .address = (uintptr_t)k->block, .size = (n + 4095) & ~(size_t)4095);
	err = sl_wait(CTL_HOST_MAP, &b, NULL);
	sl_buf_free(&b);
	if (err) {
		munmap(k->block, n);
		k->block = NULL;
	}
	return err;
}

CUresult sl_graph_copy_new(const CUDA_MEMCPY3D *asked, CUDA_MEMCPY3D *c, CUgraph graph, uint32_t *fn)
{
	struct copy *k = calloc(1, sizeof *k);
	struct sl_ctx *ctx;
	CUresult err;

	*fn = 0;
	if (!k)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_ctx_use(&ctx);
	if (!err) {
		k->asked = *asked;
		k->c = *c;
		k->ctx = ctx;
		k->ctx_id = atomic_load(&ctx->id);
		if (c->srcMemoryType != c->dstMemoryType)
			err = map_block(k);
	}
	if (!err) {
		*fn = sl_hostfn_inside_graph(move, k, drop, graph);
		err = *fn ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (err) {
		drop(k);
		return err;
	}
	if (c->srcMemoryType == CU_MEMORYTYPE_HOST)
		c->srcHost = k->block;
	if (c->dstMemoryType == CU_MEMORYTYPE_HOST)
		c->dstHost = k->block;
	return CUDA_SUCCESS;
}

bool sl_graph_copy_asked(uint32_t fn, CUDA_MEMCPY3D *asked, CUmemorytype *src, CUmemorytype *dst)
{
	struct copy *k = sl_hostfn_of(fn, NULL);

	if (!k)
		return false;
	*asked = k->asked;
	*src = k->c.srcMemoryType;
	*dst = k->c.dstMemoryType;
	return true;
}

CUresult sl_graph_copy_capture(const CUDA_MEMCPY3D *p, CUstream s, bool *captured)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	const CUgraphNode *deps = NULL;
	CUDA_MEMCPY3D c = *p, asked = *p;
	CUgraph graph = NULL;
	uint32_t fn, id;
	struct sl_ctx *ctx;
	CUresult err;
	size_t n = 0;
	CUgraphNode node;
	void *h;

	*captured = false;
	if (!sl_capturing_any() || sl_cuStreamGetCaptureInfo_v2(s, &status, NULL, &graph, &deps, &n) || status == CU_STREAM_CAPTURE_STATUS_NONE)
		return CUDA_SUCCESS;
	*captured = true;
	if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	err = sl_ctx_use(&ctx);
	if (p->Height == 1 && p->Depth == 1) /* of a row CUDA tells none */
		asked.srcPitch = asked.srcHeight = asked.dstPitch = asked.dstHeight = 0;
	if (!err)
		err = sl_graph_copy_new(&asked, &c, graph, &fn);
	if (err)
		return err;
	id = sl_handle_new(SL_NODE, NULL, &h);
	err = id ? fw_cuGraphAddMemcpyNode(id, graph, deps, n, &c, sl_ctx_handle(ctx), fn) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_NODE, id);
		sl_hostfn_unused(fn);
		return err;
	}
	node = h;
	return fw_cuStreamUpdateCaptureDependencies(s, &node, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

/* --- user objects --- */

CUresult sl_cuUserObjectCreate(CUuserObject *object, void *ptr, CUhostFn destroy, unsigned int refs, unsigned int flags)
{
	uint32_t id, fn;
	CUresult err;
	void *h;

	if (!object || !destroy || !refs || refs > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
		return CUDA_ERROR_INVALID_VALUE;
	id = sl_handle_new(SL_USEROBJ, NULL, &h);
	fn = id ? sl_hostfn_object(destroy, ptr, id) : 0;
	err = fn ? fw_cuUserObjectCreate(id, fn, refs, flags) : CUDA_ERROR_OUT_OF_MEMORY;
	if (!err) {
		*object = h;
		return CUDA_SUCCESS;
	}
	sl_hostfn_unused(fn);
	sl_handle_free(SL_USEROBJ, id);
	return err;
}
