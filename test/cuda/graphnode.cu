/*
 * Graphs made by hand: nodes of every kind that a device alone needs, their parameters changed in the graph and in the
 * executable one, and an executable graph updated from another of the same form, and refused one of another.
 */
#include "graphs.h"

extern "C" __global__ void affine(int *v, int n, int mul, int add)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * mul + add;
}

static const int n = 1024;

static cudaKernelNodeParams kernel(int **v, int *count, int *mul, int *add)
{
	static void *args[8][4];
	static int next;
	cudaKernelNodeParams p = {};
	void **a = args[next++ % 8];

	a[0] = v;
	a[1] = count;
	a[2] = mul;
	a[3] = add;
	p.func = (void *)affine;
	p.gridDim = dim3(n / 128);
	p.blockDim = dim3(128);
	p.kernelParams = a;
	return p;
}

static void expect(const int *d, int want, const char *what)
{
	static int h[n];

	CHECK(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		REQUIRE(h[i] == want, "%s: element %d is %d, not %d", what, i, h[i], want);
}

/* v = 3; v = v * mul + add; w = v; and an empty node at the end of both. */
static cudaGraph_t build(int *v, int *w, int mul, int add, cudaGraphNode_t *kernel_node, cudaGraphNode_t *fill_node)
{
	cudaMemsetParams fill = {};
	cudaGraphNode_t copy, deps[2];
	cudaKernelNodeParams p;
	cudaGraph_t g;
	int count = n;
	size_t nodes;

	CHECK(cudaGraphCreate(&g, 0));
	fill.dst = v;
	fill.elementSize = 4;
	fill.value = 3;
	fill.width = n;
	fill.height = 1;
	CHECK(cudaGraphAddMemsetNode(fill_node, g, NULL, 0, &fill));
	p = kernel(&v, &count, &mul, &add);
	CHECK(cudaGraphAddKernelNode(kernel_node, g, fill_node, 1, &p));
	CHECK(cudaGraphAddMemcpyNode1D(&copy, g, kernel_node, 1, w, v, n * sizeof *v, cudaMemcpyDeviceToDevice));
	deps[0] = *kernel_node;
	deps[1] = copy;
	CHECK(cudaGraphAddEmptyNode(&copy, g, deps, 2));
	CHECK(cudaGraphGetNodes(g, NULL, &nodes));
	REQUIRE(nodes == 4, "%zu nodes, not 4", nodes);
	return g;
}

static cudaError_t edge(cudaGraph_t g, cudaGraphNode_t from, cudaGraphNode_t to, bool add)
{
#if CUDART_VERSION >= 13000
	return add ? cudaGraphAddDependencies(g, &from, &to, NULL, 1) : cudaGraphRemoveDependencies(g, &from, &to, NULL, 1);
#else
	return add ? cudaGraphAddDependencies(g, &from, &to, 1) : cudaGraphRemoveDependencies(g, &from, &to, 1);
#endif
}

static void refused(cudaError_t err, const char *what)
{
	REQUIRE(err == cudaErrorInvalidValue, "%s: %d", what, (int)err);
	cudaGetLastError();
}

/* Edges that a graph cannot have, or not lose: the call says so, and not a wait after it. from and to have an edge. */
static void wrong_edges(cudaGraph_t g, cudaGraphNode_t from, cudaGraphNode_t to)
{
	cudaGraphNode_t mine, theirs;
	cudaGraph_t strange;

	CHECK(cudaGraphCreate(&strange, 0));
	CHECK(cudaGraphAddEmptyNode(&theirs, strange, NULL, 0));
	CHECK(cudaGraphAddEmptyNode(&mine, g, NULL, 0));
	refused(edge(g, from, from, true), "a node that depends on itself");
	refused(edge(g, from, theirs, true), "an edge to a node of another graph");
	refused(edge(g, theirs, to, true), "an edge from a node of another graph");
	refused(edge(strange, from, to, true), "an edge of another graph");
	refused(edge(g, from, to, true), "an edge that is there");
	refused(edge(g, from, mine, false), "an edge that is not there, taken away");
	CHECK(edge(g, from, mine, true));
	CHECK(edge(g, from, mine, false));
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaGraphDestroyNode(mine));
	CHECK(cudaGraphDestroy(strange));
}

static void CUDART_CB nothing(void *) {}

/* Nodes of every kind that depend on these are refused by the call that adds them, and no later wait fails. */
static void wrong_dependencies(cudaGraph_t g, const cudaGraphNode_t *deps, size_t count, int *v, int *w, const char *what)
{
	cudaHostNodeParams host = { nothing, NULL };
	int elements = n, mul = 1, add = 0;
	cudaKernelNodeParams p = kernel(&v, &elements, &mul, &add);
	cudaMemsetParams fill = {};
	cudaGraphNode_t extra;
	cudaGraph_t child;
	cudaEvent_t event;
	size_t before, after;

	fill.dst = v;
	fill.elementSize = 4;
	fill.width = n;
	fill.height = 1;
	CHECK(cudaEventCreate(&event));
	CHECK(cudaGraphCreate(&child, 0));
	CHECK(cudaGraphGetNodes(g, NULL, &before));
	refused(cudaGraphAddEmptyNode(&extra, g, deps, count), what);
	refused(cudaGraphAddHostNode(&extra, g, deps, count, &host), what);
	refused(cudaGraphAddKernelNode(&extra, g, deps, count, &p), what);
	refused(cudaGraphAddMemsetNode(&extra, g, deps, count, &fill), what);
	refused(cudaGraphAddMemcpyNode1D(&extra, g, deps, count, w, v, n * sizeof *v, cudaMemcpyDeviceToDevice), what);
	refused(cudaGraphAddChildGraphNode(&extra, g, deps, count, child), what);
	refused(cudaGraphAddEventRecordNode(&extra, g, deps, count, event), what);
	refused(cudaGraphAddEventWaitNode(&extra, g, deps, count, event), what);
	CHECK(cudaGraphGetNodes(g, NULL, &after));
	REQUIRE(before == after, "%s: %zu nodes, not %zu", what, after, before);
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaGraphDestroy(child));
	CHECK(cudaEventDestroy(event));
}

/* mine is a node of g; so are nodes that the program has from the graph's lists, from a clone and from a capture of those. */
static void dependencies(cudaGraph_t g, cudaGraphNode_t mine, int *v, int *w)
{
	cudaGraphNode_t theirs, gone, twice[2] = { mine, mine }, found, list[8], extra;
	cudaGraph_t strange, clone, captured;
	cudaStream_t s;
	size_t count = 8;

	CHECK(cudaGraphCreate(&strange, 0));
	CHECK(cudaGraphAddEmptyNode(&theirs, strange, NULL, 0));
	CHECK(cudaGraphAddEmptyNode(&gone, g, NULL, 0));
	CHECK(cudaGraphDestroyNode(gone));
	wrong_dependencies(g, &theirs, 1, v, w, "a node of another graph");
	wrong_dependencies(g, &gone, 1, v, w, "a node that was destroyed");
	wrong_dependencies(g, twice, 2, v, w, "a node named twice");
	wrong_dependencies(g, NULL, 1, v, w, "no nodes");
	CHECK(cudaGraphDestroy(strange));
	wrong_dependencies(g, &theirs, 1, v, w, "a node of a graph that was destroyed");

	CHECK(cudaGraphClone(&clone, g));
	CHECK(cudaGraphNodeFindInClone(&found, mine, clone));
	wrong_dependencies(clone, &mine, 1, v, w, "a node of the original");
	CHECK(cudaGraphAddEmptyNode(&extra, clone, &found, 1));
	wrong_dependencies(g, &found, 1, v, w, "a node of the clone");
	CHECK(cudaGraphDestroy(clone));

	CHECK(cudaStreamCreate(&s));
	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	CHECK(cudaMemsetAsync(v, 0, n * sizeof *v, s));
	CHECK(cudaStreamEndCapture(s, &captured));
	CHECK(cudaGraphGetNodes(captured, list, &count));
	REQUIRE(count == 1, "%zu nodes, not 1", count);
	CHECK(cudaGraphAddEmptyNode(&extra, captured, list, 1));
	wrong_dependencies(g, list, 1, v, w, "a node of a captured graph");
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaGraphDestroy(captured));
}

int main()
{
	int *v, *w, count = n, mul, add;
	cudaGraphNode_t k, f, k2, f2, extra;
	cudaKernelNodeParams p;
	cudaGraph_t g, other;
	cudaGraphExec_t exec;
	cudaStream_t s;

	CHECK(cudaMalloc(&v, n * sizeof *v));
	CHECK(cudaMalloc(&w, n * sizeof *w));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	g = build(v, w, 2, 1, &k, &f);
	wrong_edges(g, f, k);
	dependencies(g, k, v, w);
	exec = instantiate(g);
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(v, 7, "as built");
	expect(w, 7, "the copy");

	/* the executable graph alone, then the graph alone */
	mul = 10;
	add = 4;
	p = kernel(&v, &count, &mul, &add);
	CHECK(cudaGraphExecKernelNodeSetParams(exec, k, &p));
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 34, "with other parameters");
	mul = 5;
	p = kernel(&v, &count, &mul, &add);
	CHECK(cudaGraphKernelNodeSetParams(k, &p));
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 34, "after the graph was changed");
	CHECK(update(exec, g));
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 19, "updated from its own graph");

	/* another graph of the same form, and one of another */
	other = build(v, w, 1, -3, &k2, &f2);
#if CUDART_VERSION >= 12000
	CHECK(update(exec, other));
#else
	/* CUDA 11 pairs nodes by the order in which they were added, destroyed ones included: g has had more than these. */
	EXPECT(update(exec, other), cudaErrorGraphExecUpdateFailure);
	cudaGetLastError();
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 19, "after an update whose nodes have no pairs");
	CHECK(cudaGraphExecDestroy(exec));
	CHECK(cudaGraphDestroy(g));
	g = build(v, w, 5, 4, &k, &f);
	exec = instantiate(g);
	CHECK(update(exec, other));
#endif
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 0, "updated from another graph");
	CHECK(cudaGraphAddEmptyNode(&extra, other, &k2, 1));
	EXPECT(update(exec, other), cudaErrorGraphExecUpdateFailure);
	cudaGetLastError();
	CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	expect(w, 0, "after an update that did not fit");

	/* what is wrong is refused at the call */
	p = kernel(&v, &count, &mul, &add);
	p.blockDim = dim3(4096);
	REQUIRE(cudaGraphAddKernelNode(&extra, g, NULL, 0, &p) != cudaSuccess, "a block of 4096 threads was taken");
	cudaGetLastError();
#if CUDART_VERSION >= 12020
	{
		cudaGraphNodeParams any = {};

		any.type = cudaGraphNodeTypeMemset;
		any.memset.dst = w;
		any.memset.elementSize = 1;
		any.memset.width = n * sizeof *w;
		any.memset.height = 1;
#if CUDART_VERSION >= 13000
		CHECK(cudaGraphAddNode(&extra, g, NULL, NULL, 0, &any));
#else
		CHECK(cudaGraphAddNode(&extra, g, NULL, 0, &any));
#endif
	}
#endif
	CHECK(cudaGraphExecDestroy(exec));
	CHECK(cudaGraphDestroy(g));
	CHECK(cudaGraphDestroy(other));
	printf("graphnode: built, changed and updated\n");
	return pass();
}
