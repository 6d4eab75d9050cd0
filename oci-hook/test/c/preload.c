/* What CVE-2025-23266 loaded into a hook: leaves a file where it runs. */
#include <fcntl.h>
#include <unistd.h>

__attribute__((constructor)) static void owned(void)
{
	int fd = open(OWNED, O_CREAT | O_WRONLY, 0600);

	if (fd >= 0)
		close(fd);
}
