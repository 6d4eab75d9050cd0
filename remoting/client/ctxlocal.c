/*
 * Context-local storage: (context, key) to value, with destructors. The runtime
 * asks on nearly every call, so a lookup first tries a few entries of the calling
 * thread, which are valid until anything is put or deleted anywhere (a generation
 * count); only a miss takes the lock. Destructors call back into the driver, so
 * they run without the lock.
 */
#include "ctxlocal.h"
#include "ctx.h"
#include "session.h"

#include <stdlib.h>

struct sl_local {
	struct sl_local *next;
	void *key, *value;
	void (*dtor)(CUcontext, void *, void *);
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t generation = 1;

/* NULL and all-ones both mean the current context. */
static CUresult which(CUcontext h, struct sl_ctx **c)
{
	if (!h || h == (CUcontext)(uintptr_t)-1)
		return sl_ctx_peek(c);
	*c = sl_ctx_of(h);
	return *c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static void changed(void)
{
	atomic_fetch_add_explicit(&generation, 1, memory_order_release);
}

CUresult sl_local_put(CUcontext h, void *key, void *value, void (*dtor)(CUcontext, void *, void *))
{
	struct sl_local *e;
	struct sl_ctx *c;
	CUresult err = which(h, &c);

	if (err)
		return err;
	pthread_mutex_lock(&lock);
	for (e = atomic_load(&c->locals); e && e->key != key; e = e->next)
		;
	if (!e) {
		e = calloc(1, sizeof *e);
		if (e) {
			e->key = key;
			e->next = atomic_load(&c->locals);
			atomic_store(&c->locals, e);
		} else {
			err = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (e) {
		e->value = value;
		e->dtor = dtor;
	}
	changed();
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_local_delete(CUcontext h, void *key)
{
	struct sl_local *e, *prev = NULL;
	struct sl_ctx *c;
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	err = which(h, &c);
	if (err)
		return err;
	pthread_mutex_lock(&lock);
	for (e = atomic_load(&c->locals); e && e->key != key; e = e->next)
		prev = e;
	if (e && prev)
		prev->next = e->next;
	else if (e)
		atomic_store(&c->locals, e->next);
	changed();
	pthread_mutex_unlock(&lock);
	free(e);
	return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sl_local_get(void **value, CUcontext h, void *key)
{
	struct sl_thread *t = sl_tls();
	uint64_t now = atomic_load_explicit(&generation, memory_order_acquire);
	unsigned slot = (unsigned)((uintptr_t)key >> 4) & 3;
	struct sl_local *e;
	struct sl_ctx *c;
	CUresult err;

	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	err = which(h, &c);
	if (err) {
		*value = NULL;
		return err;
	}
	if (t->local[slot].key == key && t->local[slot].ctx == c && t->local[slot].gen == now) {
		*value = t->local[slot].value;
		return CUDA_SUCCESS;
	}
	pthread_mutex_lock(&lock);
	for (e = atomic_load(&c->locals); e && e->key != key; e = e->next)
		;
	*value = e ? e->value : NULL;
	now = atomic_load(&generation);
	pthread_mutex_unlock(&lock);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	t->local[slot].key = key;
	t->local[slot].ctx = c;
	t->local[slot].value = *value;
	t->local[slot].gen = now;
	return CUDA_SUCCESS;
}

void sl_local_drop(struct sl_ctx *c)
{
	CUcontext h = sl_ctx_handle(c);
	struct sl_local *list, *next;

	pthread_mutex_lock(&lock);
	list = atomic_exchange(&c->locals, NULL);
	changed();
	pthread_mutex_unlock(&lock);
	for (; list; list = next) {
		next = list->next;
		if (list->dtor)
			list->dtor(h, list->key, list->value);
		free(list);
	}
}
