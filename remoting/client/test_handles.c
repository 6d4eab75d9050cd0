/* Handle tables: values, generations, reuse, and threads that create, use and free at once. */
#include <pthread.h>

#include "handles.h"
#include "ctx.h"
#include "session.h"
#include "test.h"

/* What the rest of the shim would say. */
unsigned sl_sessions = 1;
uint32_t sl_ctx_cur(void) { return 0; }

#define THREADS 4
#define ROUNDS 200000

struct object {
	void *link;
	uint32_t id;
};

static struct sl_pool objects = { .size = sizeof(struct object) };
static void *_Atomic shared[64];

static void basics(void)
{
	CUresult err = CUDA_SUCCESS;
	int x;
	void *a, *b;
	uint32_t id = sl_handle_new(SL_STREAM, &x, &a);

	CHECK(id && sl_handle_id(SL_STREAM, a, &err) == id && !err);
	CHECK(sl_handle_state(SL_STREAM, a) == &x);
	CHECK(a == sl_handle_value(SL_STREAM, id));
	/* another kind, a wild pointer, NULL and the small values are no handles */
	CHECK(!sl_handle_id(SL_EVENT, a, &err) && err == CUDA_ERROR_INVALID_HANDLE);
	CHECK(!sl_handle_id(SL_STREAM, &x, &err) && !sl_handle_id(SL_STREAM, NULL, &err));
	CHECK(!sl_handle_id(SL_STREAM, (char *)a + 1, &err) && !sl_handle_id(SL_STREAM, (void *)2, &err));
	err = CUDA_SUCCESS;
	CHECK(!sl_handle_id(SL_CTX, a, &err) && err == CUDA_ERROR_INVALID_CONTEXT);
	/* it is claimed once, and lives on until it is freed */
	CHECK(sl_handle_claim(SL_STREAM, id) && !sl_handle_claim(SL_STREAM, id) && sl_handle_state(SL_STREAM, a) == &x);
	sl_handle_free(SL_STREAM, id);
	sl_handle_free(SL_STREAM, id);
	CHECK(!sl_handle_state(SL_STREAM, a) && !sl_handle_claim(SL_STREAM, id));

	/* a freed slot comes back with another id, and not at once */
	for (int i = 0; i < 1000; i++) {
		id = sl_handle_new(SL_STREAM, &x, &b);
		CHECK(id && b != a, "a dead handle's value was given out again");
		sl_handle_free(SL_STREAM, id);
	}
	CHECK(!sl_handle_state(SL_STREAM, a));

	/* what it is part of is forgotten with it */
	id = sl_handle_new(SL_NODE, NULL, &a);
	CHECK(!sl_handle_whole(SL_NODE, a));
	sl_handle_set_whole(SL_NODE, a, 7);
	CHECK(!sl_handle_note(SL_NODE, a));
	sl_handle_set_note(SL_NODE, a, 3);
	CHECK(sl_handle_note(SL_NODE, a) == 3);
	CHECK(sl_handle_whole(SL_NODE, a) == 7 && !sl_handle_whole(SL_EVENT, a));
	sl_handle_free(SL_NODE, id);
	CHECK(!sl_handle_whole(SL_NODE, a) && !sl_handle_note(SL_NODE, a));

	/* fixed ids, and those the worker chooses */
	CHECK(sl_handle_take(SL_CTX, 1, &x) && !sl_handle_take(SL_CTX, 1, &x));
	CHECK(sl_handle_state(SL_CTX, sl_handle_value(SL_CTX, 1)) == &x);
	CHECK(sl_handle_new(SL_CTX, &x, &a) > SL_MAX_DEVICES);
	CHECK(!sl_handle_from_id(SL_POOL, 0, 0));
	a = sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 7, 0);
	err = CUDA_SUCCESS;
	CHECK(a && a == sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 7, 0) && sl_handle_id(SL_POOL, a, &err) == SL_WORKER_INDEX + 7 && !err);
	b = sl_handle_from_id(SL_POOL, (SL_WORKER_INDEX + 7) | 1u << 24, 0);
	CHECK(b != a && !sl_handle_id(SL_POOL, a, &err), "an older generation of the worker's lives on");

	/* another session's worker counts alike: its ids get values of their own and keep their numbers */
	a = sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 9, 0);
	b = sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 9, 1);
	err = CUDA_SUCCESS;
	CHECK(a && b && a != b && b == sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 9, 1) && b != sl_handle_from_id(SL_POOL, SL_WORKER_INDEX + 9, 2));
	CHECK(sl_handle_id(SL_POOL, a, &err) == SL_WORKER_INDEX + 9 && sl_handle_id(SL_POOL, b, &err) == SL_WORKER_INDEX + 9 && !err);
	sl_handle_free(SL_POOL, sl_handle_bare(b));
	CHECK(!sl_handle_id(SL_POOL, b, &err) && sl_handle_id(SL_POOL, a, &err));

	/* a function made of a kernel is another value of the same id */
	id = sl_handle_new(SL_KERNEL, &x, &a);
	err = CUDA_SUCCESS;
	CHECK(sl_handle_id(SL_KERNEL, (char *)a + 1, &err) == id && !err);
}

/* Each thread fills and empties slots of a shared board and looks at what others left there. */
static void *churn(void *arg)
{
	uint64_t seed = (uint64_t)(uintptr_t)arg;

	for (int i = 0; i < ROUNDS; i++) {
		unsigned at = next_random(&seed) % 64;
		void *h = shared[at];
		struct object *o;

		if (h && next_random(&seed) % 4) {
			o = sl_handle_state(SL_EVENT, h);
			/* gone meanwhile is fine, somebody else's is not */
			CHECK(!o || o->id == sl_handle_bare(h) || !sl_handle_state(SL_EVENT, h), "handle %p leads to object %x", h, o->id);
			continue;
		}
		h = __atomic_exchange_n((void **)&shared[at], NULL, __ATOMIC_ACQ_REL);
		if (h) {
			o = sl_handle_state(SL_EVENT, h);
			CHECK(o && o->id == sl_handle_bare(h) && sl_handle_claim(SL_EVENT, o->id));
			sl_handle_free(SL_EVENT, o->id);
			sl_pool_put(&objects, o);
		} else {
			void *none = NULL;

			o = sl_pool_get(&objects);
			CHECK(o);
			o->id = sl_handle_new(SL_EVENT, NULL, &h);
			CHECK(o->id && sl_handle_set_state(SL_EVENT, h, o));
			if (!__atomic_compare_exchange_n((void **)&shared[at], &none, h, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
				sl_handle_free(SL_EVENT, o->id);
				sl_pool_put(&objects, o);
			}
		}
	}
	return NULL;
}

int main(void)
{
	pthread_t t[THREADS];

	basics();
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&t[i], NULL, churn, (void *)(i + 1)));
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
	printf("test_handles: ok\n");
	return 0;
}
