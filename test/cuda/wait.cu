/*
 * wait sync|stream|event|older|copy|poll|launch: wait, in that way, for a kernel that takes a minute. When
 * the other side goes away meanwhile the wait must end with an error: it is named, status 3.
 */
#include "check.h"

#include <string.h>

LASTING(minute)

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "sync";
	cudaError_t err = cudaSuccess;
	cudaStream_t s;
	cudaEvent_t e;
	int *d, h;

	CHECK(cudaMalloc(&d, sizeof *d));
	CHECK(cudaStreamCreate(&s));
	CHECK(cudaEventCreate(&e));
	minute<<<1, 1, 0, s>>>(1);
	CHECK(cudaStreamSynchronize(s));
	for (int i = 0; i < 4; i++) {
		CHECK(cudaEventRecord(e, s));
		minute<<<1, 1, 0, s>>>(1);
		CHECK(cudaEventSynchronize(e));
	}
	minute<<<1, 1, 0, s>>>(60000000000ll);
	CHECK(cudaEventRecord(e, s));
	printf("wait: waiting\n");
	fflush(stdout);
	if (!strcmp(how, "sync"))
		err = cudaDeviceSynchronize();
	else if (!strcmp(how, "stream"))
		err = cudaStreamSynchronize(s);
	else if (!strcmp(how, "event"))
		err = cudaEventSynchronize(e);
	else if (!strcmp(how, "older")) /* than other work, as often before */
		for (int i = 0; i < 4 && err == cudaSuccess; i++) {
			minute<<<1, 1, 0, s>>>(1);
			err = cudaEventSynchronize(e);
		}
	else if (!strcmp(how, "copy"))
		err = cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost);
	else if (!strcmp(how, "poll"))
		while ((err = cudaEventQuery(e)) == cudaErrorNotReady)
			;
	else
		for (;;) {
			minute<<<1, 1>>>(1);
			err = cudaGetLastError();
			if (err != cudaSuccess)
				break;
		}
	if (err == cudaSuccess)
		return pass();
	printf("wait: %s: %s\n", how, cudaGetErrorName(err));
	return 3;
}
