#define _GNU_SOURCE
#include "attention.h"
#include "deadline.h"
#include "wire.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 2000000	/* polling for an answer, with processors to spare */
#define LINGER_NS 1000000	/* the longest polling for the next call that waits */
#define SPARE 4		/* processors to spare: a program polls with two threads, its own and the receiver */

static int64_t until; /* ns of CLOCK_MONOTONIC */
static int processors_known;

/* A system call, because glibc's function has a version that the shim does not link with. */
int sl_processors(void)
{
	int n = __atomic_load_n(&processors_known, __ATOMIC_RELAXED);
	unsigned long mask[128];

	if (n)
		return n;
	for (long i = 0, got = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask); i < got / (long)sizeof *mask; i++)
		for (unsigned long m = mask[i]; m; m &= m - 1)
			n++;
	__atomic_store_n(&processors_known, n ? n : 1, __ATOMIC_RELAXED);
	return n ? n : 1;
}

bool sl_attend(int64_t *again, uint32_t us)
{
	int64_t now = sl_now_ns(), ns = (int64_t)(us < SL_MAX_TURN_US ? us : SL_MAX_TURN_US) * 1000;

	if (!ns || now < *again || sl_processors() < 2)
		return false;
	*again = now + 2 * ns;
	/* Another worker may have announced a later end. */
	if (now + ns > __atomic_load_n(&until, __ATOMIC_RELAXED))
		__atomic_store_n(&until, now + ns, __ATOMIC_RELAXED);
	return true;
}

void sl_waiters_add(struct sl_waiters *w, int threads)
{
	int64_t answered = __atomic_load_n(&w->answered, __ATOMIC_RELAXED), linger, gap;

	__atomic_fetch_add(&w->threads, (uint32_t)threads, __ATOMIC_RELAXED);
	if (threads <= 0 || !answered)
		return;
	/* Twice the gap that there was, or half of what was right for earlier ones. */
	gap = sl_now_ns() - answered;
	linger = __atomic_load_n(&w->linger, __ATOMIC_RELAXED) / 2;
	if (gap <= LINGER_NS)
		linger = 2 * gap < LINGER_NS ? 2 * gap : LINGER_NS;
	__atomic_store_n(&w->linger, linger, __ATOMIC_RELAXED);
}

void sl_answered(struct sl_waiters *w)
{
	__atomic_store_n(&w->answered, sl_now_ns(), __ATOMIC_RELAXED);
}

/* Whether a thread waits for an answer, or is likely to soon. The time begins anew while none waits. */
static bool awaited(int64_t *since, int64_t now, const struct sl_waiters *w)
{
	if (!w || __atomic_load_n(&w->threads, __ATOMIC_RELAXED))
		return now - *since < LOOK_NS;
	*since = now;
	return now - __atomic_load_n(&w->answered, __ATOMIC_RELAXED) < __atomic_load_n(&w->linger, __ATOMIC_RELAXED);
}

bool sl_look(int64_t *since, const struct sl_waiters *w)
{
	int64_t now = sl_now_ns();

	if (!*since)
		*since = now;
	if (now >= __atomic_load_n(&until, __ATOMIC_RELAXED) && (sl_processors() < SPARE || !awaited(since, now, w)))
		return false;
	for (int i = 0; i < 4; i++)
		__builtin_ia32_pause();
	return true;
}
