/*
 * Reading graphs: a kernel node's parameters, and a picture of a graph for people.
 *
 * What cuGraphKernelNodeGetParams points at belongs to the node, and stays until the node is read again or destroyed.
 */
#include "codec.h"
#include "ctx.h"
#include "gen.h"
#include "graphhost.h"
#include "handles.h"
#include "kernel.h"
#include "module.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- parameters --- */

enum { PARAMS_MAX = 1 << 16 };	/* bytes of a kernel's parameters */

struct node {
	void **params;
	size_t bytes;
	unsigned char packed[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The node has n; what it had before is freed. */
static void give(CUgraphNode h, struct node *n)
{
	struct node *was;

	pthread_mutex_lock(&lock);
	was = sl_handle_state(SL_NODE, h);
	if (sl_handle_set_state(SL_NODE, h, n) || !n)
		n = was;
	pthread_mutex_unlock(&lock);
	if (n) {
		free(n->params);
		free(n);
	}
}

void *sl_graph_node_keep(CUgraphNode h, size_t n)
{
	struct node *k = calloc(1, sizeof *k + n);

	if (k)
		give(h, k);
	return k ? k->packed : NULL;
}

CUresult sl_cuGraphDestroyNode(CUgraphNode hNode)
{
	give(hNode, NULL);
	return fw_cuGraphDestroyNode(hNode);
}

/* The function of a kernel, as cuKernelGetFunction or cuModuleGetFunction gives it. */
static CUfunction function_of(uint32_t id)
{
	struct sl_kernel *k = sl_handle_state_by_id(SL_KERNEL, id);

	if (!k || !k->owner)
		return NULL;
	return k->owner->library || k->owner->parent ? sl_kernel_function(id) : sl_handle_value(SL_KERNEL, id);
}

CUresult sl_cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p)
{
	CUDA_KERNEL_NODE_PARAMS got = { 0 };
	struct node *n = malloc(sizeof *n + PARAMS_MAX);
	unsigned id = 0, has = 0;
	struct sl_launch_info k;
	CUcontext ctx = NULL;
	struct sl_ctx *c;
	CUresult err;

	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	n->params = NULL;
	n->bytes = PARAMS_MAX;
	err = p ? sl_ctx_use(&c) : CUDA_ERROR_INVALID_VALUE;
	if (!err)
		err = fw_cuGraphKernelNodeGetParams_v2(node, &got, &id, &has, &ctx, n->packed, &n->bytes);
	if (!err) {
		CUfunction f = function_of(id);

		got.ctx = ctx;
		if (has & 1)
			got.func = f;
		if (has & 2)
			got.kern = sl_handle_value(SL_KERNEL, id);
		err = f ? sl_kernel_layout(f, c->dev, &k) : CUDA_ERROR_INVALID_VALUE;
	}
	if (!err && k.nparams) {
		n->params = calloc(k.nparams, sizeof *n->params);
		err = n->params && k.param_bytes <= n->bytes ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
		for (uint32_t i = 0; !err && i < k.nparams; i++)
			n->params[i] = n->packed + k.offset[i];
	}
	if (err) {
		free(n->params);
		free(n);
		return err;
	}
	got.kernelParams = n->params;
	*p = got;
	give(node, n);
	return CUDA_SUCCESS;
}

CUresult sl_cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	CUDA_KERNEL_NODE_PARAMS got;
	CUresult err;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_cuGraphKernelNodeGetParams_v2(node, &got);
	if (err)
		return err;
	*p = (CUDA_KERNEL_NODE_PARAMS_v1){ .func = got.func ? got.func : (CUfunction)(void *)got.kern,
					   .gridDimX = got.gridDimX, .gridDimY = got.gridDimY, .gridDimZ = got.gridDimZ,
					   .blockDimX = got.blockDimX, .blockDimY = got.blockDimY, .blockDimZ = got.blockDimZ,
					   .sharedMemBytes = got.sharedMemBytes, .kernelParams = got.kernelParams };
	return CUDA_SUCCESS;
}

/* --- a picture --- */

static const char *const kinds[] = { "KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "EVENT_WAIT", "EVENT_RECORD",
				     "EXT_SEMAS_SIGNAL", "EXT_SEMAS_WAIT", "MEM_ALLOC", "MEM_FREE", "BATCH_MEM_OP", "CONDITIONAL" };

struct picture {
	FILE *f;
	bool verbose;
	unsigned graphs;
};

static CUresult draw_graph(struct picture *p, CUgraph graph, unsigned depth);

static CUresult draw_node(struct picture *p, CUgraphNode node, unsigned depth)
{
	CUDA_KERNEL_NODE_PARAMS k;
	CUgraphNodeType type = 0;
	CUgraph child;
	CUresult err = sl_cuGraphNodeGetType(node, &type);

	if (err)
		return err;
	fprintf(p->f, "\"node_%p\" [shape=\"%s\" label=\"%s", (void *)node, type == CU_GRAPH_NODE_TYPE_KERNEL ? "octagon" : "rectangle",
		type < sizeof kinds / sizeof *kinds ? kinds[type] : "NODE");
	if (type == CU_GRAPH_NODE_TYPE_KERNEL && !sl_cuGraphKernelNodeGetParams_v2(node, &k)) {
		struct sl_kernel *fn = sl_handle_state_by_id(SL_KERNEL, sl_handle_bare(k.kern ? (void *)k.kern : (void *)k.func));

		fprintf(p->f, "\\n%s", fn ? fn->name : "");
		if (p->verbose)
			fprintf(p->f, "\\n<<<(%u,%u,%u),(%u,%u,%u),%u>>>", k.gridDimX, k.gridDimY, k.gridDimZ, k.blockDimX, k.blockDimY,
				k.blockDimZ, k.sharedMemBytes);
	}
	fprintf(p->f, "\"];\n");
	if (type != CU_GRAPH_NODE_TYPE_GRAPH)
		return CUDA_SUCCESS;
	err = sl_cuGraphChildGraphNodeGetGraph(node, &child);
	return err ? err : draw_graph(p, child, depth + 1);
}

static CUresult draw_edges(struct picture *p, CUgraph graph)
{
	CUgraphNode *from, *to;
	size_t n = 0;
	CUresult err = sl_cuGraphGetEdges(graph, NULL, NULL, &n);

	if (err || !n)
		return err;
	from = calloc(n, sizeof *from);
	to = calloc(n, sizeof *to);
	err = from && to ? sl_cuGraphGetEdges(graph, from, to, &n) : CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t i = 0; !err && i < n; i++)
		fprintf(p->f, "\"node_%p\" -> \"node_%p\";\n", (void *)from[i], (void *)to[i]);
	free(from);
	free(to);
	return err;
}

static CUresult draw_graph(struct picture *p, CUgraph graph, unsigned depth)
{
	CUgraphNode *nodes;
	size_t n = 0;
	CUresult err = sl_cuGraphGetNodes(graph, NULL, &n);

	if (err || depth > 64)
		return err;
	fprintf(p->f, "subgraph cluster_%u {\nlabel=\"graph_%u\";\n", p->graphs, p->graphs);
	p->graphs++;
	nodes = calloc(n + 1, sizeof *nodes);
	err = !nodes ? CUDA_ERROR_OUT_OF_MEMORY : n ? sl_cuGraphGetNodes(graph, nodes, &n) : CUDA_SUCCESS;
	for (size_t i = 0; !err && i < n; i++)
		err = draw_node(p, nodes[i], depth);
	free(nodes);
	if (!err)
		err = draw_edges(p, graph);
	fprintf(p->f, "}\n");
	return err;
}

CUresult sl_cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags)
{
	struct picture p = { .verbose = flags & CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE };
	CUresult err = CUDA_SUCCESS;

	if (!path)
		return CUDA_ERROR_INVALID_VALUE;
	sl_handle_id(SL_GRAPH, graph, &err);
	if (err)
		return CUDA_ERROR_INVALID_VALUE;
	p.f = fopen(path, "we");
	if (!p.f)
		return CUDA_ERROR_OPERATING_SYSTEM;
	fprintf(p.f, "digraph dot {\n");
	err = draw_graph(&p, graph, 0);
	fprintf(p.f, "}\n");
	if (fclose(p.f) && !err)
		err = CUDA_ERROR_OPERATING_SYSTEM;
	return err;
}
