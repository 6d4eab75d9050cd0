/*
 * What every function of the driver's interface checks first and does last. sl_live points
 * to a word that is 1 while calls may proceed; the kernel wipes its page in a forked child,
 * so that one load covers the fork, the end of the session and the end of the process.
 */
#include "entry.h"

#include <stdatomic.h>

#include "errlog.h"
#include "log.h"
#include "session.h"
#include "waits.h"

static uint32_t not_live;
uint32_t *sl_live = &not_live;
bool sl_tracing;

CUresult sl_gate_slow(void)
{
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	return sl_dead();
}

void sl_gate_close(void)
{
	__atomic_store_n(sl_live, 0, __ATOMIC_RELEASE);
}

CUresult sl_left(const char *function, CUresult result)
{
	if (sl_tracing) {
		sl_log(SL_TRACE, "%s = %d", function, result);
		if (!sl_forked())
			sl_waits_take(function);
	}
	if (result && !sl_forked()) /* the log's lock may have been held by a thread that the child lacks */
		sl_errlog_failed(function, result);
	return result;
}

CUresult sl_refuse(const char *function, uint8_t *once)
{
	if (!__atomic_exchange_n(once, 1, __ATOMIC_RELAXED))
		sl_log(SL_WARN, "%s is not supported; see docs/coverage.md", function);
	if (!sl_forked())
		sl_errlog("%s is not supported by Sluice", function);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sl_refuse_narrow(const char *function, uint8_t *once)
{
	sl_refuse(function, once);
	return CUDA_ERROR_INVALID_CONTEXT;
}

#define PAIRS 256

static uint64_t hash(uint64_t h, const char *s)
{
	do
		h = (h ^ (uint8_t)*s) * 1099511628211u;
	while (*s++);
	return h;
}

/* Whether a pair is new. When the table is full, every pair is. */
static bool first(uint64_t pair)
{
	static _Atomic uint64_t told[PAIRS];

	for (unsigned i = 0; i < PAIRS; i++) {
		uint64_t seen = 0;

		if (atomic_compare_exchange_strong(&told[(pair + i) % PAIRS], &seen, pair))
			return true;
		if (seen == pair)
			return false;
	}
	return true;
}

CUresult sl_refuse_with(const char *function, const char *with)
{
	if (first(hash(hash(14695981039346656037u, function), with)))
		sl_log(SL_WARN, "%s with %s is not supported; see docs/limits.md", function, with);
	if (!sl_forked())
		sl_errlog("%s with %s is not supported by Sluice", function, with);
	return CUDA_ERROR_NOT_SUPPORTED;
}
