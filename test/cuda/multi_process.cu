/*
 * Several processes of one job share one device and one account: each computes on its own, all see
 * the same total, and what one holds the others cannot have.
 */
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

extern "C" __global__ void fill(int *v, int n, int value)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = value;
}

static const int children = 4, n = 1 << 20;

static void child(int me, int up, int down)
{
	size_t before, total, now;
	int *d, *h = (int *)malloc(n * sizeof(int));
	char go;

	CHECK(cudaMalloc(&d, n * sizeof(int)));
	fill<<<n / 256, 256>>>(d, n, me);
	CHECK(cudaMemcpy(h, d, n * sizeof(int), cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		REQUIRE(h[i] == me, "child %d sees %d", me, h[i]);
	CHECK(cudaMemGetInfo(&before, &total));
	REQUIRE(write(up, &total, sizeof total) == sizeof total, "the parent is gone");
	REQUIRE(read(down, &go, 1) == 1, "the parent is gone");
	/* the parent took 64 MiB meanwhile */
	CHECK(cudaMemGetInfo(&now, &total));
	REQUIRE(now + (64 << 20) <= before, "free was %zu and is %zu", before, now);
	REQUIRE(write(up, &total, sizeof total) == sizeof total, "the parent is gone");
	REQUIRE(read(down, &go, 1) == 1, "the parent is gone");
	exit(0);
}

int main()
{
	int up[children][2], down[children][2], status;
	size_t total[children], mine, free0;
	pid_t pid[children];
	void *held;

	for (int i = 0; i < children; i++) {
		REQUIRE(!pipe(up[i]) && !pipe(down[i]), "no pipe");
		pid[i] = fork();
		if (!pid[i])
			child(i, up[i][1], down[i][0]);
		close(up[i][1]);
	}
	/* every child has its memory before the parent takes its own */
	CHECK(cudaFree(0));
	for (int i = 0; i < children; i++)
		REQUIRE(read(up[i][0], &total[i], sizeof total[i]) == sizeof total[i], "child %d died", i);
	CHECK(cudaMalloc(&held, 64 << 20));
	for (int i = 0; i < children; i++)
		REQUIRE(write(down[i][1], "g", 1) == 1, "child %d died", i);
	for (int i = 0; i < children; i++)
		REQUIRE(read(up[i][0], &total[i], sizeof total[i]) == sizeof total[i], "child %d died", i);
	CHECK(cudaMemGetInfo(&free0, &mine));
	for (int i = 0; i < children; i++) {
		REQUIRE(total[i] == mine, "child %d sees %zu bytes, the parent %zu", i, total[i], mine);
		REQUIRE(write(down[i][1], "g", 1) == 1, "child %d died", i);
	}
	for (int i = 0; i < children; i++) {
		REQUIRE(waitpid(pid[i], &status, 0) == pid[i], "child %d is not there", i);
		REQUIRE(WIFEXITED(status) && !WEXITSTATUS(status), "child %d ended with %#x", i, status);
	}
	printf("multi_process: %d processes, one total\n", children + 1);
	return pass();
}
