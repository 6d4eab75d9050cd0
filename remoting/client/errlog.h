/*
 * The log of failed calls that cuLogs* give to a program (errlog.c).
 */
#ifndef SLUICE_ERRLOG_H
#define SLUICE_ERRLOG_H

#include "cuabi.h"

/* Notes that a call of the program returns an error, and tells the callbacks. The caller holds no lock. */
void sl_errlog_failed(const char *function, CUresult result);
/* Notes why a call is refused. */
void sl_errlog(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
