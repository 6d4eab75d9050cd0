/* What the shim's unit tests share: a check that says where it failed. */
#ifndef SLUICE_TEST_H
#define SLUICE_TEST_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void __attribute__((noreturn, format(printf, 4, 5)))
test_failed(const char *file, int line, const char *cond, const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "%s:%d: %s: ", file, line, cond);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(1);
}

/* CHECK(condition) or CHECK(condition, format, ...) */
#define CHECK(cond, ...) do { \
	if (!(cond)) \
		test_failed(__FILE__, __LINE__, #cond, " " __VA_ARGS__); \
} while (0)

/* Waits for what another thread does. */
#define WAIT_FOR(cond) do { \
	for (int waited_ = 0; !(cond); waited_++) { \
		CHECK(waited_ < 200000, "it did not come about"); \
		usleep(100); \
	} \
} while (0)

static inline const char *hex(const uint8_t *p, size_t n)
{
	static char text[129];

	for (size_t i = 0; i < n && i < 64; i++)
		snprintf(text + 2 * i, 3, "%02x", p[i]);
	return text;
}

/* A small generator, so that a failure repeats. */
static inline uint32_t next_random(uint64_t *state)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*state >> 33);
}

#endif
