/*
 * Nodes of graphs that are made or changed by hand. A kernel node's parameters are packed as a launch's are, by the
 * kernel's layout. A copy's operands are checked as those of a copy in a stream; what is done about this process's
 * memory is in graphhost.c.
 */
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "graphdeps.h"
#include "graphhost.h"
#include "handles.h"
#include "hostfn.h"
#include "launch.h"
#include "route.h"
#include "send.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- kernels --- */

/* A kernel node's parameters as they go on the wire. */
struct packed {
	CUfunction f;
	sl_buf b;
	const unsigned char *bytes;
	uint32_t n;
};

static CUresult pack(struct packed *k, const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUresult err;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	sl_buf_init(&k->b);
	k->f = p->func ? p->func : (CUfunction)(void *)p->kern; /* both are our kernels */
	err = sl_launch_pack(&k->b, k->f, (const unsigned[]){ p->gridDimX, p->gridDimY, p->gridDimZ },
			     (const unsigned[]){ p->blockDimX, p->blockDimY, p->blockDimZ }, p->sharedMemBytes, p->kernelParams, p->extra, &k->n);
	if (err) {
		sl_buf_free(&k->b);
		return err;
	}
	k->bytes = k->b.p;
	return CUDA_SUCCESS;
}

static CUDA_KERNEL_NODE_PARAMS from_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return (CUDA_KERNEL_NODE_PARAMS){ .func = p->func, .gridDimX = p->gridDimX, .gridDimY = p->gridDimY, .gridDimZ = p->gridDimZ,
					  .blockDimX = p->blockDimX, .blockDimY = p->blockDimY, .blockDimZ = p->blockDimZ,
					  .sharedMemBytes = p->sharedMemBytes, .kernelParams = p->kernelParams, .extra = p->extra };
}

CUresult sl_cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, const CUDA_KERNEL_NODE_PARAMS *p)
{
	struct packed k;
	CUresult err;
	uint32_t id;
	void *h;

	if (!node || (ndeps && !deps))
		return CUDA_ERROR_INVALID_VALUE;
	err = pack(&k, p);
	if (err)
		return err;
	id = sl_handle_new(SL_NODE, NULL, &h);
	err = !id ? CUDA_ERROR_OUT_OF_MEMORY :
		    fw_cuGraphAddKernelNode_v2(id, graph, deps, ndeps, k.f, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY,
					       p->blockDimZ, p->sharedMemBytes, k.bytes, k.n);
	sl_buf_free(&k.b);
	if (!err)
		*node = h;
	else if (id)
		sl_handle_free(SL_NODE, id);
	return err;
}

CUresult sl_cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return p ? sl_cuGraphAddKernelNode_v2(node, graph, deps, ndeps, &(CUDA_KERNEL_NODE_PARAMS[]){ from_v1(p) }[0]) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sl_cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	struct packed k;
	CUresult err = pack(&k, p);

	if (err)
		return err;
	err = fw_cuGraphKernelNodeSetParams_v2(node, k.f, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ,
					       p->sharedMemBytes, k.bytes, k.n);
	sl_buf_free(&k.b);
	return err;
}

CUresult sl_cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return p ? sl_cuGraphKernelNodeSetParams_v2(node, &(CUDA_KERNEL_NODE_PARAMS[]){ from_v1(p) }[0]) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sl_cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	struct packed k;
	CUresult err = pack(&k, p);

	if (err)
		return err;
	err = fw_cuGraphExecKernelNodeSetParams_v2(exec, node, k.f, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY,
						   p->blockDimZ, p->sharedMemBytes, k.bytes, k.n);
	sl_buf_free(&k.b);
	return err;
}

CUresult sl_cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return p ? sl_cuGraphExecKernelNodeSetParams_v2(exec, node, &(CUDA_KERNEL_NODE_PARAMS[]){ from_v1(p) }[0]) : CUDA_ERROR_INVALID_VALUE;
}

/* --- copies --- */

/* The copy that p asks for, with its sides in order; *host: one of them is this process's memory. */
static CUresult copy_of(CUDA_MEMCPY3D *c, const CUDA_MEMCPY3D *p, bool *host)
{
	bool twin = false;
	CUresult err;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	*c = *p;
	err = sl_copy3d_sides(c, true, &twin);
	*host = !err && sl_graph_copy_host(c);
	if (!err && !*host) { /* what the program leaves out stays so, for it to read back */
		c->srcPitch = p->srcPitch;
		c->srcHeight = p->srcHeight;
		c->dstPitch = p->dstPitch;
		c->dstHeight = p->dstHeight;
	}
	return err;
}

CUresult sl_cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	CUDA_MEMCPY3D c;
	CUresult err;
	uint32_t id, fn = 0;
	bool host;
	void *h;

	if (!node || (ndeps && !deps))
		return CUDA_ERROR_INVALID_VALUE;
	err = copy_of(&c, p, &host);
	if (!err && host)
		err = sl_graph_copy_new(p, &c, graph, &fn);
	if (err)
		return err;
	id = sl_handle_new(SL_NODE, NULL, &h);
	err = id ? fw_cuGraphAddMemcpyNode(id, graph, deps, ndeps, &c, ctx, fn) : CUDA_ERROR_OUT_OF_MEMORY;
	if (!err) {
		*node = h;
		return CUDA_SUCCESS;
	}
	sl_handle_free(SL_NODE, id);
	sl_hostfn_unused(fn);
	return err;
}

/* The function of a node that is a copy of this process's memory, 0 if it is another one. */
static CUresult function_of(CUgraphNode node, uint32_t *fn)
{
	CUDA_MEMCPY3D c;

	*fn = 0;
	return sl_hostfns_in_graphs() ? fw_cuGraphMemcpyNodeGetParams(node, &c, NULL, NULL, fn) : CUDA_SUCCESS;
}

CUresult sl_cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *p)
{
	CUDA_MEMCPY3D c;
	uint32_t fn;
	bool host;
	CUresult err = copy_of(&c, p, &host);

	if (!err)
		err = function_of(node, &fn);
	if (err)
		return err;
	if (!host && !fn)
		return fw_cuGraphMemcpyNodeSetParams(node, &c, 0);
	if (!host || !fn)
		return sl_refuse_with("cuGraphMemcpyNodeSetParams", "host memory, where the node copies none, or the other way round");
	err = sl_graph_copy_new(p, &c, NULL, &fn);
	if (err)
		return err;
	err = fw_cuGraphMemcpyNodeSetParams(node, &c, fn);
	if (err)
		sl_hostfn_unused(fn);
	return err;
}

/* A copy in an executable graph keeps its kind. */
CUresult sl_cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	CUDA_MEMCPY3D c, was;
	CUmemorytype src, dst;
	uint32_t fn;
	bool host;
	CUresult err = copy_of(&c, p, &host);

	if (!err)
		err = function_of(node, &fn);
	if (err)
		return err;
	if (!host && !fn)
		return fw_cuGraphExecMemcpyNodeSetParams(exec, node, &c, ctx, 0);
	if (!host || !fn || !sl_graph_copy_asked(fn, &was, &src, &dst) || (src == CU_MEMORYTYPE_HOST) != (c.srcMemoryType == CU_MEMORYTYPE_HOST) ||
	    (dst == CU_MEMORYTYPE_HOST) != (c.dstMemoryType == CU_MEMORYTYPE_HOST))
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_graph_copy_new(p, &c, NULL, &fn);
	if (err)
		return err;
	err = fw_cuGraphExecMemcpyNodeSetParams(exec, node, &c, ctx, fn);
	if (err)
		sl_hostfn_unused(fn);
	return err;
}

CUresult sl_cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *p)
{
	CUDA_MEMCPY3D c = { 0 };
	CUarray src = NULL, dst = NULL;
	CUmemorytype from, to;
	uint32_t fn = 0;
	CUresult err;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuGraphMemcpyNodeGetParams(node, &c, &src, &dst, &fn);
	if (err)
		return err;
	if (fn)
		return sl_graph_copy_asked(fn, p, &from, &to) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	c.srcArray = src;
	c.dstArray = dst;
	*p = c;
	return CUDA_SUCCESS;
}

/* --- nodes that an executable graph leaves out --- */

/* The note of a node's handle. It never changes: a node keeps its type, and a copy of host memory never becomes one of device memory. */
enum { UNKNOWN, OPTIONAL, HOST_COPY, ALWAYS };

/* Whether CUDA can leave a node out: a kernel, a fill or a copy. The worker is asked once about a node. */
static CUresult check_optional(CUgraphNode node, const char *function)
{
	CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
	uint8_t what = sl_handle_note(SL_NODE, node);
	CUresult err = CUDA_SUCCESS;
	uint32_t fn = 0;

	if (what == UNKNOWN) {
		err = sl_cuGraphNodeGetType(node, &type);
		if (!err && type == CU_GRAPH_NODE_TYPE_MEMCPY)
			err = function_of(node, &fn);
		if (err)
			return err;
		what = fn ? HOST_COPY : type <= CU_GRAPH_NODE_TYPE_MEMSET ? OPTIONAL : ALWAYS;
		sl_handle_set_note(SL_NODE, node, what);
	}
	if (what == HOST_COPY)
		return sl_refuse_with(function, "a node that copies host memory");
	return what == ALWAYS ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult sl_cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled)
{
	CUresult err = check_optional(node, "cuGraphNodeSetEnabled");

	return err ? err : fw_cuGraphNodeSetEnabled(exec, node, enabled);
}

CUresult sl_cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled)
{
	CUresult err = check_optional(node, "cuGraphNodeGetEnabled");

	return err ? err : fw_cuGraphNodeGetEnabled(exec, node, enabled);
}

/* --- parameters of all kinds --- */

static CUresult refuse_kind(const char *function, CUgraphNodeType type)
{
	char kind[32];

	snprintf(kind, sizeof kind, "a node of type %u", type);
	return sl_refuse_with(function, kind);
}

static CUDA_KERNEL_NODE_PARAMS kernel_of(const CUgraphNodeParams *p)
{
	CUDA_KERNEL_NODE_PARAMS k;

	_Static_assert(sizeof k == sizeof p->kernel, "the versions of a kernel node's parameters have one layout");
	memcpy(&k, &p->kernel, sizeof k);
	return k;
}

static CUDA_MEMSET_NODE_PARAMS fill_of(const CUgraphNodeParams *p)
{
	return (CUDA_MEMSET_NODE_PARAMS){ p->memset.dst, p->memset.pitch, p->memset.value, p->memset.elementSize, p->memset.width, p->memset.height };
}

static CUcontext or_current(CUcontext ctx)
{
	struct sl_ctx *c;

	return ctx || sl_ctx_use(&c) ? ctx : sl_ctx_handle(c);
}

/* --- memory nodes --- */

/* Memory of one device, which no other device and no other process reaches. */
static CUresult check_alloc(const CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	const char *with = NULL;

	if (p->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || (p->accessDescCount && !p->accessDescs))
		return CUDA_ERROR_INVALID_VALUE;
	if (p->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		with = "host memory";
	else if (!sl_dev(p->poolProps.location.id))
		return CUDA_ERROR_INVALID_VALUE;
	if (p->poolProps.handleTypes)
		with = "memory to export";
	for (size_t i = 0; i < p->accessDescCount && !with; i++)
		if (p->accessDescs[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || p->accessDescs[i].location.id != p->poolProps.location.id)
			with = "access of another device";
	return with ? sl_refuse_with("cuGraphAddMemAllocNode", with) : CUDA_SUCCESS;
}

CUresult sl_cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	CUdeviceptr at = 0;
	CUresult err;
	uint32_t id;
	void *h;

	if (!node || !p || (ndeps && !deps))
		return CUDA_ERROR_INVALID_VALUE;
	err = check_alloc(p);
	if (err)
		return err;
	id = sl_handle_new(SL_NODE, NULL, &h);
	err = id ? fw_cuGraphAddMemAllocNode(id, graph, deps, ndeps, p->poolProps.location.id, p->bytesize, &at) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_NODE, id);
		return err;
	}
	*node = h;
	p->dptr = at;
	return sl_graph_memory(at, p->bytesize);
}

static CUresult add_alloc(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUgraphNodeParams *p)
{
	CUDA_MEM_ALLOC_NODE_PARAMS a = { .poolProps = p->alloc.poolProps, .accessDescs = p->alloc.accessDescs,
					 .accessDescCount = p->alloc.accessDescCount, .bytesize = p->alloc.bytesize };
	CUresult err = sl_cuGraphAddMemAllocNode(node, graph, deps, ndeps, &a);

	if (!err)
		p->alloc.dptr = a.dptr;
	return err;
}

/* --- conditional nodes --- */

CUresult sl_cuGraphConditionalHandleCreate(CUgraphConditionalHandle *handle, CUgraph graph, CUcontext ctx, unsigned int value, unsigned int flags)
{
	if (!handle)
		return CUDA_ERROR_INVALID_VALUE;
	/* Here NULL does not stand for the current context, with driver 580. */
	return ctx ? fw_cuGraphConditionalHandleCreate(handle, graph, ctx, value, flags) : CUDA_ERROR_INVALID_CONTEXT;
}

#define BODIES_MAX 65536

/* The bodies are graphs of the node's own; the program finds them in a list that belongs to the node. */
static CUresult add_conditional(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUDA_CONDITIONAL_NODE_PARAMS *p)
{
	CUgraph *bodies = NULL;
	size_t n = p->size;
	CUresult err;
	uint32_t id;
	void *h;

	if ((ndeps && !deps) || !n || n > BODIES_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	id = sl_handle_new(SL_NODE, NULL, &h);
	if (id)
		bodies = sl_graph_node_keep(h, (n + 1) * sizeof *bodies);
	err = bodies ? fw_cuGraphAddNode(id, graph, deps, ndeps, p->handle, p->type, p->ctx, bodies, &n) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_NODE, id);
		return err;
	}
	p->phGraph_out = bodies;
	*node = h;
	return CUDA_SUCCESS;
}

/* --- child graphs --- */

static CUresult add_child(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUgraph child, unsigned ownership)
{
	CUresult err;
	uint32_t id;
	void *h;

	if (!node || (ndeps && !deps) || ownership > CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE)
		return CUDA_ERROR_INVALID_VALUE;
	id = sl_handle_new(SL_NODE, NULL, &h);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = fw_cuGraphAddChildGraphNode(id, graph, deps, ndeps, child, ownership);
	if (err)
		sl_handle_free(SL_NODE, id);
	else
		*node = h;
	return err;
}

CUresult sl_cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUgraph child)
{
	return add_child(node, graph, deps, ndeps, child, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE);
}

/* --- one function for all kinds --- */

CUresult sl_cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t ndeps, CUgraphNodeParams *p)
{
	if (!p || !node)
		return CUDA_ERROR_INVALID_VALUE;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return sl_cuGraphAddKernelNode_v2(node, graph, deps, ndeps, &(CUDA_KERNEL_NODE_PARAMS[]){ kernel_of(p) }[0]);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return sl_cuGraphAddMemcpyNode(node, graph, deps, ndeps, &p->memcpy.copyParams, or_current(p->memcpy.copyCtx));
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return sl_cuGraphAddMemsetNode(node, graph, deps, ndeps, &(CUDA_MEMSET_NODE_PARAMS[]){ fill_of(p) }[0], or_current(p->memset.ctx));
	case CU_GRAPH_NODE_TYPE_HOST:
		return sl_cuGraphAddHostNode(node, graph, deps, ndeps, (CUDA_HOST_NODE_PARAMS[]){ { p->host.fn, p->host.userData } });
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return add_child(node, graph, deps, ndeps, p->graph.graph, p->graph.ownership);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return sl_cuGraphAddEmptyNode(node, graph, deps, ndeps);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return sl_cuGraphAddEventWaitNode(node, graph, deps, ndeps, p->eventWait.event);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return sl_cuGraphAddEventRecordNode(node, graph, deps, ndeps, p->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return add_alloc(node, graph, deps, ndeps, p);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return sl_cuGraphAddMemFreeNode(node, graph, deps, ndeps, p->free.dptr);
	case CU_GRAPH_NODE_TYPE_CONDITIONAL:
		return add_conditional(node, graph, deps, ndeps, &p->conditional);
	default:
		return refuse_kind("cuGraphAddNode", p->type);
	}
}

/* Edge data of zeroes describes a plain edge. */
static bool plain(const CUgraphEdgeData *edges, size_t n)
{
	static const CUgraphEdgeData zero;

	for (size_t i = 0; edges && i < n; i++)
		if (memcmp(&edges[i], &zero, sizeof zero))
			return false;
	return true;
}

#define PORT_LAUNCH_ORDER 2	/* the last port of a kernel */
#define EDGE_PROGRAMMATIC 1

/* Whether CUDA has such an edge, from a kernel to a node of a type; a plain edge is always one. */
static CUresult check_edge(CUgraphNode from, const CUgraphEdgeData *e, CUgraphNodeType to)
{
	CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
	CUresult err;

	if (plain(e, 1))
		return CUDA_SUCCESS;
	if (e->to_port || e->from_port > PORT_LAUNCH_ORDER || e->type > EDGE_PROGRAMMATIC ||
	    (e->type == EDGE_PROGRAMMATIC && (!e->from_port || to != CU_GRAPH_NODE_TYPE_KERNEL)))
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_cuGraphNodeGetType(from, &type);
	return err || type == CU_GRAPH_NODE_TYPE_KERNEL ? err : CUDA_ERROR_INVALID_VALUE;
}

/* Whether a node that was added can be taken away again, and all is as it was. */
static bool retractable(const CUgraphNodeParams *p)
{
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return p->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
	case CU_GRAPH_NODE_TYPE_CONDITIONAL:
		return false;
	default:
		return true;
	}
}

CUresult sl_cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *edges, size_t ndeps, CUgraphNodeParams *p)
{
	CUgraphNode *to, added;
	CUresult err;

	if (plain(edges, ndeps))
		return sl_cuGraphAddNode(node, graph, deps, ndeps, p);
	if (!node || !p)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_graph_dependencies(graph, deps, ndeps);
	for (size_t i = 0; !err && i < ndeps; i++)
		err = check_edge(deps[i], &edges[i], p->type);
	if (err)
		return err;
	if (!retractable(p))
		return sl_refuse_with("cuGraphAddNode", "edge data for a moved graph, a conditional node or a memory node");
	to = calloc(ndeps, sizeof *to);
	if (!to)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* The node alone, then its edges. */
	err = sl_cuGraphAddNode(&added, graph, NULL, 0, p);
	if (!err) {
		for (size_t i = 0; i < ndeps; i++)
			to[i] = added;
		err = sl_cuGraphAddDependencies_v2(graph, deps, to, edges, ndeps);
		if (err)
			sl_cuGraphDestroyNode(added);
		else
			*node = added;
	}
	free(to);
	return err;
}

CUresult sl_cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *p)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return sl_cuGraphKernelNodeSetParams_v2(node, &(CUDA_KERNEL_NODE_PARAMS[]){ kernel_of(p) }[0]);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return sl_cuGraphMemcpyNodeSetParams(node, &p->memcpy.copyParams);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return sl_cuGraphMemsetNodeSetParams(node, &(CUDA_MEMSET_NODE_PARAMS[]){ fill_of(p) }[0]);
	case CU_GRAPH_NODE_TYPE_HOST:
		return sl_cuGraphHostNodeSetParams(node, (CUDA_HOST_NODE_PARAMS[]){ { p->host.fn, p->host.userData } });
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return sl_cuGraphEventWaitNodeSetEvent(node, p->eventWait.event);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return sl_cuGraphEventRecordNodeSetEvent(node, p->eventRecord.event);
	default:
		return refuse_kind("cuGraphNodeSetParams", p->type);
	}
}

CUresult sl_cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *p)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return sl_cuGraphExecKernelNodeSetParams_v2(exec, node, &(CUDA_KERNEL_NODE_PARAMS[]){ kernel_of(p) }[0]);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return sl_cuGraphExecMemcpyNodeSetParams(exec, node, &p->memcpy.copyParams, or_current(p->memcpy.copyCtx));
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return sl_cuGraphExecMemsetNodeSetParams(exec, node, &(CUDA_MEMSET_NODE_PARAMS[]){ fill_of(p) }[0], or_current(p->memset.ctx));
	case CU_GRAPH_NODE_TYPE_HOST:
		return sl_cuGraphExecHostNodeSetParams(exec, node, (CUDA_HOST_NODE_PARAMS[]){ { p->host.fn, p->host.userData } });
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return sl_cuGraphExecChildGraphNodeSetParams(exec, node, p->graph.graph);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return sl_cuGraphExecEventWaitNodeSetEvent(exec, node, p->eventWait.event);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return sl_cuGraphExecEventRecordNodeSetEvent(exec, node, p->eventRecord.event);
	default:
		return refuse_kind("cuGraphExecNodeSetParams", p->type);
	}
}

/* --- updating a whole graph --- */

CUresult sl_cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	CUgraphExecUpdateResultInfo got = { 0 };
	CUresult status = CUDA_SUCCESS, err;

	if (!info)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuGraphExecUpdate_v2(exec, graph, &status, &got.result, &got.errorNode, &got.errorFromNode);
	if (err)
		return err;
	*info = got;
	return status; /* GRAPH_EXEC_UPDATE_FAILURE if the graph does not fit */
}

/*
 * CUDA 11's. It is not the other one with fewer results: it pairs the nodes of the two graphs by the order in which they
 * were added, destroyed ones included, so it refuses some updates that the other one makes. A worker of a release
 * that has only the other one makes them.
 */
CUresult sl_cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *bad, CUgraphExecUpdateResult *result)
{
	CUgraphExecUpdateResultInfo info = { 0 };
	CUresult status = CUDA_SUCCESS, err;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_EXEC, exec);
	if (sl_worker_lacks(&b, SL_OP_cuGraphExecUpdate)) {
		err = sl_cuGraphExecUpdate_v2(exec, graph, &info);
	} else {
		err = fw_cuGraphExecUpdate(exec, graph, &status, &info.result, &info.errorNode);
		err = err ? err : status;
	}
	if (err && err != CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
		return err;
	if (bad)
		*bad = info.errorNode;
	if (result)
		*result = info.result;
	return err;
}
