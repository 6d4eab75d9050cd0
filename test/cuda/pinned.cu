/*
 * Pinned memory: copies both ways return before they are done, arrive in their order in the stream,
 * and a result is there once its event is. Registered memory and two-dimensional copies too.
 */
#include "check.h"

#include <string.h>

extern "C" __global__ void hold(long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
}

extern "C" __global__ void twice(unsigned *v, int n)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		v[i] *= 2;
}

static void CUDART_CB fill(void *p)
{
	unsigned *v = (unsigned *)p;

	for (int i = 0; i < 1000; i++)
		v[i] = 5 * i;
}

/* Host memory that work in the stream writes and later work in the stream reads, with no wait between. */
static void round_trip(unsigned *out, unsigned *d, int part, cudaStream_t s)
{
	memset(out, 0xff, 2 * part * sizeof *out);
	hold<<<1, 1, 0, s>>>(50000000ll);
	CHECK(cudaMemcpyAsync(out, d, part * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaMemcpyAsync(d + part, out, part * sizeof *d, cudaMemcpyHostToDevice, s));
	CHECK(cudaMemcpyAsync(out + part, d + part, part * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	for (int i = 0; i < part; i++)
		REQUIRE(out[part + i] == out[i] && out[i] == 2u * i, "element %d went out as %u and came back as %u", i, out[i], out[part + i]);
	memset(out, 0xff, 2 * part * sizeof *out);
	hold<<<1, 1, 0, s>>>(50000000ll);
	CHECK(cudaLaunchHostFunc(s, fill, out));
	CHECK(cudaMemcpyAsync(d, out, 1000 * sizeof *d, cudaMemcpyHostToDevice, s));
	CHECK(cudaMemcpyAsync(out + part, d, 1000 * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	for (int i = 0; i < 1000; i++)
		REQUIRE(out[part + i] == 5u * i, "element %d of the host function is %u", i, out[part + i]);
}

/* A few words that both sides write: each sees the other's, and neither undoes the other's. */
static void mapped(cudaStream_t s, cudaEvent_t e)
{
	unsigned *word, *there;

	CHECK(cudaHostAlloc(&word, 4 * sizeof *word, cudaHostAllocMapped));
	for (int i = 0; i < 4; i++)
		word[i] = i + 1;
	CHECK(cudaHostGetDevicePointer(&there, word, 0));
	twice<<<1, 1, 0, s>>>(there, 2);
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(word[0] == 2 && word[1] == 4 && word[2] == 3, "the words are %u %u %u", word[0], word[1], word[2]);
	word[3] = 50;
	twice<<<1, 1, 0, s>>>(there, 1);
	CHECK(cudaEventRecord(e, s));
	while (cudaEventQuery(e) == cudaErrorNotReady)
		;
	cudaGetLastError();
	REQUIRE(word[0] == 4 && word[1] == 4 && word[3] == 50, "after a poll the words are %u %u %u", word[0], word[1], word[3]);
	twice<<<1, 1, 0, s>>>(there + 3, 1);
	CHECK(cudaDeviceSynchronize());
	REQUIRE(word[0] == 4 && word[3] == 100, "at the end the words are %u %u", word[0], word[3]);
	CHECK(cudaFreeHost(word));
}

/*
 * Page-locked memory by its own address, as unified addressing has it: a fill, two kernels and a copy in the order of the
 * stream, with nothing waited for in between. XLA measures kernels that way.
 */
static void direct(cudaStream_t s)
{
	unsigned *word, *seen, was = 0;

	CHECK(cudaMallocHost(&seen, sizeof *seen));
	for (int i = 0; i < 20; i++) {
		CHECK(cudaMallocHost(&word, 2 * sizeof *word));
		word[0] = word[1] = 7;
		hold<<<1, 1, 0, s>>>(2000000ll);
		CHECK(cudaMemsetAsync(word, 1, 2 * sizeof *word, s));
		twice<<<1, 1, 0, s>>>(word, 2);
		twice<<<1, 1, 0, s>>>(word, 1);
		CHECK(cudaMemcpyAsync(&was, word, sizeof was, cudaMemcpyDeviceToHost, s));
		CHECK(cudaMemcpyAsync(seen, word + 1, sizeof *seen, cudaMemcpyDefault, s));
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(was == 0x04040404 && *seen == 0x02020202, "copies of the words are %#x and %#x", was, *seen);
		REQUIRE(word[0] == 0x04040404 && word[1] == 0x02020202, "the words are %#x and %#x", word[0], word[1]);
		CHECK(cudaFreeHost(word));
	}
	CHECK(cudaFreeHost(seen));
}

/* Page-locked memory that is given back while a stream still has a fill or a copy of it to do. */
static void given_back(cudaStream_t s)
{
	const size_t n = 1 << 20;
	unsigned char *p, *from, *own = (unsigned char *)malloc(n);

	CHECK(cudaMallocHost(&from, n));
	memset(from, 3, n);
	for (int i = 0; i < 4; i++) {
		CHECK(cudaMallocHost(&p, n));
		hold<<<1, 1, 0, s>>>(20000000ll);
		if (i % 2)
			CHECK(cudaMemsetAsync(p, 1, n, s));
		else
			CHECK(cudaMemcpyAsync(p, from, n, cudaMemcpyHostToHost, s));
		CHECK(cudaFreeHost(p));
		CHECK(cudaStreamSynchronize(s));
		CHECK(cudaHostRegister(own, n, cudaHostRegisterDefault));
		hold<<<1, 1, 0, s>>>(20000000ll);
		CHECK(cudaMemsetAsync(own, 1, n, s));
		CHECK(cudaHostUnregister(own));
		memset(own, 9, n);
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(own[0] == 9 && own[n - 1] == 9, "memory that is no longer registered was filled: %d, %d", own[0], own[n - 1]);
	}
	CHECK(cudaFreeHost(from));
	free(own);
}

int main()
{
	const int n = 1 << 20, slices = 8, part = n / slices, w = 100, rows = 64, wide = 256;
	unsigned *in, *out, *d, *reg, sum = 0;
	unsigned char *img, *dimg;
	cudaStream_t s, s2;
	cudaEvent_t e;
	cudaPointerAttributes attr;
	size_t pitch;
	double t0, queued;
	cudaError_t err;

	CHECK(cudaMallocHost(&in, n * sizeof *in));
	CHECK(cudaHostAlloc(&out, n * sizeof *out, cudaHostAllocPortable));
	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaStreamCreateWithFlags(&s2, cudaStreamNonBlocking));
	CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
	CHECK(cudaPointerGetAttributes(&attr, in));
	REQUIRE(attr.type == cudaMemoryTypeHost, "pinned memory is of type %d", (int)attr.type);
	CHECK(cudaPointerGetAttributes(&attr, d));
	REQUIRE(attr.type == cudaMemoryTypeDevice, "device memory is of type %d", (int)attr.type);
	for (int i = 0; i < n; i++)
		in[i] = i;
	memset(out, 0xff, n * sizeof *out);
	hold<<<1, 1, 0, s>>>(1);
	twice<<<1, 1, 0, s>>>(d, 0);
	CHECK(cudaStreamSynchronize(s));

	/* everything is queued behind a kernel while that runs; a longer one is tried where the machine stalled */
	for (long long ms = 200;; ms *= 2) {
		t0 = seconds();
		hold<<<1, 1, 0, s>>>(ms * 1000000);
		for (int i = 0; i < slices; i++) {
			CHECK(cudaMemcpyAsync(d + i * part, in + i * part, part * sizeof *d, cudaMemcpyHostToDevice, s));
			twice<<<32, 128, 0, s>>>(d + i * part, part);
			CHECK(cudaMemcpyAsync(out + i * part, d + i * part, part * sizeof *d, cudaMemcpyDeviceToHost, s));
		}
		CHECK(cudaEventRecord(e, s));
		err = cudaEventQuery(e);
		queued = seconds() - t0;
		if (err == cudaErrorNotReady && queued < 0.75e-3 * ms)
			break;
		REQUIRE(ms < 1600, "queueing behind a kernel of %lld ms took %.3f s: the copies waited", ms, queued);
		CHECK(cudaEventSynchronize(e));
		cudaGetLastError();
	}
	cudaGetLastError();
	CHECK(cudaEventSynchronize(e));
	for (int i = 0; i < n; i++) {
		REQUIRE(out[i] == 2u * i, "element %d is %u right after its event", i, out[i]);
		sum += out[i];
	}

	/* the same, with the event polled from the host and a second stream behind it */
	memset(out, 0xff, n * sizeof *out);
	hold<<<1, 1, 0, s>>>(20000000ll);
	CHECK(cudaMemcpyAsync(out, d, part * sizeof *d, cudaMemcpyDeviceToHost, s));
	CHECK(cudaEventRecord(e, s));
	CHECK(cudaStreamWaitEvent(s2, e, 0));
	CHECK(cudaMemcpyAsync(out + part, d + part, part * sizeof *d, cudaMemcpyDeviceToHost, s2));
	while (cudaEventQuery(e) == cudaErrorNotReady)
		;
	cudaGetLastError();
	for (int i = 0; i < part; i++)
		REQUIRE(out[i] == 2u * i, "element %d is %u after its event was seen ready", i, out[i]);
	CHECK(cudaStreamSynchronize(s2));
	for (int i = part; i < 2 * part; i++)
		REQUIRE(out[i] == 2u * i, "element %d is %u after its stream was synchronised", i, out[i]);

	/* memory that the program owns, pinned afterwards */
	reg = (unsigned *)aligned_alloc(4096, n * sizeof *reg);
	memset(reg, 0, n * sizeof *reg);
	CHECK(cudaHostRegister(reg, n * sizeof *reg, cudaHostRegisterDefault));
	CHECK(cudaMemcpyAsync(reg, d, n * sizeof *reg, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(!memcmp(reg, out, 2 * part * sizeof *reg) && reg[n - 1] == 2u * (n - 1), "registered memory holds something else");
	CHECK(cudaHostUnregister(reg));

	/* rows of a picture, there and back */
	img = (unsigned char *)malloc(2 * rows * wide);
	for (int i = 0; i < rows * wide; i++)
		img[i] = i * 7;
	memset(img + rows * wide, 0, rows * wide);
	CHECK(cudaMallocPitch(&dimg, &pitch, w, rows));
	CHECK(cudaMemset2DAsync(dimg, pitch, 0, w, rows, s));
	CHECK(cudaMemcpy2DAsync(dimg, pitch, img + 16, wide, w, rows, cudaMemcpyHostToDevice, s));
	CHECK(cudaMemcpy2DAsync(img + rows * wide + 16, wide, dimg, pitch, w, rows, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	for (int y = 0; y < rows; y++)
		for (int x = 0; x < wide; x++) {
			unsigned char want = x >= 16 && x < 16 + w ? img[y * wide + x] : 0, got = img[(rows + y) * wide + x];

			REQUIRE(got == want, "pixel %d,%d is %d, not %d", x, y, got, want);
		}

	CHECK(cudaMemcpy(d, in, n * sizeof *d, cudaMemcpyHostToDevice));
	twice<<<32, 128>>>(d, n);
	CHECK(cudaDeviceSynchronize());
	round_trip(out, d, part, s);
	mapped(s, e);
	direct(s);
	given_back(s);

	CHECK(cudaFreeHost(in));
	CHECK(cudaFreeHost(out));
	CHECK(cudaFree(d));
	CHECK(cudaFree(dimg));
	printf("pinned: sum %u\n", sum);
	return pass();
}
