/*
 * See timeline.h. A file is opened for each frame, whose payload is up to 4 MiB and comes ten times a second: the program may close
 * descriptors that it does not know. Its name, DIR/PID-OWNER-START.trace, is this process's alone: a program that executes another one keeps its number. left is the receivers' and sl_timeline_end's.
 */
#define _GNU_SOURCE
#include "timeline.h"
#include "conf.h"
#include "deadline.h"
#include "forms.h"
#include "log.h"
#include "peer.h"
#include "send.h"
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define END_MS 3000	/* the worker itself waits for work on the GPU, but no longer than a second */

static struct {
	bool on;
	uint32_t left;		/* futex: traces that have not ended */
	int64_t start;		/* ms */
	char dir[3072];
	uint64_t bytes[SL_MAX_OWNERS];	/* each its receiver's */
} T;

static bool ask(struct sl_peer *t, bool on)
{
	const struct wire_trace m = { .on = on };

	return sl_send_soon(t, CTL_TRACE, &m, sizeof m);
}

void sl_timeline_begin(void)
{
	const char *dir = sl_config("SLUICE_TIMELINE");

	if (!dir || !*dir)
		return;
	if (*dir != '/' || strlen(dir) >= sizeof T.dir) {
		sl_log(SL_ERROR, "SLUICE_TIMELINE is not the full path of a folder: there is no timeline of this process");
		return;
	}
	strcpy(T.dir, dir);
	T.start = sl_now_ms();
	T.on = true;
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &sl_peers[i];

		if (t->lacks && sl_forms_lack(t->lacks, CTL_TRACE)) {
			sl_log(SL_ERROR, "the worker is of a release that has no traces: there is no timeline of its part");
			continue;
		}
		__atomic_fetch_add(&T.left, 1, __ATOMIC_RELAXED);
		if (!ask(t, true)) {
			sl_log(SL_ERROR, "the worker cannot be asked for a trace: there is no timeline of its part");
			__atomic_fetch_sub(&T.left, 1, __ATOMIC_RELAXED);
		}
	}
}

/* Nothing of it may keep the receiver for long, and a full disk is no reason to end the program. */
static bool write_out(unsigned owner, const uint8_t *p, size_t n)
{
	static uint8_t told;
	char path[sizeof T.dir + 64];
	int fd;

	snprintf(path, sizeof path, "%s/%d-%u-%lld.trace", T.dir, (int)getpid(), owner, (long long)T.start);
	fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
	while (fd >= 0 && n) {
		ssize_t w = write(fd, p, n);

		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			break;
		p += w;
		n -= (size_t)w;
	}
	if ((fd < 0 || n) && !__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED))
		sl_log(SL_ERROR, "%s: %s: the timeline of this process is not whole", path, strerror(errno));
	if (fd >= 0)
		close(fd);
	return fd >= 0 && !n;
}

void sl_timeline_add(struct sl_peer *t, const uint8_t *p, uint32_t n, bool last)
{
	uint64_t *bytes = &T.bytes[t->index];

	if (!T.on)
		return;
	if (n && *bytes + n <= SL_MAX_TRACE) {
		*bytes += n;
		if (!write_out(t->index, p, n))
			*bytes = SL_MAX_TRACE; /* what comes after a gap cannot be read */
	}
	if (last && __atomic_load_n(&T.left, __ATOMIC_RELAXED)) {
		__atomic_fetch_sub(&T.left, 1, __ATOMIC_RELEASE);
		sl_futex_wake(&T.left);
	}
}

void sl_timeline_end(void)
{
	int64_t now = sl_now_ms(), until = now + END_MS;
	uint32_t left;

	if (!T.on || sl_ended())
		return;
	for (unsigned i = 0; i < sl_sessions; i++) {
		if (sl_peers[i].lacks && sl_forms_lack(sl_peers[i].lacks, CTL_TRACE))
			continue;
		/* Another thread may be sending, or the ring be full. */
		while (!ask(&sl_peers[i], false)) {
			const struct timespec nap = { 0, 1000000 };

			if (sl_ended() || sl_now_ms() >= until) {
				sl_log(SL_ERROR, "the worker cannot be told that its trace is over: the timeline of this process lacks its end");
				break;
			}
			nanosleep(&nap, NULL);
		}
	}
	while ((left = __atomic_load_n(&T.left, __ATOMIC_ACQUIRE)) && !sl_ended() && (now = sl_now_ms()) < until) {
		const struct timespec most = { 0, 100000000 };

		sl_futex_wait(&T.left, left, &most);
	}
}
