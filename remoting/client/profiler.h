/* Profilers cannot attach: a program that starts one finds in the log what there is instead. */
#ifndef SLUICE_PROFILER_H
#define SLUICE_PROFILER_H

/* Logs once for each that it cannot be had. what lives as long as the process. */
void sl_profiler_refused(const char *what);

#endif
