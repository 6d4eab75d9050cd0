#define _GNU_SOURCE
#include "bind.h"

#include <errno.h>
#include <linux/capability.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * The signal is the one by which the C library has set*id change every thread. No
 * thread can block it, not even the driver's, which block all they can. The library
 * does not let it be handled by anybody else, so the kernel is asked itself. The
 * session's user has been set for good by then, so nobody misses the old handler.
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

	/* Its way back out of a handler is the library's and stays. */
	if (syscall(SYS_rt_sigaction, SL_CAPS_SIGNAL, NULL, &a, sizeof a.mask))
		return -1;
	if (!a.handler)
		return -1;
	a.handler = drop;
	a.flags |= SA_SIGINFO | SA_RESTART | SA_ONSTACK;
	return syscall(SYS_rt_sigaction, SL_CAPS_SIGNAL, &a, NULL, sizeof a.mask) ? -1 : 0;
}
