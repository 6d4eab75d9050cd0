/*
 * Which processes can give a device no work at the moment: they are idle.
 *
 * Whether a process has work cannot be observed, so the processes tell. A process is idle in one of two cases.
 * Either it waits for a time, says that it is blocked, and has found its futex word unchanged since all processes
 * were last found idle. Or it has given no work for SLUICE_SIM_QUIET, none of its threads can run, and its timers
 * sleep here. So a process that the kernel does not schedule is waited for, and one that is stopped or dead is not.
 * The processes on whose behalf it works (a worker's clients) cannot be seen from here: the process behind
 * SLUICE_SIM_WATCH (struct sim_watch), if that is set, is asked whether they are idle too.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "idle.h"

static uint64_t quiet = 5000000;	/* real ns: a process may be idle after doing nothing for this long */
static struct sim_watch *watch;		/* by slot; NULL: there is nothing to ask */

void idle_config(double ms) { quiet = (uint64_t)(ms * 1e6); }

int idle_watch(const char *path)
{
	size_t size = SIM_MAX_PROC * sizeof(*watch);
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
	struct stat st;
	void *p = MAP_FAILED;

	if (fd >= 0 && !fstat(fd, &st) && (size_t)st.st_size >= size)
		p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (p == MAP_FAILED)
		return -1;
	watch = p;
	return 0;
}

bool idle_due(uint64_t since, uint64_t real) { return real > since + quiet; }

/* The state of a thread as /proc has it; 0 if it has ended. */
static char thread_state(const char *path)
{
	char buf[512];
	const char *p;
	ssize_t n;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return 0;
	n = read(fd, buf, sizeof(buf) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	buf[n] = 0;
	p = strrchr(buf, ')');
	return p && p[1] == ' ' ? p[2] : 0;
}

bool idle_stopped(int pid)
{
	char path[64], state;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	state = thread_state(path);
	return !state || strchr("TtZX", state);
}

bool idle_runs(int pid)
{
	char path[320], state;
	struct dirent *d;
	bool found = false;
	int self = (int)syscall(SYS_gettid);
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	dir = opendir(path);
	if (!dir)
		return false;
	while (!found && (d = readdir(dir))) {
		if (d->d_name[0] == '.' || atoi(d->d_name) == self)
			continue;
		snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", pid, d->d_name);
		state = thread_state(path);
		found = state == 'R' || state == 'D';
	}
	closedir(dir);
	return found;
}

/* Whether the processes are idle on whose behalf a process works; since: when it last did something itself. */
static bool watched(const struct sim_proc *p, uint64_t since)
{
	struct sim_watch *w = &watch[p - state_slots()];

	if (atomic_load(&w->asleep) == since)
		return true;
	atomic_store(&w->pid, p->pid);
	atomic_store(&w->want, since);
	return false;
}

/* A process found idle stays idle until it does something, unless one of its timers is awake. */
bool idle_is(struct sim_proc *p, int dev, uint64_t real)
{
	uint64_t last = atomic_load(&p->stir_ns[dev]), woke = atomic_load(&p->up_ns[dev]);

	if (!last)
		return true;	/* it has not begun */
	if (atomic_load(&p->entering) > 0)	/* not below 0: a slot's last owner may leave late */
		return real > last + quiet && idle_stopped(p->pid);
	if (atomic_load(&p->up[dev]) > 0 && woke > last)
		last = woke;
	if (atomic_load(&p->idle_ns[dev]) == last)
		return true;
	if (real < last + quiet || (watch ? !watched(p, last) : idle_runs(p->pid)))
		return false;
	atomic_store(&p->idle_ns[dev], last);
	return true;
}
