/*
 * Devices that reach each other's memory: kernels of one read and write the other's by what is enabled
 * or set for it, and only then; copies go either way without; handles of another process are opened
 * with any device current.
 *
 * peer illegal: a kernel touches the other device's memory, which has not been enabled.
 * peer nccl: memory that NCCL's processes would share, their kernels waiting for each other by it, is refused.
 * peer staged: the devices belong to several owners, which do not reach each other; copies work.
 */
#include "driver.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" __global__ void peer_add(unsigned *to, const unsigned *from, int n, unsigned by)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		to[i] = from[i] + by;
}

static const int N = 1 << 18;
static const size_t BYTES = N * sizeof(unsigned);

static void add(unsigned *to, const unsigned *from, unsigned by)
{
	peer_add<<<N / 256, 256>>>(to, from, N, by);
	CHECK(cudaGetLastError());
}

/* All words of p are v. */
static void all(const char *what, const unsigned *p, unsigned v)
{
	static unsigned h[N];

	CHECK(cudaMemcpy(h, p, BYTES, cudaMemcpyDefault));
	for (int i = 0; i < N; i++)
		REQUIRE(h[i] == v, "%s: word %d is %u, not %u", what, i, h[i], v);
}

static unsigned *words(int dev, unsigned v)
{
	static unsigned h[N];
	unsigned *p;

	CHECK(cudaSetDevice(dev));
	CHECK(cudaMalloc(&p, BYTES));
	for (int i = 0; i < N; i++)
		h[i] = v;
	CHECK(cudaMemcpy(p, h, BYTES, cudaMemcpyHostToDevice));
	CHECK(cudaDeviceSynchronize());
	return p;
}

/* Before anything was done on device 1: peer access makes its context. */
static void enabling()
{
	int can = 7, v = 7;
	CUcontext own, other;

	CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
	REQUIRE(can == 1, "0 can access 1: %d", can);
	CHECK(cudaDeviceCanAccessPeer(&can, 1, 1));
	REQUIRE(can == 0, "1 can access itself: %d", can);
	EXPECT(cudaDeviceCanAccessPeer(&can, 0, 99), cudaErrorInvalidDevice);
	cudaGetLastError();
	CHECK(cudaDeviceGetP2PAttribute(&v, cudaDevP2PAttrAccessSupported, 1, 0));
	REQUIRE(v == 1, "access from 1 to 0: %d", v);
	EXPECT(cudaDeviceGetP2PAttribute(&v, cudaDevP2PAttrAccessSupported, 1, 1), cudaErrorInvalidDevice);
	cudaGetLastError();

	CHECK(cudaSetDevice(0));
	EXPECT(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
	EXPECT(cudaDeviceEnablePeerAccess(1, 1), cudaErrorInvalidValue);
	CHECK(cudaDeviceEnablePeerAccess(1, 0));
	EXPECT(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
	CHECK(cudaDeviceDisablePeerAccess(1));
	EXPECT(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
	cudaGetLastError();

	DRIVER(CU(cuDevicePrimaryCtxRetain)(&own, 0));
	DRIVER(CU(cuDevicePrimaryCtxRetain)(&other, 1));
	EXPECT_DRIVER(CU(cuCtxEnablePeerAccess)(own, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
	EXPECT_DRIVER(CU(cuCtxEnablePeerAccess)(NULL, 0), CUDA_ERROR_INVALID_CONTEXT);
	DRIVER(CU(cuCtxEnablePeerAccess)(other, 0));
	EXPECT_DRIVER(CU(cuCtxEnablePeerAccess)(other, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
	DRIVER(CU(cuCtxDisablePeerAccess)(other));
	EXPECT_DRIVER(CU(cuCtxDisablePeerAccess)(other), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
	DRIVER(CU(cuDevicePrimaryCtxRelease)(0));
	DRIVER(CU(cuDevicePrimaryCtxRelease)(1));
}

static void kernels(unsigned *a, unsigned *b)
{
	unsigned *later;
	cudaEvent_t done;
	cudaPointerAttributes at;

	CHECK(cudaSetDevice(1));
	CHECK(cudaMalloc(&later, BYTES)); /* before access is enabled, and after */
	CHECK(cudaSetDevice(0));
	CHECK(cudaDeviceEnablePeerAccess(1, 0));
	add(a, b, 5);
	all("read from the other device", a, 205);
	add(b, a, 1);
	all("written to the other device", b, 206);
	add(later, b, 1);
	CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
	CHECK(cudaEventRecord(done, 0));
	CHECK(cudaSetDevice(1));
	CHECK(cudaStreamWaitEvent(0, done, 0));
	add(b, later, 1);
	all("one device after the other", b, 208);
	CHECK(cudaPointerGetAttributes(&at, a));
	REQUIRE(at.device == 0 && at.type == cudaMemoryTypeDevice && at.devicePointer == a, "device %d", at.device);
	CHECK(cudaMemcpy(later, a, BYTES, cudaMemcpyDefault));
	all("copied to where the kernel may not", later, 205);
	CHECK(cudaFree(later));
	CHECK(cudaEventDestroy(done));
	CHECK(cudaSetDevice(0));
	CHECK(cudaDeviceDisablePeerAccess(1));
}

static void copies(unsigned *a, unsigned *b)
{
	cudaMemcpy3DPeerParms p;

	CHECK(cudaSetDevice(0));
	CHECK(cudaMemset(a, 1, BYTES));
	CHECK(cudaMemcpyPeer(b, 1, a, 0, BYTES));
	all("cudaMemcpyPeer", b, 0x01010101);
	CHECK(cudaMemset(b, 2, BYTES));
	CHECK(cudaMemcpyPeerAsync(a, 0, b, 1, BYTES, 0));
	all("cudaMemcpyPeerAsync", a, 0x02020202);
	CHECK(cudaMemset(a, 3, BYTES));
	CHECK(cudaMemcpy(b, a, BYTES, cudaMemcpyDeviceToDevice));
	all("cudaMemcpy", b, 0x03030303);
	CHECK(cudaMemset(b, 4, BYTES));
	memset(&p, 0, sizeof(p));
	p.srcDevice = 1;
	p.srcPtr = make_cudaPitchedPtr(b, 1024, 1024, N / 256);
	p.dstPtr = make_cudaPitchedPtr(a, 1024, 1024, N / 256);
	p.extent = make_cudaExtent(1024, N / 256, 1);
	CHECK(cudaMemcpy3DPeer(&p));
	all("cudaMemcpy3DPeer", a, 0x04040404);
	CHECK(cudaMemset(a, 5, BYTES));
	p.srcDevice = 0;
	p.dstDevice = 1;
	p.srcPtr.ptr = a;
	p.dstPtr.ptr = b;
	CHECK(cudaMemcpy3DPeerAsync(&p, 0));
	CHECK(cudaStreamSynchronize(0));
	all("cudaMemcpy3DPeerAsync", b, 0x05050505);
}

static CUmemAccessDesc may(int dev, CUmemAccess_flags flags)
{
	CUmemAccessDesc d;

	memset(&d, 0, sizeof(d));
	d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	d.location.id = dev;
	d.flags = flags;
	return d;
}

/* Memory of device 1 that device 0 alone may touch, then both. */
static void mapped(unsigned *a)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop, is;
	CUmemAccessDesc both[2] = { may(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), may(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) };
	unsigned long long flags = 9;
	const size_t size = 2 << 20;
	CUdeviceptr p;
	int dev = -1;

	memset(&prop, 0, sizeof(prop));
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location = both[1].location;
	CHECK(cudaSetDevice(0));
	DRIVER(CU(cuMemCreate)(&handle, size, &prop, 0));
	DRIVER(CU(cuMemGetAllocationPropertiesFromHandle)(&is, handle));
	REQUIRE(is.location.id == 1, "memory of device %d", is.location.id);
	DRIVER(CU(cuMemAddressReserve)(&p, size, 0, 0, 0));
	DRIVER(CU(cuMemMap)(p, size, 0, handle, 0));
	DRIVER(CU(cuMemSetAccess)(p, size, both, 1));
	DRIVER(CU(cuMemGetAccess)(&flags, &both[0].location, p));
	REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "device 0 may %llu", flags);
	DRIVER(CU(cuMemGetAccess)(&flags, &both[1].location, p));
	REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE, "device 1 may %llu", flags);
	DRIVER(CU(cuPointerGetAttribute)(&dev, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
	REQUIRE(dev == 1, "mapped memory is of device %d", dev);
	CHECK(cudaMemset(a, 0, BYTES));
	add((unsigned *)p, a, 11);
	all("mapped for one", (unsigned *)p, 11);
	DRIVER(CU(cuMemSetAccess)(p, size, both, 2));
	CHECK(cudaSetDevice(1));
	add((unsigned *)p, (unsigned *)p, 1);
	all("mapped for both", (unsigned *)p, 12);
	DRIVER(CU(cuMemUnmap)(p, size));
	DRIVER(CU(cuMemAddressFree)(p, size));
	DRIVER(CU(cuMemRelease)(handle));
}

/* A pool of device 1, whose memory device 0 is given. */
static void pool(unsigned *a)
{
	cudaMemPool_t own;
	cudaMemPoolProps props;
	cudaMemAccessDesc desc;
	cudaMemAccessFlags flags;
	unsigned *p;

	memset(&props, 0, sizeof(props));
	props.allocType = cudaMemAllocationTypePinned;
	props.location.type = cudaMemLocationTypeDevice;
	props.location.id = 1;
	CHECK(cudaSetDevice(1));
	CHECK(cudaMemPoolCreate(&own, &props));
	CHECK(cudaMallocFromPoolAsync(&p, BYTES, own, 0));
	CHECK(cudaMemsetAsync(p, 0, BYTES, 0));
	CHECK(cudaDeviceSynchronize());
	memset(&desc, 0, sizeof(desc));
	desc.location.type = cudaMemLocationTypeDevice;
	desc.location.id = 0;
	desc.flags = cudaMemAccessFlagsProtReadWrite;
	CHECK(cudaMemPoolGetAccess(&flags, own, &desc.location));
	REQUIRE(flags == cudaMemAccessFlagsProtNone, "device 0 may %d", (int)flags);
	CHECK(cudaMemPoolSetAccess(own, &desc, 1));
	CHECK(cudaMemPoolGetAccess(&flags, own, &desc.location));
	REQUIRE(flags == cudaMemAccessFlagsProtReadWrite, "device 0 may %d", (int)flags);
	CHECK(cudaSetDevice(0));
	CHECK(cudaMemset(a, 0, BYTES));
	add(p, a, 21);
	all("a pool", p, 21);
	CHECK(cudaSetDevice(1));
	CHECK(cudaFreeAsync(p, 0));
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaMemPoolDestroy(own));
}

/* Another process, with device 1 current, opens memory of device 0 and adds to it. */
static void opener(int side)
{
	cudaIpcMemHandle_t h;
	unsigned *p, *mine;

	REQUIRE(read(side, &h, sizeof(h)) == (ssize_t)sizeof(h), "the parent is gone");
	mine = words(1, 30);
	CHECK(cudaIpcOpenMemHandle((void **)&p, h, cudaIpcMemLazyEnablePeerAccess));
	all("opened", p, 40);
	add(mine, p, 2);
	all("read by a kernel of the other device", mine, 42);
	add(p, mine, 1);
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaIpcCloseMemHandle(p));
	CHECK(cudaFree(mine));
	REQUIRE(write(side, "", 1) == 1, "the parent is gone");
	exit(0);
}

static void shared(int side)
{
	unsigned *a = words(0, 40);
	cudaIpcMemHandle_t h;
	char c;

	CHECK(cudaIpcGetMemHandle(&h, a));
	REQUIRE(write(side, &h, sizeof(h)) == (ssize_t)sizeof(h), "the child is gone");
	REQUIRE(read(side, &c, 1) == 1, "the child is gone");
	all("written by another process's kernel of the other device", a, 43);
	CHECK(cudaFree(a));
}

static int staged()
{
	unsigned *a, *b;
	int can = 7;

	CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
	REQUIRE(can == 0, "0 can access 1: %d", can);
	a = words(0, 100);
	b = words(1, 200);
	CHECK(cudaSetDevice(0));
	EXPECT(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessUnsupported);
	EXPECT(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
	cudaGetLastError();
	copies(a, b);
	puts("peer: staged");
	return pass();
}

static int nccl()
{
	char name[] = "/dev/shm/nccl-XXXXXX";
	int fd = mkstemp(name);
	void *p, *there;

	REQUIRE(fd >= 0 && !unlink(name) && !ftruncate(fd, 65536), "no file in /dev/shm");
	p = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	REQUIRE(p != MAP_FAILED, "no mapping");
	CHECK(cudaHostRegister(p, 65536, cudaHostRegisterPortable | cudaHostRegisterMapped));
	EXPECT(cudaHostGetDevicePointer(&there, p, 0), cudaErrorNotSupported);
	puts("peer: NCCL's shared memory is refused");
	return pass();
}

int main(int argc, char **argv)
{
	int sides[2], status = 0;
	unsigned *a, *b;
	pid_t child;

	if (argc > 1 && !strcmp(argv[1], "staged"))
		return staged();
	if (argc > 1 && !strcmp(argv[1], "nccl"))
		return nccl();
	if (argc > 1) {
		a = words(0, 100);
		b = words(1, 200);
		CHECK(cudaSetDevice(0));
		add(a, b, 5);
		EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
		EXPECT(cudaMemcpy(a, b, 4, cudaMemcpyDefault), cudaErrorIllegalAddress);
		puts("peer: an illegal address");
		return pass();
	}
	REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM, 0, sides), "no socket");
	child = fork();
	if (!child) {
		close(sides[0]);
		opener(sides[1]);
	}
	close(sides[1]);
	enabling();
	a = words(0, 100);
	b = words(1, 200);
	kernels(a, b);
	copies(a, b);
	mapped(a);
	pool(a);
	CHECK(cudaSetDevice(0));
	CHECK(cudaFree(a));
	CHECK(cudaFree(b));
	shared(sides[0]);
	REQUIRE(waitpid(child, &status, 0) == child && !status, "the child ended with %x", status);
	puts("peer: kernels, copies, mappings, pools, another process");
	return pass();
}
