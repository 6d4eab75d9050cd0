/* What the process has sent, for SLUICE_TRACE and SLUICE_STATS. All counters are atomic. */
#ifndef SLUICE_STATS_H
#define SLUICE_STATS_H

#include "gen.h"
#include "wire.h"

struct sl_stats {
	uint64_t calls, waits, bytes_out;
	uint64_t background; /* bytes of copies to the device that a thread of the session's has sent */
	uint64_t bulk_out, bulk_in; /* bytes of copies by bulk connections */
	uint64_t bulk_bytes_in;	/* all that came over those */
	uint64_t stored; /* bytes of copies to the device that the worker had */
	uint64_t compressed, compressed_to; /* bytes of copies to the device that were compressed, and what became of them */
	uint32_t waits_by_op[SL_NOPS + SL_NCONTROLS]; /* by sl_op_slot */
};

extern struct sl_stats sl_stats;

/* The index of an operation: first the table's rows, then the control operations. */
static inline unsigned sl_op_slot(uint16_t op)
{
	return op < SL_NOPS ? op : SL_NOPS + (op - SL_OP_CONTROL);
}

/* How many calls have been sent. */
uint64_t sl_calls(void);
/* Writes the counters to where SLUICE_TRACE and SLUICE_STATS say. */
void sl_stats_write(void);

#endif
