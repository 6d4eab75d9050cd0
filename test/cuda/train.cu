/*
 * train [STEPS]: a network of three layers learns a picture, 72 by 18 points of grey: given a point's
 * place it is to answer with the point's brightness. Prints the loss as it falls (400 steps), what the
 * network sees after the first twentieth of them, and what it sees at the end.
 *
 * Every kernel adds up in a fixed order, so that a GPU gives the same lines whenever it is asked.
 */
#include "check.h"

#include <math.h>
#include <string.h>
#include <vector>

static const int width = 72, height = 18, points = width * height;
static const int features = 32, hidden = 64;

/* The picture: the word in letters of 5 by 7, doubled, and water under it. */
static const char *const word[7] = {
	" #### #     #   # #####  #### #####",
	"#     #     #   #   #   #     #    ",
	"#     #     #   #   #   #     #    ",
	" ###  #     #   #   #   #     #### ",
	"    # #     #   #   #   #     #    ",
	"    # #     #   #   #   #     #    ",
	"####  #####  ###  #####  #### #####",
};

static float brightness(int x, int y)
{
	if (y < 14)
		return x / 2 < 35 && word[y / 2][x / 2] == '#' ? 1 : 0;
	return 0.5f + 0.45f * sinf(x * 0.35f + y * 1.3f);
}

static void draw(const char *title, const std::vector<float> &grey)
{
	static const char shades[] = " .:-=+*#%@";

	printf("\n%s\n", title);
	for (int y = 0; y < height; y++) {
		for (int x = 0; x < width; x++) {
			float g = grey[y * width + x];

			putchar(shades[(int)(fminf(fmaxf(g, 0), 1) * 9 + 0.5f)]);
		}
		putchar('\n');
	}
	printf("\n");
	fflush(stdout);
}

/* y[n][out] = x[n][in] w[in][out] + b[out], what is below zero cut off if bend is set. */
extern "C" __global__ void layer(const float *x, const float *w, const float *b, float *y, int n, int in, int out, int bend)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	int row = i / out, col = i % out;
	float sum;

	if (i >= n * out)
		return;
	sum = b[col];
	for (int k = 0; k < in; k++)
		sum += x[row * in + k] * w[k * out + col];
	y[i] = bend && sum < 0 ? 0 : sum;
}

/* What the layer's weights, and its b as one more row of them, have to do with the loss. */
extern "C" __global__ void layer_weights(const float *x, const float *dy, float *dw, int n, int in, int out)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	int k = i / out, col = i % out;
	float sum = 0;

	if (i >= (in + 1) * out)
		return;
	for (int row = 0; row < n; row++)
		sum += (k < in ? x[row * in + k] : 1) * dy[row * out + col];
	dw[i] = sum;
}

/* What the layer's input has to do with it; x came out of a bent layer. */
extern "C" __global__ void layer_input(const float *dy, const float *w, const float *x, float *dx, int n, int in, int out)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	int row = i / in, k = i % in;
	float sum = 0;

	if (i >= n * in)
		return;
	if (x[i] > 0)
		for (int col = 0; col < out; col++)
			sum += dy[row * out + col] * w[k * out + col];
	dx[i] = sum;
}

/* The mean square error, and its derivative; one block. */
extern "C" __global__ void error_of(const float *y, const float *want, float *dy, float *loss, int n)
{
	__shared__ float part[256];
	float sum = 0;

	for (int i = threadIdx.x; i < n; i += 256) {
		float d = y[i] - want[i];

		dy[i] = 2 * d / n;
		sum += d * d;
	}
	part[threadIdx.x] = sum;
	__syncthreads();
	for (int half = 128; half; half /= 2) {
		if (threadIdx.x < half)
			part[threadIdx.x] += part[threadIdx.x + half];
		__syncthreads();
	}
	if (!threadIdx.x)
		*loss = part[0] / n;
}

/* Adam, with the rate already corrected for the step. */
extern "C" __global__ void adam(float *w, float *m, float *v, const float *dw, int n, float rate)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i >= n)
		return;
	m[i] = 0.9f * m[i] + 0.1f * dw[i];
	v[i] = 0.999f * v[i] + 0.001f * dw[i] * dw[i];
	w[i] -= rate * m[i] / (sqrtf(v[i]) + 1e-8f);
}

struct Layer {
	int in, out, weights;	/* b comes after w, as one more row */
	float *w, *dw, *m, *v, *y, *dy;

	Layer(int in, int out, unsigned int *seed) : in(in), out(out), weights((in + 1) * out)
	{
		std::vector<float> start(weights, 0.0f);

		for (int i = 0; i < in * out; i++) {
			*seed = *seed * 1664525u + 1013904223u;
			start[i] = ((*seed >> 8) / 8388608.0f - 1) * sqrtf(6.0f / in);
		}
		for (float **p : {&w, &dw, &m, &v}) {
			CHECK(cudaMalloc(p, weights * sizeof(float)));
			CHECK(cudaMemset(*p, 0, weights * sizeof(float)));
		}
		CHECK(cudaMalloc(&y, points * out * sizeof(float)));
		CHECK(cudaMalloc(&dy, points * out * sizeof(float)));
		CHECK(cudaMemcpy(w, start.data(), weights * sizeof(float), cudaMemcpyHostToDevice));
	}
};

static int blocks(int n) { return (n + 127) / 128; }

int main(int argc, char **argv)
{
	const int steps = argc > 1 ? atoi(argv[1]) : 400;
	const int shown = steps >= 20 ? steps / 20 : 1;
	std::vector<float> at(points * features), want(points), seen(points);
	unsigned int seed = 1;
	cudaDeviceProp gpu;
	size_t free_bytes, total_bytes;
	float *x, *target, *mean, loss = 0, first = 0;

	CHECK(cudaGetDeviceProperties(&gpu, 0));
	CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
	printf("train: %s, %zu MiB of memory\n", gpu.name, total_bytes >> 20);
	for (int p = 0; p < points; p++) {
		want[p] = brightness(p % width, p / width);
		for (int f = 0; f < features; f++) { /* waves along both sides, each twice as short as the one before */
			float place = f & 1 ? (p / width + 0.5f) / height : (p % width + 0.5f) / width;
			float wave = 3.14159265f * (1 << (f >> 2)) * place;

			at[p * features + f] = f & 2 ? cosf(wave) : sinf(wave);
		}
	}
	CHECK(cudaMalloc(&x, at.size() * sizeof(float)));
	CHECK(cudaMalloc(&target, points * sizeof(float)));
	CHECK(cudaMalloc(&mean, sizeof(float)));
	CHECK(cudaMemcpy(x, at.data(), at.size() * sizeof(float), cudaMemcpyHostToDevice));
	CHECK(cudaMemcpy(target, want.data(), points * sizeof(float), cudaMemcpyHostToDevice));
	std::vector<Layer> net = {Layer(features, hidden, &seed), Layer(hidden, hidden, &seed), Layer(hidden, 1, &seed)};

	for (int step = 1; step <= steps; step++) {
		const float *from = x;

		for (Layer &l : net) {
			layer<<<blocks(points * l.out), 128>>>(from, l.w, l.w + l.in * l.out, l.y, points, l.in, l.out, l.out > 1);
			from = l.y;
		}
		error_of<<<1, 256>>>(from, target, net[2].dy, mean, points);
		for (int i = 2; i >= 0; i--) {
			Layer &l = net[i];
			const float *input = i ? net[i - 1].y : x;

			layer_weights<<<blocks(l.weights), 128>>>(input, l.dy, l.dw, points, l.in, l.out);
			if (i)
				layer_input<<<blocks(points * l.in), 128>>>(l.dy, l.w, input, net[i - 1].dy, points, l.in, l.out);
		}
		for (Layer &l : net)
			adam<<<blocks(l.weights), 128>>>(l.w, l.m, l.v, l.dw, l.weights,
				0.005f * (1 - (step - 1.0f) / steps) * sqrtf(1 - powf(0.999f, step)) / (1 - powf(0.9f, step)));
		CHECK(cudaGetLastError());
		if (step == 1 || step % shown == 0) {
			CHECK(cudaMemcpy(&loss, mean, sizeof(loss), cudaMemcpyDeviceToHost));
			if (step == 1)
				first = loss;
			/* a bar of seven for each power of ten above 1e-8 */
			printf("step %5d  loss %.1e  %.*s\n", step, loss, (int)fmaxf(0, 7 * (log10f(loss) + 8)),
				"##########################################################");
			fflush(stdout);
		}
		if (step == shown || step == steps) {
			CHECK(cudaMemcpy(seen.data(), from, points * sizeof(float), cudaMemcpyDeviceToHost));
			draw(step == steps ? "what it has learned:" : "what it sees so far:", seen);
		}
	}
	REQUIRE(loss < first / 4, "after %d steps the loss is %g, it began with %g", steps, loss, first);
	return pass();
}
