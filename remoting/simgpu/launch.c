/*
 * Launches: checking what the driver checks, packing the parameters, running the
 * twin on the stream's thread, and the faults that SLUICE_SIM_FAULT asks for. A
 * kernel takes as long as its twin, or longer if the twin names a cost or a fault
 * makes it slow; the rest of the time it sleeps, so that streams overlap as on a
 * GPU with room for both.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"


/* faults */

/* Parses SLUICE_SIM_FAULT; returns false if it is invalid. */
static bool faults(bool (*fn)(const char *key, char *value, CUresult *r), CUresult *r)
{
	const char *env = getenv("SLUICE_SIM_FAULT");
	char *copy, *save = NULL;
	bool ok = true;

	if (!env || !*env)
		return true;
	copy = strdup(env);
	if (!copy)
		return false;
	for (char *p = strtok_r(copy, ",", &save); p && ok; p = strtok_r(NULL, ",", &save)) {
		char *eq = strchr(p, '=');

		ok = eq != NULL;
		if (ok) {
			*eq = 0;
			ok = fn(p, eq + 1, r);
		}
		if (!ok)
			fprintf(stderr, "simgpu: SLUICE_SIM_FAULT: %s: want slow=NAME:ms, illegal=NAME[:nth], hang=NAME, "
				"alloc=nth or init=CODE\n", p);
	}
	free(copy);
	return ok;
}

static bool fault_early(const char *key, char *value, CUresult *r)
{
	if (!strcmp(key, "init"))
		*r = atoi(value);
	else if (!strcmp(key, "alloc"))
		sim.alloc_fail = atol(value);
	else if (strcmp(key, "slow") && strcmp(key, "illegal") && strcmp(key, "hang"))
		return false;
	return true;
}

static bool fault_twin(const char *key, char *value, CUresult *r)
{
	char *colon = strrchr(value, ':');
	long n = colon ? atol(colon + 1) : 0;

	(void)r;
	if (!strcmp(key, "init") || !strcmp(key, "alloc"))
		return true;
	if (!strcmp(key, "slow") && (!colon || n <= 0))
		return false;
	if (colon)
		*colon = 0;
	for (size_t i = 0; i < sim.ntwins; i++) {
		struct twin *t = sim.twins[i];

		if (strcmp(value, "*") && strcmp(value, t->k->name))
			continue;
		if (!strcmp(key, "slow"))
			t->slow_ns = (uint64_t)n * 1000000;
		else if (!strcmp(key, "illegal"))
			t->illegal_at = n > 0 ? n : -1;
		else
			t->hang = true;
	}
	return true;
}

CUresult fault_init(void)
{
	CUresult r = CUDA_SUCCESS;

	return faults(fault_early, &r) ? r : CUDA_ERROR_INVALID_VALUE;
}

CUresult fault_twins(void)
{
	CUresult r = CUDA_SUCCESS;

	for (size_t i = 0; i < sim.ntwins; i++)
		sim.twins[i]->cost_ns = engine_kernel(sim.twins[i]->k->name);

	return faults(fault_twin, &r) ? r : CUDA_ERROR_INVALID_VALUE;
}

/* running */

struct running {
	struct sim_launch pub;		/* first: the twin sees this */
	struct kcall *k;
	struct ctx *c;
	uint64_t start, cost;
	CUresult fault;
};

/* Adds text to the context's printed output. */
static void output(struct ctx *c, struct output *o, const char *fmt, va_list ap)
{
	char buf[1024];
	int n = vsnprintf(buf, sizeof(buf), fmt, ap);

	if (n <= 0)
		return;
	if ((size_t)n >= sizeof(buf))
		n = sizeof(buf) - 1;
	pthread_mutex_lock(&sim.lock);
	if (o->n + (size_t)n <= c->limits[CU_LIMIT_PRINTF_FIFO_SIZE]) {	/* a full buffer loses lines */
		o->text = xgrow(o->text, o->n + (size_t)n, &o->cap, 1);
		memcpy(o->text + o->n, buf, (size_t)n);
		o->n += (size_t)n;
	}
	pthread_mutex_unlock(&sim.lock);
}

static void api_print(struct sim_launch *l, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void api_print(struct sim_launch *l, const char *fmt, ...)
{
	struct ctx *c = ((struct running *)l)->c;
	va_list ap;

	va_start(ap, fmt);
	output(c, &c->print, fmt, ap);
	va_end(ap);
}

static void api_fault(struct sim_launch *l, int result)
{
	struct running *r = (struct running *)l;

	if (!r->fault)
		r->fault = result;
}

static void api_assertion(struct sim_launch *l, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void api_assertion(struct sim_launch *l, const char *fmt, ...)
{
	struct ctx *c = ((struct running *)l)->c;
	va_list ap;

	va_start(ap, fmt);
	output(c, &c->failed, fmt, ap);
	va_end(ap);
	api_fault(l, CUDA_ERROR_ASSERT);
}

static void api_cost(struct sim_launch *l, uint64_t ns)
{
	((struct running *)l)->cost = ns;
}

/* A kernel may go from one block of registered memory to the next; a copy may not. */
static bool reached(uint64_t p, size_t n)
{
	struct alloc *a = mem_find(p);

	while (a && a->akind == A_REGISTERED && a->base + a->size - p < n) {
		n -= a->base + a->size - p;
		p = a->base + a->size;
		a = mem_find(p);
	}
	return mem_ok(p, n);
}

static int api_check(struct sim_launch *l, const void *p, size_t n)
{
	bool ok;

	pthread_mutex_lock(&sim.lock);
	ok = reached((uintptr_t)p, n) && mem_reached(((struct running *)l)->c, (uintptr_t)p, n);
	pthread_mutex_unlock(&sim.lock);
	if (!ok)
		api_fault(l, CUDA_ERROR_ILLEGAL_ADDRESS);
	return ok;
}

static void *api_symbol(struct sim_launch *l, const char *name)
{
	struct module *m = ((struct running *)l)->k->module;
	void *p = NULL;

	pthread_mutex_lock(&sim.lock);
	for (size_t i = 0; m->global && i < sim.nglobals; i++)
		if (m->global[i] && !strcmp(sim.globals[i]->name, name))
			p = (void *)(uintptr_t)m->global[i]->base;
	pthread_mutex_unlock(&sim.lock);
	return p;
}

static int api_stopped(struct sim_launch *l)
{
	int dying;

	pthread_mutex_lock(&sim.lock);
	dying = ((struct running *)l)->c->dying;
	pthread_mutex_unlock(&sim.lock);
	return dying;
}

static void api_tag(struct sim_launch *l, uint64_t tag)
{
	(void)l;
	engine_tag(tag);
}

static const struct sim_kernel_api api = {
	api_print, api_fault, api_cost, api_check, api_symbol, api_stopped, api_tag, api_assertion,
};

/* Occupies the device for ns of its own time, or until the context ends. */
static void occupy(struct ctx *c, uint64_t ns)
{
	bool dying = false;

	while (ns && !dying) {
		ns -= engine_step(c->dev, ns, false);
		pthread_mutex_lock(&sim.lock);
		dying = c->dying;
		pthread_mutex_unlock(&sim.lock);
	}
}

/*
 * A kernel without end. Called with the lock held; with an engine it occupies the device whenever
 * other processes let it.
 */
static void hang(struct ctx *c)
{
	struct timespec nap = { 0, 1000000 };

	while (!c->dying && !engine_on())
		pthread_cond_wait(&sim.progress, &sim.lock);
	while (!c->dying) {
		pthread_mutex_unlock(&sim.lock);
		engine_step(c->dev, 2000000, false);
		nanosleep(&nap, NULL);
		pthread_mutex_lock(&sim.lock);
	}
}

/* Sleeps until t, or until the context ends. Called with the lock held. */
static void sleep_until(struct ctx *c, uint64_t t)
{
	struct timespec ts = { (time_t)(t / 1000000000), (long)(t % 1000000000) };

	while (!c->dying && sim_now() < t)
		pthread_cond_timedwait(&sim.progress, &sim.lock, &ts);
}

static CUresult run_twin(struct kcall *k, struct ctx *c)
{
	struct twin *t = k->twin;
	struct running run = { .k = k, .c = c, .start = sim_now() };
	void **args;
	uint64_t wait;

	pthread_mutex_lock(&sim.lock);
	t->calls++;
	if (k->module->gone)
		run.fault = CUDA_ERROR_LAUNCH_FAILED;
	else if (t->illegal_at == -1 || (t->illegal_at && t->calls == t->illegal_at))
		run.fault = CUDA_ERROR_ILLEGAL_ADDRESS;
	if (t->hang) {
		hang(c);
		run.fault = CUDA_ERROR_LAUNCH_TIMEOUT;
	}
	pthread_mutex_unlock(&sim.lock);
	if (run.fault)
		return run.fault;

	args = xcalloc(t->k->nparams, sizeof(*args));
	for (uint32_t i = 0; i < t->k->nparams; i++)
		args[i] = k->params + t->offset[i];
	run.pub.api = &api;
	run.pub.grid = (struct sim_dim){ k->grid[0], k->grid[1], k->grid[2] };
	run.pub.block = (struct sim_dim){ k->block[0], k->block[1], k->block[2] };
	run.pub.shared_bytes = k->shared;
	run.pub.shared = xcalloc(1, k->shared);
	run.pub.args = args;
	run.pub.device = c->dev;
	t->k->run(&run.pub);
	free(run.pub.shared);
	free(args);

	wait = t->slow_ns > run.cost ? t->slow_ns : run.cost;
	if (engine_on()) {
		occupy(c, wait ? wait : t->cost_ns);
	} else if (wait) {
		pthread_mutex_lock(&sim.lock);
		sleep_until(c, run.start + wait);
		pthread_mutex_unlock(&sim.lock);
	}
	return run.fault;
}

CUresult kernel_run(struct kcall *k, struct ctx *c)
{
	CUresult r;

	state_begin(c->dev);
	r = run_twin(k, c);
	state_end(c->dev);
	return r;
}

/* making a launch */

static CUresult params_extra(struct twin *t, void **extra, unsigned char *to)
{
	const void *buf = NULL;
	const size_t *size = NULL;

	for (int i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
		if (i > 8 || !extra[i + 1])
			return CUDA_ERROR_INVALID_VALUE;
		if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buf = extra[i + 1];
		else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
			size = extra[i + 1];
		else
			return CUDA_ERROR_INVALID_VALUE;
	}
	if (size && *size > t->nbytes && *size > 4096)
		return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
	if (!t->nbytes)
		return CUDA_SUCCESS;
	if (!buf || !size || !*size)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(to, buf, *size < t->nbytes ? *size : t->nbytes);	/* NCCL gives fewer bytes than its kernels declare */
	return CUDA_SUCCESS;
}

static CUresult dims_check(struct func *f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared)
{
	uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
	unsigned int max = f->twin->k->max_threads ? (unsigned int)f->twin->k->max_threads : 1024;

	if (!grid[0] || !grid[1] || !grid[2] || !threads || grid[0] > 0x7fffffff || grid[1] > 65535 ||
	    grid[2] > 65535 || block[0] > 1024 || block[1] > 1024 || block[2] > 64)
		return CUDA_ERROR_INVALID_VALUE;
	if (threads > max) /* its launch bounds; registers are no matter here */
		return CUDA_ERROR_INVALID_VALUE;
	if (shared > (unsigned int)f->max_dyn)
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult kcall_make(struct ctx *c, CUfunction h, const unsigned int grid[3], const unsigned int block[3],
		    unsigned int shared, void **params, void **extra, int cooperative, struct kcall *k)
{
	struct twin *t;
	struct func *f;
	CUresult r = func_get(c, h, &f);

	if (!r)
		r = dims_check(f, grid, block, shared);
	if (!r)
		r = ctx_local(c, (uint64_t)f->twin->k->local_bytes, false);
	if (r)
		return r;
	t = f->twin;
	if (params && extra)
		return CUDA_ERROR_INVALID_VALUE;
	if (t->k->nparams && !params && !extra)
		return CUDA_ERROR_INVALID_VALUE;
	if (cooperative && (uint64_t)grid[0] * grid[1] * grid[2] > 132ULL * 32)
		return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
	memset(k, 0, sizeof(*k));
	k->twin = t;
	k->module = f->module;
	k->func = (uintptr_t)h;
	memcpy(k->grid, grid, sizeof(k->grid));
	memcpy(k->block, block, sizeof(k->block));
	k->shared = shared;
	k->cooperative = cooperative != 0;
	k->nbytes = t->nbytes;
	k->params = xcalloc(1, t->nbytes);
	if (extra) {
		r = params_extra(t, extra, k->params);
	} else {
		for (uint32_t i = 0; i < t->k->nparams && !r; i++) {
			if (!params[i])
				r = CUDA_ERROR_INVALID_VALUE;
			else
				memcpy(k->params + t->offset[i], params[i], t->size[i]);
		}
	}
	if (r) {
		free(k->params);
		return r;
	}
	f->module->refs++;
	return CUDA_SUCCESS;
}

static CUresult launch(CUfunction f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared,
		       CUstream h, CUstream dflt, void **params, void **extra, int cooperative)
{
	struct work w = { .kind = W_KERNEL };
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (!r && s->obj.ctx != c)
		r = CUDA_ERROR_INVALID_HANDLE;
	if (!r)
		r = kcall_make(c, f, grid, block, shared, params, extra, cooperative, &w.kernel);
	if (r)
		return sim_leave(r);
	return sim_leave(stream_put(s, &w));
}

#define DIMS unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz
#define GRID (const unsigned int[3]){ gx, gy, gz }
#define BLOCK (const unsigned int[3]){ bx, by, bz }

API CUresult cuLaunchKernel(CUfunction f, DIMS, unsigned int shared, CUstream h, void **params, void **extra)
{
	return launch(f, GRID, BLOCK, shared, h, NULL, params, extra, 0);
}

API CUresult cuLaunchKernel_ptsz(CUfunction f, DIMS, unsigned int shared, CUstream h, void **params, void **extra)
{
	return launch(f, GRID, BLOCK, shared, h, CU_STREAM_PER_THREAD, params, extra, 0);
}

API CUresult cuLaunchCooperativeKernel(CUfunction f, DIMS, unsigned int shared, CUstream h, void **params)
{
	return launch(f, GRID, BLOCK, shared, h, NULL, params, NULL, 1);
}

API CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, DIMS, unsigned int shared, CUstream h, void **params)
{
	return launch(f, GRID, BLOCK, shared, h, CU_STREAM_PER_THREAD, params, NULL, 1);
}

static CUresult launch_ex(const CUlaunchConfig *cfg, CUstream dflt, CUfunction f, void **params, void **extra)
{
	unsigned int grid[3], block[3];
	int cooperative = 0;

	if (!cfg || (cfg->numAttrs && !cfg->attrs) || cfg->numAttrs > CU_LAUNCH_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	grid[0] = cfg->gridDimX;
	grid[1] = cfg->gridDimY;
	grid[2] = cfg->gridDimZ;
	block[0] = cfg->blockDimX;
	block[1] = cfg->blockDimY;
	block[2] = cfg->blockDimZ;
	for (unsigned int i = 0; i < cfg->numAttrs; i++) {
		const CUlaunchAttribute *a = &cfg->attrs[i];

		if (a->id >= CU_LAUNCH_ATTRIBUTE_MAX)
			return CUDA_ERROR_INVALID_VALUE;
		if (a->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
			cooperative = a->value.cooperative;
		if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION &&
		    (!a->value.clusterDim.x || !a->value.clusterDim.y || !a->value.clusterDim.z ||
		     grid[0] % a->value.clusterDim.x || grid[1] % a->value.clusterDim.y ||
		     grid[2] % a->value.clusterDim.z))
			return CUDA_ERROR_INVALID_CLUSTER_SIZE;
	}
	return launch(f, grid, block, cfg->sharedMemBytes, cfg->hStream, dflt, params, extra, cooperative);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *cfg, CUfunction f, void **params, void **extra)
{
	return launch_ex(cfg, NULL, f, params, extra);
}

API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *cfg, CUfunction f, void **params, void **extra)
{
	return launch_ex(cfg, CU_STREAM_PER_THREAD, f, params, extra);
}
