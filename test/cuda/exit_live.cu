/*
 * exit_live return|exit|quick|thread: end with live streams, events, memory, pending kernels and
 * copies, and threads that wait for them. The end must be neither a crash nor a hang. All threads
 * are in their wait by then: one that comes to libcudart after its end finds a null pointer there,
 * whatever the driver.
 */
#include "check.h"

#include <atomic>
#include <string.h>
#include <thread>
#include <unistd.h>

LASTING(linger)

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "return";
	const size_t size = 8 << 20;
	cudaStream_t s[3];
	cudaEvent_t e;
	void *d, *h;

	CHECK(cudaMalloc(&d, size));
	CHECK(cudaMallocHost(&h, size));
	CHECK(cudaEventCreate(&e));
	for (int i = 0; i < 3; i++) {
		CHECK(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
		for (int k = 0; k < 10; k++) {
			linger<<<1, 1, 0, s[i]>>>(20000000ll);
			CHECK(cudaMemcpyAsync(h, d, size, cudaMemcpyDeviceToHost, s[i]));
		}
		CHECK(cudaEventRecord(e, s[i]));
	}
	static std::atomic<int> waiting;
	for (int i = 0; i < 3 && !strcmp(how, "thread"); i++) {
		std::thread([=] {
			waiting++;
			cudaStreamSynchronize(s[i]);
		}).detach();
		while (waiting <= i)
			std::this_thread::yield();
	}
	usleep(10000);
	printf("exit_live: leaving by %s\n", how);
	pass();
	if (!strcmp(how, "exit"))
		exit(0);
	if (!strcmp(how, "quick"))
		_exit(0);
	return 0;
}
