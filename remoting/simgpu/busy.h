/* Utilisation of the simulated GPUs, as NVML reports it. */
#ifndef SLUICE_SIM_BUSY_H
#define SLUICE_SIM_BUSY_H

#include "state.h"

struct busy_sample {
	int pid;
	unsigned int percent;		/* of the time since the caller's last sample */
	uint64_t stamp;			/* microseconds since 1970 */
};

/* Percent of the time since the last call in which kernels ran; at most one sample in 50 ms. */
unsigned int busy_device(int dev);
/*
 * What live processes did since a time in microseconds, averaged over all of that time, as NVIDIA's driver does
 * (seen on an H200, driver 580). Returns the number of processes, of which at most max are written.
 */
int busy_processes(int dev, uint64_t since, struct busy_sample *out, int max);

#endif
