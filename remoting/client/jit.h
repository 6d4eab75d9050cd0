/* Options of the driver's compiler and linker, and where their logs go (jit.c). */
#ifndef SLUICE_JIT_H
#define SLUICE_JIT_H

#include "codec.h"

/* A log: the program's buffer, and the option that has its size and is given the log's. */
struct sl_jit_log {
	char *to;
	size_t cap;
	void **size;
};

/* What the driver's compiler and linker tell the program. It refers to the program's options. */
struct sl_jit {
	struct sl_jit_log info, error;
	void **wall; /* the option that is given the time */
};

/* Reads n options and appends those that are sent to b, behind their number at *sent. Refuses what is not carried. */
CUresult sl_jit_count(unsigned n, const CUjit_option *opt, void *const *val, uint32_t *sent);
void sl_jit_put(sl_buf *b, unsigned n, const CUjit_option *opt, void *const *val);
void sl_jit_open(struct sl_jit *j, unsigned n, const CUjit_option *opt, void **val);
/* Gives the program its logs, from the rest of a reply; there are none in a reply that ends here. */
void sl_jit_take(const struct sl_jit *j, sl_reply *r);

#endif
