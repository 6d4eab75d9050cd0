/*
 * Graphs that have to do with the program's own memory and functions: copies between host and device and host nodes, by
 * hand and captured, which see the memory as it is when the graph gets there; parameters and edges read back; user
 * objects, which end with the last graph.
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "graphs.h"

extern "C" __global__ void affine(int *v, int n, int mul, int add)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * mul + add;
}

static const int n = 3000;

static size_t edges(cudaGraph_t g)
{
	size_t count = 0;

#if CUDART_VERSION >= 13000
	CHECK(cudaGraphGetEdges(g, NULL, NULL, NULL, &count));
#else
	CHECK(cudaGraphGetEdges(g, NULL, NULL, &count));
#endif
	return count;
}

static unsigned types(cudaGraph_t g, cudaGraphNode_t *list, size_t *count)
{
	unsigned mask = 0;

	CHECK(cudaGraphGetNodes(g, list, count));
	for (size_t i = 0; i < *count; i++) {
		cudaGraphNodeType t;

		CHECK(cudaGraphNodeGetType(list[i], &t));
		mask |= 1u << t;
	}
	return mask;
}

/* What a host node does: it takes the result and prepares the next input. */
struct step {
	int *in, *out;
	long sum;
	int calls;
};

static void next_step(void *p)
{
	struct step *s = (struct step *)p;

	s->calls++;
	s->sum = 0;
	for (int i = 0; i < n; i++) {
		s->sum += s->out[i];
		s->in[i]++;
	}
}

static long expected(int first, int mul, int add)
{
	long sum = 0;

	for (int i = 0; i < n; i++)
		sum += (long)(first + i) * mul + add;
	return sum;
}

static void fill(int *in, int first)
{
	for (int i = 0; i < n; i++)
		in[i] = first + i;
}

/* In, compute, out, and a function that looks at it; from stream s, which captures. */
static void body(int *d, int *in, int *out, struct step *step, cudaStream_t s)
{
	CHECK(cudaMemcpyAsync(d, in, n * sizeof *d, cudaMemcpyHostToDevice, s));
	affine<<<(n + 127) / 128, 128, 0, s>>>(d, n, 3, 5);
	CHECK(cudaMemcpyAsync(out, d, n * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaLaunchHostFunc(s, next_step, step));
}

static void captured(int *d, cudaStream_t s)
{
	static int in_pageable[n], out_pageable[n];
	int *in, *out;
	cudaGraph_t g, clone;
	cudaGraphExec_t e, e2;
	cudaGraphNode_t list[8];
	size_t count = 8;
	struct step step = {};

	CHECK(cudaMallocHost(&in, n * sizeof *in));
	CHECK(cudaMallocHost(&out, n * sizeof *out));
	step.in = in;
	step.out = out;
	fill(in, 1);
	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
	body(d, in, out, &step, s);
	CHECK(cudaStreamEndCapture(s, &g));
	REQUIRE(step.calls == 0, "a captured function was called");
	REQUIRE(types(g, list, &count) == (1u << cudaGraphNodeTypeMemcpy | 1u << cudaGraphNodeTypeKernel | 1u << cudaGraphNodeTypeHost),
		"other types of nodes");
	REQUIRE(count == 4 && edges(g) == 3, "%zu nodes, %zu edges", count, edges(g));
	e = instantiate(g);
	for (int i = 0; i < 5; i++) { /* each run sees what the one before has prepared */
		CHECK(cudaGraphLaunch(e, s));
		if (i == 2)
			CHECK(cudaStreamSynchronize(s));
	}
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(step.calls == 5 && step.sum == expected(5, 3, 5), "after 5 runs: %d calls, sum %ld", step.calls, step.sum);
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaMemcpyAsync(d, in, n * sizeof *d, cudaMemcpyHostToDevice, s)); /* behind the host node */
	CHECK(cudaMemcpyAsync(out, d, n * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(out[0] == 7 && in[0] == 7, "behind a graph %d was copied, not %d", out[0], in[0]);

	/* the clone stays when the graph is gone; an exec is updated from a graph of other memory */
	CHECK(cudaGraphClone(&clone, g));
	CHECK(cudaGraphDestroy(g));
	e2 = instantiate(clone);
	CHECK(cudaGraphDestroy(clone));
	fill(in, 10);
	CHECK(cudaGraphLaunch(e2, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(step.sum == expected(10, 3, 5), "from a clone: sum %ld", step.sum);
	for (int i = 0; i < 20; i++) {
		struct step other = { in_pageable, out_pageable, 0, 0 };

		CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
		body(d, in_pageable, out_pageable, &other, s);
		CHECK(cudaStreamEndCapture(s, &g));
		CHECK(update(e2, g));
		CHECK(cudaGraphDestroy(g));
		fill(in_pageable, 100 * i);
		CHECK(cudaGraphLaunch(e2, s));
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(other.calls == 1 && other.sum == expected(100 * i, 3, 5), "update %d: sum %ld", i, other.sum);
	}
	CHECK(cudaGraphExecDestroy(e));
	CHECK(cudaGraphExecDestroy(e2));
	CHECK(cudaFreeHost(in));
	CHECK(cudaFreeHost(out));
}

static void by_hand(int *d, cudaStream_t s)
{
	static int in[n], in2[n], out[n];
	int mul = 2, add = 1, count = n;
	void *args[] = { &d, &count, &mul, &add };
	struct step step = { in, out, 0, 0 }, step2 = { in2, out, 0, 0 };
	cudaHostNodeParams host = { next_step, &step }, got = {};
	cudaKernelNodeParams kernel = {}, read;
	cudaMemcpy3DParms copy;
	cudaGraphNode_t to, k, from, fn, found;
	cudaGraphNodeType type;
	cudaGraph_t g, clone;
	cudaGraphExec_t e;

	CHECK(cudaGraphCreate(&g, 0));
	CHECK(cudaGraphAddMemcpyNode1D(&to, g, NULL, 0, d, in, n * sizeof *in, cudaMemcpyHostToDevice));
	kernel.func = (void *)affine;
	kernel.gridDim = dim3((n + 127) / 128);
	kernel.blockDim = dim3(128);
	kernel.kernelParams = args;
	CHECK(cudaGraphAddKernelNode(&k, g, &to, 1, &kernel));
	CHECK(cudaGraphAddMemcpyNode1D(&from, g, &k, 1, out, d, n * sizeof *out, cudaMemcpyDeviceToHost));
	CHECK(cudaGraphAddHostNode(&fn, g, &from, 1, &host));

	/* what was given is read back */
	CHECK(cudaGraphKernelNodeGetParams(k, &read));
	REQUIRE(read.func == (void *)affine && read.gridDim.x == kernel.gridDim.x && read.blockDim.x == 128 && read.kernelParams, "the kernel node");
	REQUIRE(*(int *)read.kernelParams[2] == 2 && *(int *)read.kernelParams[3] == 1 && *(int **)read.kernelParams[0] == d, "its parameters");
	CHECK(cudaGraphMemcpyNodeGetParams(to, &copy));
	REQUIRE(copy.srcPtr.ptr == in && copy.dstPtr.ptr == d && copy.extent.width == n * sizeof *in, "the copy node");
	CHECK(cudaGraphHostNodeGetParams(fn, &got));
	REQUIRE(got.fn == next_step && got.userData == &step, "the host node");
	CHECK(cudaGraphClone(&clone, g));
	CHECK(cudaGraphNodeFindInClone(&found, fn, clone));
	CHECK(cudaGraphHostNodeGetParams(found, &got));
	REQUIRE(got.userData == &step, "the host node of the clone");
	CHECK(cudaGraphDestroy(clone));

	e = instantiate(g);
	fill(in, 4);
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(step.sum == expected(4, 2, 1), "by hand: sum %ld", step.sum);

	/* the executable graph alone, then the graph */
	CHECK(cudaGraphExecMemcpyNodeSetParams1D(e, to, d, in2, n * sizeof *in2, cudaMemcpyHostToDevice));
	host.userData = &step2;
	CHECK(cudaGraphExecHostNodeSetParams(e, fn, &host));
	fill(in2, 50);
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(step2.sum == expected(50, 2, 1) && step.calls == 1 && step2.calls == 1, "changed: sum %ld", step2.sum);
	CHECK(cudaGraphHostNodeSetParams(fn, &host));
	CHECK(cudaGraphHostNodeGetParams(fn, &got));
	REQUIRE(got.userData == &step2, "the host node after it was changed");
	CHECK(cudaGraphMemcpyNodeSetParams1D(to, d, in2, n * sizeof *in2, cudaMemcpyHostToDevice));
	CHECK(cudaGraphMemcpyNodeGetParams(to, &copy));
	REQUIRE(copy.srcPtr.ptr == in2 && copy.dstPtr.ptr == d && copy.extent.width == n * sizeof *in2, "the copy node after it was changed");
	CHECK(cudaGraphNodeGetType(to, &type));
	REQUIRE(type == cudaGraphNodeTypeMemcpy, "its type is %d", (int)type);
	CHECK(cudaGraphExecDestroy(e));
	e = instantiate(g);
	fill(in2, 7);
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(step2.sum == expected(7, 2, 1) && step2.calls == 2, "the graph changed: sum %ld", step2.sum);

	/* of less, and back to the input, which the host node then counts up */
	CHECK(cudaGraphMemcpyNodeSetParams1D(from, in2, d, n * sizeof *in2, cudaMemcpyDeviceToHost));
	CHECK(cudaGraphMemcpyNodeSetParams1D(to, d, in2, n / 2 * sizeof *in2, cudaMemcpyHostToDevice));
	CHECK(cudaGraphExecDestroy(e));
	e = instantiate(g);
	fill(in2, 1);
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(in2[0] == 2 * 1 + 1 + 1 && in2[n - 1] == 2 * (2 * (7 + n - 1) + 1) + 1 + 1, "half of it: %d, %d", in2[0], in2[n - 1]);
	CHECK(cudaGraphExecDestroy(e));
	CHECK(cudaGraphDestroy(g));
}

static volatile int ended;

static void end(void *p)
{
	__sync_fetch_and_add((int *)p, 1);
}

static void objects(void)
{
	cudaUserObject_t o;
	cudaGraph_t g;
	cudaGraphNode_t node;
	cudaGraphExec_t e;

	CHECK(cudaUserObjectCreate(&o, (void *)&ended, end, 1, cudaUserObjectNoDestructorSync));
	CHECK(cudaUserObjectRetain(o, 2));
	CHECK(cudaGraphCreate(&g, 0));
	CHECK(cudaGraphAddEmptyNode(&node, g, NULL, 0));
	CHECK(cudaGraphRetainUserObject(g, o, 1, cudaGraphUserObjectMove));
	CHECK(cudaUserObjectRelease(o, 2));
	e = instantiate(g);
	CHECK(cudaGraphDestroy(g));
	CHECK(cudaGraphLaunch(e, 0));
	CHECK(cudaDeviceSynchronize());
	REQUIRE(!ended, "the object ended before its graph");
	CHECK(cudaGraphExecDestroy(e));
	while (!ended)
		usleep(1000);
}

/* A capture that nodes are added to by hand. */
static void mixed(int *d, cudaStream_t s)
{
	cudaStreamCaptureStatus status;
	const cudaGraphNode_t *deps;
	cudaGraphNode_t node, list[4];
	cudaGraph_t g, own;
	size_t count = 0;
	unsigned long long id;
	FILE *f;
	char path[] = "/tmp/graphhost.XXXXXX", line[64] = "";
	int fd = mkstemp(path);

	REQUIRE(fd >= 0, "no file");
	close(fd);
	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
	CHECK(cudaMemsetAsync(d, 0, 64, s));
#if CUDART_VERSION >= 13000
	const cudaGraphEdgeData *data;

	CHECK(cudaStreamGetCaptureInfo(s, &status, &id, &own, &deps, &data, &count));
#else
	CHECK(cudaStreamGetCaptureInfo_v2(s, &status, &id, &own, &deps, &count));
#endif
	REQUIRE(status == cudaStreamCaptureStatusActive && count == 1, "%zu dependencies", count);
	CHECK(cudaGraphAddEmptyNode(&node, own, deps, count));
#if CUDART_VERSION >= 13000
	CHECK(cudaStreamUpdateCaptureDependencies(s, &node, NULL, 1, cudaStreamSetCaptureDependencies));
#else
	CHECK(cudaStreamUpdateCaptureDependencies(s, &node, 1, cudaStreamSetCaptureDependencies));
#endif
	CHECK(cudaMemsetAsync(d, 1, 64, s));
	CHECK(cudaStreamEndCapture(s, &g));
	count = 4;
	CHECK(cudaGraphGetNodes(g, list, &count));
	REQUIRE(count == 3 && edges(g) == 2, "%zu nodes, %zu edges", count, edges(g));
	CHECK(cudaGraphDebugDotPrint(g, path, 0));
	f = fopen(path, "r");
	REQUIRE(f && fgets(line, sizeof line, f) && !strncmp(line, "digraph", 7), "the picture begins with %s", line);
	fclose(f);
	unlink(path);
	CHECK(cudaGraphDestroy(g));
}

/*
 * A node that copies host memory is left out, or the call that asks for it says that it cannot be; of a host node CUDA says so.
 * Either way the graph runs.
 */
static void left_out(int *d, cudaStream_t s)
{
	static int in[n], out[n];
	struct step step = { in, out, 0, 0 };
	cudaHostNodeParams host = { next_step, &step };
	cudaMemsetParams fill_params = {};
	cudaGraphNode_t zero, to, from, fn;
	cudaGraphExec_t e;
	cudaError_t err;
	cudaGraph_t g;

	fill_params.dst = d;
	fill_params.elementSize = 4;
	fill_params.width = n;
	fill_params.height = 1;
	CHECK(cudaGraphCreate(&g, 0));
	CHECK(cudaGraphAddMemsetNode(&zero, g, NULL, 0, &fill_params));
	CHECK(cudaGraphAddMemcpyNode1D(&to, g, &zero, 1, d, in, n * sizeof *in, cudaMemcpyHostToDevice));
	CHECK(cudaGraphAddMemcpyNode1D(&from, g, &to, 1, out, d, n * sizeof *out, cudaMemcpyDeviceToHost));
	CHECK(cudaGraphAddHostNode(&fn, g, &from, 1, &host));
	e = instantiate(g);
	for (int i = 0; i < 2; i++) {
		err = cudaGraphNodeSetEnabled(e, to, 0);
		REQUIRE(err == cudaSuccess || err == cudaErrorNotSupported, "a copy of host memory left out: %d", (int)err);
		REQUIRE(cudaGraphNodeSetEnabled(e, fn, 0) == cudaErrorInvalidValue, "a host node left out");
		cudaGetLastError();
	}
	CHECK(cudaGraphNodeSetEnabled(e, zero, 0));
	fill(in, 3);
	CHECK(cudaMemset(d, 0, n * sizeof *d));
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaGraphLaunch(e, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(out[5] == (err ? 3 + 5 : 0) && step.calls == 1, "out[5] is %d", out[5]);
	CHECK(cudaGraphExecDestroy(e));
	CHECK(cudaGraphDestroy(g));
}

int main()
{
	cudaStream_t s;
	int *d;

	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	captured(d, s);
	by_hand(d, s);
	objects();
	mixed(d, s);
	left_out(d, s);
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaFree(d));
	printf("graphhost: copies, functions, objects and captures\n");
	return pass();
}
