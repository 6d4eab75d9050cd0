/*
 * rarecalls [SECTION...]: calls functions of the driver that few programs call, and prints a line for each call: the
 * function, what is particular about the call, and the result. The lines do not depend on the machine, so that two
 * drivers can be compared line by line: the simulated one, a real one, and each of them through Sluice.
 *
 * Without a section those run that the simulated driver has, each in the primary context of device 0.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuprotos.h"

static void *cu;

static void *entry(const char *name)
{
	void *f = dlsym(cu, name);

	if (!f) {
		fprintf(stderr, "rarecalls: %s\n", dlerror());
		exit(1);
	}
	return f;
}

#define F(name) ((__typeof__(&name))entry(#name))

static int said(int result, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int said(int result, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf(" -> %d\n", result);
	return result;
}

/* Calls a function and prints its result: the function's name, a space, and the text. */
#define CALL(name, text, ...) said((int)F(name)(__VA_ARGS__), "%s %s", #name, text)

/* A call that must succeed for the rest to make sense; it prints nothing. */
#define MUST(name, ...) do { \
	int r_ = (int)F(name)(__VA_ARGS__); \
	if (r_) { \
		fprintf(stderr, "rarecalls: %s returned %d\n", #name, r_); \
		exit(1); \
	} \
} while (0)

static CUcontext ctx;

/* --- textures --- */

#define READ_AS_INTEGER 1
#define OVERRIDE_FORMAT 1

static const char ptx[] =
	".version 7.0\n.target sm_50, texmode_unified\n.address_size 64\n"
	".global .texref tex;\n.global .surfref surf;\n"
	".visible .entry fetch(.param .u64 out)\n{\n"
	"\t.reg .u64 %rd<2>;\n\t.reg .f32 %f<5>;\n\t.reg .s32 %r<2>;\n"
	"\tld.param.u64 %rd1, [out];\n\tmov.s32 %r1, 1;\n"
	"\ttex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [tex, {%r1}];\n\tst.global.f32 [%rd1], %f1;\n\tret;\n}\n";

static void references(void)
{
	static const CUDA_ARRAY_DESCRIPTOR floats = { .Width = 16, .Height = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	CUmodule m;
	CUtexref t = NULL, own = NULL;
	CUsurfref s = NULL;
	CUarray a, b;
	CUdeviceptr p, q;
	size_t offset = 7;
	unsigned int u = 9;
	int n = 9;
	CUarray_format f = 0;
	float x, y, c[4] = { 1, 2, 3, 4 }, d[4];

	MUST(cuModuleLoadData, &m, ptx);
	MUST(cuMemAlloc_v2, &p, 4096);
	MUST(cuArrayCreate_v2, &a, &floats);
	CALL(cuModuleGetTexRef, "a texture", &t, m, "tex");
	CALL(cuModuleGetTexRef, "a name that is none", &own, m, "nothing");
	CALL(cuModuleGetTexRef, "no name", &own, m, NULL);
	CALL(cuModuleGetTexRef, "nowhere", NULL, m, "tex");
	CALL(cuModuleGetSurfRef, "a surface", &s, m, "surf");
	CALL(cuModuleGetSurfRef, "a name that is none", &s, m, "nothing");
	CALL(cuTexRefSetFormat, "float", t, CU_AD_FORMAT_FLOAT, 1);
	CALL(cuTexRefSetFormat, "unknown", t, 77, 1);
	CALL(cuTexRefGetFormat, "", &f, &n, t);
	printf("format %#x, %d channels\n", f, n);
	CALL(cuTexRefSetFlags, "as integers", t, READ_AS_INTEGER);
	CALL(cuTexRefGetFlags, "", &u, t);
	printf("flags %u\n", u);
	CALL(cuTexRefSetFlags, "none", t, 0);
	CALL(cuTexRefSetFilterMode, "linear", t, 1);
	CALL(cuTexRefGetFilterMode, "", &u, t);
	printf("filter %u\n", u);
	CALL(cuTexRefSetFilterMode, "point", t, 0);
	CALL(cuTexRefSetAddressMode, "mirror", t, 0, 2);
	CALL(cuTexRefGetAddressMode, "", &u, t, 0);
	printf("address mode %u\n", u);
	CALL(cuTexRefSetMaxAnisotropy, "4", t, 4);
	CALL(cuTexRefGetMaxAnisotropy, "", &n, t);
	printf("anisotropy %d\n", n);
	CALL(cuTexRefSetMipmapFilterMode, "linear", t, 1);
	CALL(cuTexRefGetMipmapFilterMode, "", &u, t);
	printf("filter between levels %u\n", u);
	CALL(cuTexRefSetMipmapLevelBias, "", t, 0.5f);
	CALL(cuTexRefGetMipmapLevelBias, "", &x, t);
	printf("bias %g\n", x);
	CALL(cuTexRefSetMipmapLevelClamp, "", t, 0.25f, 2.0f);
	CALL(cuTexRefGetMipmapLevelClamp, "", &x, &y, t);
	printf("clamp %g %g\n", x, y);
	CALL(cuTexRefSetBorderColor, "", t, c);
	CALL(cuTexRefGetBorderColor, "", d, t);
	printf("border %g %g %g %g\n", d[0], d[1], d[2], d[3]);
	CALL(cuTexRefSetAddress_v2, "device memory", &offset, t, p, 64);
	CALL(cuTexRefGetAddress_v2, "", &q, t);
	printf("offset %zu, same address %d\n", offset, p == q);
	CALL(cuTexRefSetAddress2D_v3, "device memory", t, &floats, p, 512);
	CALL(cuTexRefSetArray, "an array", t, a, OVERRIDE_FORMAT);
	CALL(cuTexRefGetArray, "", &b, t);
	printf("same array %d\n", a == b);
	CALL(cuParamSetTexRef, "no function", NULL, -1, t);
	CALL(cuTexRefCreate, "", &own);
	CALL(cuTexRefGetFlags, "of a created one", &u, own);
	CALL(cuTexRefDestroy, "a created one", own);
	MUST(cuModuleUnload, m);
	MUST(cuArrayDestroy, a);
	MUST(cuMemFree_v2, p);
}

static void objects(void)
{
	static const CUDA_ARRAY3D_DESCRIPTOR floats = { .Width = 16, .Height = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1, .Flags = CUDA_ARRAY3D_SURFACE_LDST };
	CUDA_RESOURCE_DESC d = { .resType = CU_RESOURCE_TYPE_ARRAY }, e;
	CUDA_TEXTURE_DESC td = { .maxAnisotropy = 2 };
	CUtexObject t;
	CUsurfObject s;
	CUdeviceptr p;
	CUarray a;

	MUST(cuArray3DCreate_v2, &a, &floats);
	d.res.array.hArray = a;
	CALL(cuTexObjectCreate, "an array", &t, &d, &td, NULL);
	CALL(cuSurfObjectCreate, "an array", &s, &d);
	memset(&e, 0, sizeof e);
	CALL(cuTexObjectGetResourceDesc, "an array", &e, t);
	printf("type %u, same array %d\n", e.resType, e.res.array.hArray == a);
	memset(&e, 0, sizeof e);
	CALL(cuSurfObjectGetResourceDesc, "an array", &e, s);
	printf("type %u, same array %d\n", e.resType, e.res.array.hArray == a);
	CALL(cuTexObjectGetResourceDesc, "nowhere", NULL, t);
	MUST(cuTexObjectDestroy, t);
	MUST(cuSurfObjectDestroy, s);
	MUST(cuArrayDestroy, a);
	MUST(cuMemAlloc_v2, &p, 4096);
	d = (CUDA_RESOURCE_DESC){ .resType = CU_RESOURCE_TYPE_LINEAR };
	d.res.linear.devPtr = p;
	d.res.linear.format = CU_AD_FORMAT_FLOAT;
	d.res.linear.numChannels = 1;
	d.res.linear.sizeInBytes = 4096;
	td.maxAnisotropy = 0;
	CALL(cuTexObjectCreate, "device memory", &t, &d, &td, NULL);
	memset(&e, 0, sizeof e);
	CALL(cuTexObjectGetResourceDesc, "device memory", &e, t);
	printf("type %u, same address %d\n", e.resType, e.res.linear.devPtr == p);
	MUST(cuTexObjectDestroy, t);
	MUST(cuMemFree_v2, p);
}

/* --- green contexts --- */

static void greens(void)
{
	CUdevResource all, part, rest, again, forged;
	CUdevResourceDesc d = NULL;
	CUgreenCtx g = NULL, of = NULL;
	CUcontext as = NULL, now = NULL;
	CUstream s = NULL, own = NULL, s2 = NULL;
	CUevent e;
	CUdeviceptr p;
	unsigned int n = 0, flags = 9;
	unsigned long long id = 0, id2 = 0;
	unsigned char got[64] = { 0 };

	CALL(cuDeviceGetDevResource, "multiprocessors", 0, &all, CU_DEV_RESOURCE_TYPE_SM);
	CALL(cuDeviceGetDevResource, "unknown resource", 0, &rest, 9);
	CALL(cuDeviceGetDevResource, "unknown device", 77, &rest, CU_DEV_RESOURCE_TYPE_SM);
	CALL(cuDeviceGetDevResource, "nowhere", 0, NULL, CU_DEV_RESOURCE_TYPE_SM);
	CALL(cuCtxGetDevResource, "multiprocessors", ctx, &again, CU_DEV_RESOURCE_TYPE_SM);
	CALL(cuCtxGetDevResource, "no context", NULL, &again, CU_DEV_RESOURCE_TYPE_SM);
	printf("type %u, as many %d\n", all.type, all.sm.smCount == again.sm.smCount);
	CALL(cuDevSmResourceSplitByCount, "how many", NULL, &n, &all, NULL, 0, 8);
	printf("some groups %d\n", n > 1);
	n = 1;
	CALL(cuDevSmResourceSplitByCount, "one group", &part, &n, &all, &rest, 0, 8);
	printf("groups %u, at least 8 %d, all are there %d\n", n, part.sm.smCount >= 8, part.sm.smCount + rest.sm.smCount == all.sm.smCount);
	n = 1;
	CALL(cuDevSmResourceSplitByCount, "too many", &again, &n, &all, NULL, 0, 100000);
	n = 0;
	CALL(cuDevSmResourceSplitByCount, "no group", &again, &n, &all, NULL, 0, 8);
	CALL(cuDevSmResourceSplitByCount, "no count", &again, NULL, &all, NULL, 0, 8);
	CALL(cuDevResourceGenerateDesc, "nowhere", NULL, &part, 1);
	CALL(cuDevResourceGenerateDesc, "no resource", &d, NULL, 1);
	memset(&forged, 0, sizeof forged);
	forged.type = CU_DEV_RESOURCE_TYPE_SM;
	forged.sm.smCount = 8;
	if (getenv("RARECALLS_FORGE")) /* natively this may crash */
		CALL(cuDevResourceGenerateDesc, "a forged resource", &d, &forged, 1);
	CALL(cuDevResourceGenerateDesc, "one group", &d, &part, 1);
	CALL(cuGreenCtxCreate, "no descriptor", &g, NULL, 0, CU_GREEN_CTX_DEFAULT_STREAM);
	CALL(cuGreenCtxCreate, "no default stream", &g, d, 0, 0);
	CALL(cuGreenCtxCreate, "", &g, d, 0, CU_GREEN_CTX_DEFAULT_STREAM);
	CALL(cuGreenCtxGetDevResource, "multiprocessors", g, &again, CU_DEV_RESOURCE_TYPE_SM);
	printf("as many %d\n", again.sm.smCount == part.sm.smCount);
	CALL(cuGreenCtxGetId, "", g, &id);
	CALL(cuCtxGetId, "the primary context", ctx, &id2);
	printf("another id %d\n", id != id2);
	CALL(cuGreenCtxStreamCreate, "blocking", &s, g, 0, 0);
	CALL(cuGreenCtxStreamCreate, "", &s, g, CU_STREAM_NON_BLOCKING, 0);
	CALL(cuStreamGetGreenCtx, "", s, &of);
	printf("same %d\n", of == g);
	CALL(cuStreamGetGreenCtx, "default stream", NULL, &of);
	printf("none %d\n", !of);
	MUST(cuMemAlloc_v2, &p, 64);
	MUST(cuEventCreate, &e, 0);
	CALL(cuMemsetD8Async, "in its stream", p, 7, 64, s);
	CALL(cuEventRecord, "in its stream", e, s);
	CALL(cuStreamWaitEvent, "default stream", NULL, e, 0);
	CALL(cuGreenCtxRecordEvent, "", g, e);
	CALL(cuGreenCtxWaitEvent, "", g, e);
	CALL(cuEventSynchronize, "", e);
	CALL(cuStreamSynchronize, "", s);
	CALL(cuMemcpyDtoH_v2, "", got, p, 64);
	printf("bytes %d %d\n", got[0], got[63]);
	CALL(cuCtxFromGreenCtx, "", &as, g);
	CALL(cuCtxSetCurrent, "green", as);
	CALL(cuCtxGetCurrent, "", &now);
	printf("same %d, the primary context's %d\n", now == as, now == ctx);
	CALL(cuCtxGetFlags, "", &flags);
	CALL(cuStreamGetGreenCtx, "default stream of green", NULL, &of);
	printf("same %d\n", of == g);
	CALL(cuMemsetD8Async, "default stream of green", p, 8, 64, NULL);
	CALL(cuStreamSynchronize, "default stream of green", NULL);
	CALL(cuStreamCreate, "non-blocking, in green", &own, CU_STREAM_NON_BLOCKING);
	CALL(cuStreamGetGreenCtx, "created in green", own, &of);
	printf("same %d\n", of == g);
	CALL(cuMemsetD8Async, "created in green", p + 32, 9, 32, own);
	CALL(cuStreamCreate, "blocking, in green", &s2, 0);
	CALL(cuStreamGetFlags, "blocking, in green", s2, &flags);
	printf("flags %u\n", flags);
	CALL(cuMemsetD8Async, "blocking, in green", p + 16, 5, 16, s2);
	CALL(cuStreamSynchronize, "blocking, in green", s2);
	CALL(cuStreamDestroy_v2, "blocking, in green", s2);
	CALL(cuMemsetD8Async, "default stream of green", p, 8, 16, NULL);
	CALL(cuCtxSynchronize, "green");
	CALL(cuCtxPopCurrent_v2, "green", &now);
	printf("same %d\n", now == as);
	MUST(cuCtxSetCurrent, ctx);
	CALL(cuMemcpyDtoH_v2, "", got, p, 64);
	printf("bytes %d %d %d\n", got[0], got[16], got[63]);
	CALL(cuStreamDestroy_v2, "", own);
	CALL(cuStreamDestroy_v2, "", s);
	CALL(cuGreenCtxDestroy, "", g);
	CALL(cuMemsetD8_v2, "memory outlives it", p, 1, 64);
	CALL(cuEventDestroy_v2, "", e);
	CALL(cuMemFree_v2, "", p);
}

/* --- graphs --- */

static unsigned char byte_at(CUdeviceptr p)
{
	unsigned char b = 0;

	MUST(cuMemcpyDtoH_v2, &b, p, 1);
	return b;
}

/* A fill of one byte, in graph g. */
static void fill(CUgraph g, CUdeviceptr p, unsigned value)
{
	CUDA_MEMSET_NODE_PARAMS m = { .dst = p, .value = value, .elementSize = 1, .width = 1, .height = 1 };
	CUgraphNode n;

	MUST(cuGraphAddMemsetNode, &n, g, NULL, 0, &m, ctx);
}

/* A conditional node of a condition with that value; its bodies write 1, 2, ... to p. */
static int condition(CUgraph g, unsigned type, unsigned size, unsigned value, CUdeviceptr p, const char *what)
{
	CUgraphNodeParams c = { .type = CU_GRAPH_NODE_TYPE_CONDITIONAL };
	CUgraphNodeType kind = 0;
	CUgraphNode n;

	MUST(cuGraphConditionalHandleCreate, &c.conditional.handle, g, ctx, value, 1);
	c.conditional.type = type;
	c.conditional.size = size;
	c.conditional.ctx = ctx;
	if (CALL(cuGraphAddNode, what, &n, g, NULL, 0, &c))
		return 1;
	MUST(cuGraphNodeGetType, n, &kind);
	printf("%s: type %u\n", what, kind);
	for (unsigned i = 0; i < size; i++)
		fill(c.conditional.phGraph_out[i], p, i + 1);
	return 0;
}

/* A capture into a graph, which needs not be given at its end: twice, the second time it is. */
static void captured_body(CUgraph g, CUdeviceptr p)
{
	CUgraph same = NULL;
	CUstream s;

	MUST(cuStreamCreate, &s, CU_STREAM_NON_BLOCKING);
	for (int i = 0; i < 2; i++) {
		CALL(cuStreamBeginCaptureToGraph, "a body", s, g, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED);
		MUST(cuMemsetD8Async, p + i, 7, 1, s);
		CALL(cuStreamEndCapture, "a body", s, i ? &same : NULL);
	}
	printf("same graph %d\n", same == g);
	CALL(cuStreamEndCapture, "no capture, no graph", s, NULL);
	MUST(cuStreamDestroy_v2, s);
}

static void conditions(void)
{
	CUgraphNodeParams c = { .type = CU_GRAPH_NODE_TYPE_CONDITIONAL };
	CUgraphConditionalHandle h;
	CUgraphExec e;
	CUgraphNode n;
	CUdeviceptr p;
	CUgraph g, bad;

	MUST(cuMemAlloc_v2, &p, 64);
	MUST(cuMemsetD8_v2, p, 0, 64);
	MUST(cuGraphCreate, &g, 0);
	CALL(cuGraphConditionalHandleCreate, "no handle", NULL, g, ctx, 0, 0);
	CALL(cuGraphConditionalHandleCreate, "flags 2", &h, g, ctx, 0, 2);
	condition(g, CU_GRAPH_COND_TYPE_IF, 1, 1, p, "if, true");
	condition(g, CU_GRAPH_COND_TYPE_IF, 1, 0, p + 1, "if, false");
	condition(g, CU_GRAPH_COND_TYPE_IF, 2, 0, p + 2, "if, else");
	condition(g, CU_GRAPH_COND_TYPE_SWITCH, 4, 2, p + 3, "switch");
	condition(g, CU_GRAPH_COND_TYPE_SWITCH, 2, 7, p + 4, "switch, none");
	condition(g, CU_GRAPH_COND_TYPE_WHILE, 1, 0, p + 5, "while, never");
	MUST(cuGraphCreate, &bad, 0); /* a condition without a node keeps a graph from being instantiated */
	condition(bad, CU_GRAPH_COND_TYPE_WHILE, 2, 0, p + 6, "while, two bodies");
	condition(bad, CU_GRAPH_COND_TYPE_IF, 0, 0, p + 6, "if, no body");
	CALL(cuGraphInstantiateWithFlags, "with conditions left over", &e, bad, 0);
	MUST(cuGraphDestroy, bad);
	CALL(cuGraphConditionalHandleCreate, "no context", &h, g, NULL, 1, 1);
	CALL(cuGraphConditionalHandleCreate, "one", &h, g, ctx, 1, 1);
	c.conditional.handle = h;
	c.conditional.size = 1;
	c.conditional.ctx = ctx;
	CALL(cuGraphAddNode, "a handle", &n, g, NULL, 0, &c);
	captured_body(c.conditional.phGraph_out[0], p + 6);
	CALL(cuGraphAddNode, "the same handle", &n, g, NULL, 0, &c);
	CALL(cuGraphInstantiateWithFlags, "of it", &e, g, 0);
	for (int i = 0; i < 2; i++) {
		MUST(cuMemsetD8_v2, p, 0, 64);
		CALL(cuGraphLaunch, "of it", e, NULL);
		CALL(cuStreamSynchronize, "of it", NULL);
		printf("left:");
		for (int k = 0; k < 8; k++)
			printf(" %u", byte_at(p + k));
		printf("\n");
	}
	MUST(cuGraphExecDestroy, e);
	MUST(cuGraphDestroy, g);
	MUST(cuMemFree_v2, p);
}

/* Edges and what a capture depends on, with their data. */
static void edges(void)
{
	CUgraphNode a, b, from[3], to[3];
	CUgraphEdgeData data[3];
	CUstreamCaptureStatus status;
	const CUgraphEdgeData *with;
	const CUgraphNode *deps;
	CUgraph g, own;
	cuuint64_t id;
	CUstream s;
	size_t n = 3;

	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddEmptyNode, &a, g, NULL, 0);
	MUST(cuGraphAddEmptyNode, &b, g, &a, 1);
	memset(data, 0x55, sizeof data);
	memset(from, 0x55, sizeof from);
	CALL(cuGraphGetEdges_v2, "with data", g, from, to, data, &n);
	printf("%zu: %d %d, then %d; data %u %u %u\n", n, from[0] == a, to[0] == b, from[1] == NULL, data[0].type, data[0].from_port, data[0].to_port);
	CALL(cuGraphGetEdges_v2, "data alone", g, NULL, NULL, data, &n);
	n = 0;
	CALL(cuGraphGetEdges_v2, "how many", g, NULL, NULL, NULL, &n);
	printf("%zu\n", n);
	n = 3;
	CALL(cuGraphNodeGetDependencies_v2, "with data", b, from, data, &n);
	printf("%zu: %d\n", n, from[0] == a);
	n = 3;
	CALL(cuGraphNodeGetDependentNodes_v2, "with data", a, to, data, &n);
	printf("%zu: %d\n", n, to[0] == b);
	MUST(cuGraphDestroy, g);
	MUST(cuStreamCreate, &s, CU_STREAM_NON_BLOCKING);
	MUST(cuStreamBeginCapture_v2, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
	CALL(cuStreamGetCaptureInfo_v3, "at its start", s, &status, &id, &own, &deps, &with, &n);
	printf("%zu, status %u, none %d\n", n, status, !deps);
	MUST(cuGraphAddEmptyNode, &a, own, NULL, 0);
	CALL(cuStreamUpdateCaptureDependencies_v2, "set", s, &a, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
	CALL(cuStreamGetCaptureInfo_v3, "then", s, &status, &id, &own, &deps, &with, &n);
	printf("%zu: %d\n", n, n == 1 && deps[0] == a);
	CALL(cuStreamEndCapture, "with a node", s, &g);
	CALL(cuStreamUpdateCaptureDependencies_v2, "after it", s, &a, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
	MUST(cuGraphDestroy, g);
	MUST(cuStreamDestroy_v2, s);
}

/* Whether a device's graphs have used memory, and reserve some. */
static void graph_memory(const char *when)
{
	cuuint64_t used = 1, reserved = 1;

	MUST(cuDeviceGetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used);
	MUST(cuDeviceGetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved);
	printf("%s: used %d, reserved %d\n", when, used != 0, reserved != 0);
}

/* An allocation, a fill and a copy out of it, by hand. */
static void memory_nodes(void)
{
	CUDA_MEM_ALLOC_NODE_PARAMS a = { .bytesize = 3 << 20 }, got;
	CUgraphNode alloc, set, copy, end;
	CUgraphExec e, second;
	CUDA_MEMSET_NODE_PARAMS m = { .value = 7, .elementSize = 1, .width = 100, .height = 1 };
	CUDA_MEMCPY3D c = { .srcMemoryType = CU_MEMORYTYPE_DEVICE, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .WidthInBytes = 100, .Height = 1, .Depth = 1 };
	CUgraph g, other;
	CUdeviceptr p, freed;
	cuuint64_t v = 0;

	MUST(cuMemAlloc_v2, &p, 100);
	MUST(cuGraphCreate, &g, 0);
	graph_memory("at first");
	a.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	a.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	a.poolProps.location.id = 99;
	CALL(cuGraphAddMemAllocNode, "no such device", &alloc, g, NULL, 0, &a);
	a.poolProps.location.id = 0;
	a.bytesize = 1ull << 50;
	CALL(cuGraphAddMemAllocNode, "too much", &alloc, g, NULL, 0, &a);
	a.bytesize = 0;
	CALL(cuGraphAddMemAllocNode, "nothing", &alloc, g, NULL, 0, &a);
	a.bytesize = 3 << 20;
	if (CALL(cuGraphAddMemAllocNode, "3 MiB", &alloc, g, NULL, 0, &a))
		return;
	CALL(cuGraphMemAllocNodeGetParams, "of it", alloc, &got);
	printf("same address %d, %zu bytes, device %d\n", got.dptr == a.dptr, got.bytesize, got.poolProps.location.id);
	m.dst = c.srcDevice = a.dptr;
	c.dstDevice = p;
	MUST(cuGraphAddMemsetNode, &set, g, &alloc, 1, &m, ctx);
	MUST(cuGraphAddMemcpyNode, &copy, g, &set, 1, &c, ctx);
	graph_memory("before a launch");
	CALL(cuGraphInstantiateWithFlags, "of it", &e, g, 0);
	CALL(cuGraphInstantiateWithFlags, "a second time", &second, g, 0);
	CALL(cuGraphClone, "of it", &other, g);
	CALL(cuGraphLaunch, "of it", e, NULL);
	CALL(cuStreamSynchronize, "of it", NULL);
	printf("left %u\n", byte_at(p + 99));
	graph_memory("after a launch");
	CALL(cuMemFree_v2, "of it", a.dptr);
	CALL(cuGraphLaunch, "again", e, NULL);
	CALL(cuMemFreeAsync, "of it", a.dptr, NULL);
	CALL(cuStreamSynchronize, "again", NULL);
	MUST(cuGraphExecDestroy, e);
	MUST(cuGraphDestroy, g);
	CALL(cuDeviceSetGraphMemAttribute, "used, high", 0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &v);
	CALL(cuDeviceSetGraphMemAttribute, "used", 0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &v);
	v = 5;
	CALL(cuDeviceSetGraphMemAttribute, "used, high, to 5", 0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &v);
	CALL(cuDeviceGraphMemTrim, "", 0);
	graph_memory("trimmed");

	/* freed by a node */
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddMemAllocNode, &alloc, g, NULL, 0, &a);
	m.dst = c.srcDevice = a.dptr;
	m.value = 9;
	MUST(cuGraphAddMemsetNode, &set, g, &alloc, 1, &m, ctx);
	MUST(cuGraphAddMemcpyNode, &copy, g, &set, 1, &c, ctx);
	CALL(cuGraphAddMemFreeNode, "no such memory", &end, g, &copy, 1, p);
	CALL(cuGraphAddMemFreeNode, "behind the copy", &end, g, &copy, 1, a.dptr);
	CALL(cuGraphMemFreeNodeGetParams, "of it", end, &freed);
	printf("same address %d\n", freed == a.dptr);
	CALL(cuGraphInstantiateWithFlags, "of it", &e, g, 0);
	for (int i = 0; i < 3; i++)
		CALL(cuGraphLaunch, "of it", e, NULL);
	CALL(cuStreamSynchronize, "of it", NULL);
	printf("left %u\n", byte_at(p + 99));
	MUST(cuGraphExecDestroy, e);
	MUST(cuGraphDestroy, g);
	MUST(cuMemFree_v2, p);
	CALL(cuDeviceGraphMemTrim, "", 0);
	graph_memory("at last");
}

/* Allocations that are captured: one freed in the capture, one by the program. */
static void captured_memory(void)
{
	CUdeviceptr p, x = 0, y = 0;
	CUgraphExec e;
	CUgraph g;
	CUstream s;
	size_t n = 0;

	MUST(cuMemAlloc_v2, &p, 100);
	MUST(cuStreamCreate, &s, CU_STREAM_NON_BLOCKING);
	MUST(cuStreamBeginCapture_v2, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
	CALL(cuMemAllocAsync, "captured", &x, 1 << 20, s);
	CALL(cuMemsetD8Async, "of it", x, 3, 100, s);
	CALL(cuMemcpyDtoDAsync_v2, "of it", p, x, 100, s);
	CALL(cuMemFreeAsync, "captured", x, s);
	CALL(cuMemAllocAsync, "captured, another", &y, 1 << 20, s);
	CALL(cuMemsetD8Async, "of it", y, 4, 100, s);
	MUST(cuStreamEndCapture, s, &g);
	MUST(cuGraphGetNodes, g, NULL, &n);
	printf("%zu nodes\n", n);
	CALL(cuGraphInstantiateWithFlags, "of it", &e, g, 0);
	for (int i = 0; i < 2; i++) {
		CALL(cuGraphLaunch, "of it", e, s);
		CALL(cuStreamSynchronize, "of it", s);
		printf("left %u and %u\n", byte_at(p + 99), byte_at(y + 99));
		CALL(cuMemFreeAsync, "of what is left", y, s);
		CALL(cuStreamSynchronize, "of it", s);
	}
	MUST(cuGraphExecDestroy, e);
	MUST(cuGraphDestroy, g);
	MUST(cuStreamDestroy_v2, s);
	MUST(cuMemFree_v2, p);
	MUST(cuDeviceGraphMemTrim, 0);
	graph_memory("at last");
}

/* --- what the driver's library answers by itself --- */

static int told; /* by the callback of the log */

static void on_log(void *data, CUlogLevel level, char *message, size_t length)
{
	told += data == &told && level == 0 && length && strlen(message) == length;
}

static void logs(void)
{
	CUlogsCallbackHandle h = NULL;
	CUlogIterator it = 0, before;
	static char text[30000];
	size_t n = sizeof text;
	int was;

	CALL(cuLogsCurrent, "", &it, 0);
	CALL(cuLogsCurrent, "nowhere", NULL, 0);
	CALL(cuLogsRegisterCallback, "none", NULL, NULL, NULL);
	CALL(cuLogsRegisterCallback, "", on_log, &told, &h);
	CALL(cuMemFree_v2, "no memory", 0x123);
	printf("told %d\n", told > 0);
	CALL(cuLogsDumpToMemory, "since before", &it, text, &n, 0);
	printf("some text %d, as long as it says %d, names the call %d, ends a line %d\n", n > 0, strlen(text) == n, strstr(text, "cuMemFree") != NULL, n && text[n - 1] == '\n');
	n = sizeof text;
	CALL(cuLogsDumpToMemory, "nothing new", &it, text, &n, 0);
	printf("bytes %zu\n", n);
	CALL(cuMemFree_v2, "no memory", 0x123);
	n = 4;
	before = it;
	CALL(cuLogsDumpToMemory, "no room", &it, text, &n, 0);
	printf("bytes %zu, still there %d\n", n, it == before);
	CALL(cuLogsDumpToMemory, "nowhere", &it, NULL, &n, 0);
	CALL(cuLogsDumpToMemory, "no size", &it, text, NULL, 0);
	CALL(cuLogsDumpToFile, "no name", NULL, NULL, 0);
	CALL(cuLogsDumpToFile, "a folder that is not there", NULL, "/nonexistent/file", 0);
	CALL(cuLogsDumpToFile, "", NULL, "/dev/null", 0);
	CALL(cuLogsUnregisterCallback, "", h);
	was = told;
	CALL(cuMemFree_v2, "no memory", 0x123);
	printf("told after that %d\n", told - was);
}

static void coredumps(void)
{
	char name[2000] = "core.%p";
	unsigned int flags = 0;
	unsigned char b = 9;
	size_t n = 8;

	CALL(cuCoredumpSetAttributeGlobal, "file", 5, name, &n);
	n = sizeof name;
	memset(name, 1, sizeof name);
	CALL(cuCoredumpGetAttributeGlobal, "file", 5, name, &n);
	printf("a name %d\n", !strncmp(name, "core.", 5));
	CALL(cuCoredumpGetAttributeGlobal, "no size", 5, name, NULL);
	n = 1;
	CALL(cuCoredumpGetAttributeGlobal, "unknown", 99, name, &n);
	CALL(cuCoredumpGetAttribute, "on exceptions", 1, &b, &n);
	printf("on %d\n", b);
	b = 0;
	CALL(cuCoredumpSetAttribute, "off", 1, &b, &n);
	n = 4;
	CALL(cuCoredumpSetAttribute, "off, too long", 1, &b, &n);
	flags = 3;
	CALL(cuCoredumpSetAttributeGlobal, "flags", 7, &flags, &n);
	MUST(cuCtxSetCurrent, NULL);
	n = 1;
	CALL(cuCoredumpGetAttribute, "no context", 1, &b, &n);
	MUST(cuCtxSetCurrent, ctx);
}

static void on_notice(CUasyncNotificationInfo *info, void *data, CUasyncCallbackHandle h)
{
	(void)info, (void)data, (void)h;
}

static void notifications(void)
{
	CUasyncCallbackHandle h = NULL;

	CALL(cuDeviceRegisterAsyncNotification, "unknown device", 77, on_notice, NULL, &h);
	CALL(cuDeviceRegisterAsyncNotification, "no callback", 0, NULL, NULL, &h);
	CALL(cuDeviceRegisterAsyncNotification, "", 0, on_notice, NULL, &h);
	CALL(cuDeviceUnregisterAsyncNotification, "", 0, h);
}

/* --- managed memory --- */

static void batches(void)
{
	CUmemLocation here = { .type = 1, .id = 0 };
	CUdeviceptr m, p, ptrs[2];
	size_t sizes[2] = { 4096, 4096 }, from[2] = { 0, 0 };
	CUstream s;

	MUST(cuMemAllocManaged, &m, 1 << 20, 1);
	MUST(cuMemAlloc_v2, &p, 1 << 20);
	MUST(cuStreamCreate, &s, CU_STREAM_NON_BLOCKING);
	ptrs[0] = m;
	ptrs[1] = m + 8192;
	CALL(cuMemPrefetchBatchAsync, "", ptrs, sizes, 2, &here, from, 1, 0, s);
	CALL(cuMemPrefetchBatchAsync, "nothing", ptrs, sizes, 0, &here, from, 1, 0, s);
	CALL(cuMemPrefetchBatchAsync, "flags", ptrs, sizes, 2, &here, from, 1, 1, s);
	CALL(cuMemPrefetchBatchAsync, "no place", ptrs, sizes, 2, &here, from, 0, 0, s);
	CALL(cuMemPrefetchBatchAsync, "default stream", ptrs, sizes, 2, &here, from, 1, 0, NULL);
	CALL(cuMemDiscardBatchAsync, "", ptrs, sizes, 2, 0, s);
	CALL(cuMemDiscardBatchAsync, "nothing", ptrs, sizes, 0, 0, s);
	CALL(cuMemDiscardBatchAsync, "flags", ptrs, sizes, 2, 1, s);
	CALL(cuMemDiscardBatchAsync, "default stream", ptrs, sizes, 2, 0, NULL);
	CALL(cuMemDiscardAndPrefetchBatchAsync, "", ptrs, sizes, 2, &here, from, 1, 0, s);
	ptrs[0] = p;
	CALL(cuMemPrefetchBatchAsync, "device memory", ptrs, sizes, 1, &here, from, 1, 0, s);
	CALL(cuMemDiscardBatchAsync, "device memory", ptrs, sizes, 1, 0, s);
	from[0] = 1;
	ptrs[0] = m;
	CALL(cuMemPrefetchBatchAsync, "places begin late", ptrs, sizes, 2, &here, from, 1, 0, s);
	MUST(cuStreamDestroy_v2, s);
	MUST(cuMemFree_v2, m);
	MUST(cuMemFree_v2, p);
}

/* --- handles that are none, and old forms --- */

static void handles(void)
{
	static const CUDA_ARRAY_DESCRIPTOR_v1 floats = { .Width = 16, .Height = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	CUfunctionLoadingState state;
	CUprocessState process = 9;
	CUdeviceptr_v1 narrow;
	const char *name;
	CUarray array;
	size_t a, b;
	CUmodule m;
	int n = 0;

	CALL(cuFuncGetName, "no function", &name, NULL);
	CALL(cuFuncGetModule, "no function", &m, NULL);
	CALL(cuKernelGetName, "no kernel", &name, NULL);
	CALL(cuFuncGetParamInfo, "no function", NULL, 0, &a, &b);
	CALL(cuFuncGetAttribute, "no function", &n, 0, NULL);
	CALL(cuFuncIsLoaded, "no function", &state, NULL);
	CALL(cuCheckpointProcessGetState, "of this process", getpid(), &process);
	printf("running %d\n", process == 0);
	CALL(cuCheckpointProcessGetState, "nowhere", getpid(), NULL);
	CALL(cuCheckpointProcessGetState, "of no process", 4000000, &process);
	CALL(cuMemAlloc, "addresses of 32 bits", &narrow, 64);
	CALL(cuMemFree, "addresses of 32 bits", 0);
	CALL(cuMemsetD8, "addresses of 32 bits", 0, 0, 4);
	CALL(cuMemcpyHtoD, "addresses of 32 bits", 0, &n, 4);
	CALL(cuArrayCreate, "sizes of 32 bits", &array, &floats);
}

static CUgraph in_body(CUgraph g, CUgraphNode *cond)
{
	CUgraphNodeParams c = { .type = CU_GRAPH_NODE_TYPE_CONDITIONAL };

	MUST(cuGraphConditionalHandleCreate, &c.conditional.handle, g, ctx, 0, 0);
	c.conditional.size = 1;
	c.conditional.ctx = ctx;
	MUST(cuGraphAddNode, cond, g, NULL, 0, &c);
	return c.conditional.phGraph_out[0];
}

/* Tells why a graph cannot be made executable, and whether one of two nodes is to blame. */
static void why(CUgraph g, cuuint64_t flags, CUgraphNode a, CUgraphNode b, const char *text)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS p = { .flags = flags, .hErrNode_out = a, .result_out = 99 };
	CUgraphExec e = (CUgraphExec)(void *)a;

	if (!CALL(cuGraphInstantiateWithParams, text, &e, g, &p))
		MUST(cuGraphExecDestroy, e);
	printf("result %u, node %s\n", p.result_out, !p.hErrNode_out ? "none" : p.hErrNode_out == a || p.hErrNode_out == b ? "named" : "another");
	MUST(cuGraphDestroy, g);
}

static void nothing(void *p) { (void)p; }

static void faults(void)
{
	CUDA_HOST_NODE_PARAMS host = { nothing, NULL };
	CUgraphNode a, b;
	CUgraph g;

	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddEmptyNode, &a, g, NULL, 0);
	MUST(cuGraphAddEmptyNode, &b, g, &a, 1);
	MUST(cuGraphAddDependencies, g, &b, &a, 1);
	why(g, 0, a, b, "a circle");
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddEmptyNode, &a, g, NULL, 0);
	why(g, 99999, a, a, "flags that are none");
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddEmptyNode, &a, g, NULL, 0);
	why(g, 0, a, a, "nothing wrong");
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddHostNode, &a, in_body(g, &b), NULL, 0, &host);
	why(g, 0, a, a, "a host node in a body");
}

/* Through Sluice a copy of host memory has a function of the host's; natively a body may have such a copy. */
static void copies_in_bodies(void)
{
	static char from[64];
	CUDA_MEMCPY3D copy = { .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = from, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
			       .WidthInBytes = sizeof from, .Height = 1, .Depth = 1 };
	CUgraphNode a, b;
	CUgraph g;

	MUST(cuMemAlloc_v2, &copy.dstDevice, sizeof from);
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphAddMemcpyNode, &a, in_body(g, &b), NULL, 0, &copy, ctx);
	why(g, 0, a, a, "a copy of host memory in a body");
	MUST(cuMemFree_v2, copy.dstDevice);
}

/* What cannot be added changes nothing: a graph that was to be moved stays the program's. */
static void not_moved(CUgraph g, CUgraphNodeParams *c, CUgraphNode inner)
{
	static const CUgraphEdgeData wrong[] = { { .type = 99 }, { .from_port = 7 }, { .to_port = 7 }, { .from_port = 1, .type = 1 } };
	CUgraphNode a, n, own;
	CUgraphNodeType type = 99;
	size_t nodes = 9;
	CUgraph strange;

	MUST(cuGraphCreate, &strange, 0);
	MUST(cuGraphAddEmptyNode, &own, strange, NULL, 0);
	MUST(cuGraphAddEmptyNode, &a, g, NULL, 0);
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		CALL(cuGraphAddNode_v2, "with data that no such edge has", &n, g, &a, &wrong[i], 1, c);
	CALL(cuGraphAddNode_v2, "behind a node of another graph", &n, g, &own, NULL, 1, c);
	MUST(cuGraphGetNodes, g, NULL, &nodes);
	printf("%zu nodes\n", nodes);
	CALL(cuGraphNodeGetType, "of the graph that was to be moved", inner, &type);
	printf("type %u\n", type);
	MUST(cuGraphDestroyNode, a);
	MUST(cuGraphDestroy, strange);
}

/* A graph that is moved into a node: its own nodes go on to be named in changes of the executable graph. */
static void moved(void)
{
	CUgraphNodeParams c = { .type = CU_GRAPH_NODE_TYPE_GRAPH };
	CUDA_MEMCPY3D copy = { .srcMemoryType = CU_MEMORYTYPE_DEVICE, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .WidthInBytes = 1, .Height = 1, .Depth = 1 };
	CUgraph g, child, other;
	CUgraphNode inner, n;
	CUgraphExec e;
	CUdeviceptr p;

	MUST(cuMemAlloc_v2, &p, 64);
	MUST(cuMemsetD8_v2, p, 0, 64);
	MUST(cuMemsetD8_v2, p, 7, 1);
	MUST(cuMemsetD8_v2, p + 1, 8, 1);
	MUST(cuGraphCreate, &g, 0);
	MUST(cuGraphCreate, &child, 0);
	MUST(cuGraphCreate, &other, 0);
	copy.srcDevice = p;
	copy.dstDevice = p + 2;
	MUST(cuGraphAddMemcpyNode, &inner, child, NULL, 0, &copy, ctx);
	c.graph.graph = child;
	c.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
	not_moved(g, &c, inner);
	CALL(cuGraphAddNode, "a graph moved", &n, g, NULL, 0, &c);
	MUST(cuGraphInstantiateWithFlags, &e, g, 0);
	MUST(cuGraphLaunch, e, NULL);
	copy.srcDevice = p + 1;
	copy.dstDevice = p + 3;
	CALL(cuGraphExecMemcpyNodeSetParams, "of a node of the moved graph", e, inner, &copy, ctx);
	MUST(cuGraphLaunch, e, NULL);
	CALL(cuStreamSynchronize, "of it", NULL);
	printf("copied: %u %u\n", byte_at(p + 2), byte_at(p + 3));
	MUST(cuGraphExecDestroy, e);
	MUST(cuGraphDestroy, g);
	MUST(cuGraphDestroy, other);
	MUST(cuMemFree_v2, p);
}

/* A capture takes a fill of memory that is nobody's; its graph cannot be instantiated. */
static void nobodys(void)
{
	CUgraphExec e;
	CUdeviceptr p;
	CUgraph g;
	CUstream s;

	MUST(cuMemAlloc_v2, &p, 4096);
	MUST(cuStreamCreate, &s, CU_STREAM_NON_BLOCKING);
	for (int i = 0; i < 3; i++) {
		MUST(cuStreamBeginCapture_v2, s, CU_STREAM_CAPTURE_MODE_RELAXED);
		CALL(cuMemsetD8Async, i ? "of memory" : "of nobody's memory", i ? p : 0xdead0000, 0, i == 1 ? (size_t)64 << 30 : 64, s);
		MUST(cuStreamEndCapture, s, &g);
		if (!CALL(cuGraphInstantiateWithFlags, "of it", &e, g, 0))
			MUST(cuGraphExecDestroy, e);
		MUST(cuGraphDestroy, g);
	}
	CALL(cuMemsetD8Async, "of nobody's memory, at once", 0xdead0000, 0, 64, s);
	MUST(cuStreamDestroy_v2, s);
	MUST(cuMemFree_v2, p);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
		int named;	/* runs only when it is named: the simulated driver lacks its functions */
	} sections[] = {
		{ "references", references, 0 }, { "objects", objects, 0 }, { "greens", greens, 0 }, { "edges", edges, 0 },
		{ "conditions", conditions, 0 }, { "memory nodes", memory_nodes, 0 }, { "captured memory", captured_memory, 0 },
		{ "moved", moved, 0 }, { "nobodys", nobodys, 0 }, { "faults", faults, 0 },
		{ "logs", logs, 1 }, { "coredumps", coredumps, 1 }, { "notifications", notifications, 1 }, { "batches", batches, 1 },
		{ "handles", handles, 1 }, { "copies in bodies", copies_in_bodies, 1 },
	};

	cu = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cu) {
		fprintf(stderr, "rarecalls: %s\n", dlerror());
		return 1;
	}
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &ctx, 0);
	for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
		int wanted = argc == 1 && !sections[i].named;

		for (int k = 1; k < argc; k++)
			wanted |= !strcmp(argv[k], sections[i].name);
		if (!wanted)
			continue;
		printf("== %s\n", sections[i].name);
		MUST(cuCtxSetCurrent, ctx);
		sections[i].run();
		CALL(cuCtxSynchronize, "after the section");
	}
	puts("PASS");
	return 0;
}
