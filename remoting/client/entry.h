/* What every function of the driver's interface checks first and does last. */
#ifndef SLUICE_ENTRY_H
#define SLUICE_ENTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "errstate.h"

/*
 * Nonzero while calls may proceed: the word lies in a page that a forked child sees
 * zeroed, so one load answers "started, not forked, not ended".
 */
extern uint32_t *sl_live;
/* The error that calls return when *sl_live is 0; CUDA_SUCCESS if they may proceed after all. */
CUresult sl_gate_slow(void);
/* Makes every call from now on ask sl_gate_slow. */
void sl_gate_close(void);
/* Set by SLUICE_LOG=trace, which logs every call and its result, and by SLUICE_TRACE=1, which notes what calls wait for (waits.h). */
extern bool sl_tracing;
/* Notes the result of a call, and gives it back. */
CUresult sl_left(const char *function, CUresult result);
/* Logs once per function name that it is not supported; returns NOT_SUPPORTED. */
CUresult sl_refuse(const char *function, uint8_t *once);
/* The same for a function that takes addresses of 32 bits; returns what the driver returns in a context of CUDA 3.2 or newer. */
CUresult sl_refuse_narrow(const char *function, uint8_t *once);
/* Refuses a function that is supported, but not with something: "host memory". Logs once for each pair. */
CUresult sl_refuse_with(const char *function, const char *with);

#define SL_LEAVE(name, call) do { \
	CUresult r_ = (call); \
	return __builtin_expect(sl_tracing || r_, 0) ? sl_left(name, r_) : r_; \
} while (0)
/* How many host functions of the program run now. A call that one of them makes is refused. */
extern uint32_t sl_functions;
bool sl_in_function(void);

/* unharmed: an error that stays (sl_sticky) does not touch the call. */
#define SL_ENTER_UNLESS(unharmed) do { \
	if (__builtin_expect(__atomic_load_n(&sl_functions, __ATOMIC_RELAXED), 0) && sl_in_function()) \
		return CUDA_ERROR_NOT_PERMITTED; \
	if (__builtin_expect(!__atomic_load_n(sl_live, __ATOMIC_RELAXED), 0)) { \
		CUresult e_ = sl_gate_slow(); \
		if (e_ && !((unharmed) && e_ == sl_sticky())) \
			return e_; \
	} \
} while (0)
#define SL_ENTER() SL_ENTER_UNLESS(false)
#define SL_ENTER_HARMED() SL_ENTER_UNLESS(true)

#endif
