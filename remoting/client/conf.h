/*
 * Settings: from the environment, otherwise from sluice.conf beside the library
 * (KEY=VALUE lines), which is how a container that does not inherit our environment
 * gets them. For both libraries.
 */
#ifndef SLUICE_CONF_H
#define SLUICE_CONF_H

#include <stdbool.h>

/* The largest sluice.conf, in bytes. A value may be as long as the file. */
#define SL_CONF_MAX (16 * 1024)

/* A setting; NULL if neither has it. The file's values live as long as the library. */
const char *sl_config(const char *key);
/* A setting of the file alone; NULL if it has none, or is larger than SL_CONF_MAX. */
const char *sl_conf_value(const char *key);
/* The file is larger than SL_CONF_MAX, and nothing of it is used. */
bool sl_conf_too_large(void);

#endif
