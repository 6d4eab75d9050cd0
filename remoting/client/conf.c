/*
 * The file is read once, at the first question. Its text is published whole and
 * never changes: reading it takes no lock, which a fork might leave taken.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "conf.h"

/* Where containers have the library as well, if the file is not beside the library that was loaded. */
#define USUAL_CONF "/usr/lib/sluice/sluice.conf"

/* Lines that end in NUL, and an empty one behind the last. */
struct conf {
	bool too_large;
	char text[];
};

static struct conf *known;

/* O_NONBLOCK: a FIFO in its place must not hang the program. */
static int open_conf(void)
{
	const int how = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
	char path[4096];
	const char *slash;
	Dl_info info;
	int n, fd = -1;

	if (dladdr((const void *)sl_config, &info) && info.dli_fname && (slash = strrchr(info.dli_fname, '/'))) {
		n = snprintf(path, sizeof path, "%.*s/sluice.conf", (int)(slash - info.dli_fname), info.dli_fname);
		if (n > 0 && (size_t)n < sizeof path)
			fd = open(path, how);
	}
	return fd < 0 ? open(USUAL_CONF, how) : fd;
}

/* The file's bytes, at most SL_CONF_MAX + 1. */
static size_t read_conf(char *text)
{
	int fd = open_conf();
	size_t got = 0;

	if (fd < 0)
		return 0;
	while (got <= SL_CONF_MAX) {
		ssize_t n = read(fd, text + got, SL_CONF_MAX + 1 - got);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	close(fd);
	return got;
}

/* Ends each line with NUL, removes trailing blanks, and drops empty lines. */
static void split(char *text, size_t n)
{
	char *to = text;

	for (size_t i = 0; i < n;) {
		char *line = text + i, *end = memchr(line, '\n', n - i);
		size_t len = end ? (size_t)(end - line) : n - i;

		i += len + 1;
		while (len && (line[len - 1] == ' ' || line[len - 1] == '\r' || !line[len - 1]))
			len--;
		if (!len)
			continue;
		memmove(to, line, len);
		to += len;
		*to++ = 0;
	}
	*to = 0;
}

static const struct conf *conf(void)
{
	struct conf *c = __atomic_load_n(&known, __ATOMIC_ACQUIRE), *other = NULL;
	size_t n;

	if (c)
		return c;
	c = malloc(sizeof *c + SL_CONF_MAX + 2);
	if (!c)
		return NULL;
	n = read_conf(c->text);
	c->too_large = n > SL_CONF_MAX;
	split(c->text, c->too_large ? 0 : n);
	if (__atomic_compare_exchange_n(&known, &other, c, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return c;
	free(c);
	return other;
}

const char *sl_conf_value(const char *key)
{
	const struct conf *c = conf();
	size_t n = strlen(key);

	for (const char *p = c ? c->text : ""; *p; p += strlen(p) + 1)
		if (!strncmp(p, key, n) && p[n] == '=')
			return p + n + 1;
	return NULL;
}

bool sl_conf_too_large(void)
{
	const struct conf *c = conf();

	return c && c->too_large;
}

const char *sl_config(const char *key)
{
	const char *v = getenv(key);

	return v ? v : sl_conf_value(key);
}
