/*
 * Flow: an entry is a file, named by the SHA-256 of everything that goes into the compilation. It lies in a folder
 * of its own, since the driver's file format is private, below the folder that CUDA_CACHE_PATH names, or
 * ~/.nv/ComputeCache. CUDA_CACHE_DISABLE=1 switches the cache off, CUDA_CACHE_MAXSIZE bounds it in bytes (default
 * 1 GiB).
 *
 * A file is a header and the bytes. It is written under another name and renamed, so that a reader sees all of it
 * or nothing; no lock is held. What is read will be loaded as code, so a file is used only if it is whole (its
 * SHA-256 is in the header), belongs to this key, and is a plain file of this user's in a folder that nobody else
 * can write to. A folder that others can write to is not used at all.
 */
#define _GNU_SOURCE
#include "compilecache.h"
#include "log.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_ENTRY (256u << 20)	/* bytes of one entry */
#define DEFAULT_MAX (1ull << 30)
#define FOLDER "sluice-compiled"

struct sl_compiled {
	uint8_t key[32];
};

struct header {
	char magic[8];
	uint8_t key[32];
	uint8_t sum[32];	/* SHA-256 of the bytes that follow */
	uint64_t n;
};

static const char magic[8] = "SLCOMP1";

/*
 * System calls relative to a folder, made directly: the C library's functions are newer than the oldest C library
 * that the shim loads with. The kernel's struct stat is the C library's on this architecture.
 */
static int at_open(int dir, const char *name, int flags)
{
	return (int)syscall(SYS_openat, dir, name, flags | O_CLOEXEC, 0600);
}

static int at_mkdir(int dir, const char *name)
{
	return (int)syscall(SYS_mkdirat, dir, name, 0700);
}

static int at_stat(int dir, const char *name, struct stat *s)
{
	return (int)syscall(SYS_newfstatat, dir, name, s, AT_SYMLINK_NOFOLLOW);
}

static int fd_stat(int fd, struct stat *s)
{
	return (int)syscall(SYS_fstat, fd, s);
}

static int at_unlink(int dir, const char *name)
{
	return (int)syscall(SYS_unlinkat, dir, name, 0);
}

static int at_rename(int dir, const char *from, const char *to)
{
	return (int)syscall(SYS_renameat, dir, from, dir, to);
}

/* Sets the time of a file's last change to now. */
static void fd_touch(int fd)
{
	syscall(SYS_utimensat, fd, NULL, NULL, 0);
}

/* An entry of a folder as the kernel gives it. */
struct entry {
	uint64_t inode;
	int64_t offset;
	uint16_t length;
	uint8_t type;
	char name[];
};

/* --- the folder --- */

static bool ours(const struct stat *s)
{
	return s->st_uid == geteuid() && !(s->st_mode & 022);
}

/* Opens one step of the path, making it if it is not there; flags may add to how. */
static int enter(int at, const char *name, int flags)
{
	int fd = at_open(at, name, O_RDONLY | O_DIRECTORY | flags);

	if (fd < 0 && errno == ENOENT && !at_mkdir(at, name))
		fd = at_open(at, name, O_RDONLY | O_DIRECTORY | flags);
	return fd;
}

/* The cache's folder as a descriptor, -1 if there is none to use. */
static int folder(void)
{
	const char *off = getenv("CUDA_CACHE_DISABLE"), *path = getenv("CUDA_CACHE_PATH"), *home = getenv("HOME");
	static bool told;
	struct stat s;
	int fd, in;

	if (off && *off && strcmp(off, "0"))
		return -1;
	if (path && *path == '/') {
		fd = enter(AT_FDCWD, path, 0);
	} else if (home && *home == '/' && (in = at_open(AT_FDCWD, home, O_RDONLY | O_DIRECTORY)) >= 0) {
		int nv = enter(in, ".nv", 0);

		close(in);
		fd = nv < 0 ? -1 : enter(nv, "ComputeCache", 0);
		if (nv >= 0)
			close(nv);
	} else {
		return -1;
	}
	if (fd < 0)
		return -1;
	in = enter(fd, FOLDER, O_NOFOLLOW); /* following a link would clean up a folder that is not the cache */
	close(fd);
	if (in >= 0 && (fd_stat(in, &s) || !ours(&s))) {
		if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
			sl_log(SL_WARN, "the compile cache is not used: others can write to its folder %s", FOLDER);
		close(in);
		return -1;
	}
	return in;
}

static uint64_t limit(void)
{
	const char *s = getenv("CUDA_CACHE_MAXSIZE");
	char *end;
	unsigned long long v;

	if (!s || !*s)
		return DEFAULT_MAX;
	v = strtoull(s, &end, 10);
	return *end ? DEFAULT_MAX : v;
}

static void name_of(const struct sl_compiled *c, char name[65])
{
	for (int i = 0; i < 32; i++)
		snprintf(name + 2 * i, 3, "%02x", c->key[i]);
}

static void sum_of(const void *p, size_t n, uint8_t out[32])
{
	struct sl_sha256 s;

	sl_sha256_init(&s);
	sl_sha256_add(&s, p, n);
	sl_sha256_end(&s, out);
}

/* --- an entry --- */

/* Each part with its length before it, so that no two lists of parts give the same bytes. */
static void add(struct sl_sha256 *s, const void *p, uint64_t n)
{
	sl_sha256_add(s, &n, sizeof n);
	if (n)
		sl_sha256_add(s, p, n);
}

CUresult sl_compiled_open(struct sl_compiled **out, uint32_t kind, const void *input, size_t n, const char *options, const char *build,
			  const char *built, uint32_t arch, uint32_t flag)
{
	struct sl_compiled *c;
	struct sl_sha256 s;

	if (!out || (!input && n))
		return CUDA_ERROR_INVALID_VALUE;
	c = malloc(sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_sha256_init(&s);
	add(&s, &kind, sizeof kind);
	add(&s, input, n);
	add(&s, options, options ? strlen(options) : 0);
	add(&s, build, build ? strlen(build) : 0);
	add(&s, built, built ? strlen(built) : 0);
	add(&s, &arch, sizeof arch);
	add(&s, &flag, sizeof flag);
	sl_sha256_end(&s, c->key);
	*out = c;
	return CUDA_SUCCESS;
}

CUresult sl_compiled_close(struct sl_compiled *c)
{
	free(c);
	return CUDA_SUCCESS;
}

static bool read_all(int fd, void *p, size_t n)
{
	uint8_t *to = p;

	while (n) {
		ssize_t k = read(fd, to, n);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		to += k;
		n -= (size_t)k;
	}
	return true;
}

static bool write_all(int fd, const void *p, size_t n)
{
	const uint8_t *from = p;

	while (n) {
		ssize_t k = write(fd, from, n);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		from += k;
		n -= (size_t)k;
	}
	return true;
}

/* The bytes behind the header of an open file, or NULL. */
static void *load(int fd, const struct sl_compiled *c, uint32_t *n)
{
	struct header h;
	struct stat s;
	uint8_t sum[32];
	void *p;

	if (fd_stat(fd, &s) || !S_ISREG(s.st_mode) || !ours(&s) || !read_all(fd, &h, sizeof h))
		return NULL;
	if (memcmp(h.magic, magic, sizeof magic) || memcmp(h.key, c->key, sizeof h.key) || h.n > MAX_ENTRY ||
	    (uint64_t)s.st_size != sizeof h + h.n)
		return NULL;
	p = malloc(h.n + 1);
	if (!p)
		return NULL;
	if (!read_all(fd, p, h.n)) {
		free(p);
		return NULL;
	}
	sum_of(p, h.n, sum);
	if (memcmp(sum, h.sum, sizeof sum)) {
		free(p);
		return NULL;
	}
	((char *)p)[h.n] = 0;
	*n = (uint32_t)h.n;
	fd_touch(fd); /* its time is that of the last use; the oldest are removed first */
	return p;
}

CUresult sl_compiled_lookup(struct sl_compiled *c, uint64_t zero, void **data, uint32_t *n)
{
	char name[65];
	int dir, fd;

	(void)zero;
	if (!c || !data || !n)
		return CUDA_ERROR_INVALID_VALUE;
	*data = NULL;
	dir = folder();
	if (dir < 0)
		return CUDA_ERROR_NOT_FOUND;
	name_of(c, name);
	fd = at_open(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
	if (fd >= 0) {
		*data = load(fd, c, n);
		close(fd);
	}
	close(dir);
	return *data ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult sl_compiled_free(void *data)
{
	free(data);
	return CUDA_SUCCESS;
}

/* --- room --- */

struct file {
	char name[65];
	uint64_t size;
	struct timespec used;
};

static int by_use(const void *a, const void *b)
{
	const struct file *x = a, *y = b;

	if (x->used.tv_sec != y->used.tv_sec)
		return x->used.tv_sec < y->used.tv_sec ? -1 : 1;
	return (x->used.tv_nsec > y->used.tv_nsec) - (x->used.tv_nsec < y->used.tv_nsec);
}

/* Whether a name is that of an entry, or of one that is being written. */
static bool is_entry(const char *name)
{
	size_t n = strlen(name);

	return n <= 64 && (!strncmp(name, "new-", 4) || (n == 64 && strspn(name, "0123456789abcdef") == n));
}

/* The cache's files in the folder, or NULL; the total size of all of them in bytes. */
static struct file *list(int dir, size_t *count, uint64_t *total)
{
	_Alignas(8) char buf[8192];
	int fd = at_open(dir, ".", O_RDONLY | O_DIRECTORY);
	struct file *all = NULL, *more;
	size_t cap = 0;
	long n;

	*count = 0;
	*total = 0;
	while (fd >= 0 && (n = syscall(SYS_getdents64, fd, buf, sizeof buf)) > 0) {
		for (long at = 0; at < n;) {
			const struct entry *e = (const struct entry *)(buf + at);
			struct stat s;

			at += e->length;
			if (!is_entry(e->name) || at_stat(dir, e->name, &s) || !S_ISREG(s.st_mode))
				continue;
			if (*count == cap) {
				more = realloc(all, (cap ? cap * 2 : 64) * sizeof *all);
				if (!more)
					break;
				all = more;
				cap = cap ? cap * 2 : 64;
			}
			all[*count] = (struct file){ .size = (uint64_t)s.st_size, .used = s.st_mtim };
			strcpy(all[(*count)++].name, e->name);
			*total += (uint64_t)s.st_size;
		}
	}
	if (fd >= 0)
		close(fd);
	return all;
}

/* Makes room for n more bytes by removing what was used longest ago. False if that is not enough. */
static bool make_room(int dir, uint64_t n)
{
	uint64_t max = limit(), total;
	struct file *all;
	size_t count;

	if (n > max)
		return false;
	all = list(dir, &count, &total);
	if (count && total + n > max)
		qsort(all, count, sizeof *all, by_use);
	for (size_t i = 0; i < count && total + n > max; i++)
		if (!at_unlink(dir, all[i].name))
			total -= all[i].size;
	free(all);
	return total + n <= max;
}

CUresult sl_compiled_store(struct sl_compiled *c, uint64_t zero, const void *data, size_t n)
{
	static uint32_t serial;
	char name[65], temporary[65];
	struct header h;
	int dir, fd;
	bool whole;

	(void)zero;
	if (!c || (!data && n))
		return CUDA_ERROR_INVALID_VALUE;
	if (n > MAX_ENTRY || (dir = folder()) < 0)
		return CUDA_SUCCESS;
	if (!make_room(dir, sizeof h + n)) {
		close(dir);
		return CUDA_SUCCESS;
	}
	memcpy(h.magic, magic, sizeof magic);
	memcpy(h.key, c->key, sizeof h.key);
	h.n = n;
	sum_of(data, n, h.sum);
	name_of(c, name);
	/* Processes of several nodes may share the folder. */
	snprintf(temporary, sizeof temporary, "new-%.16s-%d-%u-%lx", name, (int)getpid(), __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED),
		 (unsigned long)(uintptr_t)&h & 0xffffff);
	fd = at_open(dir, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
	if (fd >= 0) {
		whole = write_all(fd, &h, sizeof h) && write_all(fd, data, n);
		whole = !close(fd) && whole;
		if (!whole || at_rename(dir, temporary, name))
			at_unlink(dir, temporary);
	}
	close(dir);
	return CUDA_SUCCESS;
}
