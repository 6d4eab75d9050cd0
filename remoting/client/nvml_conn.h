/*
 * Facts about the lease's devices, as the workers tell them. nvml_conn.c fetches them;
 * the functions of NVML turn them into answers (nvml_answer.h).
 */
#ifndef SLUICE_NVML_CONN_H
#define SLUICE_NVML_CONN_H

#include "nvml.h"
#include "snapshot.h"

#define NV_NA SL_UNKNOWN_READING	/* a reading the device does not have */

/* Readings of one device; each but memory may be NV_NA. */
struct nv_readings {
	uint64_t mem_total, mem_used, mem_free;	/* bytes, of the grant */
	uint32_t util_gpu, util_mem;		/* percent */
	uint32_t temp_c;
	uint32_t power_mw, power_limit_mw;
	uint32_t sm_mhz, mem_mhz;
	uint32_t pstate;
	uint32_t fan;				/* percent */
	uint32_t persistence;			/* 0 or 1 */
};

/* By SL_READING_; each may be NV_NA. */
struct nv_more {
	uint32_t value[SL_READING_COUNT];
};

/* How a device reaches the others of its owner's session. */
struct nv_links {
	struct wire_observe_links_reply r;
};

/* Numbers that hardly ever change, by SL_FACT_; each may be NV_NA. */
struct nv_facts {
	uint32_t value[SL_FACT_COUNT];
};

/* What NVML has in words; empty: unknown. */
struct nv_text {
	char s[sizeof(((struct wire_observe_text_reply *)0)->text)];
};

struct nv_process {
	uint32_t pid;	/* the client's own number */
	uint64_t used;	/* bytes */
	char name[41];
};

/* Opens are counted: the first one connects, the last close disconnects. */
/* How old readings may be, in milliseconds: of most, and of what programs take the difference of. */
#define FRESH_MS 200
#define COUNTER_MS 10

nvmlReturn_t nv_open(void);
nvmlReturn_t nv_close(void);
bool nv_opened(void);
/* Fixed from nvmlInit to nvmlShutdown, so it is read without a lock. */
const struct sl_snapshot *nv_facts(void);
/* Readings not older than 200 ms; with now, read during this call: memory must agree with CUDA's. */
nvmlReturn_t nv_read(unsigned int dev, bool now, struct nv_readings *r);
/* More readings, younger than age in milliseconds; those of PCIe traffic are NV_NA unless they are asked for. */
nvmlReturn_t nv_read_more(unsigned int dev, bool traffic, unsigned int age, struct nv_more *m);
/* What does not change from nvmlInit to nvmlShutdown. */
nvmlReturn_t nv_read_links(unsigned int dev, struct nv_links *l);
nvmlReturn_t nv_read_facts(unsigned int dev, struct nv_facts *f);
/* One of NVML's texts (SL_TEXT_), read during this call. */
nvmlReturn_t nv_read_text(unsigned int dev, unsigned int which, struct nv_text *t);
/* Other's number in the session that dev is of; -1 if it is another owner's. */
int nv_sibling(unsigned int dev, unsigned int other);
/* The lease's sessions on a device, read during this call; the caller frees the list, NULL when empty. */
nvmlReturn_t nv_processes(unsigned int dev, struct nv_process **list, unsigned int *n);

#endif
