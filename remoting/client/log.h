/*
 * Logging to stderr, for both libraries: SLUICE_LOG says how much.
 */
#ifndef SLUICE_LOG_H
#define SLUICE_LOG_H

enum { SL_ERROR, SL_WARN, SL_INFO, SL_DEBUG, SL_TRACE };

/* Each library defines the prefix of its lines, and the level without SLUICE_LOG: -1 is nothing. */
extern const char sl_log_prefix[];
extern const int sl_log_default;

void sl_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The last level that is logged. */
int sl_log_level(void);

#endif
