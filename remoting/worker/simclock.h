/* The clock of a simulated GPU. The driver of a real GPU does not have these functions. */
#ifndef SLUICE_SIMCLOCK_H
#define SLUICE_SIMCLOCK_H

#include "driver.h"

/* Returns 0 and the device's time in ns, or -1 if the device has no clock of its own. */
int sl_sim_clock(int dev, uint64_t *ns);
/* Waits for a futex word until a time of that clock, see turns.Clock. */
void sl_sim_wait(int dev, const uint32_t *word, uint32_t old, uint64_t until, int blocked);

#endif
