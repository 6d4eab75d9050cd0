/* Files in memory, sealed: what C libraries before glibc 2.27 do not declare (memfd_create(2), fcntl(2)). */
#ifndef SL_MEMFD_H
#define SL_MEMFD_H

#include <fcntl.h>
#include <sys/mman.h>

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1u
#define MFD_ALLOW_SEALING 2u
#endif
#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_SEAL_SEAL 1
#define F_SEAL_SHRINK 2
#define F_SEAL_GROW 4
#define F_SEAL_WRITE 8
#endif

#endif
