/* The simulated GPU's clock, which the driver of a real one does not have. */
#ifndef SLUICE_SIMCLOCK_H
#define SLUICE_SIMCLOCK_H

#include "driver.h"

/* 0 and the device's time in ns; -1: it has no clock of its own. */
int sl_sim_clock(int dev, uint64_t *ns);
/* Waits for a futex word until a time of that clock; see turns.Clock. */
void sl_sim_wait(int dev, const uint32_t *word, uint32_t old, uint64_t until, int blocked);

#endif
