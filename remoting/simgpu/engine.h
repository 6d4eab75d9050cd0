/*
 * What kernels and copies cost: one engine for each device, shared by all processes of the machine, and a clock
 * that moves by what it runs. Off unless SLUICE_SIM_COST is set.
 */
#ifndef SLUICE_SIM_ENGINE_H
#define SLUICE_SIM_ENGINE_H

#include "state.h"

/* Reads the environment, once; returns 0, or -1 when a value makes no sense. */
int engine_config(void);
bool engine_on(void);
/* Makes the engines of a fresh state file; returns 0 or -EINVAL. */
int engine_fresh(struct sim_engine *e);
/* The simulated time of a device of this process, in ns. */
uint64_t engine_now(int dev);
/* What a kernel of this name costs, in ns. */
uint64_t engine_kernel(const char *name);
/* What moving bytes costs, within the device or between it and the host. */
uint64_t engine_bytes(uint64_t bytes, bool inner);
/* Runs work of this process for cost ns or a slice of that; returns how much. What runs aside, on an engine for copies, needs
 * no switch and is in no trace; but it is not simulated that others go on meanwhile. */
uint64_t engine_step(int dev, uint64_t cost, bool aside);
/* Marks what this process does from now on in the trace. */
void engine_tag(uint64_t tag);
/* This process does something for the device. */
void engine_stir(int dev);
/* This process ends. */
void engine_leave(void);

#endif
