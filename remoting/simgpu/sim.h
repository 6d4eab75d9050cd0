/*
 * The inside of the simulated GPU: one lock, a registry of handles, devices with
 * arenas of memory, contexts, streams that are threads, and pieces of work.
 *
 * Flow of a call: sim_enter_ctx() takes the one lock and checks what the driver
 * would check; stream calls build a struct work and give it to stream_put(), which
 * records it as a graph node while the stream captures and otherwise queues it as a
 * struct op. The stream's thread takes ops in order, waits for what they depend on,
 * runs them without the lock, and marks them done. Waiters sleep on sim.progress.
 *
 * Locking: sim.lock guards everything here except the content of device memory and
 * the shared state file, which has a lock of its own (state.c) taken inside
 * sim.lock.
 */
#ifndef SLUICE_SIM_H
#define SLUICE_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The API table's prototypes: a definition here that differs does not compile. */
#pragma GCC visibility push(default)
#include "../api/cuprotos.h"
#pragma GCC visibility pop
#include "simkernel.h"
#include "engine.h"
#include "state.h"

#define API __attribute__((visibility("default")))
#define GRANULE (2ULL << 20)
#define UNIT 512U			/* what slabs are divided in */
#define SLAB_UNITS (GRANULE / UNIT)
#define SMALL_MAX (1ULL << 20)		/* larger allocations get granules of their own */
#define ROUND_UP(n, a) (((n) + ((a) - 1)) / (a) * (a))

enum kind {
	K_CTX = 1, K_STREAM, K_EVENT, K_MODULE, K_LIBRARY, K_KERNEL, K_FUNC, K_GRAPH, K_NODE,
	K_EXEC, K_POOL, K_ARRAY, K_MIPMAP, K_VMEM, K_USEROBJ, K_COND, K_LINK,
	K_TEXREF, K_TEXOBJ, K_DESC, K_GREEN,
};

struct ctx;
struct stream;
struct op;
struct graph;
struct capture;
struct pool;
struct module;
struct texref;

/* First member of everything a program holds a handle of. */
struct obj {
	enum kind kind;
	uint64_t handle;
	struct ctx *ctx;		/* it is destroyed with this; NULL: with nothing */
};

/* memory */

enum akind { A_DEVICE, A_POOL, A_MANAGED, A_HOST, A_REGISTERED, A_RESERVED, A_MAPPED, A_SHARED };

struct alloc {
	uint64_t base, size;		/* size: as asked */
	uint64_t charge;		/* bytes of own granules; 0 in a slab */
	enum akind akind;
	int dev;
	struct ctx *ctx;
	struct slab *slab;
	struct pool *pool;
	struct vmem *vmem;
	struct gmem *gmem;
	uint64_t id, vmem_off;
	uint32_t access;		/* of mapped memory, see peer.c */
	unsigned int flags;
	bool accessible, freeing;
	unsigned int sync_memops;
	struct alloc *next, *prev;	/* in ctx->allocs */
};

struct slab {
	uint64_t base;
	int dev;
	unsigned int free, run;		/* free units; no free run is longer than run */
	struct slab_list *owner;
	struct slab *next, *prev;
	struct alloc *at[SLAB_UNITS];
};

struct slab_list { struct slab *head; };

struct vmem {
	struct obj obj;
	int fd, dev, maps, refs;
	bool imported;			/* charged to the process that made it */
	uint64_t size;
	CUmemAllocationProp prop;
};

struct pool {
	struct obj obj;
	int dev;
	bool dflt, destroyed;
	unsigned imported;		/* times; 0 for one of this process's own */
	uint64_t identity;		/* 0 until the pool is exported; an imported one has its exporter's */
	uint32_t access;		/* see peer.c */
	CUmemPoolProps props;
	struct slab_list slabs;
	uint64_t attr[9], used, reserved, idle, live;
};

struct array {
	struct obj obj;
	struct alloc *mem;
	CUDA_ARRAY3D_DESCRIPTOR desc;
	size_t elem, pitch, slice;	/* bytes */
	size_t depth;			/* slices, layers included */
	struct mipmap *parent;
};

struct mipmap {
	struct obj obj;
	unsigned int levels;
	struct array *level[32];
};

struct device {
	uint64_t arena;
	size_t ngran, cursor;
	uintptr_t *gran;		/* alloc, slab | 1, or 0 */
	struct ctx *primary;
	struct pool *pool, *current_pool;
	uint64_t graph_mem[4];		/* by CUgraphMem_attribute */
};

/* contexts and streams */

#define SIM_LIMITS 10

struct ctx {
	struct obj obj;
	int dev;
	unsigned int flags, version, primary_refs;
	bool primary, active, dying, ever;
	uint64_t id, overhead, local;	/* local: bytes of local memory held for all threads */
	CUresult sticky;
	struct stream *legacy, *streams;
	struct alloc *allocs;
	struct slab_list slabs;
	size_t limits[SIM_LIMITS];
	unsigned int cache_config;
	uint32_t peers;			/* devices whose memory its kernels reach */
	struct output {
		char *text;
		size_t n, cap;
	} print, failed;		/* device printf and assertions not yet written */
	struct ctx *dead;		/* next destroyed one */
	struct ctx *home;		/* of a green context as a context: the primary one */
	uint64_t green;			/* its handle */
};

struct stream {
	struct obj obj;
	struct stream *next, *prev;	/* in ctx->streams */
	struct op *head, *last;		/* queue; last: also when already done */
	unsigned int flags;
	int priority, refs;
	uint64_t id;
	bool thread, stop, gone;
	pthread_cond_t wake;
	struct capture *cap;
	struct gnode **cap_deps;
	size_t ncap;
	CUlaunchAttributeValue *attrs;	/* made when asked for, by id */
	uint64_t green;			/* handle of the green context it is of, 0 if none */
};

struct event {
	struct obj obj;
	unsigned int flags;
	struct op *op;			/* the op of the latest record */
	int share;			/* of an interprocess event, + 1 */
	bool opened;			/* another process made it */
	bool recorded;
	struct capture *cap;		/* the latest record was captured */
	struct gnode **cap_deps;
	size_t ncap;
};

/* work */

enum wkind {
	W_EMPTY, W_KERNEL, W_COPY, W_SET, W_HOST, W_CALLBACK, W_GRAPH, W_WAIT, W_WRITE, W_FREE,
	W_RECORD, W_WAITEV, W_CHILD, W_COND, W_ALLOC, W_GFREE, W_SIGNAL, W_ANY,
};

struct copy {
	char *dst;
	const char *src;
	size_t dst_pitch, dst_slice, src_pitch, src_slice;
	size_t width, height, depth;
	void *own;			/* a private copy of the source, freed with the work */
};

struct kcall {
	struct twin *twin;
	struct module *module;
	uint64_t func;			/* handle */
	unsigned int grid[3], block[3], shared, cooperative;
	unsigned char *params;
	size_t nbytes;
};

struct work {
	enum wkind kind;
	union {
		struct kcall kernel;
		struct {
			struct copy c;
			CUDA_MEMCPY3D desc;
		} copy;
		struct { CUDA_MEMSET_NODE_PARAMS p; } set;
		struct { CUhostFn fn; void *arg; } host;
		struct { CUstreamCallback fn; void *arg; CUstream stream; CUresult status; } callback;
		struct { struct plan *plan; } graph;
		struct { uint64_t addr, value; unsigned int flags; bool wide; } val;
		struct { uint64_t addr, id; } free;
		struct { uint64_t handle; } event;
		struct { struct gmem *m; } gmem;
		struct { struct cond *c; unsigned int type; struct plan **body; size_t n; } cond;
	};
};

struct op {
	int refs;
	bool done;
	uint64_t t;			/* of completion, see sim_time() */
	struct op *next;
	struct ctx *ctx;
	struct op **deps;
	size_t ndeps;
	struct work work;
};

/* modules */

struct twin {
	const struct sim_kernel *k;
	uint32_t *offset, *size;
	size_t nbytes;
	uint64_t slow_ns, cost_ns;	/* cost_ns: by SLUICE_SIM_COST */
	long illegal_at, calls;		/* illegal_at: 0 never, -1 always */
	bool hang;
};

/* p[n] is NUL. unread: part of it is compressed, and nobody knows what it holds. */
struct text { char *p; size_t n, cap; bool unread; };

/* What the compiler and the linker say: the buffers and options of the program that are given it. */
struct jit {
	struct jit_log { char *to; size_t cap, n; void **size; } info, error;
	void **wall;
	bool verbose;
	uint64_t begun;
};

struct image {
	int refs;
	struct text *gather;		/* of an input of the linker: what it names goes there */
	bool all;			/* compressed with zstd: any twin may be in it */
	bool *twin, *global;		/* which of sim.twins, sim.globals it names */
	int sm;				/* the architecture that the code which runs was compiled for */
	struct refname {
		char *name;
		bool surface;
	} *texnames;		/* texture and surface references that PTX declares */
	size_t ntexnames, captexnames;
};

struct module {
	struct obj obj;
	struct image *image;
	struct library *lib;
	struct alloc **global;		/* beside sim.globals */
	struct func **funcs;		/* made on first use, in the order of sim.twins */
	struct texref **texrefs;	/* made on first use, in the order of image->texnames */
	int refs;			/* the handle, queued launches, graph nodes */
	bool gone;
	uint64_t overhead;
};

struct func {
	struct obj obj;
	struct module *module;
	struct twin *twin;
	struct kernel *kernel;
	int max_dyn, carveout, cluster[3], nonportable, cluster_policy;
	unsigned int cache;
};

struct library {
	struct obj obj;
	CUresult broken;		/* PTX that is wrong: the error of its kernels and modules */
	struct image *image;
	struct kernel **kernels;	/* beside sim.twins */
	struct module **modules;	/* one per context that used it */
	size_t nmodules, capmodules;
};

struct kernel {
	struct obj obj;
	struct library *lib;
	size_t index;
	struct twin *twin;
	int max_dyn[SIM_MAX_DEV], carveout[SIM_MAX_DEV];
};

/* graphs */

/* What a program wants to know the end of. */
struct userobj {
	struct obj obj;
	CUhostFn destroy;
	void *arg;
	uint64_t refs;
};

/* References to user objects that a graph or a plan holds; of: the child node that they came with, in a plan. */
struct users {
	struct user { struct userobj *o; uint64_t n, of; } *v;
	size_t n, cap;
};

/*
 * Memory of an allocation node. It is held by nodes and by plans, and is there from the beginning; live while a launch has
 * allocated it and nobody has freed it.
 */
struct gmem {
	int refs, execs;
	uint64_t base, id, size;
	int dev;
	bool live, freed;		/* freed: by a node */
};

/* A condition of a graph: the value decides what its node runs. Held by the graph and by plans made of it. */
struct cond {
	struct obj obj;
	int refs;
	unsigned int value, dflt;
	bool assign, used;		/* assign: the value is dflt when a launch begins */
};

struct gnode {
	struct obj obj;
	struct graph *graph;
	struct work work;
	void **params;			/* cuGraphKernelNodeGetParams points here */
	struct graph *child;
	struct graph **body;		/* of a conditional node */
	size_t nbody;
	struct gnode **deps;
	size_t ndeps;
	uint64_t origin;		/* what it was cloned from */
	uint64_t order;			/* among the nodes that were added to the graph */
	size_t mark;
};

/* Which nodes were added to a graph and which of them destroyed. Graphs with the same history have equal ones. */
struct history { uint64_t added, destroyed; };

struct graph {
	struct obj obj;
	struct gnode **nodes;
	size_t n, cap_nodes;
	struct gnode *parent;
	struct users users;
	struct cond **cond;
	size_t ncond, cap_cond;
	bool capturing;
	uint64_t id;
	struct history history;
};

struct capture {
	struct graph *graph;
	struct stream *origin;
	int refs;
	bool invalid, ended, into;	/* into: a graph that existed before */
	unsigned int mode;
	uint64_t id;
	pthread_t thread;
	struct capture *next;
};

/*
 * What a graph launch runs: works in an order that respects the edges. top: the child node of the plan's own graph that
 * a step lies in; those of one child stand together.
 */
struct plan_step { struct work work; uint64_t node, top; bool disabled; };
struct plan {
	int refs;
	bool body;		/* of a conditional node, which cannot run host functions */
	unsigned int why;	/* a CUgraphInstantiateResult: why it could not be made, */
	uint64_t bad;		/* and by which node, 0 for none */
	struct users users;
	size_t n, cap;
	struct plan_step *step;
};

/* the simulator of this process; guarded by lock unless said otherwise */

struct sim {
	pthread_mutex_t lock;
	pthread_cond_t progress;
	bool inited, exiting;
	CUresult init_result;
	int pid;
	struct sim_config cfg;
	struct device dev[SIM_MAX_DEV];
	struct alloc **range;		/* host, VMM and reserved ranges by address */
	size_t nrange, caprange;
	struct alloc *reserved;		/* address ranges without memory, see vmm.c */
	uint64_t serial;		/* ids of contexts, streams, allocations, captures */
	struct twin **twins;
	size_t ntwins;
	const struct sim_global **globals;
	size_t nglobals;
	struct capture *captures;
	struct ctx *dead;
	long alloc_count, alloc_fail;
	bool strict;			/* a handle that does not exist ends the process */
};

extern struct sim sim;
extern __thread bool sim_in_host_fn;		/* in a host function, where the driver refuses calls */

/* core.c */
CUresult sim_enter(void);			/* takes the lock; on error it is not held */
CUresult sim_enter_ctx(struct ctx **c);		/* and finds a usable current context */
CUresult sim_leave(CUresult r);
uint64_t sim_now(void);
uint64_t sim_time(int dev);			/* the clock of a device's events */
void *obj_new(enum kind kind, struct ctx *c, size_t size);
void *obj_get(const void *handle, enum kind kind);
void *obj_get_id(uint64_t handle, enum kind kind);
void obj_del(void *o);				/* handle and memory */
void obj_forget(void *o);			/* handle only */
struct obj *obj_next(size_t *it, struct ctx *c);
#define HANDLE(type, o) ((type)(uintptr_t)((struct obj *)(o))->handle)
void *xcalloc(size_t n, size_t size);
void *xgrow(void *p, size_t n, size_t *cap, size_t size);

/* context.c */
struct ctx *ctx_current(void);
bool ctx_dangling(void);
bool ctx_usable(struct ctx *c);
CUresult ctx_activate(struct ctx *c);
CUresult ctx_local(struct ctx *c, uint64_t bytes, bool exact);
void ctx_print_flush(struct ctx *c);
struct ctx *ctx_green(struct ctx *primary, uint64_t green);	/* a green context as a context */
void ctx_green_end(struct ctx *c);
struct ctx *ctx_current_green(void);		/* the current context if it is a green one */
struct ctx *green_ctx(uint64_t green);		/* green.c: NULL if it is none */
CUresult ctx_broken(struct ctx *c);
CUresult dev_check(CUdevice dev);
int dev_attr(CUdevice dev, int attr, int *value);
size_t array_elem(CUarray_format format, unsigned int channels);

/* memory.c */
CUresult mem_init(void);
CUresult mem_alloc(struct ctx *c, int dev, enum akind kind, struct pool *pool, size_t n, struct alloc **out);
void mem_free(struct alloc *a);
struct alloc *mem_find(uint64_t p);
bool mem_ok(uint64_t p, size_t n);		/* all of it is mapped device or pinned memory */
bool mem_reached(const struct ctx *c, uint64_t p, size_t n);	/* a kernel of c may touch it, wherever it lies */
uint32_t access_own(int dev);
CUmemAccess_flags access_of(uint32_t access, int dev);
CUresult access_set(uint32_t *access, int home, const CUmemAccessDesc *desc, size_t n);
bool mem_device(uint64_t p);			/* belongs to the simulator's devices */
struct device *dev_of(uint64_t p);		/* the device whose arena p lies in; NULL if none */
struct alloc *range_add(struct ctx *c, enum akind kind, uint64_t base, size_t n);
void range_del(struct alloc *a);
bool range_free(uint64_t base, size_t n);
size_t range_at(uint64_t base);
void mem_ctx_destroy(struct ctx *c);
bool alloc_must_fail(void);
void pool_release(struct pool *p, uint64_t keep);

/* stream.c */
CUresult stream_find(CUstream h, CUstream dflt, struct ctx *c, struct stream **out);
CUresult stream_get(CUstream h, CUstream dflt, struct ctx *c, struct stream **out);
struct stream *stream_new(struct ctx *c, unsigned int flags, int priority);
CUresult stream_put(struct stream *s, struct work *w);
CUresult stream_put_wait(struct stream *s, struct work *w);
CUresult stream_queue(struct stream *s, struct work *w, struct op *dep, struct op **out);
void stream_wait(struct stream *s);
bool stream_busy(struct stream *s);
void ctx_wait(struct ctx *c);
void all_wait(void);
void stream_ctx_destroy(struct ctx *c);
void op_wait(struct op *op);
void op_unref(struct op *op);
struct op *op_ref(struct op *op);
CUresult stream_sync_check(struct stream *s);

/* work.c */
CUresult work_run(struct work *w, struct ctx *c);	/* without the lock */
void work_drop(struct work *w);
void work_clone(struct work *to, const struct work *from);

/* launch.c */
CUresult kernel_run(struct kcall *k, struct ctx *c);
CUresult fault_init(void);
CUresult fault_twins(void);
CUresult kcall_make(struct ctx *c, CUfunction f, const unsigned int grid[3], const unsigned int block[3],
		    unsigned int shared, void **params, void **extra, int cooperative, struct kcall *k);

/* image.c */
CUresult twins_init(void);
CUresult image_load(const void *data, struct jit *j, struct image **out);
CUresult image_input(const char *p, size_t n, CUjitInputType type, struct jit *j, struct text *out);
void image_unref(struct image *im);
long image_twin(const struct image *im, const char *name);
unsigned int image_count(const struct image *im);

/* link.c */
CUresult jit_open(struct jit *j, unsigned int n, const CUjit_option *opt, void **val);
void jit_info(struct jit *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
void jit_error(struct jit *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
void jit_time(struct jit *j);
CUresult ptx_check(const char *p, size_t n, struct jit *j);
void text_add(struct text *t, const char *p, size_t n);

/* module.c */
void module_destroy(struct module *m);
void module_unref(struct module *m);
CUresult func_get(struct ctx *c, const void *handle, struct func **out);

/* texture.c */
void texref_free(struct texref *t);
struct module *texref_module(const struct texref *t);	/* NULL: none, it was created by itself */

/* copy.c */
CUresult copy3d_make(const CUDA_MEMCPY3D *d, struct copy *out);
CUresult set_check(const CUDA_MEMSET_NODE_PARAMS *p);
void array_free(struct array *a);

/* event.c */
CUresult event_record(struct event *e, struct stream *s);

/* vmm.c */
CUresult enter_vmem(CUmemGenericAllocationHandle h, struct vmem **v);
#define SIM_POOL "simgpu-pool-%d-%llx"		/* and files of pools, with the device and the identity */
#define SIM_VMEM "simgpu-memory-"		/* what files of memory are called, with the machine's number of the device */

/* ipc.c */
bool ipc_freed(uint64_t base);			/* memory that is given back, if others have it too: then a new range lies there */
void ipc_unmap(struct alloc *a);
void ipc_close(struct alloc *a);		/* and forgets the range */
uint64_t ipc_device(uint64_t p);		/* the end of opened memory of another process that p lies in, or 0 */

/* capture.c */
CUresult capture_put(struct stream *s, struct work *w);
CUresult capture_record(struct stream *s, struct event *e);
CUresult capture_wait(struct stream *s, struct event *e);
void capture_break(struct stream *s);
void capture_drop(struct stream *s);
void event_uncapture(struct event *e);
CUresult capture_unsafe(void);
CUresult capture_legacy(struct ctx *c, bool uses);

/* graph.c */
struct graph *graph_new(void);
void graph_destroy(struct graph *g);
struct graph *graph_copy(struct graph *src);	/* with nodes in the same places */
struct gnode *node_new(struct graph *g, struct work *w, struct gnode **deps, size_t ndeps);
CUresult graph_enter(CUgraph h, struct graph **g);	/* sim_enter, and finds the graph */
CUresult node_enter(CUgraphNode h, enum wkind kind, struct gnode **n);	/* a node of that kind; W_ANY: of any */

/* conditional.c */
void cond_unref(struct cond *c);
void cond_free(struct graph *g);
CUresult cond_run(const struct work *w, struct ctx *c);	/* without the lock */
void plan_begin(struct plan *p);			/* a launch begins; without the lock */

/* graphmem.c */
bool graph_single(const struct graph *g);		/* a node of it, or of its children, cannot be copied */
void gmem_unref(struct gmem *m);
CUresult gmem_release(struct alloc *a);			/* the program frees it */
CUresult gmem_capture(struct stream *s, struct ctx *c, int dev, size_t n, CUdeviceptr *out);
CUresult gmem_capture_free(struct stream *s, CUdeviceptr p);
CUresult gmem_launch(struct plan *p, bool again);	/* again: what is live is freed first */
CUresult gmem_exec(struct plan *p, int n);		/* one more executable graph, or one less */

/* userobj.c */
void users_add(struct users *u, struct userobj *o, uint64_t n, uint64_t of);	/* takes n references more */
void users_copy(struct users *to, const struct users *from, uint64_t of);
void users_drop(struct users *u, uint64_t of);		/* those that came with a child node */
void users_free(struct users *u);

/* graphnode.c */
/* Adds a node with work w, which it takes over, to graph h. Called with the lock held; releases it. */
CUresult node_add(CUgraphNode *out, CUgraph h, const CUgraphNode *deps, size_t ndeps, struct work *w, struct graph *child);
CUresult kernel_work(struct ctx *c, const CUDA_KERNEL_NODE_PARAMS_v2 *p, bool v2, struct work *w);
CUresult memcpy_work(const CUDA_MEMCPY3D *p, struct work *w);
CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS *p, struct work *w);

/* exec.c */
void plan_unref(struct plan *p);
CUresult plan_run(struct plan *p, struct ctx *c);

#endif
