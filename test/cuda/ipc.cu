/*
 * Two processes share memory and events: by CUDA's IPC handles, and by file descriptors of memory of
 * cuMemCreate. What one writes the other sees, in the order that an event or a word between the
 * processes makes; handles that are forged, stale or the process's own are refused; memory stays
 * with who has it open when its maker ends.
 */
#include "driver.h"

#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" __global__ void ipc_add(unsigned *v, int n, unsigned by)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] += by;
}

static const int n = 1 << 20, small = 300, rounds = 20;
static int side; /* of the socket between the processes */

static void tell(const void *p, size_t bytes)
{
	REQUIRE(write(side, p, bytes) == (ssize_t)bytes, "the other process is gone");
}

static void hear(void *p, size_t bytes)
{
	for (char *c = (char *)p; bytes;) {
		ssize_t k = read(side, c, bytes);

		REQUIRE(k > 0, "the other process is gone");
		c += k;
		bytes -= k;
	}
}

static void go(char c)
{
	tell(&c, 1);
}

static void await(char c)
{
	char have;

	hear(&have, 1);
	REQUIRE(have == c, "%c instead of %c", have, c);
}

static void tell_fd(int fd)
{
	char b = 'f', space[CMSG_SPACE(sizeof fd)] = { 0 };
	struct iovec v = { &b, 1 };
	struct msghdr m = {};

	m.msg_iov = &v;
	m.msg_iovlen = 1;
	m.msg_control = space;
	m.msg_controllen = sizeof space;
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(h), &fd, sizeof fd);
	REQUIRE(sendmsg(side, &m, 0) == 1, "the other process is gone");
}

static int hear_fd(void)
{
	char b, space[CMSG_SPACE(sizeof(int))];
	struct iovec v = { &b, 1 };
	struct msghdr m = {};
	int fd;

	m.msg_iov = &v;
	m.msg_iovlen = 1;
	m.msg_control = space;
	m.msg_controllen = sizeof space;
	REQUIRE(recvmsg(side, &m, 0) == 1 && CMSG_FIRSTHDR(&m), "no descriptor came");
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

static void expect_words(const unsigned *d, int count, unsigned want)
{
	unsigned *h = (unsigned *)malloc(count * sizeof *h);

	CHECK(cudaMemcpy(h, d, count * sizeof *h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < count; i++)
		REQUIRE(h[i] == want, "word %d is %u, not %u", i, h[i], want);
	free(h);
}

static void set_words(unsigned *d, int count, unsigned value)
{
	unsigned *h = (unsigned *)malloc(count * sizeof *h);

	for (int i = 0; i < count; i++)
		h[i] = value;
	CHECK(cudaMemcpy(d, h, count * sizeof *h, cudaMemcpyHostToDevice));
	/* Such a copy may return before all of it is in the device, where another process can see it. */
	CHECK(cudaDeviceSynchronize());
	free(h);
}

static void add(unsigned *d, int count, unsigned by, cudaStream_t s)
{
	ipc_add<<<(count + 255) / 256, 256, 0, s>>>(d, count, by);
	CHECK(cudaGetLastError());
}

/* Both processes add in turns, and only events on the device order their kernels. */
static void turns(unsigned *d, cudaEvent_t mine, cudaEvent_t theirs, bool first)
{
	cudaStream_t s;

	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	for (int i = 0; i < rounds; i++) {
		if (!first || i) {
			await('t');
			CHECK(cudaStreamWaitEvent(s, theirs, 0));
		}
		add(d, n, 1, s);
		CHECK(cudaEventRecord(mine, s));
		go('t');
	}
	if (first)
		await('t');
	CHECK(cudaEventSynchronize(first ? theirs : mine));
	CHECK(cudaEventQuery(mine));
	CHECK(cudaStreamDestroy(s));
}

static CUmemAccessDesc readwrite(void)
{
	CUmemAccessDesc a = {};

	a.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return a;
}

static unsigned *map(CUmemGenericAllocationHandle h, size_t bytes)
{
	CUmemAccessDesc a = readwrite();
	CUdeviceptr p;

	DRIVER(CU(cuMemAddressReserve)(&p, bytes, 0, 0, 0));
	DRIVER(CU(cuMemMap)(p, bytes, 0, h, 0));
	DRIVER(CU(cuMemSetAccess)(p, bytes, &a, 1));
	return (unsigned *)p;
}

static void unmap(unsigned *p, size_t bytes)
{
	DRIVER(CU(cuMemUnmap)((CUdeviceptr)p, bytes));
	DRIVER(CU(cuMemAddressFree)((CUdeviceptr)p, bytes));
}

static void refused_here(unsigned *d)
{
	cudaIpcMemHandle_t h;
	unsigned plain;
	void *p, *host;

	EXPECT(cudaIpcGetMemHandle(&h, &plain), cudaErrorInvalidValue);
	CHECK(cudaMallocHost(&host, 4096));
	EXPECT(cudaIpcGetMemHandle(&h, host), cudaErrorInvalidValue);
	CHECK(cudaFreeHost(host));
	CHECK(cudaIpcGetMemHandle(&h, d));
	REQUIRE(cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess, "its own memory is opened");
	cudaGetLastError();
}

static void export_fd(size_t bytes)
{
	CUmemAllocationProp prop = {};
	CUmemGenericAllocationHandle h, again;
	unsigned *p;
	int fd;

	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	DRIVER(CU(cuMemCreate)(&h, bytes, &prop, 0));
	REQUIRE(CU(cuMemExportToShareableHandle)(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS, "not asked for");
	DRIVER(CU(cuMemRelease)(h));
	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	DRIVER(CU(cuMemCreate)(&h, bytes, &prop, 0));
	DRIVER(CU(cuMemExportToShareableHandle)(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	p = map(h, bytes);
	DRIVER(CU(cuMemRetainAllocationHandle)(&again, p));
	REQUIRE(again == h, "another handle of the same memory");
	DRIVER(CU(cuMemRelease)(h)); /* as NCCL does: twice by one value */
	DRIVER(CU(cuMemRelease)(again));
	DRIVER(CU(cuMemRetainAllocationHandle)(&again, p));
	DRIVER(CU(cuMemRelease)(again));
	set_words(p, n, 70);
	tell_fd(fd);
	close(fd);
	await('v');
	expect_words(p, n, 77);
	unmap(p, bytes);
	go('u');
}

static void import_fd(size_t bytes)
{
	CUmemGenericAllocationHandle h;
	int fd = hear_fd(), null = open("/dev/null", O_RDWR);
	unsigned *p;

	REQUIRE(CU(cuMemImportFromShareableHandle)(&h, (void *)(long)null, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS, "/dev/null is imported");
	DRIVER(CU(cuMemImportFromShareableHandle)(&h, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(fd);
	p = map(h, bytes);
	DRIVER(CU(cuMemRelease)(h));
	expect_words(p, n, 70);
	add(p, n, 7, 0);
	CHECK(cudaDeviceSynchronize());
	go('v');
	await('u'); /* unmapped there */
	expect_words(p, n, 77);
	unmap(p, bytes);
}

/* The data that exports memory of a pool, which no context need be current for. */
static CUmemPoolPtrExportData exported(CUdeviceptr p)
{
	CUmemPoolPtrExportData data;
	CUcontext c;

	DRIVER(CU(cuCtxPopCurrent_v2)(&c));
	DRIVER(CU(cuMemPoolExportPointer)(&data, p));
	DRIVER(CU(cuCtxPushCurrent_v2)(c));
	return data;
}

static void export_pool(void)
{
	CUmemPoolProps prop = {};
	CUmemPoolPtrExportData data;
	CUmemoryPool pool, other;
	CUdeviceptr p;
	int fd;

	prop.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	DRIVER(CU(cuMemPoolCreate)(&pool, &prop));
	DRIVER(CU(cuMemPoolExportToShareableHandle)(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	tell_fd(fd);
	close(fd);
	for (int i = 0; i < 2; i++) {
		DRIVER(CU(cuMemAllocFromPoolAsync)(&p, n * sizeof(unsigned), pool, 0));
		set_words((unsigned *)p, n, 30 + i);
		data = exported(p);
		tell(&data, sizeof data);
		await('p');
		expect_words((unsigned *)p, n, 31 + i);
		DRIVER(CU(cuMemFreeAsync)(p, 0));
	}
	DRIVER(CU(cuMemPoolCreate)(&other, &prop));
	DRIVER(CU(cuMemAllocFromPoolAsync)(&p, n * sizeof(unsigned), other, 0));
	REQUIRE(CU(cuMemPoolExportPointer)(&data, p) == CUDA_ERROR_INVALID_VALUE, "memory is exported before its pool");
	DRIVER(CU(cuMemPoolExportToShareableHandle)(&fd, other, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	close(fd);
	data = exported(p);
	tell(&data, sizeof data);
	await('p');
	/* A pool that is destroyed stays until nothing of it is left. */
	DRIVER(CU(cuMemPoolDestroy)(other));
	set_words((unsigned *)p, n, 44);
	expect_words((unsigned *)p, n, 44);
	DRIVER(CU(cuMemFreeAsync)(p, 0));
	CHECK(cudaDeviceSynchronize());
	DRIVER(CU(cuMemPoolDestroy)(pool));
}

static CUresult import_pointer(CUdeviceptr *p, CUmemoryPool pool, CUmemPoolPtrExportData data)
{
	CUresult rc;
	CUcontext c;

	DRIVER(CU(cuCtxPopCurrent_v2)(&c));
	rc = CU(cuMemPoolImportPointer)(p, pool, &data);
	DRIVER(CU(cuCtxPushCurrent_v2)(c));
	return rc;
}

static void import_pool(void)
{
	CUmemPoolPtrExportData data;
	CUmemoryPool pool, again;
	CUdeviceptr p;
	int fd = hear_fd(), on = -1;

	DRIVER(CU(cuMemPoolImportFromShareableHandle)(&pool, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	/* Each import is ended by itself. */
	DRIVER(CU(cuMemPoolImportFromShareableHandle)(&again, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	DRIVER(CU(cuMemPoolDestroy)(again));
	close(fd);
	REQUIRE(CU(cuMemAllocFromPoolAsync)(&p, 4096, pool, 0) != CUDA_SUCCESS, "an imported pool allocates");
	for (int i = 0; i < 2; i++) {
		hear(&data, sizeof data);
		DRIVER(import_pointer(&p, pool, data));
		DRIVER(CU(cuPointerGetAttribute)(&on, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
		REQUIRE(on == 0, "imported memory is on device %d", on);
		expect_words((unsigned *)p, n, 30 + i);
		add((unsigned *)p, n, 1, 0);
		DRIVER(CU(cuMemFreeAsync)(p, 0));
		CHECK(cudaDeviceSynchronize());
		go('p');
	}
	hear(&data, sizeof data);
	REQUIRE(import_pointer(&p, pool, data) == CUDA_ERROR_INVALID_VALUE, "memory of another pool is imported");
	go('p');
	DRIVER(CU(cuMemPoolDestroy)(pool));
}

/* The maker of the memory ends first. */
static void outlived(void)
{
	cudaIpcMemHandle_t h;
	unsigned *d;
	void *other;

	hear(&h, sizeof h);
	CHECK(cudaIpcOpenMemHandle((void **)&d, h, cudaIpcMemLazyEnablePeerAccess));
	expect_words(d, n, 2 * rounds + 1);
	go('e');
	char c;
	REQUIRE(read(side, &c, 1) == 0, "the other process is there");
	add(d, n, 1, 0);
	expect_words(d, n, 2 * rounds + 2);
	CHECK(cudaIpcCloseMemHandle(d));
	/* Its end reaches whoever answers for its memory a moment after it. */
	for (int i = 0; i < 15000 && cudaIpcOpenMemHandle(&other, h, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess; i++) {
		CHECK(cudaIpcCloseMemHandle(other));
		usleep(1000);
	}
	REQUIRE(cudaGetLastError() != cudaSuccess, "memory of an ended process is opened");
}

static int maker(void)
{
	cudaEvent_t mine, theirs;
	cudaIpcEventHandle_t e;
	cudaIpcMemHandle_t h;
	unsigned *big, *little, *gone;

	CHECK(cudaMalloc(&big, n * sizeof *big));
	CHECK(cudaMalloc(&gone, 4096));
	CHECK(cudaMalloc(&little, small * sizeof *little));
	refused_here(big);
	set_words(big, n, 1);
	set_words(little, small, 5);
	CHECK(cudaIpcGetMemHandle(&h, big));
	tell(&h, sizeof h);
	CHECK(cudaIpcGetMemHandle(&h, little));
	tell(&h, sizeof h);
	CHECK(cudaIpcGetMemHandle(&h, gone));
	CHECK(cudaFree(gone));
	tell(&h, sizeof h);
	await('a');
	expect_words(little, small, 8);
	for (int i = 0; i < rounds; i++) {
		set_words(little, small, 100 + i);
		go('c');
		await('c');
	}
	CHECK(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess));
	CHECK(cudaIpcGetEventHandle(&e, mine));
	tell(&e, sizeof e);
	hear(&e, sizeof e);
	CHECK(cudaIpcOpenEventHandle(&theirs, e));
	turns(big, mine, theirs, true);
	expect_words(big, n, 2 * rounds + 1);
	CHECK(cudaEventDestroy(theirs));
	export_fd(4 << 20);
	export_pool();
	CHECK(cudaIpcGetMemHandle(&h, big));
	tell(&h, sizeof h);
	await('e');
	_exit(0);
}

static void user(void)
{
	cudaEvent_t mine, theirs;
	cudaIpcEventHandle_t e;
	cudaIpcMemHandle_t hb, hl, hg, forged;
	unsigned *big, *little;
	void *again, *p;

	hear(&hb, sizeof hb);
	hear(&hl, sizeof hl);
	hear(&hg, sizeof hg);
	CHECK(cudaIpcOpenMemHandle((void **)&big, hb, cudaIpcMemLazyEnablePeerAccess));
	CHECK(cudaIpcOpenMemHandle((void **)&little, hl, cudaIpcMemLazyEnablePeerAccess));
	REQUIRE(cudaIpcOpenMemHandle(&p, hg, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess || p != NULL, "freed memory");
	cudaGetLastError();
	memset(&forged, 0x5a, sizeof forged);
	REQUIRE(cudaIpcOpenMemHandle(&p, forged, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess, "a forged handle is opened");
	cudaGetLastError();
	CHECK(cudaIpcOpenMemHandle(&again, hb, cudaIpcMemLazyEnablePeerAccess));
	REQUIRE(again == big, "opened at %p, and again at %p", (void *)big, again);
	CHECK(cudaIpcCloseMemHandle(again));
	expect_words(little, small, 5);
	add(little, small, 3, 0);
	CHECK(cudaDeviceSynchronize());
	go('a');
	for (int i = 0; i < rounds; i++) {
		await('c');
		expect_words(little, small, 100 + i);
		go('c');
	}
	CHECK(cudaIpcCloseMemHandle(little));
	hear(&e, sizeof e);
	CHECK(cudaIpcOpenEventHandle(&theirs, e));
	CHECK(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess));
	CHECK(cudaIpcGetEventHandle(&e, mine));
	tell(&e, sizeof e);
	turns(big, mine, theirs, false);
	CHECK(cudaIpcCloseMemHandle(big));
	CHECK(cudaEventDestroy(theirs));
	import_fd(4 << 20);
	import_pool();
	outlived();
}

int main()
{
	int s[2], status;
	pid_t pid;

	REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM, 0, s), "no socket");
	pid = fork();
	side = s[pid ? 0 : 1];
	close(s[pid ? 1 : 0]);
	if (!pid)
		return maker();
	user();
	REQUIRE(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status), "the other process ended with %#x", status);
	printf("ipc: memory, %d turns by events, a descriptor, a pool\n", 2 * rounds);
	return pass();
}
