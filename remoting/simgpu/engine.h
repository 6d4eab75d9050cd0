/*
 * What kernels and copies cost: one engine for each device, shared by all processes of the machine, with a
 * clock that advances by what it runs. Off unless SLUICE_SIM_COST is set.
 */
#ifndef SLUICE_SIM_ENGINE_H
#define SLUICE_SIM_ENGINE_H

#include "state.h"

/* Reads the environment, once; returns 0, or -1 if a value is invalid. */
int engine_config(void);
bool engine_on(void);
/* Initialises the engines of a new state file; returns 0 or -EINVAL. */
int engine_fresh(struct sim_engine *e);
/* The simulated time of a device of this process, in ns. */
uint64_t engine_now(int dev);
/* What a kernel of this name costs, in ns. */
uint64_t engine_kernel(const char *name);
/* What moving bytes costs, within the device or between it and the host. */
uint64_t engine_bytes(uint64_t bytes, bool inner);
/*
 * Runs work of this process for cost ns or a slice of that; returns how much. Work on a copy engine (aside) needs
 * no switch and is not in the trace; the simulation does not let other work run beside it.
 */
uint64_t engine_step(int dev, uint64_t cost, bool aside);
/* Labels what this process does from now on in the trace. */
void engine_tag(uint64_t tag);
/* Notes that this process does something for the device. */
void engine_stir(int dev);
/* This process ends. */
void engine_leave(void);

#endif
