/* Utilisation of the simulated GPUs, as NVML tells it. */
#ifndef SLUICE_SIM_BUSY_H
#define SLUICE_SIM_BUSY_H

#include "state.h"

struct busy_sample {
	int pid;
	unsigned int percent;		/* of the time since the caller's last look */
	uint64_t stamp;			/* microseconds since 1970 */
};

/* Percent of the time since the last call in which kernels ran; at most one look in 50 ms. */
unsigned int busy_device(int dev);
/*
 * What live processes did since a time in microseconds, the average of all that time, as NVIDIA's driver has it
 * (seen on an H200, driver 580). Returns how many there are, of which max are written.
 */
int busy_processes(int dev, uint64_t since, struct busy_sample *out, int max);

#endif
