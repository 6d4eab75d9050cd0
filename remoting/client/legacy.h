/* What cuLaunch and its kin launch with (legacy.c). */
#ifndef SLUICE_LEGACY_H
#define SLUICE_LEGACY_H

/* Most bytes of parameters that such a launch has. */
#define SL_LEGACY_PARAMS 4096

struct sl_legacy;

/* Makes a kernel's setting as new; NULL if it has none. */
void sl_legacy_reset(struct sl_legacy *l);

#endif
