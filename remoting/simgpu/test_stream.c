/* Order and overlap: streams, events, the default stream, capture and graphs. */
#include "testing.h"

static void t_overlap(void)
{
	CUfunction f;
	CUstream a, b;
	int ms = 100;
	void *args[] = { &ms };
	double start;

	begin();
	f = kernel("_Z5sleepi");
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	start = now_ms();
	CU(run1(f, a, args));
	CU(run1(f, b, args));
	CHECK(now_ms() - start < 50);
	IS(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
	CU(cuCtxSynchronize());
	CHECK(now_ms() - start < 180);
	CHECK(now_ms() - start >= 100);
	CU(cuStreamQuery(a));
	start = now_ms();
	CU(run1(f, a, args));
	CU(run1(f, a, args));
	CU(cuStreamSynchronize(a));
	CHECK(now_ms() - start >= 200);
}

static void t_order(void)
{
	CUdeviceptr p;
	CUfunction f;
	CUstream s;
	int v = 0, want = 0;

	begin();
	f = kernel("_Z3madPiii");
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuStreamCreate(&s, 0));
	CU(cuMemsetD32Async(p, 0, 1, s));
	for (int i = 0; i < 200; i++) {
		int k = i % 3, add = i;
		void *args[] = { &p, &k, &add };

		CU(run1(f, s, args));
		want = want * k + add;
	}
	CU(cuMemcpyDtoHAsync_v2(&v, p, 4, s));
	CU(cuStreamSynchronize(s));
	CHECK(v == want);
}

/* A slow store in one stream and a copy that reads it in another: what the copy sees tells the order. */
static int after(CUfunction f, CUdeviceptr p, CUstream first, CUstream second)
{
	int v = 0, one = 1, ms = 50;
	void *args[] = { &p, &one, &ms };
	int *pin;

	CU(cuMemsetD32_v2(p, 0, 1));
	CU(cuCtxSynchronize());
	CU(cuMemHostAlloc((void **)&pin, 4, 0));
	CU(run1(f, first, args));
	CU(cuMemcpyDtoHAsync_v2(pin, p, 4, second));
	CU(cuCtxSynchronize());
	v = *pin;
	CU(cuMemFreeHost(pin));
	return v;
}

static void t_default_stream(void)
{
	CUstream a, b, n;
	CUdeviceptr p;
	CUfunction f;

	begin();
	f = kernel("_Z5storePiii");
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuStreamCreate(&a, 0));
	CU(cuStreamCreate(&b, 0));
	CU(cuStreamCreate(&n, CU_STREAM_NON_BLOCKING));
	CHECK(after(f, p, a, NULL) == 1);
	CHECK(after(f, p, NULL, a) == 1);
	CHECK(after(f, p, CU_STREAM_LEGACY, b) == 1);
	CHECK(after(f, p, CU_STREAM_PER_THREAD, NULL) == 1);	/* the thread's own stream blocks too */
#ifndef __SANITIZE_THREAD__	/* what is not ordered is a race, and that is the point */
	CHECK(after(f, p, a, b) == 0);
	CHECK(after(f, p, NULL, n) == 0);
	CHECK(after(f, p, n, NULL) == 0);
	CHECK(after(f, p, CU_STREAM_PER_THREAD, a) == 0);
#endif
}

static void *thread_run(void *arg)
{
	void **a = arg;
	int ms = 60;
	void *args[] = { &ms };

	CU(cuCtxSetCurrent(a[0]));
	CU(cuLaunchKernel_ptsz(a[1], 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL));
	CU(cuStreamSynchronize(CU_STREAM_PER_THREAD));
	return NULL;
}

static void t_threads(void)
{
	pthread_t t[6];
	void *a[2];
	double start;

	a[0] = begin();
	a[1] = kernel("_Z5sleepi");
	start = now_ms();
	for (int i = 0; i < 6; i++)
		CHECK(!pthread_create(&t[i], NULL, thread_run, a));
	for (int i = 0; i < 6; i++)
		pthread_join(t[i], NULL);
	CHECK(now_ms() - start < 300);		/* one after the other it were 360 */
}

static void t_events(void)
{
	CUevent a, b, c;
	CUstream s, o;
	CUdeviceptr p;
	CUfunction f, g;
	int ms = 40, v, one = 1, delay = 40;
	void *args[] = { &ms }, *gargs[] = { &p, &one, &delay };
	float t;

	begin();
	f = kernel("_Z5sleepi");
	g = kernel("_Z5storePiii");
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuMemsetD32_v2(p, 0, 1));
	CU(cuEventCreate(&a, 0));
	CU(cuEventCreate(&b, CU_EVENT_BLOCKING_SYNC));
	CU(cuEventCreate(&c, CU_EVENT_DISABLE_TIMING));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&o, CU_STREAM_NON_BLOCKING));
	CU(cuEventQuery(a));
	CU(cuEventRecord(a, s));
	CU(run1(f, s, args));
	CU(cuEventRecord(b, s));
	IS(cuEventQuery(b), CUDA_ERROR_NOT_READY);
	IS(cuEventElapsedTime_v2(&t, a, b), CUDA_ERROR_NOT_READY);
	CU(cuEventSynchronize(b));
	CU(cuEventQuery(b));
	CU(cuEventElapsedTime_v2(&t, a, b));
	CHECK(t >= 40 && t < 90);
	IS(cuEventElapsedTime_v2(&t, a, c), CUDA_ERROR_INVALID_HANDLE);
	CU(run1(g, s, gargs));
	CU(cuEventRecord(c, s));
	CU(cuStreamWaitEvent(o, c, 0));
	CU(cuMemcpyDtoHAsync_v2(&v, p, 4, o));
	CU(cuStreamSynchronize(o));
	CHECK(v == 1);
	CU(cuEventDestroy_v2(c));		/* may go while it is waited for */
	CU(run1(f, s, args));
	CU(cuEventRecord(a, s));
	CU(cuStreamDestroy_v2(s));		/* work goes on */
	IS(cuEventQuery(a), CUDA_ERROR_NOT_READY);
	CU(cuEventSynchronize(a));
}

static int host_value;

static void host_add(void *arg)
{
	size_t n;

	IS(cuMemGetInfo_v2(&n, &n), CUDA_ERROR_NOT_PERMITTED);
	host_value = host_value * 10 + *(int *)arg;
}

static void callback(CUstream s, CUresult r, void *arg)
{
	(void)s;
	CHECK(r == CUDA_SUCCESS);
	host_add(arg);
}

static void t_host_functions(void)
{
	int one = 1, two = 2, ms = 20;
	void *args[] = { &ms };
	CUstream s;
	CUfunction f;

	begin();
	f = kernel("_Z5sleepi");
	CU(cuStreamCreate(&s, 0));
	CU(run1(f, s, args));
	CU(cuLaunchHostFunc(s, host_add, &one));
	CU(cuStreamAddCallback(s, callback, &two, 0));
	CU(cuStreamSynchronize(s));
	CHECK(host_value == 12);
}

static void t_values(void)
{
	CUdeviceptr p;
	CUstream a, b;
	int *v;

	begin();
	CU(cuMemHostAlloc((void **)&v, 8, 0));
	CU(cuMemAlloc_v2(&p, 8));
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuCtxSynchronize());
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuStreamWaitValue32_v2(a, p, 5, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuMemcpyDtoHAsync_v2(v, p, 4, a));
	usleep(20000);
	IS(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
	CU(cuStreamWriteValue32_v2(b, p, 6, 0));
	CU(cuStreamSynchronize(a));
	CHECK(*v == 6);
}

static void t_stream_attributes(void)
{
	CUstreamBatchMemOpParams ops[3];
	CUstreamAttrValue v;
	CUdeviceptr p;
	CUstream a, b;
	CUcontext c, got;
	int prio;

	c = begin();
	memset(&v, 0, sizeof(v));
	CU(cuStreamCreateWithPriority(&a, CU_STREAM_NON_BLOCKING, -9));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuStreamGetPriority(a, &prio));
	CHECK(prio == -5);
	CU(cuStreamGetAttribute(a, CU_LAUNCH_ATTRIBUTE_PRIORITY, &v));
	CHECK(v.priority == -5);
	v.priority = -2;
	CU(cuStreamSetAttribute(a, CU_LAUNCH_ATTRIBUTE_PRIORITY, &v));
	CU(cuStreamCopyAttributes(b, a));
	CU(cuStreamGetPriority(b, &prio));
	CHECK(prio == -2);
	IS(cuStreamGetAttribute(a, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &v), CUDA_ERROR_INVALID_VALUE);
	CU(cuStreamGetCtx(a, &got));
	CHECK(got == c);
	CU(cuMemAlloc_v2(&p, 16));
	CU(cuMemsetD8_v2(p, 0, 16));
	CU(cuCtxSynchronize());
	memset(ops, 0, sizeof(ops));
	ops[0].operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
	ops[0].writeValue.address = p;
	ops[0].writeValue.value64 = 1ULL << 40;
	ops[1].operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
	ops[1].waitValue.address = p;
	ops[1].waitValue.value64 = 1ULL << 40;
	ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
	ops[2].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
	ops[2].writeValue.address = p + 8;
	ops[2].writeValue.value = 3;
	CU(cuStreamBatchMemOp_v2(a, 3, ops, 0));
	CU(cuStreamSynchronize(a));
	CU(cuMemcpyDtoH_v2(&prio, p + 8, 4));
	CHECK(prio == 3);
	ops[2].writeValue.address = 0x10;
	IS(cuStreamBatchMemOp_v2(a, 3, ops, 0), CUDA_ERROR_INVALID_VALUE);
}

static void t_printf(void)
{
	char out[256] = "";
	int pipes[2], saved = dup(1), x = 5;
	void *args[] = { &x };
	CUfunction f;
	ssize_t n;

	begin();
	f = kernel("_Z3sayi");
	fflush(stdout);
	CHECK(!pipe(pipes));
	dup2(pipes[1], 1);
	CU(cuLaunchKernel(f, 2, 1, 1, 2, 1, 1, 0, NULL, args, NULL));
	CU(cuCtxSynchronize());
	fflush(stdout);
	dup2(saved, 1);
	n = read(pipes[0], out, sizeof(out) - 1);
	CHECK(n > 0);
	CHECK(!strcmp(out, "block 0 thread 0 says 5\nblock 0 thread 1 says 5\n"
			   "block 1 thread 0 says 5\nblock 1 thread 1 says 5\n"));
}

/* graphs */

static void t_capture(void)
{
	CUdeviceptr p;
	CUstream s, o;
	CUevent fork, join;
	CUgraph g;
	CUgraphExec x;
	CUfunction f;
	CUgraphNode nodes[16];
	CUgraphNodeType type;
	CUstreamCaptureStatus st;
	size_t n = 16;
	int k = 2, add = 1, v, one = 1;
	void *args[] = { &p, &k, &add };

	begin();
	f = kernel("_Z3madPiii");
	CU(cuMemAlloc_v2(&p, 8));
	CU(cuMemsetD32_v2(p, 0, 2));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&o, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CU(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CU(cuStreamIsCapturing(s, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_ACTIVE);
	CU(run1(f, s, args));
	CU(cuEventRecord(fork, s));
	CU(cuStreamWaitEvent(o, fork, 0));
	CU(cuStreamIsCapturing(o, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_ACTIVE);
	CU(cuMemsetD32Async(p + 4, 9, 1, o));
	CU(cuLaunchHostFunc(o, host_add, &one));
	CU(cuEventRecord(join, o));
	IS(cuEventQuery(join), CUDA_ERROR_CAPTURED_EVENT);
	CU(run1(f, s, args));
	CU(cuStreamWaitEvent(s, join, 0));
	CU(run1(f, s, args));
	CU(cuStreamEndCapture(s, &g));
	CU(cuStreamIsCapturing(o, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_NONE);
	CU(cuGraphGetNodes(g, nodes, &n));
	CHECK(n == 5);
	CU(cuGraphNodeGetType(nodes[1], &type));
	CHECK(type == CU_GRAPH_NODE_TYPE_MEMSET);
	n = 0;
	CU(cuGraphNodeGetDependencies(nodes[4], NULL, &n));
	CHECK(n == 2);
	CU(cuMemcpyDtoH_v2(&v, p, 4));
	CHECK(v == 0);				/* nothing has run */
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphDestroy(g));
	add = 100;				/* captured by value */
	CU(cuGraphLaunch(x, s));
	CU(cuGraphLaunch(x, s));
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2(&v, p, 4));
	CHECK(v == 63);				/* six times 2v+1 */
	CU(cuMemcpyDtoH_v2(&v, p + 4, 4));
	CHECK(v == 9 && host_value == 11);
	CU(cuGraphExecDestroy(x));
	IS(cuGraphLaunch(x, s), CUDA_ERROR_INVALID_VALUE);
}

static void t_capture_errors(void)
{
	CUstream s, o, n;
	CUdeviceptr p, q;
	CUevent e;
	CUgraph g;
	CUstreamCaptureStatus st;

	begin();
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuStreamCreate(&s, 0));
	CU(cuStreamCreate(&o, 0));
	CU(cuStreamCreate(&n, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&e, 0));
	IS(cuStreamBeginCapture_v2(NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	IS(cuStreamEndCapture(s, &g), CUDA_ERROR_ILLEGAL_STATE);
	/* synchronising breaks it */
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	IS(cuStreamSynchronize(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CU(cuStreamIsCapturing(s, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
	IS(cuMemsetD32Async(p, 0, 1, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	IS(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* allocating is not for global mode */
	CU(cuStreamBeginCapture_v2(n, CU_STREAM_CAPTURE_MODE_GLOBAL));
	IS(cuMemAlloc_v2(&q, 4), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	IS(cuStreamEndCapture(n, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	CU(cuStreamBeginCapture_v2(n, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuMemAlloc_v2(&q, 4));
	CU(cuMemsetD32_v2(q, 0, 1));		/* the default stream minds blocking ones only */
	CU(cuStreamEndCapture(n, &g));
	CU(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
	IS(cuStreamIsCapturing(NULL, &st), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);	/* asking does no harm */
	CU(cuStreamIsCapturing(s, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_ACTIVE);
	IS(cuMemsetD32_v2(q, 0, 1), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	IS(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* a stream that joined must come back */
	CU(cuStreamBeginCapture_v2(n, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuEventRecord(e, n));
	CU(cuStreamWaitEvent(o, e, 0));
	CU(cuMemsetD32Async(p, 0, 1, o));
	IS(cuStreamEndCapture(o, &g), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	IS(cuStreamEndCapture(n, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	CU(cuStreamBeginCapture_v2(n, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuEventRecord(e, n));
	CU(cuStreamWaitEvent(o, e, 0));
	CU(cuMemsetD32Async(p, 0, 1, o));
	IS(cuStreamEndCapture(n, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
	/* an event from outside */
	CU(cuEventRecord(e, o));
	CU(cuStreamBeginCapture_v2(n, CU_STREAM_CAPTURE_MODE_RELAXED));
	IS(cuStreamWaitEvent(n, e, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	IS(cuStreamEndCapture(n, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	CU(cuMemFree_v2(p));
}

static void t_graph(void)
{
	CUDA_KERNEL_NODE_PARAMS_v2 kp = { 0 }, got;
	CUDA_MEMSET_NODE_PARAMS sp = { 0 };
	CUDA_MEMCPY3D cp = { 0 };
	CUDA_HOST_NODE_PARAMS hp = { 0 };
	CUgraphNode set, mad, copy, host, child, empty, from[8], to[8];
	CUgraph g, sub, clone;
	CUgraphExec x;
	CUdeviceptr p;
	CUcontext c;
	CUfunction f;
	size_t n = 8;
	int k = 3, add = 4, out = 0, seven = 7;
	void *args[] = { &p, &k, &add };

	c = begin();
	f = kernel("_Z3madPiii");
	CU(cuMemAlloc_v2(&p, 4));
	CU(cuGraphCreate(&g, 0));
	sp.dst = p;
	sp.value = 5;
	sp.elementSize = 4;
	sp.width = sp.height = 1;
	CU(cuGraphAddMemsetNode(&set, g, NULL, 0, &sp, c));
	kp.func = f;
	kp.gridDimX = kp.gridDimY = kp.gridDimZ = kp.blockDimX = kp.blockDimY = kp.blockDimZ = 1;
	kp.kernelParams = args;
	CU(cuGraphAddKernelNode_v2(&mad, g, &set, 1, &kp));
	CU(cuGraphCreate(&sub, 0));
	CU(cuGraphAddKernelNode_v2(&empty, sub, NULL, 0, &kp));
	CU(cuGraphAddChildGraphNode(&child, g, &mad, 1, sub));
	CU(cuGraphDestroy(sub));		/* it was copied */
	cp.srcMemoryType = CU_MEMORYTYPE_DEVICE;
	cp.srcDevice = p;
	cp.dstMemoryType = CU_MEMORYTYPE_HOST;
	cp.dstHost = &out;
	cp.WidthInBytes = 4;
	cp.Height = cp.Depth = 1;
	CU(cuGraphAddMemcpyNode(&copy, g, &child, 1, &cp, c));
	hp.fn = host_add;
	hp.userData = &seven;
	CU(cuGraphAddHostNode(&host, g, &copy, 1, &hp));
	CU(cuGraphAddEmptyNode(&empty, g, &host, 1));
	IS(cuGraphAddEmptyNode(&empty, g, (CUgraphNode[]){ (CUgraphNode)p }, 1), CUDA_ERROR_INVALID_VALUE);
	CU(cuGraphGetEdges(g, from, to, &n));
	CHECK(n == 5 && from[0] == set && to[0] == mad);
	CU(cuGraphKernelNodeGetParams_v2(mad, &got));
	CHECK(got.func == f && *(int *)got.kernelParams[1] == 3);
	CU(cuGraphClone(&clone, g));
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphLaunch(x, NULL));
	CU(cuStreamSynchronize(NULL));
	CHECK(out == (5 * 3 + 4) * 3 + 4 && host_value == 7);
	k = 0;
	CU(cuGraphExecKernelNodeSetParams_v2(x, mad, &kp));
	CU(cuGraphLaunch(x, NULL));
	CU(cuStreamSynchronize(NULL));
	CHECK(out == 4 * 3 + 4);
	CU(cuGraphNodeSetEnabled(x, mad, 0));
	CU(cuGraphLaunch(x, NULL));
	CU(cuStreamSynchronize(NULL));
	CHECK(out == 5 * 3 + 4);
	CU(cuGraphAddDependencies(g, &empty, &set, 1));	/* a circle */
	IS(cuGraphInstantiateWithFlags(&x, g, 0), CUDA_ERROR_INVALID_VALUE);
	CU(cuGraphRemoveDependencies(g, &empty, &set, 1));
	CU(cuGraphDestroyNode(child));
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphInstantiateWithFlags(&x, clone, 0));
	CU(cuGraphDestroy(g));
	CU(cuGraphLaunch(x, NULL));
	CU(cuStreamSynchronize(NULL));
	CHECK(out == (5 * 3 + 4) * 3 + 4);
	CU(cuGraphDestroy(clone));
}

/* Capture into a graph that is there, and events in graphs. */
static void t_graph_more(void)
{
	CUDA_HOST_NODE_PARAMS hp = { 0 };
	CUgraphNode host, rec;
	CUgraph g, same;
	CUgraphExec x;
	CUstream s;
	CUevent e, got;
	size_t n = 0;
	int one = 1, two = 2;

	begin();
	CU(cuStreamCreate(&s, 0));
	CU(cuEventCreate(&e, 0));
	CU(cuGraphCreate(&g, 0));
	hp.fn = host_add;
	hp.userData = &one;
	CU(cuGraphAddHostNode(&host, g, NULL, 0, &hp));
	CU(cuGraphAddEventRecordNode(&rec, g, &host, 1, e));
	CU(cuGraphEventRecordNodeGetEvent(rec, &got));
	CHECK(got == e);
	CU(cuStreamBeginCaptureToGraph(s, g, &rec, NULL, 1, CU_STREAM_CAPTURE_MODE_RELAXED));
	CU(cuLaunchHostFunc(s, host_add, &two));
	CU(cuStreamEndCapture(s, &same));
	CHECK(same == g);
	CU(cuGraphGetEdges(g, NULL, NULL, &n));
	CHECK(n == 2);
	CU(cuGraphInstantiateWithFlags(&x, g, 0));
	CU(cuGraphLaunch(x, s));
	CU(cuStreamSynchronize(s));
	CHECK(host_value == 12);
	CU(cuEventSynchronize(e));
	CU(cuGraphExecDestroy(x));
	CU(cuGraphDestroy(g));
}

/* Many threads, many streams, contexts come and go: for the sanitizers. */
static void *storm(void *arg)
{
	CUfunction f = ((void **)arg)[1];
	CUcontext own;

	CU(cuCtxSetCurrent(((void **)arg)[0]));
	for (int i = 0; i < 30; i++) {
		int k = 1, add = 1, v = 0;
		CUdeviceptr p;
		void *args[] = { &p, &k, &add };
		CUstream s;
		CUevent e;

		CU(cuStreamCreate(&s, i & 1));
		CU(cuEventCreate(&e, 0));
		CU(cuMemAllocAsync(&p, 64, s));
		CU(cuMemsetD32Async(p, 0, 1, s));
		for (int j = 0; j < 5; j++)
			CU(run1(f, s, args));
		CU(cuEventRecord(e, s));
		CU(cuStreamWaitEvent(CU_STREAM_PER_THREAD, e, 0));
		CU(cuMemcpyDtoHAsync_v2(&v, p, 4, CU_STREAM_PER_THREAD));
		CU(cuStreamSynchronize(CU_STREAM_PER_THREAD));
		CHECK(v == 5);
		CU(cuMemFreeAsync(p, s));
		CU(cuStreamDestroy_v2(s));
		CU(cuEventDestroy_v2(e));
		if (i % 10 == 0) {
			CU(cuCtxCreate_v2(&own, 0, 0));
			CU(cuMemAlloc_v2(&p, 100));
			CU(cuMemsetD8Async(p, 0, 100, NULL));
			CU(cuCtxDestroy_v2(own));
		}
	}
	return NULL;
}

static void t_storm(void)
{
	pthread_t t[4];
	size_t n0, n, total;
	void *a[2];

	a[0] = begin();
	a[1] = kernel("_Z3madPiii");
	CU(cuMemGetInfo_v2(&n0, &total));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&t[i], NULL, storm, a));
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	CU(cuCtxSynchronize());
	CU(cuMemGetInfo_v2(&n, &total));
	CHECK(n == n0);
}

static void nap(void *arg)
{
	usleep(*(unsigned *)arg);
}

/* Access that is taken away, and a mapping that ends, wait for the work that uses the memory. */
static void t_access(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc on = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemAccessDesc off = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_NONE };
	CUmemGenericAllocationHandle h;
	unsigned us = 50000, got = 0;
	CUdeviceptr va;
	CUstream s;

	begin();
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuMemAddressReserve(&va, 4 * MIB, 0, 0, 0));
	CU(cuMemCreate(&h, 2 * MIB, &prop, 0));
	CU(cuMemMap(va, 2 * MIB, 0, h, 0));
	CU(cuMemSetAccess(va, 2 * MIB, &on, 1));
	CU(cuLaunchHostFunc(s, nap, &us));
	CU(cuMemsetD8Async(va, 7, 2 * MIB, s));
	CU(cuMemSetAccess(va, 2 * MIB, &off, 1));
	IS(cuMemsetD8Async(va, 8, 4, s), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemSetAccess(va, 2 * MIB, &on, 1));
	CU(cuMemcpyDtoH_v2(&got, va + 2 * MIB - 4, 4));
	CHECK(got == 0x07070707);
	CU(cuLaunchHostFunc(s, nap, &us));
	CU(cuMemsetD8Async(va, 9, 2 * MIB, s));
	CU(cuMemUnmap(va, 2 * MIB));
	CU(cuStreamSynchronize(s));
	CU(cuMemRelease(h));
	CU(cuMemAddressFree(va, 4 * MIB));
	CU(cuStreamDestroy_v2(s));
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "two streams overlap", t_overlap, { NULL } },
		{ "order in a stream", t_order, { NULL } },
		{ "the default stream", t_default_stream, { NULL } },
		{ "a stream per thread", t_threads, { NULL } },
		{ "events", t_events, { NULL } },
		{ "host functions", t_host_functions, { NULL } },
		{ "values in memory", t_values, { NULL } },
		{ "attributes and batches", t_stream_attributes, { NULL } },
		{ "device printf", t_printf, { NULL } },
		{ "capture and replay", t_capture, { NULL } },
		{ "what capture forbids", t_capture_errors, { NULL } },
		{ "graphs by hand", t_graph, { NULL } },
		{ "graphs, further", t_graph_more, { NULL } },
		{ "access to memory", t_access, { NULL } },
		{ "many threads", t_storm, { NULL } },
		{ NULL, NULL, { NULL } },
	};

	return run_tests(tests, argc, argv);
}
