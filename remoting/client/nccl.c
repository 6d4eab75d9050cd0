/*
 * NCCL's network transport, for ranks whose GPUs do not reach each other's memory: a kernel writes into page-locked
 * memory and a thread of NCCL's sends it on, each polling words of the same block for what the other has done. Such a block is
 * larger than what a program and a running kernel share here (mapped.h).
 *
 * The size identifies such a block. NCCL 2.20 to 2.28 allocate no other page-locked memory of more than 64 KiB but the queue
 * of work, whose size is a power of two, by default 1 MiB (NCCL_WORK_FIFO_BYTES). The transport's blocks begin with two
 * pages of polled words, so their size is no power of two; only the buffers that several connections share have such a
 * size, 2 MiB or more.
 *
 * The host alone writes to the queue, before launches, and kernels never do. So nothing of it is ever fetched: NCCL writes
 * to it while kernels run, and would wait for them.
 */
#include "nccl.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL = 64 << 10, QUEUE = 1 << 20 };

struct part {
	uintptr_t lo, hi;
};

/* Whether the code at an address is of a file of NCCL's name; *of is the part of the file that the address is in. */
static bool look(uintptr_t p, struct part *of)
{
	FILE *f = fopen("/proc/self/maps", "re");
	bool begins = true, found = false;
	unsigned long lo, hi;
	char line[4096 + 128];

	while (f && fgets(line, sizeof line, f)) {
		if (begins && sscanf(line, "%lx-%lx", &lo, &hi) == 2 && lo <= p && p < hi) {
			const char *name = strrchr(line, '/');

			found = name && !strncmp(name, "/libnccl", 8);
			*of = (struct part){ lo, hi };
			break;
		}
		begins = strchr(line, '\n');
	}
	if (f)
		fclose(f);
	return found;
}

/* The same, asking the kernel only when the caller is another library than that of the last call. */
static bool of_nccl(uintptr_t p)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static struct part last;
	static bool was;
	bool is;

	pthread_mutex_lock(&lock);
	if (p < last.lo || p >= last.hi)
		was = look(p, &last);
	is = was;
	pthread_mutex_unlock(&lock);
	return is;
}

static size_t queue_size(void)
{
	const char *s = getenv("NCCL_WORK_FIFO_BYTES");
	unsigned long long n = s ? strtoull(s, NULL, 0) : 0;

	return n ? n : QUEUE;
}

enum sl_host_use sl_nccl_use(const void *caller, size_t n)
{
	if (!caller || n <= SMALL || !of_nccl((uintptr_t)caller))
		return SL_HOST_ANY;
	if (n == queue_size())
		return SL_HOST_NCCL_QUEUE;
	return n & (n - 1) || n > QUEUE ? SL_HOST_NCCL_NETWORK : SL_HOST_ANY;
}
