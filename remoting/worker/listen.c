#define _GNU_SOURCE
#include "listen.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/*
 * A thread of C and not of Go: while a thread of Go is held up in a system call, the runtime may stop all of
 * its other threads to collect garbage, and one that should let the call go on would wait for that.
 */
#define CALLS 1024

struct ends {
	int ready, seen;
};

static void *answer(void *arg)
{
	struct ends *e = arg;
	static char told[CALLS];
	int fd;

	if (read(e->ready, &fd, sizeof fd) != sizeof fd)
		return NULL;
	for (;;) {
		struct seccomp_notif in;
		struct seccomp_notif_resp out;
		int nr;

		memset(&in, 0, sizeof in);
		if (ioctl(fd, SECCOMP_IOCTL_NOTIF_RECV, &in)) {
			if (errno == EINTR || errno == ENOENT)
				continue;
			return NULL;
		}
		nr = in.data.nr;
		if (nr >= 0 && nr < CALLS && !told[nr]) {
			told[nr] = 1;
			if (write(e->seen, &nr, sizeof nr) < 0)
				told[nr] = 0;
		}
		memset(&out, 0, sizeof out);
		out.id = in.id;
		out.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
		ioctl(fd, SECCOMP_IOCTL_NOTIF_SEND, &out);
	}
}

int sl_listen(int ready, int seen)
{
	static struct ends e;
	sigset_t all, old;
	pthread_t t;
	int rc;

	e.ready = ready;
	e.seen = seen;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = pthread_create(&t, NULL, answer, &e);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return rc;
}
