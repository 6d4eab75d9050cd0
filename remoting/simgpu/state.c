/*
 * The shared state file. Every process writes only its own slot, under a robust
 * process-shared mutex, and the use of a device is the sum of the slots: a process
 * may die at any instant, and no count is wrong afterwards. The next process to
 * look clears the slots of processes that have ended (by pid and start time).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"
#include "state.h"

#define MAGIC "SLSIMG6"
#define HEAP (64ULL << 30)	/* bytes of address space in the file */
#define FILE_SIZE (HEAP_AT + HEAP)
#define HEAP_AT ((sizeof(struct sim_shared) + (2ULL << 20) - 1) & ~((2ULL << 20) - 1))

static struct sim_shared *sh;
static struct sim_proc *mine;
static int heap_fd = -1;
/* The machine's number of each device that this process sees. */
static int phys[SIM_MAX_DEV] = { 0, 1, 2, 3, 4, 5, 6, 7 };
/* The number of this process's kernels that run now. */
static pthread_mutex_t running_lock = PTHREAD_MUTEX_INITIALIZER;
static int running[SIM_MAX_DEV];

static int parse_size(const char *name, uint64_t *out)
{
	const char *s = getenv(name);
	char *end;
	unsigned long long v;
	int shift = 0;

	if (!s || !*s)
		return 0;
	errno = 0;
	v = strtoull(s, &end, 10);
	switch (*end) {
	case 'k': case 'K': shift = 10; end++; break;
	case 'm': case 'M': shift = 20; end++; break;
	case 'g': case 'G': shift = 30; end++; break;
	default: break;
	}
	if (errno || end == s || *end || v > (UINT64_MAX >> shift) >> 12) {
		fprintf(stderr, "simgpu: %s=%s is not a size; use for example 8G\n", name, s);
		return -1;
	}
	*out = (uint64_t)v << shift;
	return 0;
}

#ifndef SIM_DEFAULT_DRIVER
#define SIM_DEFAULT_DRIVER 13000
#endif

int state_config(struct sim_config *cfg)
{
	uint64_t ndev = 1, driver = SIM_DEFAULT_DRIVER, sm = 90;

	cfg->mem = 16ULL << 30;
	cfg->ctx_mem = 64ULL << 20;
	cfg->module_mem = cfg->stream_mem = 0;
	if (parse_size("SLUICE_SIM_MEM", &cfg->mem) || parse_size("SLUICE_SIM_CTX_MEM", &cfg->ctx_mem) ||
	    parse_size("SLUICE_SIM_MODULE_MEM", &cfg->module_mem) || parse_size("SLUICE_SIM_STREAM_MEM", &cfg->stream_mem) ||
	    parse_size("SLUICE_SIM_DEVICES", &ndev) ||
	    parse_size("SLUICE_SIM_DRIVER", &driver) || parse_size("SLUICE_SIM_SM", &sm))
		return -1;
	if (ndev > SIM_MAX_DEV || sm < 50 || sm > 999 || driver < 11000 || driver > 99999 ||
	    cfg->mem < 4ULL << 20 || cfg->mem > 1ULL << 40) {
		fprintf(stderr, "simgpu: at most %d devices, memory from 4M to 1024G, sm 50 or later\n", SIM_MAX_DEV);
		return -1;
	}
	cfg->mem &= ~((2ULL << 20) - 1);
	cfg->ctx_mem = (cfg->ctx_mem + (2ULL << 20) - 1) & ~((2ULL << 20) - 1);
	cfg->module_mem = (cfg->module_mem + (2ULL << 20) - 1) & ~((2ULL << 20) - 1);
	cfg->ndev = (int)ndev;
	cfg->driver = (int)driver;
	cfg->sm = (int)sm;
	return 0;
}

uint64_t state_start_time(int pid)
{
	char path[32], buf[512], state;
	unsigned long long start;
	const char *p;
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, buf, sizeof(buf) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	buf[n] = 0;
	p = strrchr(buf, ')');
	if (!p || sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
			 &state, &start) != 2)
		return 0;
	return state == 'Z' || state == 'X' ? 0 : start;
}

static void lock(void)
{
	if (pthread_mutex_lock(&sh->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&sh->lock);
}

static void unlock(void)
{
	pthread_mutex_unlock(&sh->lock);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* Ends a share without users. Its memory goes back to the file system. */
static void share_end(struct sim_share *e)
{
	for (int i = 0; i < SIM_MAX_PROC / 64; i++)
		if (e->users[i])
			return;
	if (e->size && heap_fd >= 0)
		(void)!fallocate(heap_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(HEAP_AT + e->off), (off_t)e->size);
	memset(e, 0, sizeof(*e));
}

/* A process has ended: what it had recorded never completes otherwise. */
static void shares_reclaim(int slot)
{
	for (int i = 0; i < SIM_MAX_SHARE; i++) {
		struct sim_share *e = &sh->share[i];

		if (!(e->secret[0] | e->secret[1]))
			continue;
		if (e->recorder == slot)
			atomic_store(&e->completed, atomic_load(&e->recorded));
		e->users[slot / 64] &= ~(1ULL << slot % 64);
		share_end(e);
	}
}

static int reclaim(void)
{
	int live = 0;

	for (int i = 0; i < SIM_MAX_PROC; i++) {
		struct sim_proc *p = &sh->proc[i];

		if (!p->pid)
			continue;
		if (p == mine || state_start_time(p->pid) == p->start)
			live++;
		else {
			memset(p, 0, sizeof(*p));
			shares_reclaim(i);
		}
	}
	return live;
}

static void state_path(char *path, size_t n, const struct sim_config *cfg)
{
	const char *s = getenv("SLUICE_SIM_STATE"), *dir = getenv("XDG_RUNTIME_DIR");

	if (s && *s)
		snprintf(path, n, "%s", s);
	else	/* named by configuration, so that machines of different shape do not share one */
		snprintf(path, n, "%s/sluice-simgpu-%u-%dx%lluM", dir && *dir ? dir : "/tmp", (unsigned int)getuid(),
			 cfg->ndev, (unsigned long long)(cfg->mem >> 20));
}

static int fresh(const struct sim_config *cfg)
{
	pthread_mutexattr_t a;

	memset(sh, 0, sizeof(*sh));
	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	if (pthread_mutex_init(&sh->lock, &a))
		return -EINVAL;
	pthread_mutexattr_destroy(&a);
	for (int i = 0; i < SIM_MAX_DEV; i++)
		if (engine_fresh(&sh->engine[i]))
			return -EINVAL;
	sh->ndev = cfg->ndev;
	sh->mem = cfg->mem;
	sh->sm = cfg->sm;
	sh->size = sizeof(*sh);
	memcpy(sh->magic, MAGIC, sizeof(sh->magic));
	return 0;
}

/* Called with the file lock held. A machine in use keeps its shape; an unused one takes ours. */
static int settle(struct sim_config *cfg, bool own)
{
	if (memcmp(sh->magic, MAGIC, sizeof(sh->magic)) || sh->size != sizeof(*sh))
		if (fresh(cfg))
			return -EINVAL;
	lock();
	if (!reclaim()) {
		sh->ndev = cfg->ndev;
		sh->mem = cfg->mem;
		sh->sm = cfg->sm;
	}
	cfg->ndev = sh->ndev;
	cfg->mem = sh->mem;
	cfg->sm = sh->sm;
	if (own) {
		int i, pid = getpid();

		for (i = 0; i < SIM_MAX_PROC; i++)
			if (sh->proc[i].pid == pid) {
				memset(&sh->proc[i], 0, sizeof(sh->proc[i]));	/* ours from before an exec */
				shares_reclaim(i);
			}
		for (i = 0; i < SIM_MAX_PROC && sh->proc[i].pid; i++)
			;
		if (i == SIM_MAX_PROC) {
			unlock();
			return -EUSERS;
		}
		mine = &sh->proc[i];
		mine->start = state_start_time(pid);
		mine->pid = pid;
	}
	unlock();
	return 0;
}

static int state_open_at(const char *path, struct sim_config *cfg, bool own, bool retry)
{
	struct stat st;
	void *p;
	int fd, rc;

	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	if (fstat(fd, &st) || st.st_uid != geteuid() || !S_ISREG(st.st_mode)) {
		close(fd);
		return -EPERM;
	}
	if (flock(fd, LOCK_EX)) {
		rc = -errno;
		close(fd);
		return rc;
	}
	if (fstat(fd, &st) == 0 && st.st_size == 0 && ftruncate(fd, (off_t)FILE_SIZE)) {
		rc = -errno;
		close(fd);
		return rc;
	}
	if (st.st_size && (uint64_t)st.st_size != FILE_SIZE) {	/* of another version: it is left to its users */
		unlink(path);
		close(fd);
		return retry ? state_open_at(path, cfg, own, false) : -ESTALE;
	}
	p = mmap(NULL, sizeof(struct sim_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) {
		rc = -errno;
		close(fd);
		return rc;
	}
	sh = p;
	rc = settle(cfg, own);
	flock(fd, LOCK_UN);	/* closing is not enough: the mapping keeps the file open */
	if (!rc && own && heap_fd < 0)
		heap_fd = fd;
	else
		close(fd);
	return rc;
}

int state_open(struct sim_config *cfg, bool own)
{
	char path[4096];

	state_path(path, sizeof(path), cfg);
	return state_open_at(path, cfg, own, true);
}

static bool named(const char *s, size_t n, int dev)
{
	unsigned char u[16];
	char text[48] = "GPU-";
	size_t k = 4;

	state_uuid(dev, u);
	for (int i = 0; i < 16; i++)
		k += (size_t)snprintf(text + k, sizeof(text) - k, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", u[i]);
	return n > 4 && n <= k && !strncasecmp(s, text, n);
}

void state_visible(struct sim_config *cfg)
{
	const char *s = getenv("CUDA_VISIBLE_DEVICES");
	int n = 0, all = cfg->ndev, found[SIM_MAX_DEV];

	if (!s)
		return;
	while (*s && n < all) {
		size_t len = strcspn(s, ",");
		int dev = all;

		if (*s >= '0' && *s <= '9')
			dev = atoi(s);
		else
			for (dev = 0; dev < all && !named(s, len, dev); dev++)
				;
		if (dev >= all)
			break;	/* the driver ignores what follows, too */
		found[n++] = dev;
		s += len + (s[len] == ',');
	}
	memcpy(phys, found, sizeof(int) * (size_t)n);
	cfg->ndev = n;
}

int state_phys(int dev) { return phys[dev]; }

void state_leave(void)
{
	if (!mine || mine->pid != getpid())
		return;
	engine_leave();
	lock();
	memset(mine, 0, sizeof(*mine));
	shares_reclaim((int)(mine - sh->proc));
	mine = NULL;
	unlock();
}

/* Here dev is the machine's number. */
static uint64_t total(int dev)
{
	uint64_t sum = 0;

	for (int i = 0; i < SIM_MAX_PROC; i++)
		if (sh->proc[i].pid)
			sum += sh->proc[i].used[dev];
	return sum;
}

bool state_charge(int dev, uint64_t bytes)
{
	bool ok;

	if (!mine)
		return false;
	lock();
	ok = bytes <= sh->mem && total(phys[dev]) <= sh->mem - bytes;
	if (!ok && bytes <= sh->mem) {
		reclaim();
		ok = total(phys[dev]) <= sh->mem - bytes;
	}
	if (ok)
		mine->used[phys[dev]] += bytes;
	unlock();
	return ok;
}

void state_uncharge(int dev, uint64_t bytes)
{
	if (!mine)
		return;
	lock();
	mine->used[phys[dev]] -= bytes;
	unlock();
}

void state_contexts(int dev, int delta)
{
	if (!mine)
		return;
	lock();
	mine->contexts[phys[dev]] += (uint64_t)(int64_t)delta;
	unlock();
}

uint64_t state_used(int dev)
{
	uint64_t n;

	lock();
	reclaim();
	n = total(phys[dev]);
	unlock();
	return n;
}

void state_begin(int dev)
{
	if (engine_on())	/* the engine counts by its own clock */
		return;
	pthread_mutex_lock(&running_lock);
	if (!running[dev]++ && mine)
		atomic_store(&mine->since_ns[phys[dev]], now_ns());
	pthread_mutex_unlock(&running_lock);
}

void state_end(int dev)
{
	uint64_t since;

	if (engine_on())
		return;
	pthread_mutex_lock(&running_lock);
	if (!--running[dev] && mine) {
		/* Written in this order and read in the opposite one, so that no time is counted twice. */
		since = atomic_exchange(&mine->since_ns[phys[dev]], 0);
		if (since)
			atomic_fetch_add(&mine->busy_ns[phys[dev]], now_ns() - since);
	}
	pthread_mutex_unlock(&running_lock);
}

int state_loads(int dev, struct sim_load *out, int max)
{
	int n = 0;

	lock();
	reclaim();
	for (int i = 0; i < SIM_MAX_PROC && n < max; i++) {
		struct sim_proc *p = &sh->proc[i];
		uint64_t busy, since, now;

		if (!p->pid)
			continue;
		busy = atomic_load(&p->busy_ns[phys[dev]]);
		since = atomic_load(&p->since_ns[phys[dev]]);
		now = now_ns();
		if (since && since < now)
			busy += now - since;
		out[n++] = (struct sim_load){ p->pid, p->start, busy };
	}
	unlock();
	return n;
}

int state_procs(struct sim_proc *out, int max)
{
	int n = 0;

	lock();
	reclaim();
	for (int i = 0; i < SIM_MAX_PROC && n < max; i++)
		if (sh->proc[i].pid)
			memcpy(&out[n++], &sh->proc[i], sizeof(*out));
	unlock();
	return n;
}

struct sim_engine *state_engine(int dev) { return sh ? &sh->engine[phys[dev]] : NULL; }
struct sim_proc *state_slots(void) { return sh->proc; }
int state_slot(void) { return mine ? (int)(mine - sh->proc) : -1; }

/* Room in the heap, first fit. The lock is held. */
static bool heap_find(uint64_t size, uint64_t *off)
{
	*off = 0;
	for (int i = 0; i < SIM_MAX_SHARE; i++) {
		const struct sim_share *e = &sh->share[i];

		if (e->size && e->off < *off + size && *off < e->off + e->size) {
			*off = e->off + e->size;
			i = -1;
		}
	}
	return *off + size <= HEAP;
}

int state_share_new(uint64_t size)
{
	uint64_t off = 0;
	int i, found = -1;

	if (!mine)
		return -1;
	lock();
	reclaim();
	for (i = 0; i < SIM_MAX_SHARE && (sh->share[i].secret[0] | sh->share[i].secret[1]); i++)
		;
	if (i < SIM_MAX_SHARE && (!size || heap_find(size, &off))) {
		struct sim_share *e = &sh->share[i];

		e->off = off;
		e->size = size;
		e->recorder = -1;
		e->users[state_slot() / 64] |= 1ULL << state_slot() % 64;
		if (getrandom(e->secret, sizeof(e->secret), 0) == sizeof(e->secret))
			found = i;
		else
			memset(e, 0, sizeof(*e));
	}
	unlock();
	return found;
}

struct sim_share *state_share(int number) { return &sh->share[number]; }

struct sim_share *state_share_open(uint32_t number, const uint64_t secret[2])
{
	struct sim_share *e = number < SIM_MAX_SHARE ? &sh->share[number] : NULL;

	if (!mine || !e || !(secret[0] | secret[1]))
		return NULL;
	lock();
	reclaim();
	if (memcmp(e->secret, secret, sizeof(e->secret)) || e->closed)
		e = NULL;
	else
		e->users[state_slot() / 64] |= 1ULL << state_slot() % 64;
	unlock();
	return e;
}

void state_share_drop(int number, bool closed)
{
	struct sim_share *e = &sh->share[number];

	if (!mine)
		return;
	lock();
	e->closed = e->closed || closed;
	e->users[state_slot() / 64] &= ~(1ULL << state_slot() % 64);
	share_end(e);
	unlock();
}

uint64_t state_share_record(int number)
{
	sh->share[number].recorder = state_slot();
	return atomic_fetch_add(&sh->share[number].recorded, 1) + 1;
}

void *state_share_map(int number, void *at)
{
	struct sim_share *e = &sh->share[number];
	void *p = mmap(at, e->size, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), heap_fd, (off_t)(HEAP_AT + e->off));

	return p == MAP_FAILED ? NULL : p;
}

/* The same GPUs on every run and in every process. */
void state_uuid(int dev, unsigned char uuid[16])
{
	static const unsigned char base[16] = {
		0x51, 0x1c, 0xe5, 0x1f, 0x00, 0x00, 0x4a, 0x00, 0x80, 0x00, 0x73, 0x69, 0x6d, 0x67, 0x70, 0x00,
	};

	/* The GPUs of different hosts of a site differ, even where one machine simulates them all. */
	const char *machine = getenv("SLUICE_SIM_MACHINE");
	unsigned long number = machine ? strtoul(machine, NULL, 10) : 0;

	memcpy(uuid, base, 16);
	uuid[4] = (unsigned char)(number >> 8);
	uuid[5] = (unsigned char)number;
	uuid[15] = (unsigned char)phys[dev];
}
