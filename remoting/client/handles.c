/* See handles.h for the flow and the locking. */
#include "handles.h"
#include "ctx.h"
#include "session.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BITS 10
#define CHUNK_SLOTS (1u << CHUNK_BITS)
#define NCHUNKS ((SL_HANDLE_INDEX + 1) >> CHUNK_BITS)
#define FUNCTION_BIT 1 /* a CUfunction taken from a CUkernel; see kernel.c */

struct slot {
	_Atomic uint32_t id; /* 0 while free */
	uint32_t next;	     /* free list: index of the next free slot */
	_Atomic(void *) state;
	uint32_t wire;	     /* the id that the worker knows it by */
	uint32_t ctx;	     /* current when it was made, if there are several sessions */
	_Atomic uint32_t whole; /* what it is part of, 0 if that is not known */
	_Atomic uint8_t note;	/* the caller's */
	uint8_t session;
	uint8_t generation;
	_Atomic bool claimed; /* somebody destroys it */
};

struct table {
	uint32_t fresh;			/* next index never used; 0 means start at 1 */
	uint32_t head, tail;		/* free list, first in first out, so that slots are reused late */
	uint32_t nfree;
};

static struct table tables[SL_NKINDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* The directories of all kinds: pages that nobody has touched cost nothing. */
static _Atomic(struct slot *) directory[SL_NKINDS][NCHUNKS];
/* One past the last chunk made, of the client's ids and of the worker's. */
static _Atomic uint32_t chunks_end[SL_NKINDS][2];

static struct slot *find(int kind, uint32_t id)
{
	uint32_t index = id & SL_HANDLE_INDEX;
	struct slot *chunk = atomic_load_explicit(&directory[kind][index >> CHUNK_BITS], memory_order_acquire);

	if (__builtin_expect(!chunk, 0))
		return NULL;
	return &chunk[index & (CHUNK_SLOTS - 1)];
}

static inline struct slot *find_live(int kind, uint32_t id)
{
	struct slot *s = find(kind, id);

	if (__builtin_expect(!s || !id || atomic_load_explicit(&s->id, memory_order_acquire) != id, 0))
		return NULL;
	return s;
}

/* The live slot behind a value, NULL if the value is not a live handle of kind. */
static inline struct slot *resolve(int kind, const void *h)
{
	uintptr_t v = (uintptr_t)h;
	unsigned low = v & 15;

	if (__builtin_expect(v >> 44 != (uintptr_t)kind || (low && !(low == FUNCTION_BIT && kind == SL_KERNEL)), 0))
		return NULL;
	return find_live(kind, (uint32_t)(v >> 4));
}

/* The state, unless the slot got another id between the two reads. */
static inline void *state_of(struct slot *s, uint32_t id)
{
	void *state = atomic_load_explicit(&s->state, memory_order_acquire);

	return atomic_load_explicit(&s->id, memory_order_relaxed) == id ? state : NULL;
}

uint32_t sl_handle_id(int kind, const void *h, CUresult *err)
{
	struct slot *s = resolve(kind, h);

	if (__builtin_expect(!s, 0)) {
		*err = kind == SL_CTX ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
		return 0;
	}
	return s->wire;
}

void *sl_handle_state(int kind, const void *h)
{
	struct slot *s = resolve(kind, h);

	return s ? state_of(s, sl_handle_bare(h)) : NULL;
}

void *sl_handle_state_by_id(int kind, uint32_t id)
{
	struct slot *s = find_live(kind, id);

	return s ? state_of(s, id) : NULL;
}

bool sl_handle_set_state(int kind, const void *h, void *state)
{
	struct slot *s = resolve(kind, h);

	if (s)
		atomic_store_explicit(&s->state, state, memory_order_release);
	return s;
}

/* The slot of an index; makes its chunk if there is none. Called with the lock held. */
static struct slot *ensure(int kind, uint32_t index)
{
	struct slot *chunk = atomic_load_explicit(&directory[kind][index >> CHUNK_BITS], memory_order_relaxed);
	_Atomic uint32_t *end;

	if (!chunk) {
		chunk = calloc(CHUNK_SLOTS, sizeof *chunk);
		if (!chunk)
			return NULL;
		atomic_store_explicit(&directory[kind][index >> CHUNK_BITS], chunk, memory_order_release);
		end = &chunks_end[kind][index >= SL_WORKER_INDEX];
		if (atomic_load(end) <= index >> CHUNK_BITS)
			atomic_store(end, (index >> CHUNK_BITS) + 1);
	}
	return &chunk[index & (CHUNK_SLOTS - 1)];
}

static void publish(struct slot *s, uint32_t id, void *state)
{
	s->wire = id;
	s->session = 0;
	s->ctx = sl_sessions > 1 ? sl_ctx_cur() : 0;
	atomic_store_explicit(&s->whole, 0, memory_order_relaxed);
	atomic_store_explicit(&s->note, 0, memory_order_relaxed);
	atomic_store_explicit(&s->claimed, false, memory_order_relaxed);
	atomic_store_explicit(&s->state, state, memory_order_relaxed);
	atomic_store_explicit(&s->id, id, memory_order_release);
}

/* Called with the lock held. */
static uint32_t make(int kind, void *state, void **h)
{
	struct table *t = &tables[kind];
	struct slot *s = NULL;
	uint32_t index = 0, id = 0;

	/*
	 * A freed slot stays unused until enough others are free too, so that an id
	 * comes back only after many creations.
	 */
	if (t->nfree > 64 || (t->nfree && t->fresh >= SL_WORKER_INDEX - 1)) {
		index = t->head;
		s = find(kind, index);
		t->head = s->next;
		if (--t->nfree == 0)
			t->tail = 0;
	} else if (t->fresh < SL_WORKER_INDEX - 1) {
		index = t->fresh + 1;
		/* The fixed ids of the primary contexts come first. */
		if (kind == SL_CTX && index <= SL_MAX_DEVICES)
			index = SL_MAX_DEVICES + 1;
		s = ensure(kind, index);
		if (s)
			t->fresh = index;
	}
	if (s) {
		id = index | (uint32_t)s->generation << SL_HANDLE_SHIFT;
		publish(s, id, state);
		*h = sl_handle_value(kind, id);
	}
	return id;
}

uint32_t sl_handle_new(int kind, void *state, void **h)
{
	uint32_t id;

	pthread_mutex_lock(&lock);
	id = make(kind, state, h);
	pthread_mutex_unlock(&lock);
	return id;
}

void sl_handle_set_wire(int kind, uint32_t id, uint32_t wire)
{
	struct slot *s;

	pthread_mutex_lock(&lock);
	s = find_live(kind, id);
	if (s)
		s->wire = wire;
	pthread_mutex_unlock(&lock);
}

uint32_t sl_handle_ctx(int kind, const void *h)
{
	struct slot *s = resolve(kind, h);

	return s ? s->ctx : 0;
}

uint32_t sl_handle_whole(int kind, const void *h)
{
	struct slot *s = resolve(kind, h);

	return s ? atomic_load_explicit(&s->whole, memory_order_relaxed) : 0;
}

void sl_handle_set_whole(int kind, const void *h, uint32_t whole)
{
	struct slot *s = resolve(kind, h);

	if (s)
		atomic_store_explicit(&s->whole, whole, memory_order_relaxed);
}

uint8_t sl_handle_note(int kind, const void *h)
{
	struct slot *s = resolve(kind, h);

	return s ? atomic_load_explicit(&s->note, memory_order_relaxed) : 0;
}

void sl_handle_set_note(int kind, const void *h, uint8_t note)
{
	struct slot *s = resolve(kind, h);

	if (s)
		atomic_store_explicit(&s->note, note, memory_order_relaxed);
}

bool sl_handle_take(int kind, uint32_t id, void *state)
{
	struct slot *s;
	bool ok = false;

	pthread_mutex_lock(&lock);
	s = ensure(kind, id & SL_HANDLE_INDEX);
	if (s && !atomic_load_explicit(&s->id, memory_order_relaxed)) {
		s->generation = id >> SL_HANDLE_SHIFT;
		publish(s, id, state);
		ok = true;
	}
	pthread_mutex_unlock(&lock);
	return ok;
}

bool sl_handle_claim(int kind, uint32_t id)
{
	struct slot *s = find_live(kind, id);

	return s && !atomic_exchange(&s->claimed, true);
}

void sl_handle_free(int kind, uint32_t id)
{
	struct table *t = &tables[kind];
	uint32_t index = id & SL_HANDLE_INDEX;
	struct slot *s;

	if (!id)
		return;
	pthread_mutex_lock(&lock);
	s = find(kind, id);
	if (s && atomic_load_explicit(&s->id, memory_order_relaxed) == id) {
		atomic_store_explicit(&s->id, 0, memory_order_release);
		atomic_store_explicit(&s->state, NULL, memory_order_relaxed);
		if (index < SL_WORKER_INDEX && !(kind == SL_CTX && index <= SL_MAX_DEVICES)) {
			s->generation++;
			s->next = 0;
			if (t->tail)
				find(kind, t->tail)->next = index;
			else
				t->head = index;
			t->tail = index;
			t->nfree++;
		}
	}
	pthread_mutex_unlock(&lock);
}

/* The workers of later sessions choose the same ids as the first one: theirs are mapped to ids chosen here. */
static void *alias(int kind, uint32_t id, unsigned session)
{
	uint32_t end = atomic_load(&chunks_end[kind][0]), own;
	void *h = NULL;

	pthread_mutex_lock(&lock);
	for (uint32_t c = 0; c < end && !h; c++) {
		struct slot *chunk = atomic_load_explicit(&directory[kind][c], memory_order_acquire);

		for (uint32_t i = 0; chunk && i < CHUNK_SLOTS && !h; i++) {
			uint32_t live = atomic_load_explicit(&chunk[i].id, memory_order_acquire);

			if (live && chunk[i].session == session && chunk[i].wire == id)
				h = sl_handle_value(kind, live);
		}
	}
	if (!h && (own = make(kind, NULL, &h))) {
		struct slot *s = find(kind, own);

		s->wire = id;
		s->session = (uint8_t)session;
	}
	pthread_mutex_unlock(&lock);
	return h;
}

void *sl_handle_from_id(int kind, uint32_t id, unsigned session)
{
	struct slot *s;

	if (!id)
		return NULL;
	if (session && (id & SL_HANDLE_INDEX) >= SL_WORKER_INDEX)
		return alias(kind, id, session);
	if (!find_live(kind, id) && (id & SL_HANDLE_INDEX) >= SL_WORKER_INDEX) {
		pthread_mutex_lock(&lock);
		s = ensure(kind, id & SL_HANDLE_INDEX);
		if (s && atomic_load_explicit(&s->id, memory_order_relaxed) != id)
			publish(s, id, NULL);
		pthread_mutex_unlock(&lock);
	}
	return sl_handle_value(kind, id);
}

static void each(int kind, uint32_t from, uint32_t to, void (*f)(uint32_t id, void *state, void *arg), void *arg)
{
	for (uint32_t c = from; c < to; c++) {
		struct slot *chunk = atomic_load_explicit(&directory[kind][c], memory_order_acquire);

		for (uint32_t i = 0; chunk && i < CHUNK_SLOTS; i++) {
			uint32_t id = atomic_load_explicit(&chunk[i].id, memory_order_acquire);

			if (id)
				f(id, atomic_load_explicit(&chunk[i].state, memory_order_acquire), arg);
		}
	}
}

void sl_handle_each(int kind, void (*f)(uint32_t id, void *state, void *arg), void *arg)
{
	each(kind, 0, atomic_load(&chunks_end[kind][0]), f, arg);
	each(kind, SL_WORKER_INDEX >> CHUNK_BITS, atomic_load(&chunks_end[kind][1]), f, arg);
}

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

void *sl_pool_get(struct sl_pool *p)
{
	void *o;

	pthread_mutex_lock(&pool_lock);
	o = p->free;
	if (o) {
		/* The link overlays the first word of a free object, which its users leave for this. */
		memcpy(&p->free, o, sizeof p->free);
		memset(o, 0, sizeof p->free);
	} else {
		size_t step = (p->size + 15) & ~(size_t)15;

		if (p->left < step) {
			size_t n = step * 64;

			p->chunk = calloc(1, n);
			p->left = p->chunk ? n : 0;
		}
		if (p->left >= step) {
			o = p->chunk;
			p->chunk += step;
			p->left -= step;
		}
	}
	pthread_mutex_unlock(&pool_lock);
	return o;
}

void sl_pool_put(struct sl_pool *p, void *obj)
{
	if (!obj)
		return;
	pthread_mutex_lock(&pool_lock);
	memcpy(obj, &p->free, sizeof p->free);
	p->free = obj;
	pthread_mutex_unlock(&pool_lock);
}
