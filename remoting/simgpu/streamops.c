/*
 * Stream calls other than the plain order of work: attributes, and waiting for and
 * writing values in memory.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static CUresult enter(CUstream h, CUstream dflt, struct ctx **c, struct stream **s)
{
	CUresult r = sim_enter_ctx(c);

	if (r)
		return r;
	r = stream_get(h, dflt, *c, s);
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

#define PT CU_STREAM_PER_THREAD

/* attributes: stored and returned, without effect except for the priority */

static CUlaunchAttributeValue *attr_of(struct stream *s, CUstreamAttrID id)
{
	switch (id) {
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
	case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
	case CU_LAUNCH_ATTRIBUTE_PRIORITY:
	case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
	case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
		break;
	default:
		return NULL;
	}
	if (!s->attrs) {
		s->attrs = xcalloc(CU_LAUNCH_ATTRIBUTE_MAX, sizeof(*s->attrs));
		s->attrs[CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY].syncPolicy = 1;
	}
	s->attrs[CU_LAUNCH_ATTRIBUTE_PRIORITY].priority = s->priority;
	return &s->attrs[id];
}

static CUresult attr(CUstream h, CUstream dflt, CUstreamAttrID id, CUstreamAttrValue *get, const CUstreamAttrValue *set)
{
	CUlaunchAttributeValue *v;
	struct stream *s;
	struct ctx *c;
	CUresult r = enter(h, dflt, &c, &s);

	if (r)
		return r;
	v = attr_of(s, id);
	if (!v || (!get && !set))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (get)
		*get = *v;
	else
		*v = *set;
	if (set && id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
		s->priority = v->priority > 0 ? 0 : v->priority < -5 ? -5 : v->priority;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuStreamGetAttribute(CUstream h, CUstreamAttrID id, CUstreamAttrValue *v) { return attr(h, NULL, id, v, NULL); }
API CUresult cuStreamGetAttribute_ptsz(CUstream h, CUstreamAttrID id, CUstreamAttrValue *v) { return attr(h, PT, id, v, NULL); }

API CUresult cuStreamSetAttribute(CUstream h, CUstreamAttrID id, const CUstreamAttrValue *v)
{
	return attr(h, NULL, id, NULL, v);
}

API CUresult cuStreamSetAttribute_ptsz(CUstream h, CUstreamAttrID id, const CUstreamAttrValue *v)
{
	return attr(h, PT, id, NULL, v);
}

static CUresult copy_attrs(CUstream to, CUstream from, CUstream dflt)
{
	struct stream *a, *b;
	struct ctx *c;
	CUresult r = enter(to, dflt, &c, &a);

	if (r)
		return r;
	r = stream_get(from, dflt, c, &b);
	if (r)
		return sim_leave(r);
	attr_of(a, CU_LAUNCH_ATTRIBUTE_PRIORITY);
	attr_of(b, CU_LAUNCH_ATTRIBUTE_PRIORITY);
	if (a != b)
		memcpy(a->attrs, b->attrs, CU_LAUNCH_ATTRIBUTE_MAX * sizeof(*a->attrs));
	a->priority = b->priority;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuStreamCopyAttributes(CUstream to, CUstream from) { return copy_attrs(to, from, NULL); }
API CUresult cuStreamCopyAttributes_ptsz(CUstream to, CUstream from) { return copy_attrs(to, from, PT); }

/* waiting for and writing values in memory */

static CUresult value_op(CUstream h, CUstream dflt, enum wkind kind, bool wide, CUdeviceptr p, uint64_t v,
			 unsigned int flags)
{
	struct work w = { .kind = kind, .val = { p, v, flags, wide } };
	struct stream *s;
	struct ctx *c;
	CUresult r = enter(h, dflt, &c, &s);

	if (r)
		return r;
	if (!mem_ok(p, wide ? 8 : 4) || p & (wide ? 7 : 3))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (s->cap) {
		capture_break(s);
		return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	}
	return sim_leave(stream_put(s, &w));
}

#define VALUE_OPS(name, kind, wide, type) \
	API CUresult name(CUstream h, CUdeviceptr p, type v, unsigned int flags) \
	{ return value_op(h, NULL, kind, wide, p, v, flags); } \
	API CUresult name##_ptsz(CUstream h, CUdeviceptr p, type v, unsigned int flags) \
	{ return value_op(h, CU_STREAM_PER_THREAD, kind, wide, p, v, flags); }

VALUE_OPS(cuStreamWaitValue32, W_WAIT, false, cuuint32_t)
VALUE_OPS(cuStreamWaitValue32_v2, W_WAIT, false, cuuint32_t)
VALUE_OPS(cuStreamWaitValue64, W_WAIT, true, cuuint64_t)
VALUE_OPS(cuStreamWaitValue64_v2, W_WAIT, true, cuuint64_t)
VALUE_OPS(cuStreamWriteValue32, W_WRITE, false, cuuint32_t)
VALUE_OPS(cuStreamWriteValue32_v2, W_WRITE, false, cuuint32_t)
VALUE_OPS(cuStreamWriteValue64, W_WRITE, true, cuuint64_t)
VALUE_OPS(cuStreamWriteValue64_v2, W_WRITE, true, cuuint64_t)

/* A batch is taken whole or not at all. */
static CUresult batch(CUstream h, CUstream dflt, unsigned int n, const CUstreamBatchMemOpParams *p, unsigned int flags)
{
	struct stream *s;
	struct ctx *c;
	CUresult r = enter(h, dflt, &c, &s);

	if (r)
		return r;
	if (!p || !n || n > 256 || flags)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (s->cap) {
		capture_break(s);
		return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	}
	for (int put = 0; put < 2 && !r; put++) {
		for (unsigned int i = 0; i < n && !r; i++) {
			struct work w = { .kind = W_EMPTY };

			switch (p[i].operation) {
			case CU_STREAM_MEM_OP_WAIT_VALUE_32: case CU_STREAM_MEM_OP_WAIT_VALUE_64:
				w.kind = W_WAIT;
				break;
			case CU_STREAM_MEM_OP_WRITE_VALUE_32: case CU_STREAM_MEM_OP_WRITE_VALUE_64:
				w.kind = W_WRITE;
				break;
			case CU_STREAM_MEM_OP_BARRIER: case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
				continue;
			default:
				r = CUDA_ERROR_INVALID_VALUE;
				continue;
			}
			w.val.wide = p[i].operation >= CU_STREAM_MEM_OP_WAIT_VALUE_64;
			w.val.addr = p[i].waitValue.address;	/* both kinds lie alike */
			w.val.value = w.val.wide ? p[i].waitValue.value64 : p[i].waitValue.value;
			w.val.flags = p[i].waitValue.flags;
			if (put)
				r = stream_put(s, &w);
			else if (!mem_ok(w.val.addr, w.val.wide ? 8 : 4) || w.val.addr & (w.val.wide ? 7 : 3))
				r = CUDA_ERROR_INVALID_VALUE;
		}
	}
	return sim_leave(r);
}

#define BATCH CUstream h, unsigned int n, CUstreamBatchMemOpParams *p, unsigned int flags

API CUresult cuStreamBatchMemOp(BATCH) { return batch(h, NULL, n, p, flags); }
API CUresult cuStreamBatchMemOp_ptsz(BATCH) { return batch(h, PT, n, p, flags); }
API CUresult cuStreamBatchMemOp_v2(BATCH) { return batch(h, NULL, n, p, flags); }
API CUresult cuStreamBatchMemOp_v2_ptsz(BATCH) { return batch(h, PT, n, p, flags); }
