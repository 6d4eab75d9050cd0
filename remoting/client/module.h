/* Modules and libraries (module.c). */
#ifndef SLUICE_MODULE_H
#define SLUICE_MODULE_H

#include "codec.h"
#include "kernel.h"

struct sl_global {
	struct sl_global *next;
	uint32_t ctx_id;
	CUdeviceptr ptr;
	size_t size;
	bool managed;
	char name[];
};

struct sl_module {
	void *link;
	uint32_t id;
	bool library;
	uint32_t ctx_id;	  /* of a module */
	int dev;		  /* of a module */
	struct sl_module *parent; /* the library a module stands for */
	pthread_mutex_t lock;	  /* guards what follows */
	bool listed;		  /* the names below are all there are */
	uint32_t nlisted;	  /* names */
	uint32_t nkernels, nslots;
	struct sl_kernel **kernel; /* hash by name, open addressing */
	char **names;		   /* in the worker's order, when listed */
	char *text;
	struct sl_global *globals;
	struct sl_module *as_module[SL_MAX_DEVICES];
};

/* The kernel of that name, whose id is bound on first use. NOT_FOUND if there is none. */
CUresult sl_module_kernel(struct sl_module *m, const char *name, struct sl_kernel **out);
/* Modules and libraries of all kinds. */
extern struct sl_pool sl_modules;
/*
 * Adds a kernel of that name; NULL when memory ran out. Called with the module's lock held, or
 * while the module is being loaded.
 */
struct sl_kernel *sl_module_insert(struct sl_module *m, const char *name);
/* Frees its kernels, names and globals. */
void sl_module_clear(struct sl_module *m);
/* In how many sessions it is loaded: a library belongs to no context, so each session has a copy by the same id. */
unsigned sl_module_copies(const struct sl_module *m);
/* Sends a frame about a module, or about the i-th copy of a library, to its session. */
void sl_module_address(sl_buf *b, const struct sl_module *m, unsigned i);
/* Forgets the modules of a context that is being destroyed, and what libraries had in it. */
void sl_modules_drop(uint32_t ctx_id);
/* Takes a library out of the first n sessions. */
CUresult sl_module_unload(const struct sl_module *m, unsigned n);

#endif
