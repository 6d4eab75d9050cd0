/*
 * Memory that the program has registered itself, of any size and at any address, that kernels read and write: by its own
 * address and by the device's. What else lies in the same pages keeps what the program writes there.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"

#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" __global__ void rg_add(const unsigned *in, unsigned *out, int n, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		out[i] = in[i] + what;
}

static void fill(unsigned *v, int n, unsigned base)
{
	for (int i = 0; i < n; i++)
		v[i] = base + i;
}

static void expect(const unsigned *v, int n, unsigned base, const char *what)
{
	for (int i = 0; i < n; i++)
		REQUIRE(v[i] == base + i, "%s: element %d of %d is %u, not %u", what, i, n, v[i], base + i);
}

/* A block of n words, off bytes into other memory of the program's. */
static void block(int n, size_t off)
{
	char *around = (char *)malloc(n * sizeof(unsigned) + off + 64);
	unsigned *v = (unsigned *)(around + off), *there;

	memset(around, 7, off);
	memset(v + n, 9, 64);
	fill(v, n, 1);
	CHECK(cudaHostRegister(v, n * sizeof *v, cudaHostRegisterMapped));
	CHECK(cudaHostGetDevicePointer(&there, v, 0));
	for (unsigned round = 0; round < 3; round++) {
		rg_add<<<8, 64>>>(round % 2 ? v : there, v, n, 1);
		if (off)
			around[off - 1] = 20 + round;
		((char *)(v + n))[0] = 30 + round;
		CHECK(cudaDeviceSynchronize());
		expect(v, n, 2 + 2 * round, "written by a kernel");
		fill(v, n, 3 + 2 * round);
		REQUIRE((!off || around[off - 1] == (char)(20 + round)) && ((char *)(v + n))[0] == (char)(30 + round), "what lies beside %d words is %d and %d",
			n, off ? around[off - 1] : 0, ((char *)(v + n))[0]);
	}
	/* what a kernel writes last is there when the memory is the program's alone */
	rg_add<<<8, 64>>>(v, v, n, 100);
	CHECK(cudaHostUnregister(v));
	expect(v, n, 107, "unregistered");
	REQUIRE(!off || around[0] == (off == 1 ? 22 : 7), "before the block is %d", around[0]);
	REQUIRE(((char *)(v + n))[63] == 9, "behind the block is %d", ((char *)(v + n))[63]);
	free(around);
}

/* Blocks that share pages come and go. */
static void neighbours(void)
{
	enum { EACH = 3000, COUNT = 6 };
	unsigned *all = (unsigned *)malloc(COUNT * EACH * sizeof *all), *v[COUNT];

	for (int i = 0; i < COUNT; i++) {
		v[i] = all + i * EACH;
		fill(v[i], EACH, i);
		CHECK(cudaHostRegister(v[i], EACH * sizeof *all, cudaHostRegisterDefault));
	}
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < COUNT; i++)
			rg_add<<<4, 64>>>(v[i], v[i], EACH, 10);
		CHECK(cudaDeviceSynchronize());
		for (int i = 0; i < COUNT; i++)
			expect(v[i], EACH, i + 10 * (round + 1), "a neighbour");
		/* one goes, is written to, and comes back */
		CHECK(cudaHostUnregister(v[round]));
		fill(v[round], EACH, round + 10 * (round + 1));
		memset(v[5], 0, 8);
		v[5][0] = 5 + 10 * (round + 1);
		v[5][1] = v[5][0] + 1;
		CHECK(cudaHostRegister(v[round], EACH * sizeof *all, cudaHostRegisterDefault));
	}
	EXPECT(cudaHostRegister(v[2] + 10, 100, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
	EXPECT(cudaHostRegister(all, COUNT * EACH * sizeof *all, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
	EXPECT(cudaHostUnregister(v[2] + 10), cudaErrorInvalidValue);
	cudaGetLastError();
	for (int i = 0; i < COUNT; i++)
		CHECK(cudaHostUnregister(v[i]));
	free(all);
}

/* With copies and fills in the order of a stream. */
static void copies(cudaStream_t s)
{
	enum { N = 100000 };
	unsigned *v = (unsigned *)malloc(N * sizeof *v), *plain = (unsigned *)malloc(N * sizeof *plain), *d;

	CHECK(cudaMalloc(&d, N * sizeof *d));
	CHECK(cudaHostRegister(v, N * sizeof *v, cudaHostRegisterPortable));
	fill(v, N, 1);
	rg_add<<<8, 64, 0, s>>>(v, v, N, 1);
	CHECK(cudaMemcpyAsync(d, v, N * sizeof *v, cudaMemcpyHostToDevice, s));
	rg_add<<<8, 64, 0, s>>>(d, d, N, 1);
	CHECK(cudaMemcpyAsync(v, d, N * sizeof *v, cudaMemcpyDeviceToHost, s));
	rg_add<<<8, 64, 0, s>>>(v, v, N, 1);
	CHECK(cudaMemcpyAsync(plain, v, N * sizeof *v, cudaMemcpyDefault, s));
	CHECK(cudaStreamSynchronize(s));
	expect(v, N, 4, "behind copies");
	expect(plain, N, 4, "copied");
	CHECK(cudaMemsetAsync(v, 1, 4096, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(v[0] == 0x01010101 && v[1023] == 0x01010101 && v[1024] == 4 + 1024, "filled: %x %x %u", v[0], v[1023], v[1024]);
	CHECK(cudaHostUnregister(v));
	CHECK(cudaFree(d));
	free(plain);
	free(v);
}

/* Memory that another process writes to, and a file that nobody may write to. */
static void other_maps(const char *self)
{
	const int n = 1 << 14;
	unsigned *v = (unsigned *)mmap(NULL, n * sizeof *v, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *out, *file;
	int status, fd = open(self, O_RDONLY), sum = 0;

	CHECK(cudaMallocHost(&out, n * sizeof *out));
	fill(v, n, 0);
	CHECK(cudaHostRegister(v, n * sizeof *v, cudaHostRegisterDefault));
	for (unsigned round = 1; round < 4; round++) {
		pid_t child = fork();

		if (!child) {
			fill(v, n, 100 * round);
			_exit(0);
		}
		REQUIRE(waitpid(child, &status, 0) == child && !status, "the child ended with %x", status);
		rg_add<<<8, 64>>>(v, out, n, 1);
		CHECK(cudaDeviceSynchronize());
		expect(out, n, 100 * round + 1, "written by another process");
	}
	CHECK(cudaHostUnregister(v));
	munmap(v, n * sizeof *v);
	file = (unsigned *)mmap(NULL, n * sizeof *v, PROT_READ, MAP_PRIVATE, fd, 0);
	REQUIRE(file != MAP_FAILED, "%s cannot be mapped", self);
	EXPECT(cudaHostRegister(file, n * sizeof *v, cudaHostRegisterIoMemory), cudaErrorInvalidValue);
	cudaGetLastError();
	CHECK(cudaHostRegister(file, n * sizeof *v, cudaHostRegisterReadOnly));
	for (int round = 0; round < 2; round++) {
		rg_add<<<8, 64>>>(file, out, n, 1);
		CHECK(cudaDeviceSynchronize());
		for (int i = 0; i < n; i++)
			sum += out[i] != file[i] + 1;
	}
	REQUIRE(!sum, "%d words of a file are wrong", sum);
	CHECK(cudaHostUnregister(file));
	munmap(file, n * sizeof *v);
	close(fd);
	CHECK(cudaFreeHost(out));
}

/* At an address that the owner's process most likely uses for its own program. */
static void taken(void)
{
	const int n = 50000;
	unsigned *v = (unsigned *)mmap((void *)0x480000, n * sizeof *v, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *there;
	unsigned seen = 0;

	REQUIRE(v != MAP_FAILED, "no memory");
	CHECK(cudaHostRegister(v, n * sizeof *v, cudaHostRegisterMapped));
	CHECK(cudaHostGetDevicePointer(&there, v, 0));
	for (unsigned round = 0; round < 4; round++) {
		fill(v, n, round);
		rg_add<<<8, 64>>>(round % 2 ? v : there, round < 2 ? v : there, n, 1);
		CHECK(cudaDeviceSynchronize());
		expect(v, n, round + 1, "at a taken address");
	}
	CHECK(cudaMemcpy(&seen, there + 3, sizeof seen, cudaMemcpyDefault));
	REQUIRE(seen == 7, "a copy of a word is %u", seen);
	CHECK(cudaHostUnregister(v));
	munmap(v, n * sizeof *v);
}

/* System calls read and write registered memory that is small, whatever kernels have done to it, and any that no kernel has seen. */
static void system_calls(void)
{
	const size_t n = 3 << 20;
	char *large, *small = (char *)malloc(10000), *pinned, *d;
	int fd = open("/dev/zero", O_RDONLY), out = open("/dev/null", O_WRONLY);

	CHECK(cudaMalloc(&d, n));
	CHECK(cudaMallocHost(&pinned, n));
	large = (char *)malloc(n);
	CHECK(cudaHostRegister(large, n, cudaHostRegisterDefault));
	CHECK(cudaHostRegister(small, 10000, cudaHostRegisterDefault));
	memset(small, 1, 10000);
	for (int round = 0; round < 5; round++) {
		CHECK(cudaMemcpyAsync(d, round % 2 ? large : pinned, n, cudaMemcpyHostToDevice));
		CHECK(cudaMemcpyAsync(round % 2 ? pinned : large, d, n, cudaMemcpyDeviceToHost));
		rg_add<<<1, 32>>>((unsigned *)small, (unsigned *)small, 2500, 1);
		CHECK(cudaDeviceSynchronize());
		REQUIRE(read(fd, large, n) == (ssize_t)n && read(fd, pinned, n) == (ssize_t)n, "reading into memory that is copied failed");
		REQUIRE(read(fd, small, 10000) == 10000, "reading into memory that a kernel has written to failed");
		rg_add<<<1, 32>>>((unsigned *)small, (unsigned *)small, 2500, round);
		REQUIRE(write(out, large, n) == (ssize_t)n && write(out, small, 10000) == 10000, "writing from registered memory failed");
		CHECK(cudaDeviceSynchronize());
		REQUIRE(write(out, small, 10000) == 10000, "writing from memory that a kernel has written to failed");
		REQUIRE(((unsigned *)small)[2499] == (unsigned)round, "a word is %u", ((unsigned *)small)[2499]);
	}
	CHECK(cudaHostUnregister(large));
	CHECK(cudaHostUnregister(small));
	CHECK(cudaFreeHost(pinned));
	CHECK(cudaFree(d));
	close(fd);
	close(out);
	free(large);
	free(small);
}

int main(int, char **argv)
{
	const int sizes[] = { 1, 25, 1000, 1024, 1500, 5000, 30000, 1 << 20 };
	cudaStream_t s;

	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	for (int n : sizes) {
		block(n, 0);
		block(n, 4);
		block(n, 4092);
	}
	neighbours();
	copies(s);
	other_maps(argv[0]);
	taken();
	system_calls();
	printf("registered: %d sizes\n", (int)(sizeof sizes / sizeof sizes[0]));
	return pass();
}
