/*
 * See trap.h. The handler does what a handler may: it writes the address of the fault's
 * description, which is on its own stack, to a pipe, and sleeps on a word of it.
 */
#define _GNU_SOURCE
#include "trap.h"
#include "ctx.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <ucontext.h>
#include <unistd.h>

enum { WAITING, READY, NOT_OURS };

struct fault {
	uint64_t p;
	bool write;
	_Atomic uint32_t state;
};

static bool (*touched_)(uint64_t p, bool write);
static bool (*left_alone_)(uint64_t p);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction had;	/* the program's */
static int ends[2] = { -1, -1 };
static int memory = -1;		/* /proc/self/mem */
static pid_t home, server_tid;
/* The program's handler runs on this thread, for the fault with this context, called from this frame. */
static __thread struct {
	const void *context, *frame;
} passing;

static bool wrote(const void *context)
{
#if defined(__x86_64__)
	return ((const ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
	(void)context;
	return true; /* a page that is only read is then noted as written, which costs time and harms nothing */
#endif
}

/*
 * Calls the program's own handler, as if it were the only one. A handler that had this one for its predecessor passes
 * on what it does not know: then this is called for the same fault from a deeper frame, and there is nobody left to
 * pass it to. One that leaves by siglongjmp leaves a frame behind that the next fault's is not below.
 */
static void pass_on(int sig, siginfo_t *info, void *context, const void *frame)
{
	struct sigaction a = had;

	if (passing.context == context && (uintptr_t)frame < (uintptr_t)passing.frame)
		a = (struct sigaction){ .sa_handler = SIG_DFL };
	passing.context = context;
	passing.frame = frame;
	if (a.sa_flags & SA_SIGINFO && a.sa_sigaction) {
		a.sa_sigaction(sig, info, context);
	} else if (!(a.sa_flags & SA_SIGINFO) && a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN) {
		a.sa_handler(sig);
	} else {
		a = (struct sigaction){ .sa_handler = SIG_DFL };
		sigaction(SIGSEGV, &a, NULL); /* and the instruction faults again */
	}
	passing.context = NULL;
}

static bool ask(const siginfo_t *info, const void *context)
{
	struct fault f = { .p = (uint64_t)(uintptr_t)info->si_addr, .write = wrote(context), .state = WAITING };
	struct fault *at = &f;
	ssize_t n;

	if (syscall(SYS_gettid) == server_tid)
		return false;
	do
		n = write(ends[1], &at, sizeof at);
	while (n < 0 && errno == EINTR);
	if (n != (ssize_t)sizeof at)
		return false;
	while (atomic_load_explicit(&f.state, memory_order_acquire) == WAITING)
		syscall(SYS_futex, &f.state, FUTEX_WAIT_PRIVATE, WAITING, NULL, NULL, 0);
	return atomic_load_explicit(&f.state, memory_order_acquire) == READY;
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
	int saved = errno;
	bool ready = false;

	/* Only what the kernel found protected; and a signal that somebody sent has no address. */
	if (info->si_code == SEGV_ACCERR)
		ready = getpid() == home ? ask(info, context) : left_alone_((uint64_t)(uintptr_t)info->si_addr);
	errno = saved;
	if (!ready)
		pass_on(sig, info, context, __builtin_frame_address(0));
}

static void *serve(void *arg)
{
	struct fault *f;

	(void)arg;
	server_tid = (pid_t)syscall(SYS_gettid);
	sl_tls()->no_print = true;
	for (;;) {
		ssize_t n = read(ends[0], &f, sizeof f);

		if (n < 0 && errno == EINTR)
			continue;
		if (n != (ssize_t)sizeof f)
			return NULL;
		atomic_store_explicit(&f->state, touched_(f->p, f->write) ? READY : NOT_OURS, memory_order_release);
		/* The thread may have gone on, and its stack with it: the wake is for an address, and at worst for nobody. */
		syscall(SYS_futex, &f->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	}
}

static void install(void)
{
	struct sigaction a = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART };

	sigemptyset(&a.sa_mask);
	sigaction(SIGSEGV, NULL, &had); /* before the handler can be called */
	sigaction(SIGSEGV, &a, NULL);
}

/* Signals belong to the program's threads. */
static bool start_server(void)
{
	sigset_t all, old;
	pthread_t thread;
	bool ok;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	ok = !pthread_create(&thread, NULL, serve, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (ok)
		pthread_detach(thread);
	return ok;
}

bool sl_trap_start(bool (*touched)(uint64_t p, bool write), bool (*left_alone)(uint64_t p))
{
	bool ok;

	pthread_mutex_lock(&lock);
	ok = home == getpid();
	if (!ok && !home) {
		touched_ = touched;
		left_alone_ = left_alone;
		memory = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/mem", O_RDWR | O_CLOEXEC); /* no cancellation point: locks are held */
		ok = memory >= 0 && !syscall(SYS_pipe2, ends, O_CLOEXEC) && start_server();
		if (ok) {
			home = getpid();
			install();
		}
	}
	pthread_mutex_unlock(&lock);
	return ok;
}

void sl_trap_keep(void)
{
	struct sigaction now;

	if (sigaction(SIGSEGV, NULL, &now) || (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault))
		return;
	pthread_mutex_lock(&lock);
	if (!sigaction(SIGSEGV, NULL, &now) && !(now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault))
		install();
	pthread_mutex_unlock(&lock);
}

bool sl_trap_poke(uint64_t p, const void *from, size_t n)
{
	const uint8_t *b = from;

	while (n) {
		ssize_t m = pwrite(memory, b, n, (off_t)p);

		if (m < 0 && errno == EINTR)
			continue;
		if (m <= 0)
			return false;
		p += (uint64_t)m;
		b += m;
		n -= (size_t)m;
	}
	return true;
}
