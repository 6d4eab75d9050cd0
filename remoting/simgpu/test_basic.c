/* Devices, contexts, memory, copies, modules and kernels, one call at a time. */
#include "testing.h"

static void t_devices(void)
{
	CUdevice d;
	CUuuid a, b;
	char text[64];
	size_t total;
	int v, n;

	IS(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
	CU(cuDriverGetVersion(&v));
	CHECK(v == 13000);
	IS(cuInit(1), CUDA_ERROR_INVALID_VALUE);
	CU(cuInit(0));
	CU(cuDeviceGetCount(&n));
	CHECK(n == 2);
	CU(cuDeviceGet(&d, 1));
	IS(cuDeviceGet(&d, 2), CUDA_ERROR_INVALID_DEVICE);
	CU(cuDeviceTotalMem_v2(&total, 1));
	CHECK(total == 512 * MIB);
	CU(cuDeviceGetUuid_v2(&a, 0));
	CU(cuDeviceGetUuid_v2(&b, 1));
	CHECK(memcmp(&a, &b, sizeof(a)));
	CU(cuDeviceGetPCIBusId(text, sizeof(text), 1));
	CHECK(!strcmp(text, "0000:02:00.0"));
	CU(cuDeviceGetByPCIBusId(&d, text));
	CHECK(d == 1);
	CU(cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
	CHECK(v == 8);
	CU(cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0));
	CHECK(v == 6);
	for (unsigned int i = 1; i < CU_DEVICE_ATTRIBUTE_MAX; i++)
		IS(cuDeviceGetAttribute(&v, i, 0), CUDA_SUCCESS);
	IS(cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_MAX, 0), CUDA_ERROR_INVALID_VALUE);
	CU(cuDeviceCanAccessPeer(&v, 0, 1));
	CHECK(v == 1);
}

static void t_contexts(void)
{
	CUcontext p, c, q;
	CUdevice d;
	unsigned int flags, version;
	unsigned long long id;
	size_t n, total;
	int active;

	CU(cuInit(0));
	IS(cuMemGetInfo_v2(&n, &total), CUDA_ERROR_INVALID_CONTEXT);
	CU(cuDevicePrimaryCtxGetState(0, &flags, &active));
	CHECK(!active);
	CU(cuDevicePrimaryCtxRetain(&p, 0));
	CU(cuDevicePrimaryCtxRetain(&q, 0));
	CHECK(p == q);
	CU(cuCtxSetCurrent(p));
	CU(cuMemGetInfo_v2(&n, &total));
	CHECK(total == 512 * MIB && n == total - 64 * MIB);
	CU(cuCtxCreate_v2(&c, CU_CTX_SCHED_BLOCKING_SYNC, 1));
	CU(cuCtxGetCurrent(&q));
	CHECK(q == c);
	CU(cuCtxGetDevice(&d));
	CHECK(d == 1);
	CU(cuCtxGetFlags(&flags));
	CHECK(flags == CU_CTX_SCHED_BLOCKING_SYNC);
	CU(cuCtxGetApiVersion(c, &version));
	CU(cuCtxGetId(c, &id));
	CU(cuCtxPopCurrent_v2(&q));
	CHECK(q == c);
	CU(cuCtxGetCurrent(&q));
	CHECK(q == p);
	CU(cuCtxPushCurrent_v2(c));
	CU(cuCtxGetLimit(&n, CU_LIMIT_STACK_SIZE));
	CHECK(n == 1024);
	CU(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1536));
	CU(cuCtxGetLimit(&n, CU_LIMIT_STACK_SIZE));
	CHECK(n == 1536);
	CU(cuCtxPushCurrent_v2(p));
	CU(cuCtxDestroy_v2(c));
	IS(cuCtxDestroy_v2(c), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxSetCurrent(c), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxDestroy_v2(p), CUDA_ERROR_INVALID_CONTEXT);
	CU(cuCtxPopCurrent_v2(&q));
	IS(cuMemGetInfo_v2(&n, &total), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	CU(cuCtxSetCurrent(p));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	CU(cuMemGetInfo_v2(&n, &total));
	CU(cuDevicePrimaryCtxRelease_v2(0));
	IS(cuMemGetInfo_v2(&n, &total), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
	CU(cuDevicePrimaryCtxRetain(&q, 0));
	CHECK(p == q);
	CU(cuMemGetInfo_v2(&n, &total));
	CHECK(n == total - 64 * MIB);
}

static size_t avail(void)
{
	size_t n, total;

	CU(cuMemGetInfo_v2(&n, &total));
	return n;
}

static void t_memory(void)
{
	CUdeviceptr p, q, base, small[40];
	size_t n0, n;
	unsigned int type;

	begin();
	n0 = avail();
	CU(cuMemAlloc_v2(&p, 1));
	CHECK(avail() == n0 - 2 * MIB);
	for (int i = 0; i < 40; i++)
		CU(cuMemAlloc_v2(&small[i], 32768));
	CHECK(avail() == n0 - 2 * MIB);
	CU(cuMemAlloc_v2(&q, MIB + 1));
	CHECK(avail() == n0 - 4 * MIB);
	CU(cuMemGetAddressRange_v2(&base, &n, q + 100));
	CHECK(base == q && n == MIB + 1);
	CU(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, q + 5));
	CHECK(type == CU_MEMORYTYPE_DEVICE);
	IS(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&type),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFree_v2(q + 1), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemFree_v2(q));
	IS(cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemsetD8_v2(q, 0, 1), CUDA_ERROR_INVALID_VALUE);
	for (int i = 0; i < 40; i++)
		CU(cuMemFree_v2(small[i]));
	CU(cuMemFree_v2(p));
	CU(cuMemFree_v2(0));
	CHECK(avail() == n0);
	IS(cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemAlloc_v2(&p, n0 + 1), CUDA_ERROR_OUT_OF_MEMORY);
	CU(cuMemAlloc_v2(&p, n0));
	CHECK(avail() == 0);
	IS(cuMemAlloc_v2(&q, 1), CUDA_ERROR_OUT_OF_MEMORY);
	CU(cuMemFree_v2(p));
	CU(cuMemAllocPitch_v2(&p, &n, 1000, 10, 4));
	CHECK(n == 1024);
	CU(cuMemAllocManaged(&q, 4096, 1));
	*(int *)(uintptr_t)q = 7;
	CU(cuDevicePrimaryCtxReset_v2(0));
	CU(cuDevicePrimaryCtxRetain(&(CUcontext){ 0 }, 0));
	CHECK(avail() == n0);
}

static void t_fill(void)
{
	static CUdeviceptr p[4096];
	size_t n = 0, left;

	begin();
	left = avail();
	srand(1);
	for (int round = 0; round < 20000; round++) {	/* churn: no drift, no corruption of the books */
		size_t i = (size_t)rand() % 512;

		if (p[i]) {
			CU(cuMemFree_v2(p[i]));
			p[i] = 0;
		} else if (cuMemAlloc_v2(&p[i], (size_t)rand() % (3 * MIB / 2) + 1)) {
			p[i] = 0;
			n++;
		}
	}
	CHECK(n > 0);		/* it was full at times */
	for (size_t i = 0; i < 512; i++)
		CU(cuMemFree_v2(p[i]));
	CHECK(avail() == left);
	for (n = 0; n < 4096 && !cuMemAlloc_v2(&p[n], MIB); n++)	/* two to a slab */
		;
	CHECK(n == left / MIB && avail() == 0);
}

static void t_copies(void)
{
	unsigned char a[4096], b[4096], *pin;
	CUdeviceptr p, q, hp;
	CUstream s;

	begin();
	for (size_t i = 0; i < sizeof(a); i++)
		a[i] = (unsigned char)(i * 7);
	CU(cuMemAlloc_v2(&p, sizeof(a)));
	CU(cuMemAlloc_v2(&q, sizeof(a)));
	CU(cuMemHostAlloc((void **)&pin, sizeof(a), CU_MEMHOSTALLOC_DEVICEMAP));
	CU(cuMemHostGetDevicePointer_v2(&hp, pin, 0));
	CHECK(hp == (uintptr_t)pin);
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuMemcpyHtoD_v2(p, a, sizeof(a)));
	CU(cuMemcpyDtoD_v2(q, p, sizeof(a)));
	CU(cuMemcpyDtoH_v2(b, q, sizeof(a)));
	CHECK(!memcmp(a, b, sizeof(a)));
	IS(cuMemcpyHtoD_v2(p + 1, a, sizeof(a)), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyHtoD_v2(0x1000, a, 1), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoH_v2(b, (CUdeviceptr)(uintptr_t)a, 1), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemsetD8Async(p, 0x55, 100, s));
	CU(cuMemsetD16Async(p + 100, 0x1234, 50, s));
	CU(cuMemsetD32Async(p + 200, 0xdeadbeef, 50, s));
	CU(cuMemcpyDtoHAsync_v2(pin, p, sizeof(a), s));
	CU(cuStreamSynchronize(s));
	CHECK(pin[99] == 0x55 && pin[100] == 0x34 && pin[199] == 0x12 && pin[200] == 0xef);
	CHECK(pin[399] == 0xde && pin[400] == a[400]);
	IS(cuMemsetD32_v2(p + 1, 0, 1), CUDA_ERROR_INVALID_VALUE);
	/* a pageable source is the caller's again when the call returns */
	memset(b, 1, sizeof(b));
	CU(cuMemcpyHtoDAsync_v2(p, b, sizeof(b), s));
	memset(b, 2, sizeof(b));
	CU(cuMemcpy((CUdeviceptr)(uintptr_t)pin, p, sizeof(b)));
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2(pin, p, sizeof(b)));
	CHECK(pin[0] == 1 && pin[4095] == 1);
	CU(cuMemcpyAsync(q, (CUdeviceptr)(uintptr_t)a, sizeof(a), s));
	CU(cuStreamSynchronize(s));
	CU(cuMemcpyDtoH_v2(b, q, sizeof(a)));
	CHECK(!memcmp(a, b, sizeof(a)));
	CU(cuMemHostRegister_v2(a, sizeof(a), 0));
	IS(cuMemHostRegister_v2(a, sizeof(a), 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	CU(cuMemHostUnregister(a));
	IS(cuMemHostUnregister(a), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	CU(cuMemFreeHost(pin));
	IS(cuMemFreeHost(pin), CUDA_ERROR_INVALID_VALUE);
}

static void t_copies_2d(void)
{
	CUDA_ARRAY3D_DESCRIPTOR d3 = { 8, 4, 2, CU_AD_FORMAT_FLOAT, 1, 0 }, got;
	CUDA_MEMCPY2D c = { 0 };
	CUDA_MEMCPY3D k = { 0 };
	float src[2][4][8], dst[2][4][8];
	CUdeviceptr p;
	CUarray a;
	size_t pitch;
	unsigned char h[10][20], out[10][20];

	begin();
	for (int i = 0; i < 200; i++)
		h[i / 20][i % 20] = (unsigned char)i;
	CU(cuMemAllocPitch_v2(&p, &pitch, 20, 10, 4));
	c.srcMemoryType = CU_MEMORYTYPE_HOST;
	c.srcHost = h;
	c.srcPitch = 20;
	c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
	c.dstDevice = p;
	c.dstPitch = pitch;
	c.WidthInBytes = 20;
	c.Height = 10;
	CU(cuMemcpy2D_v2(&c));
	c.Height = 11;
	IS(cuMemcpy2D_v2(&c), CUDA_ERROR_INVALID_VALUE);
	memset(&c, 0, sizeof(c));
	c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
	c.srcDevice = p;
	c.srcPitch = pitch;
	c.srcXInBytes = 5;
	c.srcY = 2;
	c.dstMemoryType = CU_MEMORYTYPE_HOST;
	c.dstHost = out;
	c.dstPitch = 20;
	c.WidthInBytes = 10;
	c.Height = 8;
	CU(cuMemcpy2DUnaligned_v2(&c));
	CHECK(!memcmp(out[0], &h[2][5], 10) && !memcmp(out[7], &h[9][5], 10));
	CU(cuMemsetD2D8_v2(p + 1, pitch, 9, 3, 10));
	CU(cuMemcpy2DAsync_v2(&c, CU_STREAM_PER_THREAD));
	CU(cuStreamSynchronize(CU_STREAM_PER_THREAD));
	c.srcXInBytes = c.srcY = 0;
	CU(cuMemcpy2D_v2(&c));
	CHECK(out[0][0] == 0 && out[0][1] == 9 && out[0][3] == 9 && out[0][4] == 4);

	CU(cuArray3DCreate_v2(&a, &d3));
	CU(cuArray3DGetDescriptor_v2(&got, a));
	CHECK(got.Width == 8 && got.Depth == 2);
	for (int i = 0; i < 64; i++)
		src[i / 32][i / 8 % 4][i % 8] = (float)i;
	k.srcMemoryType = CU_MEMORYTYPE_HOST;
	k.srcHost = src;
	k.srcPitch = 32;
	k.srcHeight = 4;
	k.dstMemoryType = CU_MEMORYTYPE_ARRAY;
	k.dstArray = a;
	k.WidthInBytes = 32;
	k.Height = 4;
	k.Depth = 2;
	CU(cuMemcpy3D_v2(&k));
	memset(&k, 0, sizeof(k));
	memset(dst, 0, sizeof(dst));
	k.srcMemoryType = CU_MEMORYTYPE_ARRAY;
	k.srcArray = a;
	k.srcZ = 1;
	k.srcY = 1;
	k.srcXInBytes = 8;
	k.dstMemoryType = CU_MEMORYTYPE_HOST;
	k.dstHost = dst;
	k.dstPitch = 32;
	k.dstHeight = 4;
	k.WidthInBytes = 16;
	k.Height = 2;
	k.Depth = 1;
	CU(cuMemcpy3D_v2(&k));
	CHECK(dst[0][0][0] == src[1][1][2] && dst[0][1][3] == src[1][2][5] && dst[0][0][4] == 0);
	k.Depth = 2;
	IS(cuMemcpy3D_v2(&k), CUDA_ERROR_INVALID_VALUE);
	CU(cuArrayDestroy(a));
	IS(cuMemcpy3D_v2(&k), CUDA_ERROR_INVALID_HANDLE);
}

static void t_kernels(void)
{
	CUdeviceptr a, b, c, g;
	CUfunction f, f2;
	CUmodule m;
	float x[100], y[100], z[100];
	int n = 100, v;
	size_t size, off;
	void *args[] = { &a, &b, &c, &n };
	struct { CUdeviceptr a, b, c; int n; } buf;
	size_t bytes = sizeof(buf);
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, &buf, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END };
	const char *name;
	unsigned int count;

	begin();
	for (int i = 0; i < n; i++) {
		x[i] = (float)i;
		y[i] = 2;
	}
	CU(cuMemAlloc_v2(&a, sizeof(x)));
	CU(cuMemAlloc_v2(&b, sizeof(x)));
	CU(cuMemAlloc_v2(&c, sizeof(x)));
	CU(cuMemcpyHtoD_v2(a, x, sizeof(x)));
	CU(cuMemcpyHtoD_v2(b, y, sizeof(x)));
	CU(cuModuleLoadData(&m, ptx("_Z6vecaddPKfS0_Pfi", "_Z5countv", "counter", "table", NULL)));
	CU(cuModuleGetFunctionCount(&count, m));
	CHECK(count == 2);
	CU(cuModuleGetFunction(&f, m, "_Z6vecaddPKfS0_Pfi"));
	IS(cuModuleGetFunction(&f2, m, "_Z3sayi"), CUDA_ERROR_NOT_FOUND);
	CU(cuFuncGetName(&name, f));
	CHECK(!strcmp(name, "_Z6vecaddPKfS0_Pfi"));
	CU(cuFuncGetAttribute(&v, CU_FUNC_ATTRIBUTE_NUM_REGS, f));
	CHECK(v == 16);
	CU(cuFuncGetParamInfo(f, 3, &off, &size));
	CHECK(off == 24 && size == 4);
	IS(cuFuncGetParamInfo(f, 4, &off, &size), CUDA_ERROR_INVALID_VALUE);
	CU(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, NULL, args, NULL));
	CU(cuMemcpyDtoH_v2(z, c, sizeof(z)));
	CHECK(z[0] == 2 && z[99] == 101);
	buf.a = a;
	buf.b = c;
	buf.c = c;
	buf.n = 50;
	CU(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, NULL, NULL, extra));
	CU(cuMemcpyDtoH_v2(z, c, sizeof(z)));
	CHECK(z[49] == 49 + 51 && z[50] == 52);
	bytes = 24; /* without n, which is then zero */
	CU(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, NULL, NULL, extra));
	CU(cuMemcpyDtoH_v2(z, c, sizeof(z)));
	CHECK(z[49] == 49 + 51 && z[50] == 52);
	bytes = 0;
	IS(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, NULL, NULL, extra), CUDA_ERROR_INVALID_VALUE);
	IS(cuLaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, NULL, args, NULL), CUDA_ERROR_INVALID_VALUE);
	IS(cuLaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, NULL, args, NULL), CUDA_ERROR_INVALID_VALUE);
	IS(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 50000, NULL, args, NULL), CUDA_ERROR_INVALID_VALUE);
	CU(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536));
	CU(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 50000, NULL, args, NULL));
	IS(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	IS(cuLaunchKernel((CUfunction)(uintptr_t)0x1234, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL),
	   CUDA_ERROR_INVALID_HANDLE);
	CU(cuModuleGetGlobal_v2(&g, &size, m, "counter"));
	CHECK(size == 4);
	CU(cuModuleGetFunction(&f2, m, "_Z5countv"));
	CU(cuLaunchKernel(f2, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	CU(cuLaunchKernel(f2, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	CU(cuMemcpyDtoH_v2(&v, g, 4));
	CHECK(v == 8);
	CU(cuOccupancyMaxActiveBlocksPerMultiprocessor(&v, f, 256, 0));
	CHECK(v == 8);
	CU(cuModuleUnload(m));
	IS(cuModuleUnload(m), CUDA_ERROR_INVALID_HANDLE);
	IS(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, NULL, args, NULL), CUDA_ERROR_INVALID_HANDLE);
	IS(cuMemcpyDtoH_v2(&v, g, 4), CUDA_ERROR_INVALID_VALUE);
}

static void t_libraries(void)
{
	CUlibrary l;
	CUkernel k, list[4];
	CUfunction f, f2;
	CUmodule m;
	CUdeviceptr p, g;
	unsigned int count;
	size_t off, size;
	long long v;
	char c = 3;
	struct { char c[3]; } odd = { { 4, 5, 6 } };
	short s = 7;
	void *args[] = { &c, &odd, &s, &p };
	CUlaunchConfig cfg = { 1, 1, 1, 32, 1, 1, 0, NULL, NULL, 0 };
	int attr;

	CU(cuInit(0));
	CU(cuLibraryLoadData(&l, ptx("_Z6layoutc3oddsPx", "_Z3sayi", "counter", NULL), NULL, NULL, 0, NULL, NULL, 0));
	CU(cuLibraryGetKernelCount(&count, l));
	CHECK(count == 2);
	CU(cuLibraryEnumerateKernels(list, 4, l));
	CU(cuLibraryGetKernel(&k, l, "_Z6layoutc3oddsPx"));
	CHECK(k == list[0] || k == list[1]);
	IS(cuLibraryGetKernel(&k, l, "nothing"), CUDA_ERROR_NOT_FOUND);
	CU(cuKernelGetParamInfo(k, 2, &off, &size));
	CHECK(off == 4 && size == 2);
	CU(cuKernelGetAttribute(&attr, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, k, 0));
	CHECK(attr == 1024);
	IS(cuKernelGetFunction(&f, k), CUDA_ERROR_INVALID_CONTEXT);
	begin();
	CU(cuKernelGetFunction(&f, k));
	CU(cuKernelGetFunction(&f2, k));
	CHECK(f == f2);
	CU(cuMemAlloc_v2(&p, 8));
	CU(cuLaunchKernelEx(&cfg, f, args, NULL));
	CU(cuMemcpyDtoH_v2(&v, p, 8));
	CHECK(v == 3040607);
	CU(cuMemsetD8_v2(p, 0, 8));
	CU(cuLaunchKernel((CUfunction)k, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL));
	CU(cuMemcpyDtoH_v2(&v, p, 8));
	CHECK(v == 3040607);
	cfg.blockDimX = 512;
	IS(cuLaunchKernelEx(&cfg, f, args, NULL), CUDA_ERROR_INVALID_VALUE);
	CU(cuLibraryGetModule(&m, l));
	CU(cuLibraryGetGlobal(&g, &size, l, "counter"));
	CHECK(size == 4);
	IS(cuModuleUnload(m), CUDA_ERROR_INVALID_HANDLE);
	CU(cuLibraryUnload(l));
	IS(cuLibraryUnload(l), CUDA_ERROR_INVALID_HANDLE);
	IS(cuKernelGetFunction(&f, k), CUDA_ERROR_INVALID_HANDLE);
}

/* A container as fatbinary writes it: one entry of kind, for sm. */
static void *container(int kind, unsigned int sm, unsigned long long flags, const char *payload)
{
	static _Alignas(8) unsigned char all[16][4096];
	static int next;
	unsigned char *b = all[next++ % 16];
	size_t n = strlen(payload) / 8 * 8 + 8;
	unsigned long long size = 64 + n, plain = flags & 0x2000 ? strlen(payload) - 1 : 0;

	memset(b, 0, 4096);
	memcpy(b, (unsigned int[]){ 0xba55ed50 }, 4);
	memcpy(b + 4, (unsigned short[]){ 1, 16 }, 4);
	memcpy(b + 8, &size, 8);
	memcpy(b + 16, (unsigned short[]){ (unsigned short)kind, 0x101 }, 4);
	memcpy(b + 20, (unsigned int[]){ 64 }, 4);
	memcpy(b + 24, (unsigned long long[]){ n }, 8);
	memcpy(b + 32, (unsigned int[]){ strlen(payload) }, 4);
	memcpy(b + 44, &sm, 4);
	memcpy(b + 56, &flags, 8);
	memcpy(b + 72, &plain, 8);
	memcpy(b + 80, payload, strlen(payload));
	return b;
}

static void t_images(void)
{
	struct { unsigned int magic, version; const void *data; void *last; } w = { 0x466243b1, 1, NULL, NULL };
	CUfunction f;
	CUmodule m;

	begin();
	IS(cuModuleLoadData(&m, "\1\2\3\4\5\6\7\10garbage"), CUDA_ERROR_INVALID_IMAGE);
	IS(cuModuleLoadData(&m, "this is no module at all"), CUDA_ERROR_INVALID_IMAGE);
	IS(cuModuleLoadData(&m, ".version 8.0\n.target sm_120\n"), CUDA_ERROR_NO_BINARY_FOR_GPU);
	IS(cuModuleLoadData(&m, NULL), CUDA_ERROR_INVALID_VALUE);
	w.data = container(2, 80, 0, ".text._Z3sayi .text._Z5sleepiX");
	IS(cuModuleLoadFatBinary(&m, &w), CUDA_ERROR_NO_BINARY_FOR_GPU);
	w.data = container(1, 80, 0, "entry _Z3sayi(");
	CU(cuModuleLoadFatBinary(&m, &w));
	w.data = container(2, 90, 0, ".text._Z3sayi .text._Z5sleepiX");
	CU(cuModuleLoadFatBinary(&m, &w));
	CU(cuModuleGetFunction(&f, m, "_Z3sayi"));
	IS(cuModuleGetFunction(&f, m, "_Z5sleepi"), CUDA_ERROR_NOT_FOUND);	/* only part of a name */
	CU(cuModuleLoadData(&m, container(2, 90, 0x8000, "compressed")));	/* by zstd: any twin may be in it */
	CU(cuModuleGetFunction(&f, m, "_Z5sleepi"));
	CU(cuModuleLoadData(&m, container(2, 90, 0x2000, "\xb0 _Z5sleepi ")));	/* by LZ4: 11 bytes as they are */
	CU(cuModuleGetFunction(&f, m, "_Z5sleepi"));
	IS(cuModuleGetFunction(&f, m, "_Z3sayi"), CUDA_ERROR_NOT_FOUND);
	IS(cuModuleLoadData(&m, container(2, 90, 0x2000, "\xb0 too short")), CUDA_ERROR_INVALID_IMAGE);
}

/* What a separately compiled program registers: a linked image, and the objects that it was made of. */
static void t_linked(void)
{
	char object[] = "\177ELF\2\1\1.........\1 .text._Z3sayi .text._Z5sleepi, and as long as the header of a file is";
	void *objects[3] = { NULL };
	struct { unsigned int magic, version; const void *data; void *last; } w = { 0x466243b1, 2, NULL, objects };
	CUfunction f;
	CUmodule m;

	object[17] = 0;
	begin();
	objects[0] = container(1, 80, 0, "entry _Z5sleepi(");
	objects[1] = container(1, 80, 0, "entry _Z3sayi(");
	w.data = container(2, 90, 0, ".text._Z3sayi");
	CU(cuModuleLoadData(&m, &w));	/* it has code: the objects do not matter */
	CU(cuModuleGetFunction(&f, m, "_Z3sayi"));
	IS(cuModuleGetFunction(&f, m, "_Z5sleepi"), CUDA_ERROR_NOT_FOUND);
	w.data = container(2, 75, 0, ".text._Z3sayi");
	CU(cuModuleLoadData(&m, &w));
	CU(cuModuleGetFunction(&f, m, "_Z3sayi"));
	CU(cuModuleGetFunction(&f, m, "_Z5sleepi"));
	objects[1] = container(1, 120, 0, "entry _Z3sayi(");
	IS(cuModuleLoadData(&m, &w), CUDA_ERROR_NO_BINARY_FOR_GPU);
	objects[1] = "not a container";
	IS(cuModuleLoadData(&m, &w), CUDA_ERROR_INVALID_IMAGE);
	objects[0] = NULL;
	IS(cuModuleLoadData(&m, &w), CUDA_ERROR_NO_BINARY_FOR_GPU);
	/* relocatable code alone is for no loader */
	w.data = container(2, 90, 0, "");
	memcpy((char *)w.data + 80, object, sizeof(object));
	((unsigned long long *)w.data)[1] = 64 + sizeof(object) / 8 * 8;
	((unsigned long long *)w.data)[3] = sizeof(object) / 8 * 8;
	IS(cuModuleLoadData(&m, w.data), CUDA_ERROR_INVALID_IMAGE);
	objects[0] = (void *)w.data;
	objects[1] = NULL;
	w.data = container(2, 75, 0, "");
	CU(cuModuleLoadData(&m, &w));
	CU(cuModuleGetFunction(&f, m, "_Z5sleepi"));
}

static void t_vmm(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc acc = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle h, h2;
	CUdeviceptr va, hint = 0;
	size_t g, n0;
	int v = 42, w = 0;

	begin();
	n0 = avail();
	CU(cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	CHECK(g == 2 * MIB);
	CU(cuMemAddressReserve(&va, 64 * MIB, 0, hint, 0));
	CHECK(avail() == n0);
	IS(cuMemCreate(&h, 12345, &prop, 0), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemCreate(&h, 4 * MIB, &prop, 0));
	CU(cuMemCreate(&h2, 2 * MIB, &prop, 0));
	CHECK(avail() == n0 - 6 * MIB);
	CU(cuMemMap(va, 4 * MIB, 0, h, 0));
	IS(cuMemMap(va, 4 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemMap(va + 32 * MIB, 4 * MIB, 0, h, 0));
	CU(cuMemMap(va + 4 * MIB, 2 * MIB, 0, h2, 0));
	IS(cuMemsetD8_v2(va, 1, 1), CUDA_ERROR_INVALID_VALUE);	/* no access yet */
	CU(cuMemSetAccess(va, 6 * MIB, &acc, 1));
	CU(cuMemSetAccess(va + 32 * MIB, 4 * MIB, &acc, 1));
	CU(cuMemsetD8_v2(va + 3 * MIB, 1, 3 * MIB));		/* over two mappings */
	IS(cuMemsetD8_v2(va + 3 * MIB, 1, 3 * MIB + 1), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpy(va + 20 * MIB, va, 4), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemcpyHtoD_v2(va + 8, &v, 4));
	CU(cuMemcpyDtoH_v2(&w, va + 32 * MIB + 8, 4));		/* the same memory seen twice */
	CHECK(w == 42);
	CU(cuMemRelease(h));
	CHECK(avail() == n0 - 6 * MIB);				/* mappings keep it */
	IS(cuMemAddressFree(va, 64 * MIB), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemUnmap(va, 6 * MIB));
	CHECK(avail() == n0 - 6 * MIB);
	CU(cuMemUnmap(va + 32 * MIB, 4 * MIB));
	CHECK(avail() == n0 - 2 * MIB);
	CU(cuMemRelease(h2));
	IS(cuMemRelease(h2), CUDA_ERROR_INVALID_VALUE);
	CHECK(avail() == n0);
	CU(cuMemAddressFree(va, 64 * MIB));
	IS(cuMemCreate(&h, 4096 * MIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
}

static void t_pools(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	cuuint64_t keep = 8 * MIB, v;
	CUmemoryPool pool, dflt;
	CUdeviceptr p, q;
	CUstream s;
	size_t n0;

	begin();
	n0 = avail();
	CU(cuStreamCreate(&s, 0));
	CU(cuMemAllocAsync(&p, 5 * MIB, s));
	CHECK(avail() == n0 - 6 * MIB);
	CU(cuMemFreeAsync(p, s));
	IS(cuMemFreeAsync(p, s), CUDA_ERROR_INVALID_VALUE);
	CU(cuStreamSynchronize(s));
	CHECK(avail() == n0);
	CU(cuDeviceGetDefaultMemPool(&dflt, 0));
	CU(cuMemPoolSetAttribute(dflt, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
	CU(cuMemAllocAsync(&p, 12 * MIB, s));
	CU(cuMemFreeAsync(p, s));
	CU(cuStreamSynchronize(s));
	CHECK(avail() == n0 - 8 * MIB);			/* kept */
	CU(cuMemAlloc_v2(&q, n0));			/* but not from those who need it */
	CU(cuMemFree_v2(q));
	CHECK(avail() == n0);
	CU(cuMemPoolCreate(&pool, &props));
	CU(cuMemAllocFromPoolAsync(&p, 100, pool, s));
	CU(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &v));
	CHECK(v == 100);
	CU(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &v));
	CHECK(v == 2 * MIB);
	CU(cuMemPoolDestroy(pool));
	IS(cuMemPoolTrimTo(pool, 0), CUDA_ERROR_INVALID_VALUE);
	CU(cuMemFree_v2(p));
	CHECK(avail() == n0);
}

static void t_handles(void)
{
	uint64_t bad[] = { 0x1234, 0x5a0000000000ULL, 0x5a0077000010ULL, ~0ULL, 0x7fff12345678ULL };
	CUevent e;
	CUstream s;
	float ms;

	begin();
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		void *h = (void *)(uintptr_t)bad[i];

		IS(cuStreamSynchronize(h), CUDA_ERROR_INVALID_HANDLE);
		IS(cuStreamDestroy_v2(h), CUDA_ERROR_INVALID_HANDLE);
		IS(cuEventQuery(h), CUDA_ERROR_INVALID_HANDLE);
		IS(cuEventRecord(h, NULL), CUDA_ERROR_INVALID_HANDLE);
		IS(cuModuleUnload(h), CUDA_ERROR_INVALID_HANDLE);
		IS(cuCtxSetCurrent(h), CUDA_ERROR_INVALID_CONTEXT);
		IS(cuGraphDestroy(h), CUDA_ERROR_INVALID_VALUE);
		IS(cuGraphLaunch(h, NULL), CUDA_ERROR_INVALID_VALUE);
		IS(cuArrayDestroy(h), CUDA_ERROR_INVALID_HANDLE);
		IS(cuMemRelease(bad[i]), CUDA_ERROR_INVALID_VALUE);
	}
	CU(cuEventCreate(&e, 0));
	CU(cuStreamCreate(&s, 0));
	IS(cuStreamSynchronize((CUstream)e), CUDA_ERROR_INVALID_HANDLE);
	IS(cuEventElapsedTime_v2(&ms, e, e), CUDA_ERROR_INVALID_HANDLE);	/* never recorded */
	CU(cuEventDestroy_v2(e));
	IS(cuEventQuery(e), CUDA_ERROR_INVALID_HANDLE);
	for (int i = 0; i < 1000; i++) {	/* a freed slot does not make an old handle good */
		CUevent x;

		CU(cuEventCreate(&x, 0));
		CHECK(x != e);
		CU(cuEventDestroy_v2(x));
	}
	CU(cuStreamDestroy_v2(s));
	IS(cuStreamQuery(s), CUDA_ERROR_INVALID_HANDLE);
}

static void t_procs(void)
{
	CUdriverProcAddressQueryResult st;
	const char *text;
	void *p;

	CU(cuGetProcAddress_v2("cuMemAlloc", &p, 13000, 0, &st));
	CHECK(p == (void *)(uintptr_t)cuMemAlloc_v2 && st == CU_GET_PROC_ADDRESS_SUCCESS);
	IS(cuGetProcAddress_v2("cuNothing", &p, 13000, 0, &st), CUDA_ERROR_NOT_FOUND);
	CHECK(!p && st == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
	IS(cuGetProcAddress_v2("cuLibraryLoadData", &p, 11080, 0, &st), CUDA_ERROR_NOT_FOUND);
	CHECK(st == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
	IS(cuGetProcAddress_v2("", NULL, 0, 0, NULL), CUDA_ERROR_NOT_FOUND);
	CU(cuGetProcAddress_v2("cuStreamGetCaptureInfo", &p, 12000, 0, &st));
	CHECK(p == (void *)(uintptr_t)cuStreamGetCaptureInfo_v2);
	CU(cuGetProcAddress_v2("cuLaunchKernel", &p, 13000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &st));
	CHECK(p == dlsym(RTLD_DEFAULT, "cuLaunchKernel_ptsz"));
	CU(cuGetProcAddress_v2("cuGetProcAddress", &p, 11030, 0, &st));
	CHECK(p == (void *)(uintptr_t)cuGetProcAddress);
	CU(cuGetErrorName(700, &text));
	CHECK(!strcmp(text, "CUDA_ERROR_ILLEGAL_ADDRESS"));
	IS(cuGetErrorName(12345, &text), CUDA_ERROR_INVALID_VALUE);
	setenv("SLUICE_SIM_DRIVER", "12020", 1);
	IS(cuGetProcAddress_v2("cuFuncGetParamInfo", &p, 13000, 0, &st), CUDA_ERROR_NOT_FOUND);
}

/* The same simulator as a driver of 12.2, as a worker opens it. */
static void t_old_driver(void)
{
	CUresult (*version)(int *);
	char path[4096];
	void *so;
	int v;

	snprintf(path, sizeof(path), "%s/driver-12020/libcuda.so.1", test_dir);
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	CHECK(so != NULL);
	if (!so)
		return;
	CHECK(!dlsym(so, "cuFuncGetParamInfo"));
	CHECK(!dlsym(so, "cuLibraryGetKernelCount"));
	CHECK(dlsym(so, "cuLibraryLoadData") != NULL);
	CHECK(dlsym(so, "cuMemAlloc_v2") != NULL);
	*(void **)&version = dlsym(so, "cuDriverGetVersion");
	CHECK(version && !version(&v) && v == 12020);
}

static void t_fork(void)
{
	int st, n;
	pid_t pid;

	CU(cuInit(0));
	pid = fork();
	if (!pid)
		_exit(cuDeviceGetCount(&n) == CUDA_ERROR_NOT_INITIALIZED && cuInit(0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
	waitpid(pid, &st, 0);
	CHECK(st == 0);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "devices", t_devices, { "SLUICE_SIM_DEVICES=2", "SLUICE_SIM_MEM=512M", "SLUICE_SIM_SM=86" } },
		{ "contexts", t_contexts, { "SLUICE_SIM_DEVICES=2", "SLUICE_SIM_MEM=512M" } },
		{ "memory", t_memory, { "SLUICE_SIM_MEM=1G" } },
		{ "fill and churn", t_fill, { "SLUICE_SIM_MEM=256M" } },
		{ "copies and sets", t_copies, { NULL } },
		{ "copies of rows and arrays", t_copies_2d, { NULL } },
		{ "modules and kernels", t_kernels, { NULL } },
		{ "libraries", t_libraries, { NULL } },
		{ "images", t_images, { NULL } },
		{ "linked images", t_linked, { NULL } },
		{ "virtual memory", t_vmm, { "SLUICE_SIM_MEM=512M" } },
		{ "pools", t_pools, { "SLUICE_SIM_MEM=512M" } },
		{ "bad handles", t_handles, { NULL } },
		{ "names", t_procs, { NULL } },
		{ "an older driver", t_old_driver, { NULL } },
		{ "fork", t_fork, { NULL } },
		{ NULL, NULL, { NULL } },
	};

	return run_tests(tests, argc, argv);
}
