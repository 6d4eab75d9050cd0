/*
 * Properties of contexts (flags, limits, cache preferences), and waiting for all work of
 * one. Most is answered here; a limit that the snapshot does not have is asked for once.
 * The fields are single atomic words: nothing here locks.
 */
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "green.h"
#include "handles.h"
#include "mapped.h"
#include "stream.h"

CUresult sl_cuCtxGetFlags(unsigned int *flags)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*flags = c->flags;
	return err;
}

CUresult sl_cuCtxSetFlags(unsigned int flags)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		c->flags = flags;
	return err;
}

CUresult sl_cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
	struct sl_green *green;
	struct sl_ctx *c;
	CUresult err = sl_ctx_or_current(ctx, &c);

	if (!ctxId)
		return CUDA_ERROR_INVALID_VALUE;
	if (err)
		return err;
	green = sl_green_or_current(ctx, c);
	*ctxId = green ? green->uid : c->uid;
	return CUDA_SUCCESS;
}

CUresult sl_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_or_current(ctx, &c);

	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err && c->primary && !__atomic_load_n(&c->refs, __ATOMIC_ACQUIRE))
		err = CUDA_ERROR_INVALID_CONTEXT;
	if (!err)
		*version = c->api_version;
	return err;
}

/*
 * A limit that the snapshot does not have is asked for once. cuBLAS reads whether
 * the context shares with graphics, and takes an error for a yes.
 */
CUresult sl_cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);
	uint64_t v;

	if (!pvalue || limit >= CU_LIMIT_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	if (err)
		return err;
	v = atomic_load(&c->limit[limit]);
	if (v) {
		*pvalue = v - 1;
		return CUDA_SUCCESS;
	}
	if (limit < 8 && sl_dev(c->dev)->limits[limit] != ~(uint64_t)0) {
		*pvalue = sl_dev(c->dev)->limits[limit];
		return CUDA_SUCCESS;
	}
	err = sl_ctx_use(&c);
	if (!err)
		err = fw_cuCtxGetLimit(pvalue, limit);
	if (!err)
		atomic_store(&c->limit[limit], *pvalue + 1);
	return err;
}

CUresult sl_cuCtxSetLimit(CUlimit limit, size_t value)
{
	struct sl_ctx *c;
	CUresult err;
	size_t now;

	if (limit >= CU_LIMIT_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_ctx_use(&c);
	if (!err)
		err = fw_cuCtxSetLimit(limit, value);
	/* The driver may round the value: ask what it is now. */
	if (!err)
		err = fw_cuCtxGetLimit(&now, limit);
	if (!err)
		atomic_store(&c->limit[limit], now + 1);
	return err;
}

CUresult sl_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (err)
		return err;
	if (least)
		*least = sl_dev(c->dev)->prio_least;
	if (greatest)
		*greatest = sl_dev(c->dev)->prio_greatest;
	return CUDA_SUCCESS;
}

/* Hints: devices with a fixed cache split ignore them, so they are only remembered here. */
CUresult sl_cuCtxGetCacheConfig(CUfunc_cache *pconfig)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!pconfig)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*pconfig = atomic_load(&c->cache_config);
	return err;
}

CUresult sl_cuCtxSetCacheConfig(CUfunc_cache config)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (config > CU_FUNC_CACHE_PREFER_EQUAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		atomic_store(&c->cache_config, config);
	return err;
}

CUresult sl_cuCtxGetSharedMemConfig(CUsharedconfig *pConfig)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!pConfig)
		return CUDA_ERROR_INVALID_VALUE;
	/* The default is read back as four-byte banks. */
	if (!err)
		*pConfig = atomic_load(&c->shared_config) ? atomic_load(&c->shared_config) : 1;
	return err;
}

CUresult sl_cuCtxSetSharedMemConfig(CUsharedconfig config)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (config > 2)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		atomic_store(&c->shared_config, config);
	return err;
}

CUresult sl_cuCtxGetExecAffinity(CUexecAffinityParam *p, CUexecAffinityType type)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!p || type != 0)
		return CUDA_ERROR_INVALID_VALUE;
	return err ? err : CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

/* --- waiting --- */

struct idle_list {
	uint32_t ctx_id;
	unsigned n;
	struct { struct sl_mark *m; uint64_t seq; } at[64];
};

static void collect(uint32_t id, void *state, void *arg)
{
	struct idle_list *l = arg;
	struct sl_stream *s = state;
	uint64_t seq;

	(void)id;
	if (s && s->ctx_id == l->ctx_id && l->n < 64 && sl_mark_begin(&s->mark, &seq)) {
		l->at[l->n].m = &s->mark;
		l->at[l->n++].seq = seq;
	}
}

CUresult sl_cuCtxSynchronize(void)
{
	struct idle_list l = { 0 };
	struct sl_ctx *c;
	uint64_t seq, direct_seq;
	bool track, direct;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	l.ctx_id = atomic_load(&c->id);
	track = sl_mark_begin(&c->legacy, &seq);
	direct = sl_mark_begin(&c->direct, &direct_seq);
	sl_handle_each(SL_STREAM, collect, &l);
	err = fw_cuCtxSynchronize();
	if (!err) {
		atomic_fetch_add(&sl_waited, 1);
		sl_mirror_stale();
		if (track)
			sl_mark_synced(&c->legacy, seq);
		if (direct)
			sl_mark_synced(&c->direct, direct_seq);
		for (unsigned i = 0; i < l.n; i++)
			sl_mark_synced(l.at[i].m, l.at[i].seq);
		err = sl_mirror_clash();
	}
	return err;
}

static CUresult synchronize(void *arg)
{
	(void)arg;
	return sl_cuCtxSynchronize();
}

CUresult sl_ctx_synchronize(struct sl_ctx *c)
{
	return sl_ctx_with(c, synchronize, NULL);
}

CUresult sl_cuCtxSynchronize_v2(CUcontext ctx)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_or_current(ctx, &c);

	return err ? err : sl_ctx_synchronize(c);
}
