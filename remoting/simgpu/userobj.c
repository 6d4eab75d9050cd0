/*
 * User objects: references are the program's, a graph's, or those of a plan that was made of a graph. With the last one
 * the object's function is called, on a thread of its own and without the lock. All else under sim.lock.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static void *end(void *p)
{
	struct userobj *o = p;

	o->destroy(o->arg);
	free(o);
	return NULL;
}

static void unref(struct userobj *o, uint64_t n)
{
	pthread_t t;

	o->refs -= n;
	if (o->refs)
		return;
	obj_forget(o);
	if (pthread_create(&t, NULL, end, o))
		abort();
	pthread_detach(t);
}

void users_add(struct users *u, struct userobj *o, uint64_t n, uint64_t of)
{
	size_t i = 0;

	while (i < u->n && (u->v[i].o != o || u->v[i].of != of))
		i++;
	if (i == u->n) {
		u->v = xgrow(u->v, u->n + 1, &u->cap, sizeof(*u->v));
		u->v[u->n++] = (struct user){ o, 0, of };
	}
	u->v[i].n += n;
	o->refs += n;
}

void users_copy(struct users *to, const struct users *from, uint64_t of)
{
	for (size_t i = 0; i < from->n; i++)
		users_add(to, from->v[i].o, from->v[i].n, of ? of : from->v[i].of);
}

void users_drop(struct users *u, uint64_t of)
{
	size_t k = 0;

	for (size_t i = 0; i < u->n; i++) {
		if (u->v[i].of == of)
			unref(u->v[i].o, u->v[i].n);
		else
			u->v[k++] = u->v[i];
	}
	u->n = k;
}

void users_free(struct users *u)
{
	for (size_t i = 0; i < u->n; i++)
		unref(u->v[i].o, u->v[i].n);
	free(u->v);
	*u = (struct users){ 0 };
}

API CUresult cuUserObjectCreate(CUuserObject *out, void *ptr, CUhostFn destroy, unsigned int refs, unsigned int flags)
{
	struct userobj *o;
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!out || !destroy || !refs || refs > INT_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	o = obj_new(K_USEROBJ, NULL, sizeof(*o));
	if (!o)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	o->destroy = destroy;
	o->arg = ptr;
	o->refs = refs;
	*out = HANDLE(CUuserObject, o);
	return sim_leave(CUDA_SUCCESS);
}

static CUresult count(CUuserObject h, unsigned int n, bool more)
{
	struct userobj *o;
	CUresult r = sim_enter();

	if (r)
		return r;
	o = obj_get(h, K_USEROBJ);
	if (!o || !n || n > INT_MAX || (!more && n > o->refs))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (more)
		o->refs += n;
	else
		unref(o, n);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuUserObjectRetain(CUuserObject o, unsigned int n) { return count(o, n, true); }
API CUresult cuUserObjectRelease(CUuserObject o, unsigned int n) { return count(o, n, false); }

API CUresult cuGraphRetainUserObject(CUgraph h, CUuserObject uh, unsigned int n, unsigned int flags)
{
	struct userobj *o;
	struct graph *g;
	CUresult r = graph_enter(h, &g);

	if (r)
		return r;
	o = obj_get(uh, K_USEROBJ);
	if (!o || !n || n > INT_MAX || flags & ~(unsigned int)CU_GRAPH_USER_OBJECT_MOVE)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	users_add(&g->users, o, n, 0);
	if (flags)
		unref(o, n);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphReleaseUserObject(CUgraph h, CUuserObject uh, unsigned int n)
{
	struct userobj *o;
	struct graph *g;
	CUresult r = graph_enter(h, &g);

	if (r)
		return r;
	o = obj_get(uh, K_USEROBJ);
	for (size_t i = 0; o && n && i < g->users.n; i++) {
		struct user *u = &g->users.v[i];

		if (u->o != o || u->n < n)
			continue;
		u->n -= n;
		if (!u->n)
			*u = g->users.v[--g->users.n];
		unref(o, n);
		return sim_leave(CUDA_SUCCESS);
	}
	return sim_leave(CUDA_ERROR_INVALID_VALUE);
}
