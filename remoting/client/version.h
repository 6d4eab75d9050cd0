/* What both shims say of their versions. */
#ifndef SL_VERSION_H
#define SL_VERSION_H

#define SL_API_VERSION 13000 /* the CUDA version whose surface the shims have: cuDriverGetVersion never exceeds it */

extern const char sl_version[]; /* "sluice version " and the commit, as git describe prints it */

#endif
