/*
 * The devices of a lease, as the workers describe them in their WELCOMEs. For both
 * libraries; connect.c has the one decoder.
 */
#ifndef SLUICE_SNAPSHOT_H
#define SLUICE_SNAPSHOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

/* One device. Sizes are bytes; texts are printable ASCII. */
struct sl_device {
	char name[97];
	uint8_t uuid[16];
	uint64_t total_mem;	/* granted: what programs see as the total */
	uint64_t physical_mem;
	int32_t pci_domain, pci_bus, pci_device;
	char pci_bus_id[25];
	uint64_t gran_min, gran_rec;	/* VMM granularity */
	int32_t prio_least, prio_greatest;
	uint64_t tex1d_max_width;
	uint64_t limits[SL_NUM_LIMITS];	/* by CUlimit; SL_UNSUPPORTED: not supported */
	int32_t cc_major, cc_minor;
	uint32_t nattr;
	int32_t attr[SL_MAX_ATTRS];
	uint8_t attr_ok[SL_MAX_ATTRS];
};

struct sl_snapshot {
	uint32_t driver_version;	/* as cuDriverGetVersion gives it */
	uint32_t ndev;
	uint32_t keepalive_ms;
	uint32_t features;
	char driver_string[33];		/* "580.159.04" */
	char driver_branch[81];		/* empty: not known */
	struct sl_device dev[SL_MAX_DEVICES];
};

/* Decodes a WELCOME's payload; false if it is malformed. */
bool sl_snapshot_decode(struct sl_snapshot *s, const void *data, size_t n);
/*
 * Adds an owner's devices to the lease's list, which begins with ndev 0. A program
 * sees one driver, so the list has the oldest driver's version. False, and logged,
 * if that is more devices than a program can have.
 */
bool sl_snapshot_add(struct sl_snapshot *all, const struct sl_snapshot *one);

#endif
