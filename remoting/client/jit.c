/*
 * Options of the driver's compiler and linker. An option's value is a number, which is
 * sent, or a buffer for a log: the worker has buffers of its own, and its replies
 * have what is in them.
 */
#include "jit.h"
#include "codec.h"
#include "entry.h"
#include "wire.h"

#include <string.h>

static bool is_log(CUjit_option o) { return o == CU_JIT_INFO_LOG_BUFFER || o == CU_JIT_ERROR_LOG_BUFFER; }

/* Hints by pointer are not sent: without them the driver keeps everything, which is correct. */
static bool is_carried(CUjit_option o)
{
	return !(o >= CU_JIT_REFERENCED_KERNEL_NAMES && o <= CU_JIT_OPTIMIZE_UNUSED_DEVICE_VARIABLES) && o != CU_JIT_GLOBAL_SYMBOL_COUNT;
}

CUresult sl_jit_count(unsigned n, const CUjit_option *opt, void *const *val, uint32_t *sent)
{
	static uint8_t once;

	bool count = false;

	*sent = 0;
	if (n && (!opt || !val))
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n; i++) {
		if (opt[i] >= CU_JIT_NUM_OPTIONS)
			return CUDA_ERROR_INVALID_VALUE;
		if (opt[i] == CU_JIT_GLOBAL_SYMBOL_NAMES || opt[i] == CU_JIT_GLOBAL_SYMBOL_ADDRESSES)
			return sl_refuse("module loading with global symbol addresses", &once);
		count |= opt[i] == CU_JIT_GLOBAL_SYMBOL_COUNT;
		*sent += is_carried(opt[i]);
	}
	return count ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; /* a count of nothing */
}

void sl_jit_put(sl_buf *b, unsigned n, const CUjit_option *opt, void *const *val)
{
	for (unsigned i = 0; i < n; i++)
		if (is_carried(opt[i]))
			sl_put(b, struct wire_jit_option, .option = opt[i], .value = is_log(opt[i]) ? 0 : (uint64_t)(uintptr_t)val[i]);
}

void sl_jit_open(struct sl_jit *j, unsigned n, const CUjit_option *opt, void **val)
{
	*j = (struct sl_jit){ 0 };
	for (unsigned i = 0; i < n; i++) {
		switch (opt[i]) {
		case CU_JIT_WALL_TIME:
			j->wall = &val[i];
			break;
		case CU_JIT_INFO_LOG_BUFFER:
			j->info.to = val[i];
			break;
		case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
			j->info.size = &val[i];
			j->info.cap = (uint32_t)(uintptr_t)val[i];
			break;
		case CU_JIT_ERROR_LOG_BUFFER:
			j->error.to = val[i];
			break;
		case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
			j->error.size = &val[i];
			j->error.cap = (uint32_t)(uintptr_t)val[i];
			break;
		default:
			break;
		}
	}
}

static void take(const struct sl_jit_log *l, sl_reply *r, uint32_t len, uint32_t size)
{
	const uint8_t *text = sl_get_ref(r, len);
	size_t n;

	if (!text || !l->to || !l->size)
		return;
	if (l->cap) {
		n = len < l->cap - 1 ? len : l->cap - 1;
		memcpy(l->to, text, n);
		l->to[n] = 0;
	}
	*l->size = (void *)(uintptr_t)(size < l->cap ? size : l->cap);
}

void sl_jit_take(const struct sl_jit *j, sl_reply *r)
{
	struct wire_jit_logs logs;

	if (r->n - r->off < sizeof logs)
		return;
	sl_get_bytes(r, &logs, sizeof logs);
	take(&j->info, r, logs.ninfo, logs.info_size);
	take(&j->error, r, logs.nerror, logs.error_size);
	/* The value of this option is a float in the place of a pointer. */
	if (j->wall)
		*j->wall = (void *)(uintptr_t)logs.wall;
}
