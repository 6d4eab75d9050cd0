/*
 * Preloaded into a tenant, it makes the shim ask for a session of kind 2, observe, wherever it
 * asks for one: the kind stands at byte 12 of what goes to the daemon and of HELLO.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/socket.h>

__attribute__((visibility("default"))) ssize_t send(int fd, const void *p, size_t n, int flags)
{
	static ssize_t (*real)(int, const void *, size_t, int);
	char b[256];

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "send");
	if (n >= 16 && n <= sizeof b && (!memcmp(p, "SLUICE-L", 8) || !memcmp(p, "SLUICE\r\n", 8))) {
		memcpy(b, p, n);
		b[12] = 2;
		p = b;
	}
	return real(fd, p, n, flags);
}
