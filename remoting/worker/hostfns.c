/*
 * Host functions as the driver sees them: one callback of ours for streams and for nodes of graphs, which tells
 * through a pipe that it was called and blocks until sl_hostfn_done; and user objects of the driver, which tell
 * through the same pipe that no graph has a function any more.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "driver.h"

struct sl_hostfn {
	uint32_t id;
	uint32_t copy;		/* it stands for the host's side of a copy in a graph */
	atomic_int refs;	/* calls yet to come; one more for one in a graph */
	sem_t done;
};

static int hostfn_pipe[2] = { -1, -1 };

int sl_hostfn_open(void)
{
	if (hostfn_pipe[0] < 0 && pipe2(hostfn_pipe, O_CLOEXEC))
		return -errno;
	return hostfn_pipe[0];
}

struct sl_hostfn *sl_hostfn_new(uint32_t id)
{
	struct sl_hostfn *f = calloc(1, sizeof *f);

	if (!f)
		return NULL;
	f->id = id;
	if (sem_init(&f->done, 0, 0)) {
		free(f);
		return NULL;
	}
	return f;
}

void sl_hostfn_ref(struct sl_hostfn *f)
{
	atomic_fetch_add(&f->refs, 1);
}

void sl_hostfn_unref(struct sl_hostfn *f)
{
	if (atomic_fetch_sub(&f->refs, 1) == 1) {
		sem_destroy(&f->done);
		free(f);
	}
}

static void tell(const struct sl_hostfn *f, uint32_t what)
{
	const struct sl_hostfn_told m = { f->id, what };

	while (write(hostfn_pipe[1], &m, sizeof m) < 0 && errno == EINTR)
		;
}

/* Called on a thread of the driver. */
static void hostfn_call(void *p)
{
	struct sl_hostfn *f = p;

	tell(f, SL_HOSTFN_CALLED);
	while (sem_wait(&f->done) && errno == EINTR)
		;
	sl_hostfn_unref(f);
}

/* Called on a thread of the driver. */
static void hostfn_gone(void *p)
{
	tell(p, SL_HOSTFN_GONE);
}

int sl_hostfn_launch(uint64_t stream, struct sl_hostfn *f)
{
	return CU(cuLaunchHostFunc, (CUstream)stream, hostfn_call, f);
}

void sl_hostfn_done(struct sl_hostfn *f)
{
	sem_post(&f->done);
}

int sl_user_object(uint64_t *object, struct sl_hostfn *f, uint32_t refs)
{
	return CU(cuUserObjectCreate, (CUuserObject *)object, f, hostfn_gone, refs, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
}

int sl_hostfn_keep(uint64_t graph, struct sl_hostfn *f)
{
	uint64_t object = 0;
	int rc = sl_user_object(&object, f, 1);

	if (!rc && (rc = CU(cuGraphRetainUserObject, (CUgraph)graph, (CUuserObject)object, 1, CU_GRAPH_USER_OBJECT_MOVE)))
		CU(cuUserObjectRelease, (CUuserObject)object, 1); /* which tells that it is gone */
	return rc;
}

/* --- nodes --- */

static CUDA_HOST_NODE_PARAMS params(struct sl_hostfn *f)
{
	return (CUDA_HOST_NODE_PARAMS){ .fn = hostfn_call, .userData = f };
}

int sl_graph_add_host(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, struct sl_hostfn *f)
{
	CUDA_HOST_NODE_PARAMS p = params(f);

	return CU(cuGraphAddHostNode, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, &p);
}

int sl_graph_set_host(uint64_t exec, uint64_t node, struct sl_hostfn *f)
{
	CUDA_HOST_NODE_PARAMS p = params(f);

	return exec ? CU(cuGraphExecHostNodeSetParams, (CUgraphExec)exec, (CUgraphNode)node, &p) :
		      CU(cuGraphHostNodeSetParams, (CUgraphNode)node, &p);
}

int sl_graph_get_host(uint64_t node, uint32_t *id)
{
	CUDA_HOST_NODE_PARAMS p = { 0 };
	int rc = CU(cuGraphHostNodeGetParams, (CUgraphNode)node, &p);

	*id = !rc && p.fn == hostfn_call ? ((struct sl_hostfn *)p.userData)->id : 0;
	return rc;
}

/* --- copies of host memory: a child graph of a copy and of the function that moves the client's bytes --- */

static int fill(uint64_t g, struct sl_hostfn *f, const CUDA_MEMCPY3D *c, int in, uint64_t ctx)
{
	uint64_t copy = 0, host = 0;
	int rc = 0;

	f->copy = 1;
	if (c && !in)
		rc = CU(cuGraphAddMemcpyNode, (CUgraphNode *)&copy, (CUgraph)g, NULL, 0, c, (CUcontext)ctx);
	if (!rc)
		rc = sl_graph_add_host(&host, g, &copy, copy != 0, f);
	if (!rc && c && in)
		rc = CU(cuGraphAddMemcpyNode, (CUgraphNode *)&copy, (CUgraph)g, (CUgraphNode *)&host, 1, c, (CUcontext)ctx);
	return rc;
}

int sl_graph_copy_make(uint64_t *child, struct sl_hostfn *f, const CUDA_MEMCPY3D *c, int in, uint64_t ctx)
{
	uint64_t g = 0;
	int rc = CU(cuGraphCreate, (CUgraph *)&g, 0);

	if (rc)
		return rc;
	rc = fill(g, f, c, in, ctx);
	if (rc)
		CU(cuGraphDestroy, (CUgraph)g);
	else
		*child = g;
	return rc;
}

int sl_graph_copy_change(uint64_t node, struct sl_hostfn *f, const CUDA_MEMCPY3D *c, int in, uint64_t ctx)
{
	CUgraphNode at[2] = { 0 };
	uint64_t trial = 0;
	CUgraph g = NULL;
	size_t n = 2;
	/* Tried on a graph of its own first, so that an error changes nothing. */
	int rc = sl_graph_copy_make(&trial, f, c, in, ctx);

	if (rc)
		return rc;
	CU(cuGraphDestroy, (CUgraph)trial);
	rc = CU(cuGraphChildGraphNodeGetGraph, (CUgraphNode)node, &g);
	if (!rc)
		rc = CU(cuGraphGetNodes, g, at, &n);
	for (size_t i = 0; !rc && i < n && i < 2; i++)
		rc = CU(cuGraphDestroyNode, at[i]);
	return rc ? rc : fill((uint64_t)g, f, c, in, ctx);
}

int sl_graph_copy_find(uint64_t node, struct sl_copy_node *out)
{
	CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
	CUgraphNode at[2] = { 0 };
	CUgraph child = NULL;
	size_t n = 2;

	*out = (struct sl_copy_node){ 0 };
	if (CU(cuGraphNodeGetType, (CUgraphNode)node, &type) || type != CU_GRAPH_NODE_TYPE_GRAPH ||
	    CU(cuGraphChildGraphNodeGetGraph, (CUgraphNode)node, &child) || CU(cuGraphGetNodes, child, NULL, &n) || !n || n > 2 ||
	    CU(cuGraphGetNodes, child, at, &n))
		return 0;
	for (size_t i = 0; i < n; i++) {
		CUDA_HOST_NODE_PARAMS p = { 0 };

		if (CU(cuGraphNodeGetType, at[i], &type))
			return 0;
		if (type == CU_GRAPH_NODE_TYPE_MEMCPY)
			out->copy = (uint64_t)at[i];
		else if (type != CU_GRAPH_NODE_TYPE_HOST || CU(cuGraphHostNodeGetParams, at[i], &p) || p.fn != hostfn_call ||
			 !((struct sl_hostfn *)p.userData)->copy)
			return 0;
		else
			out->id = ((struct sl_hostfn *)p.userData)->id, out->host = (uint64_t)at[i];
	}
	return out->id != 0;
}
