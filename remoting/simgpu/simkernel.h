/*
 * Twins: host functions that stand for CUDA kernels on the simulated GPU.
 *
 * A twin carries the mangled name of the kernel it stands for and the sizes of
 * its parameters. It is called once for a whole grid, on the thread of the
 * stream it was launched in. Device pointers are plain addresses.
 *
 *	#include "simkernel.h"
 *
 *	SIM_KERNEL(_Z6vecaddPKfS0_Pfi, SIM_PARAMS(8, 8, 8, 4))
 *	{
 *		const float *a = SIM_ARG(0, const float *);
 *		const float *b = SIM_ARG(1, const float *);
 *		float *c = SIM_ARG(2, float *);
 *		int n = SIM_ARG(3, int);
 *
 *		sim_check(c, n * sizeof(float));
 *		SIM_FOR_1D(i)
 *			if (i < n)
 *				c[i] = a[i] + b[i];
 *	}
 *
 *	SIM_GLOBAL(counter, 4);		a __device__ variable, zero at load
 *
 * Build: cc -shared -fPIC -I remoting/simgpu -o twins.so twins.c
 * Use:   SLUICE_SIM_KERNELS=/path/twins.so[:/path/more.so]
 *
 * Nothing here needs linking: a twin reaches the simulator through the launch
 * it was handed.
 */
#ifndef SLUICE_SIMKERNEL_H
#define SLUICE_SIMKERNEL_H

#include <stddef.h>
#include <stdint.h>

#define SIM_ABI 2

struct sim_dim { unsigned int x, y, z; };
struct sim_launch;

/* What a twin may ask the simulator for. */
struct sim_kernel_api {
	void (*print)(struct sim_launch *l, const char *fmt, ...)
		__attribute__((format(printf, 2, 3)));
	void (*fault)(struct sim_launch *l, int result);
	void (*cost)(struct sim_launch *l, uint64_t ns);
	int (*check)(struct sim_launch *l, const void *p, size_t n);
	void *(*symbol)(struct sim_launch *l, const char *name);
	int (*stopped)(struct sim_launch *l);
	void (*tag)(struct sim_launch *l, uint64_t tag);
	void (*assertion)(struct sim_launch *l, const char *fmt, ...)
		__attribute__((format(printf, 2, 3)));
};

struct sim_launch {
	const struct sim_kernel_api *api;
	struct sim_dim grid, block;
	unsigned int shared_bytes;	/* dynamic shared memory of one block */
	void *shared;			/* one block's worth, zeroed, reused by all blocks */
	void **args;			/* args[i] points at parameter i */
	int device;
};

struct sim_kernel {
	uint32_t abi;
	const char *name;
	void (*run)(struct sim_launch *sim);
	const uint32_t *params;		/* sizes, or offset and size pairs when at is set */
	uint32_t nparams;
	int at;
	int regs, static_shared, local_bytes, const_bytes, max_threads;
};

struct sim_global {
	const char *name;
	uint64_t size;
	const void *init;		/* NULL: zeroes */
	int managed;
};

/* Sizes in bytes; each parameter sits at the next multiple of its size (of 8 when larger). */
#define SIM_PARAMS(...) \
	.params = (const uint32_t[]){ __VA_ARGS__ }, \
	.nparams = sizeof((const uint32_t[]){ __VA_ARGS__ }) / sizeof(uint32_t)
/* Offset, size, offset, size ...: for structures with an alignment of their own. */
#define SIM_PARAMS_AT(...) \
	.at = 1, .params = (const uint32_t[]){ __VA_ARGS__ }, \
	.nparams = sizeof((const uint32_t[]){ __VA_ARGS__ }) / sizeof(uint32_t) / 2
#define SIM_NO_PARAMS .nparams = 0

/*
 * SIM_KERNEL(name, SIM_PARAMS(...)) { body }, or with attributes that
 * cuFuncGetAttribute is to report:
 * SIM_KERNEL(name, SIM_PARAMS(...), .regs = 40, .static_shared = 4096) { body }
 */
#define SIM_KERNEL(name_, ...) \
	static void sim_run_##name_(struct sim_launch *sim); \
	static const struct sim_kernel sim_kernel_##name_ = { \
		.abi = SIM_ABI, .name = #name_, .run = sim_run_##name_, __VA_ARGS__ }; \
	static const struct sim_kernel *const sim_kptr_##name_ \
		__attribute__((section("sim_kernels"), used)) = &sim_kernel_##name_; \
	static void sim_run_##name_(struct sim_launch *sim __attribute__((unused)))

/* A __device__ variable of the module that holds the kernels; zeroes at load, or a copy of init. */
#define SIM_GLOBAL(name_, size_) SIM_GLOBAL_INIT(name_, size_, NULL)
#define SIM_GLOBAL_INIT(name_, size_, init_) SIM_GLOBAL_KIND(name_, size_, init_, 0)
/* The same for a __managed__ variable. */
#define SIM_MANAGED(name_, size_, init_) SIM_GLOBAL_KIND(name_, size_, init_, 1)
#define SIM_GLOBAL_KIND(name_, size_, init_, managed_) \
	static const struct sim_global sim_global_##name_ = { #name_, (size_), (init_), (managed_) }; \
	static const struct sim_global *const sim_gptr_##name_ \
		__attribute__((section("sim_globals"), used)) = &sim_global_##name_

/* Parameter i of the launch, as type. */
#define SIM_ARG(i, type) \
	(__extension__({ type sim_v_; __builtin_memcpy(&sim_v_, sim->args[i], sizeof(sim_v_)); sim_v_; }))

/* The module's own copy of a SIM_GLOBAL, as a pointer; NULL when the image lacks it. */
#define SIM_SYMBOL(name_, type) ((type *)sim->api->symbol(sim, #name_))

/* Device printf: collected, and written to stdout at the next synchronisation. */
#define sim_printf(...) sim->api->print(sim, __VA_ARGS__)
/* An assertion of thread t of block b that failed: its text goes to stderr at the next synchronisation. */
#define sim_assert_failed(b, t, file, line, function, text) \
	sim->api->assertion(sim, "%s:%d: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.\n", file, line, \
			    function, (b).x, (b).y, (b).z, (t).x, (t).y, (t).z, text)
/* Ends the kernel with a CUDA error that sticks to the context; the twin should return next. */
#define sim_fault(result) sim->api->fault(sim, (result))
/* Makes the kernel take at least this long, counted from its start. */
#define sim_cost_ns(ns) sim->api->cost(sim, (ns))
/* Faults with an illegal address and returns from the twin unless [p, p+n) is memory a kernel may touch. */
#define sim_check(p, n) do { if (!sim->api->check(sim, (p), (n))) return; } while (0)
/* The label of the process in the engine's trace from now on. */
#define sim_tag(tag_) sim->api->tag(sim, (tag_))
/* True once the context is being destroyed: long loops should check it. */
#define sim_stopped() sim->api->stopped(sim)

/* One-dimensional launches: i is the global thread index. */
#define SIM_FOR_1D(i) \
	for (size_t i = 0, sim_n_ = (size_t)sim->grid.x * sim->block.x; i < sim_n_; i++)

/* All blocks, and all threads of a block, x fastest: SIM_FOR_BLOCKS(b) { SIM_FOR_THREADS(t) { ... b.x, t.y ... } } */
#define SIM_FOR_DIM(v, d) \
	for (struct sim_dim v = { 0, 0, 0 }; v.z < (d).z; \
	     v.x + 1 < (d).x ? (void)v.x++ : (v.x = 0, v.y + 1 < (d).y ? (void)v.y++ : (void)(v.y = 0, v.z++)))
#define SIM_FOR_BLOCKS(b) SIM_FOR_DIM(b, sim->grid)
#define SIM_FOR_THREADS(t) SIM_FOR_DIM(t, sim->block)

/* How the simulator finds what a shared object declares; both are emitted once per object. */
struct sim_tables {
	uint32_t abi;
	const struct sim_kernel *const *kernels, *const *kernels_end;
	const struct sim_global *const *globals, *const *globals_end;
};

extern const struct sim_kernel *const __start_sim_kernels[] __attribute__((weak, visibility("hidden")));
extern const struct sim_kernel *const __stop_sim_kernels[] __attribute__((weak, visibility("hidden")));
extern const struct sim_global *const __start_sim_globals[] __attribute__((weak, visibility("hidden")));
extern const struct sim_global *const __stop_sim_globals[] __attribute__((weak, visibility("hidden")));

#ifndef SIM_NO_TABLES
__attribute__((weak, visibility("default"))) void sim_tables(struct sim_tables *t)
{
	t->abi = SIM_ABI;
	t->kernels = __start_sim_kernels;
	t->kernels_end = __stop_sim_kernels;
	t->globals = __start_sim_globals;
	t->globals_end = __stop_sim_globals;
}
#endif

#endif
