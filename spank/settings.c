/* The arguments of the plug-in in plugstack.conf: socket=PATH. */
#include "plugin.h"

#include <string.h>

void sl_settings_read(struct sl_settings *s, int ac, char **av, void (*say)(const char *, ...))
{
	strcpy(s->socket, SL_SOCKET);
	for (int i = 0; i < ac; i++) {
		if (strncmp(av[i], "socket=", 7)) {
			say("sluice: plugstack.conf: unknown argument %s; want socket=PATH", av[i]);
		} else if (av[i][7] != '/' || strlen(av[i] + 7) >= sizeof s->socket) {
			say("sluice: plugstack.conf: %s: want an absolute path of at most %zu bytes; using %s", av[i],
			    sizeof s->socket - 1, s->socket);
		} else {
			strcpy(s->socket, av[i] + 7);
		}
	}
}
