/*
 * Logging to stderr. A line is written by one write(2), so that lines of several
 * threads do not mix. A program that closes stderr gets no log.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "conf.h"
#include "log.h"

#define UNKNOWN (-2)

int sl_log_level(void)
{
	static const char *const names[] = { "error", "warn", "info", "debug", "trace" };
	static int known = UNKNOWN;
	int level = __atomic_load_n(&known, __ATOMIC_RELAXED);
	const char *s;

	if (level != UNKNOWN)
		return level;
	s = sl_config("SLUICE_LOG");
	/* A value that is not a level asks for something: log errors. */
	level = s ? SL_ERROR : sl_log_default;
	for (int i = SL_ERROR; s && i <= SL_TRACE; i++)
		if (!strcmp(s, names[i]))
			level = i;
	__atomic_store_n(&known, level, __ATOMIC_RELAXED);
	return level;
}

void sl_log(int level, const char *fmt, ...)
{
	char line[1024];
	va_list ap;
	int n;

	if (level > sl_log_level())
		return;
	n = snprintf(line, sizeof line, "%s", sl_log_prefix);
	va_start(ap, fmt);
	vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	n = (int)strlen(line);
	line[n++] = '\n';
	if (syscall(SYS_write, 2, line, (size_t)n) < 0) /* no cancellation point: the caller may hold a lock */
		return;
}
