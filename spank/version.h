/*
 * Slurm loads a plug-in only if its plugin_version has Slurm's own major and minor number.
 * From 22.05 to 26.05 SPANK has only had additions, so the universal build finds out the
 * release when it is loaded: slurm_api_version() counts releases. In a release that is not
 * in the table the plug-in has version 0, which Slurm refuses by name; a build for that
 * release (SLURM_PREFIX=) takes the number from its header.
 */
#ifndef SLUICE_SPANK_VERSION_H
#define SLUICE_SPANK_VERSION_H

#pragma GCC visibility push(default)
#include <slurm/spank.h>

#ifdef SLUICE_RELEASE_BUILD
SPANK_PLUGIN(sluice, 1)
#else
const char plugin_name[] = "sluice";
const char plugin_type[] = "spank";
unsigned int plugin_version;
const unsigned int spank_plugin_version = 1;

extern long slurm_api_version(void) __attribute__((weak));

__attribute__((constructor)) static void pick_version(void)
{
	static const struct {
		unsigned char api, major, minor;
	} releases[] = { { 38, 22, 5 }, { 39, 23, 2 }, { 40, 23, 11 }, { 41, 24, 5 }, { 42, 24, 11 }, { 43, 25, 5 }, { 44, 25, 11 }, { 45, 26, 5 } };
	long api = slurm_api_version ? slurm_api_version() >> 16 : 0;

	for (unsigned int i = 0; i < sizeof releases / sizeof releases[0]; i++)
		if (releases[i].api == api)
			plugin_version = (unsigned int)releases[i].major << 16 | (unsigned int)releases[i].minor << 8;
}
#endif
#pragma GCC visibility pop

#endif
