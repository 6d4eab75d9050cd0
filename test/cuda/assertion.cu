/* Assertions in a kernel: the wait reports cudaErrorAssert, and the text of each is on the program's own stderr by then. */
#undef NDEBUG
#include "check.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

extern "C" __global__ void assert_below(int n)
{
	assert(blockIdx.x * blockDim.x + threadIdx.x < n);
}

/* Reads back what came on a stream that begin has turned to a file. */
static int failures(FILE *f)
{
	char line[1024];
	int n = 0;

	rewind(f);
	while (fgets(line, sizeof line, f)) {
		REQUIRE(strstr(line, "assertion.cu:") && strstr(line, "block: [1,0,0]") && strstr(line, "Assertion `blockIdx.x"), "%s", line);
		n++;
	}
	fclose(f);
	return n;
}

static FILE *begin(int fd)
{
	FILE *f = tmpfile();

	REQUIRE(f && dup2(fileno(f), fd) == fd, "a file for descriptor %d", fd);
	return f;
}

int main()
{
	int out = dup(1), err = dup(2);
	FILE *o, *e;

	CHECK(cudaFree(0));
	o = begin(1);
	e = begin(2);
	assert_below<<<2, 32>>>(60);
	EXPECT(cudaDeviceSynchronize(), cudaErrorAssert);
	fflush(stdout);
	fflush(stderr);
	dup2(out, 1);
	dup2(err, 2);
	printf("assertion: %d on stdout, %d on stderr\n", failures(o), failures(e));
	EXPECT(cudaFree(0), cudaErrorAssert);
	return pass();
}
