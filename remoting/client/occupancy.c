/*
 * Occupancy. An answer depends only on the kernel's code, its attributes and the
 * arguments, so each question is asked once. The last questions and answers are
 * kept in a fixed table under a lock; the attributes are part of the key.
 */
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "handles.h"
#include "kernel.h"

#include <string.h>

enum what { ACTIVE_BLOCKS = 1, AVAILABLE_SMEM, CLUSTER_SIZE, ACTIVE_CLUSTERS };

#define ENTRIES 1024

struct key {
	uint64_t kernel; /* id, device, context's life */
	uint64_t a, b;
	uint32_t what, flags;
	int32_t attr[CU_FUNC_ATTRIBUTE_MAX];
	uint64_t attrs_hash;
};

struct entry {
	struct key key;
	uint64_t value;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry table[ENTRIES];

static uint64_t mix(const void *p, size_t n, uint64_t h)
{
	const uint8_t *b = p;

	while (n--)
		h = (h ^ *b++) * 1099511628211u;
	return h;
}

static struct entry *slot(const struct key *k)
{
	return &table[mix(k, sizeof *k, 14695981039346656037u) % ENTRIES];
}

static bool recall(const struct key *k, uint64_t *v)
{
	struct entry *e = slot(k);
	bool hit;

	pthread_mutex_lock(&lock);
	hit = !memcmp(&e->key, k, sizeof *k);
	if (hit)
		*v = e->value;
	pthread_mutex_unlock(&lock);
	return hit;
}

static void remember(const struct key *k, uint64_t v)
{
	struct entry *e = slot(k);

	pthread_mutex_lock(&lock);
	e->key = *k;
	e->value = v;
	pthread_mutex_unlock(&lock);
}

static CUresult make_key(struct key *k, CUfunction f, enum what what, uint64_t a, uint64_t b, uint32_t flags)
{
	struct sl_kernel *kernel = sl_handle_state(SL_KERNEL, f);
	struct sl_kernel_info *info;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (!kernel)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!err)
		err = sl_kernel_info(kernel, c->dev, &info);
	if (err)
		return err;
	memset(k, 0, sizeof *k);
	k->kernel = sl_handle_bare(f) | (uint64_t)c->dev << 32 | (uint64_t)atomic_load(&c->epoch) << 40;
	k->what = what;
	k->flags = flags;
	k->a = a;
	k->b = b;
	for (unsigned i = 0; i < CU_FUNC_ATTRIBUTE_MAX; i++)
		k->attr[i] = atomic_load(&info->attr[i].value);
	return CUDA_SUCCESS;
}

CUresult sl_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f, int blockSize, size_t smem, unsigned int flags)
{
	struct key k;
	uint64_t v;
	CUresult err;

	if (!n || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	err = make_key(&k, f, ACTIVE_BLOCKS, (uint64_t)blockSize, smem, flags);
	if (err)
		return err;
	if (recall(&k, &v)) {
		*n = (int)v;
		return CUDA_SUCCESS;
	}
	err = fw_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, blockSize, smem, flags);
	if (!err)
		remember(&k, (uint64_t)*n);
	return err;
}

CUresult sl_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int blockSize, size_t smem)
{
	return sl_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, blockSize, smem, 0);
}

CUresult sl_cuOccupancyAvailableDynamicSMemPerBlock(size_t *smem, CUfunction f, int blocks, int blockSize)
{
	struct key k;
	uint64_t v;
	CUresult err;

	if (!smem || blockSize <= 0 || blocks <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	err = make_key(&k, f, AVAILABLE_SMEM, (uint64_t)blocks, (uint64_t)blockSize, 0);
	if (err)
		return err;
	if (recall(&k, &v)) {
		*smem = v;
		return CUDA_SUCCESS;
	}
	err = fw_cuOccupancyAvailableDynamicSMemPerBlock(smem, f, blocks, blockSize);
	if (!err)
		remember(&k, *smem);
	return err;
}

/* The bytes of an attribute's value that are significant; programs leave the others uninitialised. */
static size_t attr_size(CUlaunchAttributeID id)
{
	switch (id) {
	case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
		return 3 * sizeof(unsigned int);
	case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
	case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
	case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
	case CU_LAUNCH_ATTRIBUTE_PRIORITY:
		return sizeof(int);
	default:
		return sizeof(CUlaunchAttributeValue);
	}
}

static CUresult cluster(int *out, CUfunction f, const CUlaunchConfig *c, enum what what)
{
	struct key k;
	uint64_t v;
	CUresult err;
	CUlaunchConfig plain;

	if (!out || !c || (c->numAttrs && !c->attrs) || c->numAttrs > 64)
		return CUDA_ERROR_INVALID_VALUE;
	err = make_key(&k, f, what, (uint64_t)c->gridDimX | (uint64_t)c->gridDimY << 32,
		       (uint64_t)c->blockDimX | (uint64_t)c->blockDimY << 16 | (uint64_t)c->blockDimZ << 32, c->sharedMemBytes);
	if (err)
		return err;
	k.attrs_hash = mix(&c->gridDimZ, sizeof c->gridDimZ, 14695981039346656037u);
	for (unsigned i = 0; i < c->numAttrs; i++) {
		k.attrs_hash = mix(&c->attrs[i].id, sizeof c->attrs[i].id, k.attrs_hash);
		k.attrs_hash = mix(&c->attrs[i].value, attr_size(c->attrs[i].id), k.attrs_hash);
	}
	if (recall(&k, &v)) {
		*out = (int)v;
		return CUDA_SUCCESS;
	}
	/* The answer does not depend on the stream, and the program's pointers mean nothing to the worker. */
	plain = *c;
	plain.hStream = NULL;
	plain.attrs = NULL;
	if (what == CLUSTER_SIZE)
		err = fw_cuOccupancyMaxPotentialClusterSize(out, f, &plain, c->attrs, c->numAttrs);
	else
		err = fw_cuOccupancyMaxActiveClusters(out, f, &plain, c->attrs, c->numAttrs);
	if (!err)
		remember(&k, (uint64_t)*out);
	return err;
}

CUresult sl_cuOccupancyMaxPotentialClusterSize(int *clusterSize, CUfunction f, const CUlaunchConfig *config)
{
	return cluster(clusterSize, f, config, CLUSTER_SIZE);
}

CUresult sl_cuOccupancyMaxActiveClusters(int *numClusters, CUfunction f, const CUlaunchConfig *config)
{
	return cluster(numClusters, f, config, ACTIVE_CLUSTERS);
}

/*
 * The block size that keeps the most threads resident: whole warps from the largest
 * block down, stopping where no smaller one can do better. The callback that gives
 * the shared memory for a block size is the program's, so this runs here.
 */
CUresult sl_cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction f, CUoccupancyB2DSize smem_of,
						      size_t smem, int limit, unsigned int flags)
{
	int warp, most, sms, resident, best_threads = 0, best_block = 0, best_blocks = 0;
	struct sl_ctx *c;
	int kernel_most;
	CUresult err = sl_ctx_use(&c);

	if (!minGridSize || !blockSize)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		err = sl_cuFuncGetAttribute(&kernel_most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f);
	if (err)
		return err;
	warp = sl_dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
	most = sl_dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
	sms = sl_dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	resident = sl_dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
	if (warp <= 0)
		return CUDA_ERROR_UNKNOWN;
	if (!limit || limit > most)
		limit = most;
	if (limit > kernel_most)
		limit = kernel_most;
	for (int aligned = (limit + warp - 1) / warp * warp; aligned > 0; aligned -= warp) {
		int block = aligned < limit ? aligned : limit, blocks;

		err = sl_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, f, block, smem_of ? smem_of(block) : smem, flags);
		if (err)
			return err;
		if (blocks * block > best_threads) {
			best_threads = blocks * block;
			best_block = block;
			best_blocks = blocks;
		}
		if (best_threads >= resident)
			break;
	}
	*blockSize = best_block;
	*minGridSize = best_blocks * sms;
	return CUDA_SUCCESS;
}

CUresult sl_cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction f, CUoccupancyB2DSize smem_of, size_t smem, int limit)
{
	return sl_cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, f, smem_of, smem, limit, 0);
}
