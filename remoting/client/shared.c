/* See shared.h. Nothing here is locked: area.c, which lends, has a lock that keeps a descriptor and its HOST_SHARE together. */
#define _GNU_SOURCE
#include "shared.h"
#include "log.h"
#include "memfd.h"
#include "peer.h"
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum {
	MIN = 64 << 10,	/* bytes of memory that is worth a descriptor */
	FILES = 256,	/* descriptors at a time: the program has a limit too */
};

static _Atomic bool stopped;
static _Atomic int files;

bool sl_shared_can(void)
{
	return sl_sessions == 1 && sl_peers[0].shm && !atomic_load_explicit(&stopped, memory_order_relaxed);
}

void sl_shared_stop(CUresult why)
{
	if (!atomic_exchange(&stopped, true))
		sl_log(SL_INFO, "page-locked memory is copied from now on, not shared with the worker: error %d", why);
}

int sl_shared_new(size_t n)
{
	int fd, high;

	if (n < MIN || !sl_shared_can())
		return 0;
	if (atomic_fetch_add(&files, 1) >= FILES)
		goto none;
	fd = (int)syscall(SYS_memfd_create, "sluice-pinned", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	/* 0 to 2 may be free, and are the program's. */
	high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (fd >= 0)
		close(fd);
	if (high < 0)
		goto none;
	if (!ftruncate(high, (off_t)n) && !fcntl(high, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		return high;
	close(high);
none:
	atomic_fetch_sub(&files, 1);
	return 0;
}

void sl_shared_close(int memfd)
{
	if (memfd) {
		close(memfd);
		atomic_fetch_sub(&files, 1);
	}
}

bool sl_shared_lend(int memfd, size_t n)
{
	union {
		char buf[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec iov = { "", 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	ssize_t r;

	/* All pages are this process's to pay for, as the driver locks them anyway. */
	if (syscall(SYS_fallocate, memfd, 0, (off_t)0, (off_t)n))
		return false;
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof memfd);
	memcpy(CMSG_DATA(h), &memfd, sizeof memfd);
	do
		r = sendmsg(sl_peers[0].fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (r < 0 && errno == EINTR);
	return r == 1;
}
