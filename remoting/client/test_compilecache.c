/* The compile cache: hits and misses, damage, strangers' files and folders, its bound, several processes at once. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "compilecache.h"
#include "log.h"
#include "test.h"

static char root[] = "/tmp/sluice-compilecache.XXXXXX";

void sl_log(int level, const char *fmt, ...)
{
	(void)level;
	(void)fmt;
}

static struct sl_compiled *entry(const char *input, const char *options)
{
	struct sl_compiled *c;

	CHECK(!sl_compiled_open(&c, 2, input, strlen(input), options, "BUILD", "today", 90, 0));
	return c;
}

/* The bytes kept for an input, or NULL. */
static char *get(const char *input)
{
	struct sl_compiled *c = entry(input, "-O3");
	uint32_t n = 0;
	void *p = NULL;
	CUresult r = sl_compiled_lookup(c, 0, &p, &n);

	sl_compiled_close(c);
	CHECK(r == (p ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND));
	CHECK(!p || strlen(p) == n);
	return p;
}

static void put(const char *input, const char *bytes)
{
	struct sl_compiled *c = entry(input, "-O3");

	CHECK(!sl_compiled_store(c, 0, bytes, strlen(bytes)));
	sl_compiled_close(c);
}

static void expect(const char *input, const char *bytes)
{
	char *p = get(input);

	CHECK(bytes ? p && !strcmp(p, bytes) : !p, "%s: %s, want %s", input, p ? p : "nothing", bytes ? bytes : "nothing");
	sl_compiled_free(p);
}

/* Calls f with the path of each file of the cache; gives their number. */
static int each(void (*f)(const char *path))
{
	char dir[128], path[600];
	struct dirent *e;
	int n = 0;
	DIR *d;

	snprintf(dir, sizeof dir, "%s/sluice-compiled", root);
	d = opendir(dir);
	CHECK(d);
	while ((e = readdir(d))) {
		if (*e->d_name == '.')
			continue;
		snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
		if (f)
			f(path);
		n++;
	}
	closedir(d);
	return n;
}

static void flip(const char *path)
{
	int fd = open(path, O_RDWR);
	struct stat s;
	char b;

	CHECK(fd >= 0 && !fstat(fd, &s) && pread(fd, &b, 1, s.st_size - 1) == 1);
	b ^= 1;
	CHECK(pwrite(fd, &b, 1, s.st_size - 1) == 1);
	close(fd);
}

static void shorten(const char *path)
{
	struct stat s;

	CHECK(!stat(path, &s) && !truncate(path, s.st_size - 1));
}

static void lengthen(const char *path)
{
	int fd = open(path, O_WRONLY | O_APPEND);

	CHECK(fd >= 0 && write(fd, "x", 1) == 1);
	close(fd);
}

static void empty(const char *path) { CHECK(!truncate(path, 0)); }
static void open_to_all(const char *path) { CHECK(!chmod(path, 0666)); }
static void erase(const char *path) { CHECK(!unlink(path)); }

static void link_away(const char *path)
{
	char to[700];

	snprintf(to, sizeof to, "%s/elsewhere", root);
	CHECK(!rename(path, to) && !symlink(to, path));
}

static void fifo(const char *path)
{
	CHECK(!unlink(path) && !mkfifo(path, 0600));
}

static void hits_and_misses(void)
{
	struct sl_compiled *c;
	uint32_t n;
	void *p;

	expect("a", NULL);
	put("a", "machine code of a");
	put("b", "machine code of b");
	expect("a", "machine code of a");
	expect("b", "machine code of b");
	put("a", "newer");
	expect("a", "newer");
	/* every part of the key counts, and where one ends and the next begins */
	c = entry("a", "-O");
	CHECK(sl_compiled_lookup(c, 0, &p, &n) == CUDA_ERROR_NOT_FOUND && !p);
	sl_compiled_close(c);
	CHECK(!sl_compiled_open(&c, 2, "a", 1, "-O3BUILD", "", "today", 90, 0));
	CHECK(sl_compiled_lookup(c, 0, &p, &n) == CUDA_ERROR_NOT_FOUND);
	sl_compiled_close(c);
	CHECK(!sl_compiled_open(&c, 1, "a", 1, "-O3", "BUILD", "today", 90, 0));
	CHECK(sl_compiled_lookup(c, 0, &p, &n) == CUDA_ERROR_NOT_FOUND);
	sl_compiled_close(c);
}

static void damage(void)
{
	static void (*const ways[])(const char *) = { flip, shorten, lengthen, empty, open_to_all, link_away, fifo };
	char path[64];

	for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
		each(erase);
		put("a", "machine code of a");
		CHECK(each(ways[i]) == 1);
		expect("a", NULL);
		put("a", "again"); /* replaces what lies there */
		expect("a", "again");
	}
	if (!geteuid()) { /* only root can give a file away */
		each(erase);
		put("a", "of another user");
		snprintf(path, sizeof path, "%s/sluice-compiled", root);
		CHECK(!chown(path, 12345, 12345));
		expect("a", NULL);
		CHECK(!chown(path, 0, 0));
		expect("a", "of another user");
	}
	snprintf(path, sizeof path, "%s/sluice-compiled", root);
	CHECK(!chmod(path, 0777));
	expect("a", NULL);
	put("c", "into a folder that others can write to");
	CHECK(!chmod(path, 0700));
	expect("c", NULL);
}

static void bounds(void)
{
	char input[16], bytes[1001];

	each(erase);
	memset(bytes, 'x', 1000);
	bytes[1000] = 0;
	setenv("CUDA_CACHE_MAXSIZE", "20000", 1);
	for (int i = 0; i < 40; i++) {
		snprintf(input, sizeof input, "input %d", i);
		put(input, bytes);
		expect("input 0", bytes); /* what is used stays */
	}
	CHECK(each(NULL) <= 18 && each(NULL) >= 10, "%d files", each(NULL));
	expect("input 1", NULL);
	expect("input 39", bytes);
	setenv("CUDA_CACHE_MAXSIZE", "500", 1);
	put("large", bytes);
	expect("large", NULL);
	unsetenv("CUDA_CACHE_MAXSIZE");
	setenv("CUDA_CACHE_DISABLE", "1", 1);
	expect("input 39", NULL);
	unsetenv("CUDA_CACHE_DISABLE");
	expect("input 39", bytes);
}

/* Files of something else stay, however little room there is, and a folder behind a link is not the cache's. */
static void strangers(void)
{
	char folder[64], away[64], letter[96], bytes[1001];
	FILE *f;

	each(erase);
	snprintf(folder, sizeof folder, "%s/sluice-compiled", root);
	snprintf(away, sizeof away, "%s/away", root);
	snprintf(letter, sizeof letter, "%s/letter.txt", folder);
	f = fopen(letter, "w");
	CHECK(f && fprintf(f, "%09000d", 0) == 9000 && !fclose(f));
	memset(bytes, 'x', 1000);
	bytes[1000] = 0;
	setenv("CUDA_CACHE_MAXSIZE", "1500", 1);
	put("a", bytes);
	put("b", bytes);
	CHECK(!access(letter, F_OK));
	expect("a", NULL);
	expect("b", bytes);
	unsetenv("CUDA_CACHE_MAXSIZE");
	CHECK(!rename(folder, away) && !symlink(away, folder));
	expect("b", NULL);
	put("c", "through a link");
	CHECK(!unlink(folder) && !rename(away, folder));
	expect("b", bytes);
	expect("c", NULL);
	CHECK(!unlink(letter));
}

/* What one process reads is whole while others write the same entries. */
static void several(void)
{
	each(erase);
	for (int p = 0; p < 4; p++) {
		if (fork())
			continue;
		for (uint64_t i = 0, seed = (uint64_t)p + 1; i < 300; i++) {
			char input[16], bytes[3000], *have;
			uint32_t k = next_random(&seed) % 8;

			snprintf(input, sizeof input, "shared %u", k);
			memset(bytes, 'a' + (int)(next_random(&seed) % 26), sizeof bytes - 1);
			bytes[sizeof bytes - 1] = 0;
			put(input, bytes);
			have = get(input);
			CHECK(have && strlen(have) == sizeof bytes - 1 && strspn(have, (char[]){ *have, 0 }) == sizeof bytes - 1);
			sl_compiled_free(have);
		}
		_exit(0);
	}
	for (int p = 0; p < 4; p++) {
		int status;

		CHECK(wait(&status) > 0 && !status);
	}
	CHECK(each(NULL) == 8, "%d files", each(NULL));
}

int main(void)
{
	char path[64];

	CHECK(mkdtemp(root));
	setenv("CUDA_CACHE_PATH", root, 1);
	hits_and_misses();
	damage();
	bounds();
	strangers();
	several();
	each(erase);
	snprintf(path, sizeof path, "%s/elsewhere", root);
	unlink(path);
	snprintf(path, sizeof path, "%s/sluice-compiled", root);
	CHECK(!rmdir(path) && !rmdir(root));
	/* without a home there is none, and that is no error */
	unsetenv("CUDA_CACHE_PATH");
	unsetenv("HOME");
	put("a", "nowhere");
	expect("a", NULL);
	puts("compilecache: ok");
	return 0;
}
