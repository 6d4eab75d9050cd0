#define _GNU_SOURCE
#include "bind.h"

#include <errno.h>
#include <linux/capability.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * The C library uses this signal to make set*id change every thread. No thread can
 * block it, not even the driver's threads, which block everything they can. The
 * library lets nobody else handle it, so the handler is set by the system call. The
 * session's user has been set for good by then, so the old handler is no longer
 * needed.
 */
struct kernel_action {
	void (*handler)(int, siginfo_t *, void *);
	unsigned long flags;
	void (*restorer)(void);
	unsigned long mask;
};

static void drop(int sig, siginfo_t *info, void *context)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3];
	int saved = errno;

	(void)sig;
	(void)info;
	(void)context;
	memset(none, 0, sizeof none);
	syscall(SYS_capset, &head, none);
	errno = saved;
}

int sl_caps_handler(void)
{
	struct kernel_action a;

	/* The library's return from a handler stays. */
	if (syscall(SYS_rt_sigaction, SL_CAPS_SIGNAL, NULL, &a, sizeof a.mask))
		return -1;
	if (!a.handler)
		return -1;
	a.handler = drop;
	a.flags |= SA_SIGINFO | SA_RESTART | SA_ONSTACK;
	return syscall(SYS_rt_sigaction, SL_CAPS_SIGNAL, &a, NULL, sizeof a.mask) ? -1 : 0;
}
