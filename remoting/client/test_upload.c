/* Copies to the device: how fast they are is measured only where they are sent, no thread reads memory that is being protected, and the worker finds the ends of host functions. */
#include "upload.c"
#include "test.h"

#define MIB ((size_t)1 << 20)

struct sl_stats sl_stats;
unsigned sl_sessions = 1;
struct sl_peer sl_peers[SL_MAX_OWNERS];
_Atomic unsigned sl_mapped_blocks, sl_mapped_shared, sl_mapped_reached, sl_mirrors;

/* ---- what the rest of the shim does ---- */

static struct sl_peer *peer = &sl_peers[0];
static uint8_t source[256 * MIB];
static _Atomic bool blocked, sending;
static _Atomic size_t sent, from_source;	/* bytes of frames; those of them that were read where they are */
static bool opens_later;	/* a copy in the background begins meanwhile */
static size_t protected_at, protected_n;
static size_t had;		/* bytes at the beginning of a copy that the worker has */
static unsigned functions, questions, stopped;
static struct sl_content content;

static __thread struct sl_thread tls;
struct sl_thread *sl_tls(void) { return &tls; }
CUresult sl_dead(void) { return CUDA_SUCCESS; }
bool sl_background_copy(const struct sl_copy_in *c) { return !c; }
void sl_background_stop(void) { stopped++; }
void sl_background_go(void) { stopped--; }
bool sl_bulk_ready(struct sl_peer *t, uint32_t direction) { return !t && direction; }
bool sl_bulk_upload(const struct sl_copy_in *c, sl_bulk_plain *plain, void *arg, CUresult *err) { return !c && plain && arg && err; }
void sl_look_begin(struct sl_look *l, struct sl_peer *t) { CHECK(l && t == peer); }
void sl_look_again(struct sl_look *l, struct sl_peer *t) { CHECK(l && t == peer); }
void sl_throughput_forget(struct sl_throughput *t) { CHECK(!t); }
struct sl_compressor *sl_compressor_new(size_t n) { CHECK(!n); return NULL; }
size_t sl_compress(struct sl_compressor *c, const uint8_t *p, size_t n, const uint8_t **out) { CHECK(!c && !p && !out); return n; }
bool sl_capturing_any(void) { return false; }
void sl_route_slow(sl_buf *b, int kind, const void *h) { CHECK(!b && kind && h); }
unsigned sl_hostfns_open(void) { return functions; }
bool sl_hostfns_in_graphs(void) { return false; }

struct sl_peer *sl_peer_route(const sl_buf *b, uint32_t *ctx)
{
	CHECK(b);
	*ctx = 1;
	return peer;
}

bool sl_mirror_has_slow(uint64_t p, size_t n)
{
	uint64_t at = (uintptr_t)source + protected_at;

	return p < at + protected_n && at < p + n;
}

CUresult fw_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p)
{
	CHECK(data && attribute && p);
	questions++;
	return CUDA_ERROR_INVALID_CONTEXT;
}

void sl_content_begin(struct sl_content_way *w, const struct sl_copy_in *c, bool shared)
{
	CHECK(shared);
	*w = (struct sl_content_way){ .k = c->t->content };
}

size_t sl_content_copy(struct sl_content_way *w, size_t at, uint64_t link, CUresult *err)
{
	CHECK(w && link && !*err);
	return at < had ? SL_CONTENT_PIECE : 0;
}

void sl_content_end(struct sl_content_way *w) { CHECK(w); }

CUresult sl_oneway_copy(const struct sl_copy_in *c, uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	const uint8_t *p = data;

	CHECK(c->t == peer && op == CTL_COPY_IN && head->n);
	sending = true;
	while (blocked)
		usleep(100);
	for (size_t i = 0; i < n; i += 4096)
		CHECK(p[i] == (uint8_t)((c->dst - MIB + (p >= source && p < source + sizeof source ? p - c->src : 0) + i) / 4096), "other bytes");
	sent += n;
	if (p >= source && p < source + sizeof source)
		from_source += n;
	if (opens_later)
		__atomic_store_n(&peer->background.open, true, __ATOMIC_RELAXED);
	sending = false;
	return CUDA_SUCCESS;
}

/* ---- tests ---- */

/* Copies n bytes at at to where they belong: the device's memory begins at 1 MiB. */
static void copy(size_t at, size_t n)
{
	size_t before = sent;

	CHECK(!sl_upload(MIB + at, source + at, n, NULL, 0, true, false));
	CHECK(sent - before == n - (had < n ? had : n));
}

static bool rated(size_t n)
{
	peer->uploads.rate = 0;
	copy(0, n);
	return peer->uploads.rate;
}

static void rates(void)
{
	CHECK(rated(4 * MIB) && !rated(MIB - 1));
	peer->background.open = true;
	CHECK(!rated(4 * MIB), "it was kept");
	sl_tls()->unkept = true;
	CHECK(rated(4 * MIB));
	sl_tls()->unkept = false;
	peer->background.open = false;
	opens_later = true;
	CHECK(!rated(4 * MIB), "the rest was kept");
	opens_later = false;
	peer->background.open = false;
	peer->content = &content;
	peer->uploads.throughput.link = 100000000;
	had = 4 * MIB;
	CHECK(!rated(4 * MIB) && rated(8 * MIB), "the worker had it");
	had = 0;
	peer->content = NULL;
}

static void *copies(void *arg)
{
	copy(0, 4 * MIB);
	return arg;
}

static _Atomic bool through;

static void *stops_it(void *arg)
{
	sl_upload_stop();
	through = true;
	return arg;
}

static void protection(void)
{
	pthread_t t, u;

	from_source = 0;
	copy(0, 3 * MIB);
	CHECK(from_source == 3 * MIB);

	/* A thread that is about to protect memory waits for a copy that has begun. A copy that begins later reads nothing while it holds a lock. */
	blocked = true;
	CHECK(!pthread_create(&t, NULL, copies, NULL));
	WAIT_FOR(sending);
	CHECK(!pthread_create(&u, NULL, stops_it, NULL));
	WAIT_FOR(atomic_load(&stops));
	usleep(20000);
	CHECK(!through);
	CHECK(!sl_upload_reads(source, 1) && !through);
	blocked = false;
	pthread_join(t, NULL);
	pthread_join(u, NULL);
	CHECK(through && stopped == 1 && from_source == 7 * MIB);
	copy(0, 2 * MIB + 5);
	CHECK(from_source == 7 * MIB);
	sl_upload_go();
	CHECK(!stopped);

	/* Memory that is protected already, in the middle of a copy too. */
	sl_mirrors = 1;
	protected_at = 2 * MIB;
	protected_n = 4096;
	copy(0, 4 * MIB);
	CHECK(from_source == 7 * MIB);
	copy(0, 2 * MIB);
	copy(2 * MIB + 4096, MIB);
	CHECK(from_source == 10 * MIB);
	copy(2 * MIB, 0);
	sl_mirrors = 0;
}

/* The worker is asked after so many bytes, while functions may be called and not otherwise. */
static void functions_run(void)
{
	copy(0, 200 * MIB);
	CHECK(!questions);
	functions = 1;
	copy(0, 96 * MIB);
	CHECK(!questions);
	copy(0, 4);
	CHECK(questions == 1);
	for (int i = 0; i < 13; i++)
		copy(0, 8 * MIB);
	CHECK(questions == 2, "%u", questions);
	copy(0, 200 * MIB);
	CHECK(questions == 4, "%u", questions);
	functions = 0;
	copy(0, 200 * MIB);
	CHECK(questions == 4);
}

int main(void)
{
	alarm(300);
	for (size_t i = 0; i < sizeof source; i += 4096)
		source[i] = (uint8_t)(i / 4096);
	rates();
	protection();
	functions_run();
	puts("test_upload: ok");
	return 0;
}
