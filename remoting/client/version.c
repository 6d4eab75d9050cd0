/* The commit that the library was built from: strings(1) finds it, and each session logs it at SLUICE_LOG=info. */
#include "version.h"

const char sl_version[] = "sluice version " SLUICE_VERSION;
