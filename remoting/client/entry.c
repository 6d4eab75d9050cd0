/*
 * What every function of the driver's interface asks first and says last. sl_live points
 * to a word that is 1 while calls may go on; the page it lies in is wiped in a forked child,
 * so that one test of it covers the fork, the end of the session and the end of the process.
 */
#include "entry.h"
#include "log.h"
#include "session.h"

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

CUresult sl_traced(const char *function, CUresult result)
{
	sl_log(SL_TRACE, "%s = %d", function, result);
	return result;
}

CUresult sl_refuse(const char *function, uint8_t *once)
{
	if (!__atomic_exchange_n(once, 1, __ATOMIC_RELAXED))
		sl_log(SL_WARN, "%s is not supported; see docs/coverage.md", function);
	return CUDA_ERROR_NOT_SUPPORTED;
}
