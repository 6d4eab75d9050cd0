/*
 * The worker's access to the driver: libcuda and libnvidia-ml by dlopen, so that on
 * a machine without them the worker starts and can say what is missing. All
 * functions take and return fixed-width numbers; handles are uint64_t.
 *
 * Calls that the API table forwards are in gen_calls.h. Here are those that the
 * worker makes for itself.
 */
#ifndef SLUICE_DRIVER_H
#define SLUICE_DRIVER_H

#include "gen_calls.h"
#include "../api/wire.h"

/* The driver's function f; returns NOT_SUPPORTED if the driver lacks it. */
#define CU(f, ...) \
	(sl_fn[FN_##f] ? ((__typeof__(&f))sl_fn[FN_##f])(__VA_ARGS__) : CUDA_ERROR_NOT_SUPPORTED)

/* Opens libcuda; 0, or -1 with a reason in err. */
int sl_driver_open(const char *path, char *err, size_t errlen);
int sl_has(int fn);

int sl_init(void);
int sl_driver_version(int *v);
int sl_device_count(int *n);
int sl_device_attr(int *v, uint32_t attr, int dev);
int sl_device_name(char *name, int len, int dev);
int sl_device_uuid(void *uuid, int dev);
int sl_device_mem(uint64_t *bytes, int dev);
int sl_device_pci(char *id, int len, int dev);
int sl_tex1d(uint64_t *width, int dev);
int sl_granularity(uint64_t *g, int dev, uint32_t which);
int sl_ctx_limit(uint64_t *v, uint32_t limit);
int sl_ctx_prio(int *least, int *greatest);

int sl_ctx_retain(uint64_t *ctx, int dev);
int sl_ctx_release(int dev);
int sl_ctx_set(uint64_t ctx);
int sl_ctx_sync(void);
int sl_ctx_create(uint64_t *ctx, uint32_t flags, int dev);
int sl_ctx_destroy(uint64_t ctx);
int sl_mem_info(uint64_t *free_, uint64_t *total);
int sl_mem_alloc(uint64_t *p, uint64_t n);
int sl_mem_free(uint64_t p);
int sl_pool_reserved(uint64_t pool, uint64_t *n);
int sl_pool_used(uint64_t pool, uint64_t *n);
int sl_pool_set(uint64_t pool, uint32_t attr, uint64_t *v);
int sl_ctx_set_limit(uint32_t limit, uint64_t v);
int sl_capture_mode(CUstreamCaptureMode *mode);
int sl_tensor_map(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride,
		  const uint32_t *box, const uint32_t *elem, uint32_t interleave, uint32_t swizzle, uint32_t l2, uint32_t fill);
/* Reads or sets the four numbers of a texture reference's border colour. */
int sl_texref_border(uint64_t ref, float *c, int set);
int sl_split(CUdevResource *out, unsigned int *n, const CUdevResource *in, CUdevResource *rest, uint32_t flags, uint32_t least);
int sl_tensor_map_im2col(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride,
			 const int *lower, const int *upper, uint32_t channels, uint32_t pixels, const uint32_t *elem, uint32_t interleave,
			 uint32_t swizzle, uint32_t l2, uint32_t fill);
int sl_tensor_map_wide(void *map, uint32_t type, uint32_t rank, uint64_t addr, const uint64_t *dim, const uint64_t *stride, int lower,
		       int upper, uint32_t channels, uint32_t pixels, const uint32_t *elem, uint32_t interleave, uint32_t mode,
		       uint32_t swizzle, uint32_t l2, uint32_t fill);
int sl_tensor_map_replace(void *map, const void *old, uint64_t addr);
int sl_max_clusters(int *n, uint64_t fn, CUlaunchConfig *cfg, CUlaunchAttribute *attrs, uint32_t nattrs, int potential);
/* Has the driver compile a kernel and load it; returns what the driver says. */
int sl_compile(void);
int sl_potential_block(int *grid, int *block, uint64_t fn, uint64_t smem, int limit, uint32_t flags);
int sl_pinned_alloc(void **p, uint64_t n);
int sl_pinned_free(void *p);
/* Registers memory of this process's, as portable. */
int sl_host_register(void *p, uint64_t n);
int sl_host_unregister(void *p);
/*
 * Maps n bytes at the address, of the file fd or, if that is -1, of new memory, and registers them with the driver, as
 * portable and mapped at the same address. NOT_SUPPORTED where this process or the driver has something else there.
 */
int sl_host_map(void **p, uint64_t at, uint64_t n, int fd);
int sl_host_unmap(void *p, uint64_t n);
int sl_stream_sync(uint64_t s);

int sl_stream_create(uint64_t *s, uint32_t flags);
int sl_stream_destroy(uint64_t s);
int sl_stream_query(uint64_t s);
int sl_stream_capturing(uint64_t s, uint32_t *status);
/* Whether a stream is ordered with its context's legacy default stream; true if that is not known. */
int sl_stream_blocking(uint64_t s);
int sl_event_create(uint64_t *e, uint32_t flags);
int sl_event_destroy(uint64_t e);
int sl_event_record(uint64_t e, uint64_t s);
int sl_event_query(uint64_t e);
int sl_event_sync(uint64_t e);

int sl_htod(uint64_t dst, const void *src, uint64_t n, uint64_t stream);
int sl_dtoh(void *dst, uint64_t src, uint64_t n, uint64_t stream);
/* A kernel node, except for the kernel's parameters, which are packed as a launch's are. */
struct sl_kernel_node {
	uint64_t fn;
	uint32_t grid[3], block[3], shared;
};
int sl_graph_add_kernel(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, const struct sl_kernel_node *k,
			const void *params, uint64_t size);
/* For a node of an executable graph, or with exec 0 of the graph itself. */
int sl_graph_set_kernel(uint64_t exec, uint64_t node, const struct sl_kernel_node *k, const void *params, uint64_t size);
/* The first is CUDA 11's, which pairs nodes in another way. */
int sl_graph_update_first(uint64_t exec, uint64_t graph, CUgraphNode *node, CUgraphExecUpdateResult *result);
int sl_graph_update(uint64_t exec, uint64_t graph, CUgraphExecUpdateResultInfo *info);

/* One copy between packed host memory and a box of device memory or an array. */
struct sl_box {
	uint32_t memtype;	/* 2 device, 3 array */
	uint32_t lod;
	uint64_t ptr;		/* address or array */
	uint64_t pitch, height;
	uint64_t x, y, z;
	uint64_t w, h, d;	/* bytes, rows, slices to copy */
};
int sl_copy3d(const struct sl_box *b, void *host, int in, uint64_t stream);

/*
 * Launches what a LAUNCH's payload describes (struct wire_launch, parameter bytes,
 * attributes), with the driver's function and stream. The caller has checked the
 * sizes and put real handles into the attributes.
 */
/*
 * The driver's list that names a packed buffer of parameters, in extra; NULL if the buffer is empty.
 * extra refers to *size, which must live as long.
 */
void **sl_extra(void *extra[5], const void *params, size_t *size);
int sl_launch(uint64_t fn, uint64_t stream, const uint8_t *p);

/* Host functions: the callback blocks its stream until sl_hostfn_done. hostfns.c */
struct sl_hostfn;
struct sl_hostfn *sl_hostfn_new(uint32_t id);
void sl_hostfn_ref(struct sl_hostfn *f);
void sl_hostfn_unref(struct sl_hostfn *f);
int sl_hostfn_launch(uint64_t stream, struct sl_hostfn *f);
void sl_hostfn_done(struct sl_hostfn *f);
/* Opens the pipe that tells of functions. Returns its reading end. */
int sl_hostfn_open(void);
enum { SL_HOSTFN_CALLED, SL_HOSTFN_GONE };
struct sl_hostfn_told {
	uint32_t id;
	uint32_t what;		/* SL_HOSTFN_* */
};
/* The pipe tells that f is gone once nothing holds the object any more, which begins with refs references. */
int sl_user_object(uint64_t *object, struct sl_hostfn *f, uint32_t refs);
/* The same, when the graph and all that was made of it are gone. */
int sl_hostfn_keep(uint64_t graph, struct sl_hostfn *f);
int sl_graph_add_host(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, struct sl_hostfn *f);
/* For a node of an executable graph, or with exec 0 of the graph itself. */
int sl_graph_set_host(uint64_t exec, uint64_t node, struct sl_hostfn *f);
/* The id of a host node's function. */
int sl_graph_get_host(uint64_t node, uint32_t *id);
/* Makes a graph of copy c and of function f, before it if in is true, else behind it. c NULL: of f alone. */
int sl_graph_copy_make(uint64_t *child, struct sl_hostfn *f, const CUDA_MEMCPY3D *c, int in, uint64_t ctx);
/* Has a node that is such a copy be another one. */
int sl_graph_copy_change(uint64_t node, struct sl_hostfn *f, const CUDA_MEMCPY3D *c, int in, uint64_t ctx);
/* Whether a node is one of such a graph; then its function's id and the nodes within: its copy, which may be 0, and its function. */
struct sl_copy_node {
	uint64_t copy, host;
	uint32_t id;
};
int sl_graph_copy_find(uint64_t node, struct sl_copy_node *out);
/* Adds a conditional node; bodies has room for size graphs. */
int sl_graph_add_child(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t child);
int sl_graph_add_moved(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t child, uint32_t ownership);
int sl_graph_add_conditional(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t handle, uint32_t type,
			     uint32_t size, uint64_t ctx, uint64_t *bodies);
/* Adds a node that allocates n bytes of a device, at *p. */
int sl_graph_add_alloc(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint32_t dev, uint64_t n, uint64_t *p);
/* Why a graph cannot be made executable, and the node to blame, 0 for none. */
void sl_graph_why(uint64_t graph, uint64_t flags, CUgraphInstantiateResult *result, uint64_t *node);
int sl_graph_get_kernel(uint64_t node, CUDA_KERNEL_NODE_PARAMS *p);
int sl_graph_get_copy(uint64_t node, CUDA_MEMCPY3D *p);
int sl_graph_set_copy(uint64_t exec, uint64_t node, const CUDA_MEMCPY3D *p, uint64_t ctx);
int sl_graph_add_copy(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, const CUDA_MEMCPY3D *p, uint64_t ctx);
/* edges NULL: a capture with edges that hold data is an error, as the driver has it. */
int sl_capture_info(uint64_t stream, CUstreamCaptureStatus *status, cuuint64_t *id, uint64_t *graph, const CUgraphNode **deps,
		    const CUgraphEdgeData **edges, size_t *n);

int sl_module_load(uint64_t *m, const void *image, uint32_t n, const uint32_t *opt, void **val);
/* Loads a linked set: its module, and the library that the module belongs to. */
int sl_linked_module_load(uint64_t *m, uint64_t *l, const void *image, uint32_t n, const uint32_t *opt, void **val);
/* Linking. The options' values, and what they point to, stay as long as the link state. */
int sl_link_create(uint64_t *link, uint32_t n, const uint32_t *opt, void **val);
int sl_link_add(uint64_t link, uint32_t type, const void *data, uint64_t size, const char *name, uint32_t n, const uint32_t *opt, void **val);
int sl_link_complete(uint64_t link, void **image, uint64_t *size);
int sl_library_load(uint64_t *l, const void *image, uint32_t n, const uint32_t *opt, void **val);
int sl_library_kernels(uint64_t lib, uint64_t *k, uint32_t max, uint32_t *n);
int sl_module_functions(uint64_t mod, uint64_t *f, uint32_t max, uint32_t *n);
int sl_kernel_name(uint64_t k, const char **name);
int sl_function_name(uint64_t f, const char **name);
int sl_library_kernel(uint64_t *k, uint64_t lib, const char *name);
int sl_module_function(uint64_t *f, uint64_t mod, const char *name);
int sl_kernel_function(uint64_t *f, uint64_t k);
int sl_kernel_attr(int *v, uint32_t attr, uint64_t k, int dev);
int sl_function_attr(int *v, uint32_t attr, uint64_t f);
int sl_kernel_param(uint64_t k, uint64_t i, uint64_t *off, uint64_t *size);
int sl_function_param(uint64_t f, uint64_t i, uint64_t *off, uint64_t *size);

/* Makes standard output a pipe; returns the reading end, or -errno. */
int sl_stdout_pipe(void);
int sl_stderr_pipe(void);
void sl_print_flush(void);

/* NVML, for readings that CUDA does not have. */
struct sl_nvml_device {
	uint64_t mem_total, mem_used, mem_free;
	uint32_t util_gpu, util_mem, temp, power_mw, power_limit_mw;
	uint32_t sm_mhz, mem_mhz, pstate, fan, persistence;
};
int sl_nvml_open(const char *path, char *err, size_t errlen);
int sl_nvml_driver(char *s, uint32_t n);
int sl_nvml_branch(char *s, uint32_t n);
int sl_nvml_find(const char *busid, void **dev);
int sl_nvml_memory(void *dev, uint64_t *total, uint64_t *used, uint64_t *free_);
void sl_nvml_dynamic(void *dev, struct sl_nvml_device *d);
/* OBSERVE_MORE, by SL_READING_; with traffic it takes 40 ms. */
void sl_nvml_readings(void *dev, uint32_t traffic, uint32_t value[SL_READING_COUNT]);
void sl_nvml_find_links(void *library);
/* OBSERVE_LINKS: how a device reaches another, and one of its NVLinks, by SL_NVLINK_. */
void sl_nvml_peer(void *dev, void *other, uint32_t status[5], uint32_t *ancestor);
void sl_nvml_link(void *dev, uint32_t link, uint32_t value[SL_NVLINK_VALUES]);
void sl_nvml_find_texts(void *library);
/* OBSERVE_TEXT, by SL_TEXT_, into a reply's text, which is empty before. */
void sl_nvml_text(void *dev, uint32_t which, char *text);
/* OBSERVE_FACTS, by SL_FACT_. */
void sl_nvml_facts(void *dev, uint32_t value[SL_FACT_COUNT]);
/* Device memory of one process in bytes; -1 when NVML does not know. */
int sl_nvml_process(void *dev, uint32_t pid, uint64_t *used);

#endif
