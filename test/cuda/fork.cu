/*
 * Fork: children made before the first CUDA call compute on their own; a child made after it gets
 * CUDA's own error, and the parent goes on undisturbed.
 */
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

extern "C" __global__ void square(int *v)
{
	*v *= *v;
}

static int compute(int value)
{
	int *d;

	CHECK(cudaMalloc(&d, sizeof *d));
	CHECK(cudaMemcpy(d, &value, sizeof value, cudaMemcpyHostToDevice));
	square<<<1, 1>>>(d);
	CHECK(cudaMemcpy(&value, d, sizeof value, cudaMemcpyDeviceToHost));
	CHECK(cudaFree(d));
	return value;
}

static int after(pid_t pid)
{
	int status;

	REQUIRE(waitpid(pid, &status, 0) == pid && WIFEXITED(status), "the child was killed by signal %d", WTERMSIG(status));
	return WEXITSTATUS(status);
}

int main()
{
	pid_t child[3];
	int late, sum = 0;
	void *p;

	for (int i = 0; i < 3; i++) {
		child[i] = fork();
		if (!child[i])
			_exit(compute(i + 2));
	}
	sum = compute(5);
	for (int i = 0; i < 3; i++)
		sum += after(child[i]);

	child[0] = fork();
	if (!child[0])
		_exit(cudaMalloc(&p, 256));
	late = after(child[0]);
	REQUIRE(late == cudaErrorInitializationError, "the late child got %s", cudaGetErrorName((cudaError_t)late));
	sum += compute(6);
	printf("fork: sum %d, a late child gets %s\n", sum, cudaGetErrorName((cudaError_t)late));
	return pass();
}
