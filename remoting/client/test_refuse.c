/* What is refused is logged once: for each function, and for each function with what it was refused for. */
#include <stdarg.h>

#include "entry.h"
#include "errlog.h"
#include "log.h"
#include "session.h"
#include "test.h"

static int lines;
static char last[256];

/* What the rest of the shim would do. */
void sl_log(int level, const char *fmt, ...)
{
	va_list ap;

	(void)level;
	va_start(ap, fmt);
	vsnprintf(last, sizeof last, fmt, ap);
	va_end(ap);
	lines++;
}

void sl_errlog(const char *fmt, ...) { (void)fmt; }
void sl_errlog_failed(const char *function, CUresult result) { (void)function, (void)result; }
bool sl_forked(void) { return false; }
void sl_waits_take(const char *name) { (void)name; }
CUresult sl_dead(void) { return CUDA_SUCCESS; }

int main(void)
{
	char kind[32];
	uint8_t once = 0;

	for (int i = 0; i < 3; i++)
		CHECK(sl_refuse("cuOne", &once) == CUDA_ERROR_NOT_SUPPORTED && lines == 1);
	CHECK(!strncmp(last, "cuOne is not supported", 22), "%s", last);

	once = 0;
	for (int i = 0; i < 3; i++)
		CHECK(sl_refuse_narrow("cuOne", &once) == CUDA_ERROR_INVALID_CONTEXT && lines == 2);
	lines = 1;

	for (int i = 0; i < 3; i++) {
		CHECK(sl_refuse_with("cuTwo", "host memory") == CUDA_ERROR_NOT_SUPPORTED);
		CHECK(lines == 2 && !strncmp(last, "cuTwo with host memory is not supported", 39), "%d: %s", lines, last);
	}
	sl_refuse_with("cuThree", "host memory");
	CHECK(lines == 3 && strstr(last, "cuThree"), "%d: %s", lines, last);

	/* More pairs than are remembered: each is still logged. Texts are compared, not their addresses. */
	for (int i = 0; i < 1000; i++) {
		snprintf(kind, sizeof kind, "a node of type %d", i);
		sl_refuse_with("cuTwo", kind);
		CHECK(lines == 4 + i && strstr(last, kind), "%d: %s", lines, last);
	}
	lines = 0;
	for (int i = 0; i < 3; i++)
		sl_refuse_with("cuTwo", "a node of type 7");
	CHECK(lines == 0, "%d", lines);
	puts("refuse: ok");
	return 0;
}
