/*
 * Host twins of the kernels in this folder, for the simulated GPU (see remoting/simgpu/simkernel.h).
 *
 * Each does what its kernel does, once for the whole grid. A kernel that waits for a time says what
 * it costs; a kernel that writes where it may not asks sim_check, as the hardware would.
 */
#include "simkernel.h"

#include <string.h>

/* vecadd.cu */

SIM_KERNEL(_Z6vecaddPKfS0_Pfi, SIM_PARAMS(8, 8, 8, 4))
{
	const float *a = SIM_ARG(0, const float *);
	const float *b = SIM_ARG(1, const float *);
	float *c = SIM_ARG(2, float *);
	size_t n = SIM_ARG(3, int);

	sim_check(a, n * sizeof(*a));
	sim_check(b, n * sizeof(*b));
	sim_check(c, n * sizeof(*c));
	SIM_FOR_1D(i)
		if (i < n)
			c[i] = a[i] + b[i];
}

/* reduce.cu: the sum of a block's threads, in any order: the values are exact */

SIM_GLOBAL(total, 8);
SIM_GLOBAL(weight, 4);

SIM_KERNEL(_Z6reduceIiEvPKT_PS0_i, SIM_PARAMS(8, 8, 4), .static_shared = 1024)
{
	const int *in = SIM_ARG(0, const int *);
	int *out = SIM_ARG(1, int *);
	int n = SIM_ARG(2, int);

	sim_check(in, n * sizeof(*in));
	sim_check(out, sim->grid.x * sizeof(*out));
	memset(out, 0, sim->grid.x * sizeof(*out));
	for (int i = 0; i < n; i++)
		out[i / 256 % sim->grid.x] += in[i];
}

SIM_KERNEL(_Z6reduceIdEvPKT_PS0_i, SIM_PARAMS(8, 8, 4), .static_shared = 2048)
{
	const double *in = SIM_ARG(0, const double *);
	double *out = SIM_ARG(1, double *);
	int n = SIM_ARG(2, int);

	sim_check(in, n * sizeof(*in));
	sim_check(out, sim->grid.x * sizeof(*out));
	for (unsigned int b = 0; b < sim->grid.x; b++)
		out[b] = 0;
	for (int i = 0; i < n; i++)
		out[i / 256 % sim->grid.x] += in[i];
}

SIM_KERNEL(reduce_dynamic, SIM_PARAMS(8, 4, 4))
{
	const int *in = SIM_ARG(0, const int *);
	int n = SIM_ARG(1, int);
	int words = SIM_ARG(2, int);
	int *wide = sim->shared;
	unsigned long long *total = SIM_SYMBOL(total, unsigned long long);
	const int *weight = SIM_SYMBOL(weight, int);
	long long sum = 0;

	sim_check(in, n * sizeof(*in));
	if (sim->shared_bytes < words * sizeof(*wide)) {
		sim_fault(700);
		return;
	}
	for (int i = 0; i < words; i++)
		wide[i] = i < n ? in[i] : 0;
	for (int i = 0; i < words; i++)
		sum += wide[i];
	*total += sum * *weight;
}

/* streams_events.cu */

SIM_KERNEL(spin, SIM_PARAMS(8, 4, 8))
{
	int *flag = SIM_ARG(0, int *);

	sim_check(flag, sizeof(*flag));
	sim_cost_ns(SIM_ARG(2, long long));
	*flag = SIM_ARG(1, int);
}

SIM_KERNEL(add_to, SIM_PARAMS(8, 8, 4))
{
	int *to = SIM_ARG(0, int *);
	const int *from = SIM_ARG(1, const int *);

	sim_check(to, sizeof(*to));
	sim_check(from, sizeof(*from));
	*to = *to * SIM_ARG(2, int) + *from;
}

/* printf.cu */

SIM_KERNEL(greet, SIM_PARAMS(4))
{
	int n = SIM_ARG(0, int);

	for (int i = 0; i < n; i++)
		sim_printf("printf: device line %d of %d, %s %.2f\n", i, n, i % 2 ? "odd" : "even", i * 0.25);
}

/* threads.cu */

SIM_KERNEL(step, SIM_PARAMS(8, 4, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	size_t n = SIM_ARG(1, int);
	unsigned int add = SIM_ARG(2, unsigned int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] = v[i] * 3 + add;
}

/* bigcopy.cu */

SIM_KERNEL(check_flip, SIM_PARAMS(8, 8, 8))
{
	uint64_t *v = SIM_ARG(0, uint64_t *);
	uint64_t n = SIM_ARG(1, uint64_t);
	unsigned long long *wrong = SIM_ARG(2, unsigned long long *);

	sim_check(v, n * sizeof(*v));
	sim_check(wrong, sizeof(*wrong));
	for (uint64_t i = 0; i < n; i++) {
		if (v[i] != (i * 0x9e3779b97f4a7c15ull ^ (i >> 7)))
			++*wrong;
		v[i] = ~v[i];
	}
}

/* pinned.cu */

SIM_KERNEL(hold, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

SIM_KERNEL(twice, SIM_PARAMS(8, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 0; i < n; i++)
		v[i] *= 2;
}

/* errors.cu */

SIM_KERNEL(set, SIM_PARAMS(8, 4))
{
	int *p = SIM_ARG(0, int *);

	sim_check(p, sizeof(*p));
	*p = SIM_ARG(1, int);
}

SIM_KERNEL(harm, SIM_PARAMS(4))
{
	sim_fault(SIM_ARG(0, int));
}

/* fork.cu */

SIM_KERNEL(square, SIM_PARAMS(8))
{
	int *v = SIM_ARG(0, int *);

	sim_check(v, sizeof(*v));
	*v *= *v;
}

/* exit_live.cu */

SIM_KERNEL(linger, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

/* twolibs.cu */

static void append_digit(struct sim_launch *sim, int digit)
{
	int *v = SIM_ARG(0, int *);
	size_t n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] = v[i] * 10 + digit;
}

SIM_KERNEL(lib_kernel1, SIM_PARAMS(8, 4)) { append_digit(sim, 1); }
SIM_KERNEL(lib_kernel2, SIM_PARAMS(8, 4)) { append_digit(sim, 2); }
SIM_KERNEL(main_kernel, SIM_PARAMS(8, 4)) { append_digit(sim, 3); }

/* assertion.cu */

SIM_KERNEL(assert_below, SIM_PARAMS(4))
{
	unsigned int n = SIM_ARG(0, int);

	SIM_FOR_BLOCKS(b)
		SIM_FOR_THREADS(t)
			if (b.x * sim->block.x + t.x >= n)
				sim_assert_failed(b, t, "assertion.cu", 11, "void assert_below(int)", "blockIdx.x * blockDim.x + threadIdx.x < n");
}

/* graph_times.cu */

SIM_KERNEL(graph_times_step, SIM_PARAMS(8))
{
	int *count = SIM_ARG(0, int *);

	sim_check(count, sizeof(*count));
	++*count;
}

struct report { long long took; int timed_out, latch; };

SIM_KERNEL(graph_times_hold, SIM_PARAMS(8, 8))
{
	long long ns = SIM_ARG(0, long long);
	struct report *r = SIM_ARG(1, struct report *);

	sim_check(r, sizeof(*r));
	sim_cost_ns(ns);
	r->took = ns;
	r->timed_out = 1;
}

/* separate.cu */

SIM_GLOBAL(separate_table, 16);
SIM_GLOBAL(separate_count, 4);

static int separate_mix(const int *table, int x)
{
	return x * table[1] + table[x & 3];
}

SIM_KERNEL(separate_start, SIM_PARAMS(8, 4))
{
	int *v = SIM_ARG(0, int *);
	size_t n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] = separate_mix(SIM_SYMBOL(separate_table, int), (int)i);
}

SIM_KERNEL(separate_chain, SIM_PARAMS(8, 4))
{
	const int *table = SIM_SYMBOL(separate_table, int);
	int *v = SIM_ARG(0, int *);
	size_t n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i) {
		if (i < n) {
			v[i] = separate_mix(table, v[i]) - table[3];
			++*SIM_SYMBOL(separate_count, int);
		}
	}
}

SIM_KERNEL(separate_say, SIM_PARAMS(4))
{
	int n = SIM_ARG(0, int);

	for (int i = 0; i < n; i++)
		sim_printf("separate: the device has %d of %d\n", separate_mix(SIM_SYMBOL(separate_table, int), i), *SIM_SYMBOL(separate_count, int));
}

/* nocode.cu: for no GPU that is simulated */

SIM_KERNEL(nocode_kernel, SIM_PARAMS(8))
{
	sim_fault(200);
}

/* graph.cu */

SIM_KERNEL(affine, SIM_PARAMS(8, 4, 4, 4))
{
	int *v = SIM_ARG(0, int *);
	size_t n = SIM_ARG(1, int);
	int mul = SIM_ARG(2, int);
	int add = SIM_ARG(3, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] = v[i] * mul + add;
}

/* multi_process.cu */

SIM_KERNEL(fill, SIM_PARAMS(8, 4, 4))
{
	int *v = SIM_ARG(0, int *);
	size_t n = SIM_ARG(1, int);
	int value = SIM_ARG(2, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] = value;
}

/* churn.cu */

SIM_KERNEL(churn_step, SIM_PARAMS(8, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	size_t n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	SIM_FOR_1D(i)
		if (i < n)
			v[i] += i;
}

/* pipeline.cu */

SIM_KERNEL(stage, SIM_PARAMS(8, 4, 4, 8))
{
	int *v = SIM_ARG(0, int *), n = SIM_ARG(1, int), what = SIM_ARG(2, int);

	sim_check(v, (size_t)n * sizeof(*v));
	sim_cost_ns(SIM_ARG(3, long long));
	for (int i = 0; i < n; i++)
		v[i] = what + i;
}

/* blocking.cu */

SIM_KERNEL(bl_hold, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

SIM_KERNEL(bl_store, SIM_PARAMS(8))
{
	int *p = SIM_ARG(0, int *);

	sim_check(p, sizeof(*p));
	*p = 1;
}

/* wait.cu */

SIM_KERNEL(minute, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

/* train.cu: built for speed, and without the library of roots, which nothing here is linked with */

#pragma GCC optimize("O3", "fast-math")

static float root(float v)
{
	uint32_t bits;
	float r;

	memcpy(&bits, &v, sizeof(bits));
	bits = (bits >> 1) + 0x1fbd1df5; /* half the exponent */
	memcpy(&r, &bits, sizeof(r));
	for (int i = 0; i < 3; i++)
		r = (r + v / r) / 2;
	return r;
}

SIM_KERNEL(layer, SIM_PARAMS(8, 8, 8, 8, 4, 4, 4, 4))
{
	const float *x = SIM_ARG(0, const float *);
	const float *w = SIM_ARG(1, const float *);
	const float *b = SIM_ARG(2, const float *);
	float *y = SIM_ARG(3, float *);
	int n = SIM_ARG(4, int), in = SIM_ARG(5, int), out = SIM_ARG(6, int);

	sim_check(x, (size_t)n * in * sizeof(*x));
	sim_check(w, (size_t)in * out * sizeof(*w));
	sim_check(b, out * sizeof(*b));
	sim_check(y, (size_t)n * out * sizeof(*y));
	for (; n > 0; n--, x += in, y += out) {
		memcpy(y, b, out * sizeof(*y));
		for (int k = 0; k < in; k++)
			for (int o = 0; o < out; o++)
				y[o] += x[k] * w[k * out + o];
		for (int o = 0; o < out; o++)
			if (SIM_ARG(7, int) && y[o] < 0)
				y[o] = 0;
	}
}

SIM_KERNEL(layer_weights, SIM_PARAMS(8, 8, 8, 4, 4, 4))
{
	const float *x = SIM_ARG(0, const float *);
	const float *dy = SIM_ARG(1, const float *);
	float *dw = SIM_ARG(2, float *);
	int n = SIM_ARG(3, int), in = SIM_ARG(4, int), out = SIM_ARG(5, int);

	sim_check(x, (size_t)n * in * sizeof(*x));
	sim_check(dy, (size_t)n * out * sizeof(*dy));
	sim_check(dw, (size_t)(in + 1) * out * sizeof(*dw));
	memset(dw, 0, (size_t)(in + 1) * out * sizeof(*dw));
	for (; n > 0; n--, x += in, dy += out)
		for (int k = 0; k <= in; k++)
			for (int o = 0; o < out; o++)
				dw[k * out + o] += (k < in ? x[k] : 1) * dy[o];
}

SIM_KERNEL(layer_input, SIM_PARAMS(8, 8, 8, 8, 4, 4, 4))
{
	const float *dy = SIM_ARG(0, const float *);
	const float *w = SIM_ARG(1, const float *);
	const float *x = SIM_ARG(2, const float *);
	float *dx = SIM_ARG(3, float *);
	int n = SIM_ARG(4, int), in = SIM_ARG(5, int), out = SIM_ARG(6, int);

	sim_check(dy, (size_t)n * out * sizeof(*dy));
	sim_check(w, (size_t)in * out * sizeof(*w));
	sim_check(x, (size_t)n * in * sizeof(*x));
	sim_check(dx, (size_t)n * in * sizeof(*dx));
	for (; n > 0; n--, dy += out, x += in, dx += in)
		for (int k = 0; k < in; k++) {
			dx[k] = 0;
			for (int o = 0; o < out && x[k] > 0; o++)
				dx[k] += dy[o] * w[k * out + o];
		}
}

SIM_KERNEL(error_of, SIM_PARAMS(8, 8, 8, 8, 4), .static_shared = 1024)
{
	const float *y = SIM_ARG(0, const float *);
	const float *want = SIM_ARG(1, const float *);
	float *dy = SIM_ARG(2, float *);
	float *loss = SIM_ARG(3, float *);
	int n = SIM_ARG(4, int);
	float sum = 0;

	sim_check(y, n * sizeof(*y));
	sim_check(want, n * sizeof(*want));
	sim_check(dy, n * sizeof(*dy));
	sim_check(loss, sizeof(*loss));
	for (int i = 0; i < n; i++) {
		dy[i] = 2 * (y[i] - want[i]) / n;
		sum += (y[i] - want[i]) * (y[i] - want[i]);
	}
	*loss = sum / n;
}

SIM_KERNEL(adam, SIM_PARAMS(8, 8, 8, 8, 4, 4))
{
	float *w = SIM_ARG(0, float *);
	float *m = SIM_ARG(1, float *);
	float *v = SIM_ARG(2, float *);
	const float *dw = SIM_ARG(3, const float *);
	int n = SIM_ARG(4, int);
	float rate = SIM_ARG(5, float);

	sim_check(w, n * sizeof(*w));
	sim_check(m, n * sizeof(*m));
	sim_check(v, n * sizeof(*v));
	sim_check(dw, n * sizeof(*dw));
	for (int i = 0; i < n; i++) {
		m[i] = 0.9f * m[i] + 0.1f * dw[i];
		v[i] = 0.999f * v[i] + 0.001f * dw[i] * dw[i];
		w[i] -= rate * m[i] / (root(v[i]) + 1e-8f);
	}
}

/* crowded.cu */

SIM_KERNEL(crowd_add, SIM_PARAMS(8, 4, 4))
{
	unsigned int **v = SIM_ARG(0, unsigned int **);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 0; i < n; i++) {
		sim_check(v[i], sizeof(*v[i]));
		*v[i] += SIM_ARG(2, unsigned int);
	}
}

SIM_KERNEL(crowd_sum, SIM_PARAMS(8, 4, 8))
{
	unsigned int **v = SIM_ARG(0, unsigned int **);
	unsigned long long *sum = SIM_ARG(2, unsigned long long *);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	sim_check(sum, sizeof(*sum));
	for (int i = 0; i < n; i++) {
		sim_check(v[i], sizeof(*v[i]));
		*sum += (unsigned long long)i * *v[i];
	}
}

/* zerocopy.cu */

static void zc_add_words(struct sim_launch *sim, const unsigned int *in, unsigned int *out, int n, unsigned int what)
{
	sim_check(in, n * sizeof(*in));
	sim_check(out, n * sizeof(*out));
	for (int i = 0; i < n; i++)
		out[i] = in[i] + what;
}

SIM_KERNEL(zc_add, SIM_PARAMS(8, 8, 4, 4))
{
	zc_add_words(sim, SIM_ARG(0, const unsigned int *), SIM_ARG(1, unsigned int *), SIM_ARG(2, int), SIM_ARG(3, unsigned int));
}

SIM_KERNEL(zc_behind, SIM_PARAMS(8, 4, 4))
{
	unsigned int **where = SIM_ARG(0, unsigned int **);
	int n = SIM_ARG(1, int);

	sim_check(where, sizeof(*where));
	sim_check(*where, n * sizeof(**where));
	for (int i = 0; i < n; i++)
		(*where)[i] += SIM_ARG(2, unsigned int);
}

struct zc_job {
	const unsigned int *in;
	unsigned int *out;
	int n;
};

SIM_KERNEL(zc_job, SIM_PARAMS(24, 4))
{
	struct zc_job j = SIM_ARG(0, struct zc_job);

	zc_add_words(sim, j.in, j.out, j.n, SIM_ARG(1, unsigned int));
}

SIM_KERNEL(zc_odd, SIM_PARAMS(8, 4, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 1; i < n; i += 2)
		v[i] = SIM_ARG(2, unsigned int);
}

SIM_KERNEL(zc_hold, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

/* registered.cu */

SIM_KERNEL(rg_add, SIM_PARAMS(8, 8, 4, 4))
{
	zc_add_words(sim, SIM_ARG(0, const unsigned int *), SIM_ARG(1, unsigned int *), SIM_ARG(2, int), SIM_ARG(3, unsigned int));
}

/* flags.cu */

struct fl_shared {
	volatile unsigned int go, done;
	volatile unsigned int in[200], out[200];
};

SIM_KERNEL(fl_serve, SIM_PARAMS(8, 4, 4, 8))
{
	struct fl_shared *b = SIM_ARG(0, struct fl_shared *);
	unsigned int rounds = SIM_ARG(1, unsigned int);

	sim_check(b, sizeof(*b));
	for (unsigned int r = 1; r <= rounds; r++) {
		while (b->go != r)
			if (sim_stopped())
				return;
		__sync_synchronize();
		for (int i = 0; i < SIM_ARG(2, int); i++)
			b->out[i] = b->in[i] + r;
		__sync_synchronize();
		b->done = r;
	}
}

/* clash.cu */

SIM_MANAGED(variable, 4 << 16, NULL);

SIM_KERNEL(clash_set, SIM_PARAMS(8, 4, 4))
{
	int *v = SIM_ARG(0, int *), n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 0; i < n; i += 2)
		v[i] = SIM_ARG(2, int);
}

/* managedvar.cu */

enum { MV_MANY = 300000 };

struct mv_pair {
	struct mv_pair *other;
	unsigned int value;
};

static const unsigned int mv_count_init = 41, mv_plain_init = 5;
static const unsigned int mv_words_init[700] = { 7, 8, 9 };

SIM_MANAGED(mv_count, 4, &mv_count_init);
SIM_MANAGED(mv_words, sizeof(mv_words_init), mv_words_init);
SIM_MANAGED(mv_first, sizeof(struct mv_pair), NULL);
SIM_MANAGED(mv_second, sizeof(struct mv_pair), NULL);
SIM_MANAGED(mv_many, 4 * MV_MANY, NULL);
SIM_GLOBAL_INIT(mv_plain, 4, &mv_plain_init);

SIM_KERNEL(mv_use, SIM_PARAMS(4))
{
	struct mv_pair *first = SIM_SYMBOL(mv_first, struct mv_pair);
	unsigned int *many = SIM_SYMBOL(mv_many, unsigned int);

	*SIM_SYMBOL(mv_count, unsigned int) += SIM_ARG(0, unsigned int);
	SIM_SYMBOL(mv_words, unsigned int)[2] += *SIM_SYMBOL(mv_plain, unsigned int);
	sim_check(first->other, sizeof(*first->other));
	first->other->value++;
	for (unsigned int i = 0; i < MV_MANY; i++)
		many[i] += i;
}

/* managed.cu */

SIM_KERNEL(mg_add, SIM_PARAMS(8, 4, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 0; i < n; i++)
		v[i] += SIM_ARG(2, unsigned int);
}

struct mg_node {
	struct mg_node *next;
	unsigned int value;
};

SIM_KERNEL(mg_walk, SIM_PARAMS(8, 4))
{
	for (struct mg_node *n = SIM_ARG(0, struct mg_node *); n; n = n->next) {
		sim_check(n, sizeof(*n));
		n->value += SIM_ARG(1, unsigned int);
	}
}

/* link.cu: kernels of its PTX */

SIM_GLOBAL(link_count, 4);

SIM_KERNEL(link_fill, SIM_PARAMS(8))
{
	int *v = SIM_ARG(0, int *);

	sim_check(v, (size_t)sim->grid.x * sim->block.x * sizeof(*v));
	SIM_FOR_1D(i) {
		v[i] = 3 * (int)i + 7;
		++*SIM_SYMBOL(link_count, int);
	}
}

SIM_KERNEL(link_print, SIM_NO_PARAMS) { sim_printf("link: printed by a kernel\n"); }

SIM_KERNEL(link_assert, SIM_NO_PARAMS)
{
	SIM_FOR_BLOCKS(b)
		SIM_FOR_THREADS(t)
			sim_assert_failed(b, t, "link.cu", 42, "link.cu", "link.cu");
}

SIM_KERNEL(link_trap, SIM_NO_PARAMS) { sim_fault(719); /* CUDA_ERROR_LAUNCH_FAILED */ }

/* ipc.cu */

SIM_KERNEL(ipc_add, SIM_PARAMS(8, 4, 4))
{
	unsigned int *v = SIM_ARG(0, unsigned int *);
	int n = SIM_ARG(1, int);

	sim_check(v, n * sizeof(*v));
	for (int i = 0; i < n; i++)
		v[i] += SIM_ARG(2, unsigned int);
}

/* legacy.cu */

SIM_KERNEL(legacy_fill, SIM_PARAMS(8, 4, 4))
{
	int *v = SIM_ARG(0, int *), add = SIM_ARG(2, int);
	size_t n = (size_t)sim->grid.x * sim->grid.y * sim->block.x * sim->block.y;
	float scale = SIM_ARG(1, float);

	sim_check(v, n * sizeof(*v));
	for (size_t i = 0; i < n; i++)
		v[i] += (int)((float)i * scale) + add;
}

/* nested.cu: what the kernels launch, they do here. */

SIM_KERNEL(nested_start, SIM_PARAMS(8, 4))
{
	int *v = SIM_ARG(0, int *);

	sim_check(v, 64 * sizeof(*v));
	for (int d = SIM_ARG(1, int); d >= 0; d--) {
		for (int i = 0; i < 64; i++)
			v[i] += d;
		sim_printf("nested: %d added\n", d);
	}
}

SIM_KERNEL(nested_wrong, SIM_PARAMS(8))
{
	int *v = SIM_ARG(0, int *);

	sim_check(v, sizeof(*v));
	*v = 1;
}

/* offload.c: GCC's kernels have the address of the mapped variables' addresses, and with OpenMP their stacks. */

static void offload_where(struct sim_launch *sim)
{
	int **mapped = SIM_ARG(0, int **);

	sim_check(mapped, sizeof(*mapped));
	sim_check(*mapped, sizeof(**mapped));
	**mapped = 0;
}

static void offload_scale(struct sim_launch *sim)
{
	int **mapped = SIM_ARG(0, int **), *v;

	sim_check(mapped, sizeof(*mapped));
	v = *mapped;
	sim_check(v, 1000 * sizeof(*v));
	for (int i = 0; i < 1000; i++)
		v[i] = v[i] * 3 + 1;
}

SIM_KERNEL(where_acc$_omp_fn$0, SIM_PARAMS(8)) { offload_where(sim); }
SIM_KERNEL(scale_acc$_omp_fn$0, SIM_PARAMS(8)) { offload_scale(sim); }
SIM_KERNEL(scale_acc$_omp_fn$1, SIM_PARAMS(8)) { offload_scale(sim); }
SIM_KERNEL(where_omp$_omp_fn$0, SIM_PARAMS(8, 8, 8)) { offload_where(sim); }
SIM_KERNEL(scale_omp$_omp_fn$0, SIM_PARAMS(8, 8, 8)) { offload_scale(sim); }

/* peer.cu */

SIM_KERNEL(peer_add, SIM_PARAMS(8, 8, 4, 4))
{
	unsigned *to = SIM_ARG(0, unsigned *);
	const unsigned *from = SIM_ARG(1, const unsigned *);
	size_t n = SIM_ARG(2, int);
	unsigned by = SIM_ARG(3, unsigned);

	sim_check(to, n * sizeof(*to));
	sim_check(from, n * sizeof(*from));
	SIM_FOR_1D(i)
		if (i < n)
			to[i] = from[i] + by;
}

/* hostpool.cu */

SIM_KERNEL(hostpool_add, SIM_PARAMS(8, 4, 4))
{
	unsigned *p = SIM_ARG(0, unsigned *), by = SIM_ARG(2, unsigned);
	size_t n = SIM_ARG(1, int);

	sim_check(p, n * sizeof(*p));
	SIM_FOR_1D(i)
		if (i < n)
			p[i] += by;
}

/* shadow.cu */

SIM_KERNEL(shadow_add, SIM_PARAMS(8, 4, 4))
{
	unsigned *p = SIM_ARG(0, unsigned *), by = SIM_ARG(2, unsigned);
	size_t n = SIM_ARG(1, int);

	sim_check(p, n * sizeof(*p));
	SIM_FOR_1D(i)
		if (i < n)
			p[i] += by;
}

/* engine.cu */

SIM_KERNEL(engine_step, SIM_PARAMS(8, 8, 8, 8, 4))
{
	const unsigned *weights = SIM_ARG(0, const unsigned *), *tokens = SIM_ARG(1, const unsigned *);
	unsigned *cache = SIM_ARG(2, unsigned *), *out = SIM_ARG(3, unsigned *);
	size_t n = SIM_ARG(4, int);

	sim_check(tokens, n * sizeof(*tokens));
	sim_check(cache, n * sizeof(*cache));
	sim_check(out, n * sizeof(*out));
	SIM_FOR_1D(i)
		if (i < n) {
			sim_check(&weights[tokens[i]], sizeof(*weights));
			cache[i] += weights[tokens[i]];
			out[i] = cache[i] * 3 + tokens[i];
		}
}

/* packed.cu */

SIM_KERNEL(packed_count, SIM_PARAMS(4096))
{
	struct { unsigned *out; unsigned n, first; } w = SIM_ARG(0, __typeof__(w));

	sim_check(w.out, w.n * sizeof(*w.out));
	for (unsigned i = 0; i < w.n; i++)
		w.out[i] = w.first + i;
}

/* pointers.cu */

struct ptr_link {
	unsigned value;
	struct ptr_link *next;
};

SIM_KERNEL(ptr_follow, SIM_PARAMS(8, 4))
{
	const struct { const unsigned *in; unsigned *out, *flag; struct ptr_link *first; } *t = SIM_ARG(0, __typeof__(t));
	int n = SIM_ARG(1, int);

	sim_check(t, sizeof(*t));
	sim_check(t->in, n * sizeof(*t->in));
	sim_check(t->out, n * sizeof(*t->out));
	sim_check(t->flag, sizeof(*t->flag));
	for (int i = 0; i < n; i++)
		t->out[i] = t->in[i] + 1;
	++*t->flag;
	for (struct ptr_link *l = t->first; l; l = l->next) {
		sim_check(l, sizeof(*l));
		l->value *= 2;
	}
}

/* arrive.cu */

SIM_KERNEL(_Z11arrive_holdx, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, long long));
}

SIM_KERNEL(arrive_count, SIM_PARAMS(8, 4, 4, 8))
{
	const unsigned *v = SIM_ARG(0, const unsigned *);
	size_t n = SIM_ARG(1, int);
	unsigned want = SIM_ARG(2, unsigned), *wrong = SIM_ARG(3, unsigned *);

	sim_check(v, n * sizeof(*v));
	sim_check(wrong, sizeof(*wrong));
	for (size_t i = 0; i < n; i++)
		*wrong += v[i] != want + i;
}

/* Those of bench/launch.cu. */
SIM_KERNEL(_Z5emptyv, SIM_NO_PARAMS)
{
}

SIM_KERNEL(_Z3addPii, SIM_PARAMS(8, 4))
{
	*SIM_ARG(0, int *) += SIM_ARG(1, int);
}
