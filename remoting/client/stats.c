/* Writes the counters of stats.h as the process ends. */
#include "stats.h"
#include "conf.h"
#include "gen.h"
#include "peer.h"
#include "resume.h"
#include "session.h"
#include "waits.h"

#include <stdio.h>
#include <unistd.h>

struct sl_stats sl_stats;

uint64_t sl_calls(void)
{
	return __atomic_load_n(&sl_stats.calls, __ATOMIC_RELAXED);
}

void sl_stats_write(void)
{
	uint64_t bytes_in = sl_stats.bulk_bytes_in;
	const char *path = sl_config("SLUICE_STATS"), *trace = sl_config("SLUICE_TRACE");
	char head[512];
	FILE *f;
	int n;

	for (unsigned i = 0; i < sl_sessions; i++)
		bytes_in += sl_peers[i].bytes_in;
	if (trace && *trace == '1') {
		n = snprintf(head, sizeof head, "sluice: calls=%llu oneway=%llu waits=%llu bytes_out=%llu bytes_in=%llu compressed=%llu compressed_to=%llu bulk_out=%llu bulk_in=%llu background=%llu stored=%llu\n",
			     (unsigned long long)sl_stats.calls, (unsigned long long)(sl_stats.calls - sl_stats.waits), (unsigned long long)sl_stats.waits,
			     (unsigned long long)sl_stats.bytes_out, (unsigned long long)bytes_in, (unsigned long long)sl_stats.compressed,
			     (unsigned long long)sl_stats.compressed_to, (unsigned long long)sl_stats.bulk_out, (unsigned long long)sl_stats.bulk_in,
			     (unsigned long long)sl_stats.background, (unsigned long long)sl_stats.stored);
		if (write(2, head, (size_t)n) < 0)
			return;
		sl_waits_write();
	}
	if (!path || !*path || !(f = fopen(path, "a")))
		return;
	fprintf(f, "{\"pid\":%d,\"calls\":%llu,\"oneway\":%llu,\"waits\":%llu,\"bytes_out\":%llu,\"bytes_in\":%llu,\"pauses\":%llu,\"pause_ms\":%llu,\"compressed\":%llu,\"compressed_to\":%llu,\"bulk_out\":%llu,\"bulk_in\":%llu,\"background\":%llu,\"stored\":%llu,\"waits_by_function\":{",
		(int)getpid(), (unsigned long long)sl_stats.calls, (unsigned long long)(sl_stats.calls - sl_stats.waits), (unsigned long long)sl_stats.waits,
		(unsigned long long)sl_stats.bytes_out, (unsigned long long)bytes_in, (unsigned long long)sl_pauses.number,
		(unsigned long long)sl_pauses.ms, (unsigned long long)sl_stats.compressed, (unsigned long long)sl_stats.compressed_to,
		(unsigned long long)sl_stats.bulk_out, (unsigned long long)sl_stats.bulk_in, (unsigned long long)sl_stats.background, (unsigned long long)sl_stats.stored);
	n = 0;
	for (unsigned i = 0; i < SL_NOPS + SL_NCONTROLS; i++)
		if (sl_stats.waits_by_op[i])
			fprintf(f, "%s\"%s\":%u", n++ ? "," : "", sl_op_name((uint16_t)(i < SL_NOPS ? i : SL_OP_CONTROL + i - SL_NOPS)), sl_stats.waits_by_op[i]);
	fprintf(f, "}}\n");
	fclose(f);
}
