/*
 * NCCL's network transport, for ranks whose GPUs do not reach each other's memory: a kernel writes into page-locked
 * memory and a thread of NCCL's sends it on, each polling words of the same block for what the other has done. Such a block is
 * larger than what a program and a running kernel share here (mapped.h).
 *
 * It is told by its size. All other page-locked memory that NCCL allocates has at most 64 KiB, except for the queue of
 * work, which has a power of two, by default 1 MiB (NCCL 2.20 to 2.28, NCCL_WORK_FIFO_BYTES); and the host writes to that
 * before launches alone. The transport's blocks begin with two pages of such words, so that their size is no power of
 * two; the pool of buffers that several connections share is one, of 2 MiB or more.
 */
#include "nccl.h"
#include "log.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL = 64 << 10, QUEUE = 1 << 20 };

/* Whether the code at an address is of a file of NCCL's name. */
static bool of_nccl(uintptr_t p)
{
	FILE *f = fopen("/proc/self/maps", "re");
	bool begins = true, found = false;
	unsigned long lo, hi;
	char line[4096 + 128];

	while (f && fgets(line, sizeof line, f)) {
		if (begins && sscanf(line, "%lx-%lx", &lo, &hi) == 2 && lo <= p && p < hi) {
			const char *name = strrchr(line, '/');

			found = name && !strncmp(name, "/libnccl", 8);
			break;
		}
		begins = strchr(line, '\n');
	}
	if (f)
		fclose(f);
	return found;
}

static size_t queue_size(void)
{
	const char *s = getenv("NCCL_WORK_FIFO_BYTES");
	unsigned long long n = s ? strtoull(s, NULL, 0) : 0;

	return n > QUEUE ? n : QUEUE;
}

bool sl_nccl_network(const void *caller, size_t n)
{
	if (n <= SMALL || (!(n & (n - 1)) && n <= queue_size()) || !of_nccl((uintptr_t)caller))
		return false;
	sl_log(SL_WARN, "NCCL over a network is not supported: its kernels and its network thread would wait for each other in %zu bytes of "
			"page-locked memory; GPUs of one owner that reach each other's memory need no network", n);
	return true;
}
