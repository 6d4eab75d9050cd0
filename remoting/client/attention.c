#define _GNU_SOURCE
#include "attention.h"
#include "wire.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 2000000	/* polling for an answer, with processors to spare */
#define SPARE 4		/* processors to spare: a program polls with two threads, its own and the receiver */

static int64_t until; /* ns of CLOCK_MONOTONIC */
static int processors_known;

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

/*
 * How many processors this process may use. A system call, because glibc's function has a version that the shim
 * does not link with.
 */
static int processors(void)
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
	int64_t now = now_ns(), ns = (int64_t)(us < SL_MAX_TURN_US ? us : SL_MAX_TURN_US) * 1000;

	if (!ns || now < *again || processors() < 2)
		return false;
	*again = now + 2 * ns;
	/* Another worker may have announced a later end. */
	if (now + ns > __atomic_load_n(&until, __ATOMIC_RELAXED))
		__atomic_store_n(&until, now + ns, __ATOMIC_RELAXED);
	return true;
}

bool sl_look(int64_t *since, bool owed)
{
	int64_t now = now_ns();

	if (!*since)
		*since = now;
	if (now >= __atomic_load_n(&until, __ATOMIC_RELAXED) && (!owed || now - *since >= LOOK_NS || processors() < SPARE))
		return false;
	for (int i = 0; i < 4; i++)
		__builtin_ia32_pause();
	return true;
}
