/* See transfer.h. Each context has a stream for transfers, which waits for no other. */
#include "transfer.h"
#include "codec.h"
#include "ctx.h"
#include "delivery.h"
#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "send.h"
#include "stream.h"
#include "wait.h"

enum { CONTEXTS = 32 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	uint32_t ctx_id, stream;
} streams[CONTEXTS];

/* The current context's stream, made if need be. */
static CUresult make_stream(uint32_t ctx_id)
{
	unsigned i, spare = CONTEXTS;
	CUstream s;
	CUresult err;

	for (i = 0; i < CONTEXTS; i++) {
		if (streams[i].ctx_id == ctx_id)
			return CUDA_SUCCESS;
		if (!streams[i].ctx_id && spare == CONTEXTS)
			spare = i;
	}
	if (spare == CONTEXTS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
	if (!err) {
		streams[spare].ctx_id = ctx_id;
		streams[spare].stream = sl_handle_bare(s);
	}
	return err;
}

CUresult sl_transfer_begin(struct sl_other *o, uint64_t delta)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	*o = (struct sl_other){ .ctx = c, .ctx_id = atomic_load(&c->id), .delta = delta };
	pthread_mutex_lock(&lock);
	err = make_stream(o->ctx_id);
	pthread_mutex_unlock(&lock);
	return err;
}

void sl_transfer_end(uint32_t ctx_id)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < CONTEXTS; i++)
		if (streams[i].ctx_id == ctx_id)
			streams[i].ctx_id = 0;
	pthread_mutex_unlock(&lock);
}

static uint32_t stream_of(const struct sl_other *o)
{
	uint32_t stream = 0;

	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < CONTEXTS; i++)
		if (streams[i].ctx_id == o->ctx_id)
			stream = streams[i].stream;
	pthread_mutex_unlock(&lock);
	return stream;
}

/* --- to the other side --- */

struct transfer {
	const struct sl_other *o;
	uint64_t p;
	size_t n;
	const uint8_t *mask, *bytes, *was;
	void *to;
};

static CUresult send_there(void *arg)
{
	const struct transfer *t = arg;
	uint32_t stream = stream_of(t->o);
	CUresult err = CUDA_SUCCESS;

	for (size_t at = 0, n; at < t->n && !err; at += n) {
		sl_buf b;

		n = t->n - at < SL_MAX_COPY_IN ? t->n - at : SL_MAX_COPY_IN;
		sl_buf_init(&b);
		sl_put(&b, struct wire_host_write, .dst = t->p + t->o->delta + at, .stream = stream);
		err = sl_oneway_bulk(CTL_HOST_WRITE, &b, (const void *)(uintptr_t)(t->p + at), n);
		sl_buf_free(&b);
	}
	return err;
}

CUresult sl_transfer_send(const struct sl_other *o, uint64_t p, size_t n)
{
	return sl_ctx_with(o->ctx, send_there, &(struct transfer){ .o = o, .p = p, .n = n });
}

static CUresult merge_there(void *arg)
{
	const struct transfer *t = arg;
	struct sl_thread *own = sl_tls();
	bool unkept = own->unkept;
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_merge, .dst = t->p + t->o->delta, .size = (uint32_t)t->n, .checked = t->was != NULL);
	sl_put_bytes(&b, t->mask, t->n / 8);
	if (t->was)
		sl_put_bytes(&b, t->was, t->n);
	own->unkept = true; /* kernels see at once what is written to memory that they reach (background.h) */
	err = sl_oneway_bulk(CTL_HOST_MERGE, &b, t->bytes, t->n);
	own->unkept = unkept;
	sl_buf_free(&b);
	return err;
}

CUresult sl_transfer_merge(const struct sl_other *o, uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes, const uint8_t *was)
{
	return sl_ctx_with(o->ctx, merge_there, &(struct transfer){ .o = o, .p = p, .n = n, .mask = mask, .bytes = bytes, .was = was });
}

static CUresult zero_there(void *arg)
{
	const struct transfer *t = arg;
	CUstream s = sl_handle_value(SL_STREAM, stream_of(t->o));

	fw_cuMemsetD8Async(t->p, 0, t->n, s);
	return fw_cuStreamSynchronize(s);
}

void sl_transfer_zero(const struct sl_other *o, uint64_t p, size_t n)
{
	sl_ctx_with(o->ctx, zero_there, &(struct transfer){ .o = o, .p = p, .n = n });
}

/* --- from the other side --- */

static CUresult read_there(void *arg)
{
	const struct transfer *t = arg;
	sl_reply r;
	sl_buf b;
	CUresult err;

	sl_buf_init(&b);
	sl_put(&b, struct wire_host_read, .src = t->p + t->o->delta, .size = t->n);
	err = sl_wait(CTL_HOST_READ, &b, &r);
	sl_get_bytes(&r, t->to, t->n);
	if (!err && r.bad)
		err = CUDA_ERROR_UNKNOWN;
	sl_reply_free(&r);
	sl_buf_free(&b);
	return err;
}

CUresult sl_transfer_read(const struct sl_other *o, uint64_t p, void *to, size_t n)
{
	return sl_ctx_with(o->ctx, read_there, &(struct transfer){ .o = o, .p = p, .n = n, .to = to });
}

static CUresult copy_there(void *arg)
{
	const struct transfer *t = arg;
	uint32_t delivery = sl_delivery_new(t->to, t->n);
	CUresult err;
	sl_buf b;

	if (!delivery)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_put(&b, struct wire_copy_out, .src = t->p, .size = t->n, .stream = stream_of(t->o), .delivery = delivery);
	err = sl_wait(CTL_COPY_OUT, &b, NULL);
	sl_buf_free(&b);
	if (!err)
		return sl_delivery_wait(delivery);
	sl_delivery_drop(delivery);
	return err;
}

CUresult sl_transfer_copy(const struct sl_other *o, uint64_t p, void *to, size_t n)
{
	return sl_ctx_with(o->ctx, copy_there, &(struct transfer){ .o = o, .p = p, .n = n, .to = to });
}
