/* The library's version, for both shims. */
#ifndef SL_VERSION_H
#define SL_VERSION_H

extern const char sl_version[]; /* "sluice version " and the commit, as git describe prints it */

#endif
