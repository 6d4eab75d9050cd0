/*
 * The clock of an engine, see clock.c. All but clock_lock and clock_real is called with the engine's lock held;
 * dev is the machine's number of the device, real is real time (CLOCK_MONOTONIC, ns).
 */
#ifndef SLUICE_SIM_CLOCK_H
#define SLUICE_SIM_CLOCK_H

#include "state.h"

/* How much slower than real time the clock runs while nothing runs. */
void clock_config(double idle);
uint64_t clock_real(void);
void clock_lock(struct sim_engine *e);
void clock_unlock(struct sim_engine *e);
uint64_t clock_now(const struct sim_engine *e, uint64_t real);
void clock_set(struct sim_engine *e, uint64_t clock, uint64_t real);
/* Notes that this process does something for the device. */
void clock_stir(struct sim_engine *e, int dev, uint64_t real);
/* Wakes the threads whose time has come; returns whether there are any. */
bool clock_ring(struct sim_engine *e, uint64_t clock);
/*
 * Lets threads go first whose time has come, and processes that are about to give work. Releases
 * the lock meanwhile.
 */
void clock_yield(struct sim_engine *e, int dev);
/* This process ends. */
void clock_leave(struct sim_engine *e);

#endif
