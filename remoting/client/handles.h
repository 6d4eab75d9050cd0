/*
 * Handle tables: what stands behind the opaque values programs hold.
 *
 * A handle is (kind, id); an id is a slot's index with a generation above it,
 * so that a destroyed handle is recognised even when its slot serves again.
 * Programs get ids folded into a value that is never a valid address.
 *
 * Locking: a lookup takes no lock. Slots live in chunks that are never freed; a
 * slot's id is published last and withdrawn first, so a reader that still sees
 * the id it asked for sees the state that belongs to it. Creation and release
 * take the table's lock. States come from pools that never return memory
 * (sl_pool), so a program that races a destroy against a use gets an error, not
 * a wild pointer.
 */
#ifndef SLUICE_HANDLES_H
#define SLUICE_HANDLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuabi.h"
#include "wire.h"

static inline void *sl_handle_value(int kind, uint32_t id)
{
	return (void *)(uintptr_t)((uint64_t)kind << 44 | (uint64_t)id << 4);
}

/* The id inside a value, unchecked. */
static inline uint32_t sl_handle_bare(const void *h)
{
	return (uint32_t)((uintptr_t)h >> 4);
}

/*
 * The wire id of a live handle. Otherwise 0, with *err set to INVALID_HANDLE
 * (INVALID_CONTEXT for a context); *err is left alone on success.
 */
uint32_t sl_handle_id(int kind, const void *h, CUresult *err);
/* A new id with its value in *h, or 0 when memory or ids ran out. */
uint32_t sl_handle_new(int kind, void *state, void **h);
/* Takes an exact id; for the fixed ids. False if it is taken. */
bool sl_handle_take(int kind, uint32_t id, void *state);
/* Claims an id for destruction; exactly one caller wins. */
bool sl_handle_claim(int kind, uint32_t id);
/* Releases an id; its state is the caller's. Releasing twice does nothing. */
void sl_handle_free(int kind, uint32_t id);
/* The state of a live handle, or NULL. */
void *sl_handle_state(int kind, const void *h);
void *sl_handle_state_by_id(int kind, uint32_t id);
bool sl_handle_set_state(int kind, const void *h, void *state);
/*
 * The value of an id that the worker of a session chose; registered if new. NULL for
 * id 0. Workers choose the same ids, so those of all sessions but the first are
 * mapped to ids chosen here.
 */
void *sl_handle_from_id(int kind, uint32_t id, unsigned session);
/* Sets the id that the worker knows a handle by, if it is not the handle's own. */
void sl_handle_set_wire(int kind, uint32_t id, uint32_t wire);
/*
 * What a live handle is part of, as sl_handle_set_whole said last: the bare id of a handle of another kind (a node's graph).
 * 0 if nobody said.
 */
uint32_t sl_handle_whole(int kind, const void *h);
void sl_handle_set_whole(int kind, const void *h, uint32_t whole);
/* A word of the caller's about a live handle, which ends with it; 0 at first. */
uint8_t sl_handle_note(int kind, const void *h);
void sl_handle_set_note(int kind, const void *h, uint8_t note);
/* The context that was current when a live handle was made; 0 if unknown, or with one session. */
uint32_t sl_handle_ctx(int kind, const void *h);
/* Calls f for every live handle of a kind; f may free the one it is given. */
void sl_handle_each(int kind, void (*f)(uint32_t id, void *state, void *arg), void *arg);

/*
 * A pool of equal-sized objects whose memory is never given back. An object is
 * zeroed at first; when reused it has the contents it was put back with.
 */
struct sl_pool {
	size_t size;
	void *free;
	char *chunk;
	size_t left;
};

void *sl_pool_get(struct sl_pool *p);
void sl_pool_put(struct sl_pool *p, void *obj);

#endif
