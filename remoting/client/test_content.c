/* Content that the worker has stored: what is asked, what is sent, what is kept, and that nothing of a copy is read once it is over. */
#define SL_CONTENT_PIECE (64u << 10)
#include "content.c"
#include "test.h"

#include <stdatomic.h>

#define PIECE ((size_t)SL_CONTENT_PIECE)
#define LINK 1000000u	/* bytes a second: slower than any machine hashes */
#define FAST_LINK (UINT64_MAX / 8)

struct sl_stats sl_stats;

/* ---- what the rest of the shim does, and the worker ---- */

static struct sl_peer peer = { .index = 3 };
static bool lacking, same, no_threads;
static const char *config;
static _Atomic unsigned threads;
static int processors = 8;

static uint8_t has[128][32];		/* what the worker has */
static unsigned nhas;
static CUresult answer;			/* to a question */
static unsigned questions, asked;	/* and pieces in them */
static bool late;			/* answers to those that nobody waits for come later */
static struct sl_question *open_question;
static unsigned held;			/* found and not copied */
static struct { uint16_t op; uint64_t dst; uint32_t size, last; } sent[4096];
static unsigned nsent;
static bool compares;			/* that what is named is what is to be copied */

static bool ended;
bool sl_ended(void) { return __atomic_load_n(&ended, __ATOMIC_ACQUIRE); }
int sl_processors(void) { return processors; }
bool sl_link_matters(int fd) { (void)fd; return !same; }
bool sl_forms_lack(const uint8_t *lacks, uint16_t op) { (void)lacks; return lacking && op == CTL_COPY_IN_STORED; }

const char *sl_config(const char *name)
{
	CHECK(!strcmp(name, "SLUICE_CONTENT"));
	return config;
}

bool sl_thread_start(void *(*f)(void *), void *arg)
{
	pthread_t t;

	if (no_threads)
		return false;
	threads++;
	return !pthread_create(&t, NULL, f, arg) && !pthread_detach(t);
}

static bool worker_has(const uint8_t *sum)
{
	for (unsigned i = 0; i < nhas; i++)
		if (!memcmp(has[i], sum, 32))
			return true;
	return false;
}

static CUresult reply(uint16_t op, const sl_buf *b, sl_reply *r, bool hold)
{
	struct wire_content_find m;
	struct wire_content_piece p;
	struct wire_content_find_reply found = { 0 };

	CHECK(op == CTL_CONTENT_FIND && b->to == 4 && b->to_ctx == 7);
	memcpy(&m, b->p, sizeof m);
	CHECK(m.npieces && m.npieces <= SL_MAX_CONTENT_FIND && b->n == sizeof m + m.npieces * sizeof p);
	CHECK(m.hold == hold);
	questions++;
	asked += m.npieces;
	r->data = r->inl;
	r->n = r->off = 0;
	r->bad = false;
	r->result = answer;
	if (answer)
		return answer;
	for (unsigned i = 0; i < m.npieces; i++) {
		memcpy(&p, b->p + sizeof m + i * sizeof p, sizeof p);
		CHECK(p.size && p.size <= PIECE);
		if (worker_has(p.sum)) {
			found.found |= 1u << i;
			held += hold;
		}
	}
	memcpy(r->inl, &found, sizeof found);
	r->n = sizeof found;
	return CUDA_SUCCESS;
}

CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r) { return reply(op, b, r, true); }

CUresult sl_ask(uint16_t op, const sl_buf *b, struct sl_question *q)
{
	CHECK(!open_question);
	open_question = q;
	reply(op, b, &q->reply, false);
	return CUDA_SUCCESS;
}

bool sl_has_answer(const struct sl_question *q)
{
	CHECK(q == open_question);
	if (!late)
		open_question = NULL;
	return !late;
}

CUresult sl_oneway_copy(const struct sl_copy_in *c, uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	struct wire_copy_in_stored s;
	struct wire_content_keep k;

	CHECK(c->t == &peer && !data && !n && nsent < sizeof sent / sizeof *sent);
	sent[nsent].op = op;
	if (op == CTL_COPY_IN_STORED) {
		CHECK(head->n == sizeof s && held);
		memcpy(&s, head->p, sizeof s);
		CHECK(worker_has(s.sum) && s.stream == 5);
		held--;
		if (compares) {
			struct wire_content_piece p = { 0 };

			hash(&p, c->src + (s.dst - c->dst), s.size);
			CHECK(!memcmp(p.sum, s.sum, 32), "piece %llu has the name of another", (unsigned long long)((s.dst - c->dst) / PIECE));
		}
		sent[nsent].dst = s.dst;
		sent[nsent].size = s.size;
		sent[nsent].last = s.last;
	} else {
		CHECK(op == CTL_CONTENT_KEEP && head->n == sizeof k);
		memcpy(&k, head->p, sizeof k);
		sent[nsent].dst = k.dst;
		sent[nsent].size = k.size;
	}
	nsent++;
	return CUDA_SUCCESS;
}

/* ---- what a program does ---- */

static uint8_t *source;
static const size_t most = 160 * PIECE;

/* Ends the session, and waits for its threads. */
static void stop(void)
{
	struct sl_content *k = peer.content;
	unsigned threads = 1;

	if (!k)
		return;
	__atomic_store_n(&ended, true, __ATOMIC_RELEASE);
	while (threads) {
		pthread_mutex_lock(&k->lock);
		sl_cond_broadcast(&k->work);
		threads = k->threads;
		pthread_mutex_unlock(&k->lock);
	}
	__atomic_store_n(&ended, false, __ATOMIC_RELEASE);
	sl_content_free(k);
	peer.content = NULL;
}

static void start(const char *env)
{
	stop();
	config = env;
	peer.content = sl_content_new(&peer);
	nhas = questions = asked = nsent = 0;
	answer = CUDA_SUCCESS;
	open_question = NULL;
	late = false;
	CHECK(!held);
}

static void store(const uint8_t *p, size_t n)
{
	struct wire_content_piece piece = { 0 };

	CHECK(nhas < 128);
	hash(&piece, p, n);
	memcpy(has[nhas++], piece.sum, 32);
}

/* Copies n bytes to dst, and returns how many were sent. */
static size_t copy_over(uint64_t dst, size_t n, uint64_t link)
{
	struct sl_copy_in c = { .t = &peer, .ctx = 7, .stream = 5, .blocking = true, .dst = dst, .src = source, .n = n };
	struct sl_content_way w;
	CUresult err = CUDA_SUCCESS;
	size_t bytes = 0;

	sl_content_begin(&w, &c, true);
	for (size_t at = 0, m; at < n; at += m) {
		m = sl_content_copy(&w, at, link, &err);
		CHECK(!err);
		if (!m)
			bytes += m = n - at < PIECE ? n - at : PIECE;
	}
	sl_content_end(&w);
	CHECK(!peer.content || (!peer.content->hashing && !peer.content->busy && peer.content->next == peer.content->end));
	return bytes;
}

static size_t copy(uint64_t dst, size_t n) { return copy_over(dst, n, LINK); }

static unsigned count(uint16_t op)
{
	unsigned n = 0;

	for (unsigned i = 0; i < nsent; i++)
		n += sent[i].op == op;
	return n;
}

static void whether(void)
{
	lacking = true;
	peer.lacks = (uint8_t *)&peer;
	start(NULL);
	CHECK(!peer.content && copy(0, 8 * PIECE) == 8 * PIECE && !nsent);
	lacking = false;
	start("0");
	CHECK(!peer.content);
	start(NULL);
	CHECK(peer.content);
	same = true;
	start(NULL);
	CHECK(!peer.content);
	start("1");
	CHECK(peer.content);
	same = false;
	/* What is too small, and what the worker refuses. */
	start(NULL);
	CHECK(copy(0, PIECE / 16 - 1) == PIECE / 16 - 1 && !questions);
	answer = CUDA_ERROR_NOT_SUPPORTED;
	CHECK(copy(0, 8 * PIECE) == 8 * PIECE && copy(1u << 30, 8 * PIECE) == 8 * PIECE && questions == 1 && nsent == 1);
	/* Hashing that is slower than the link, and not just for a moment. */
	start(NULL);
	CHECK(copy_over(0, 2 * PIECE, FAST_LINK) == 2 * PIECE && !questions && !nsent);
	CHECK(copy(1u << 30, PIECE) == PIECE && questions == 1 && nsent == 1);
	CHECK(copy_over(0, 3 * PIECE, FAST_LINK) == 3 * PIECE && peer.content->state != NONE); /* one goes without a question */
	CHECK(copy_over(0, 1 * PIECE, FAST_LINK) == PIECE && peer.content->state == NONE);
	start(NULL);
	CHECK(copy_over(0, 8 * PIECE, FAST_LINK) == 8 * PIECE && !questions && !nsent);
	CHECK(copy(1u << 30, 8 * PIECE) == 8 * PIECE && !questions && !nsent);
}

/* Content that is always new costs few questions. What goes where nothing went before may be stored. */
static void new_content(void)
{
	start(NULL);
	CHECK(copy(PIECE, 160 * PIECE) == 160 * PIECE);
	CHECK(asked == questions && questions <= 10, "%u questions", questions);
	CHECK(nsent == 160);
	for (unsigned i = 0; i < nsent; i++)
		CHECK(sent[i].op == CTL_CONTENT_KEEP && sent[i].dst == PIECE + i * PIECE && sent[i].size == PIECE);
	nsent = 0;
	CHECK(copy(PIECE, 64 * PIECE) == 64 * PIECE && copy(160 * PIECE, 4 * PIECE) == 4 * PIECE && !nsent);
	CHECK(copy((uint64_t)1 << 40, 4 * PIECE + 100) == 4 * PIECE + 100 && nsent == 4); /* the end is too short */
}

/* Content that is there: all of it, and with holes. */
static void stored_content(void)
{
	size_t n = 40 * PIECE + PIECE / 4;
	size_t missing = 0;

	start(NULL);
	for (size_t at = 0; at < n; at += PIECE)
		store(source + at, n - at < PIECE ? n - at : PIECE);
	CHECK(copy(0, n) == PIECE); /* the first is sent while the question is under way */
	CHECK(nsent == 41 && count(CTL_COPY_IN_STORED) == 40 && !held && asked == 41);
	for (unsigned i = 1; i < nsent; i++)
		CHECK(sent[i].dst == i * PIECE && sent[i].last == (i == 40) && sent[i].size == (i == 40 ? PIECE / 4 : PIECE));
	CHECK(processors == 1 || no_threads || threads);
	nsent = 0;
	for (unsigned i = 0; i < 41; i++) {
		if (i % 5 == 3) {
			memset(has[i], 0xee, 32);
			missing += i == 40 ? PIECE / 4 : PIECE;
		}
	}
	CHECK(copy((uint64_t)1 << 40, n) == missing && !held);
	CHECK(count(CTL_CONTENT_KEEP) == 8 && nsent == 41);
	/* The worker has it no more. After a while nothing is asked; once it has it again, it is found. */
	nhas = nsent = questions = 0;
	CHECK(copy(0, n) == n && !nsent && questions < 10);
	for (size_t at = 0; at < n; at += PIECE)
		store(source + at, n - at < PIECE ? n - at : PIECE);
	copy(0, n);
	CHECK(copy(0, n) == 0 && !held);
	CHECK(copy(0, n) == 0 && !held);
	/* An answer that comes late, in a later copy. */
	start(NULL);
	store(source, PIECE);
	late = true;
	CHECK(copy(0, 4 * PIECE) == 4 * PIECE && copy(0, 4 * PIECE) == 4 * PIECE && questions == 1);
	late = false;
	CHECK(copy(0, PIECE) == 0 && questions == 2);
	/* An answer that fails is none. */
	answer = CUDA_ERROR_DEVICE_UNAVAILABLE;
	CHECK(copy(0, n) == n);
}

/* Pieces that are sent without a look, because the link is not known to be slow for a while: what follows has its own name. */
static void passed_over(void)
{
	const size_t n = 100 * PIECE;
	struct sl_copy_in c = { .t = &peer, .ctx = 7, .stream = 5, .src = source, .n = n };
	struct sl_content_way w;
	CUresult err = CUDA_SUCCESS;

	start(NULL);
	for (size_t at = 0; at < n; at += PIECE)
		store(source + at, PIECE);
	CHECK(copy(0, 4 * PIECE) == PIECE);
	nsent = 0;
	compares = true;
	for (unsigned step = 2; step < 40; step += 12) {
		sl_content_begin(&w, &c, true);
		for (size_t i = 0; i < n / PIECE; i++)
			if (i % step != 1)
				sl_content_copy(&w, i * PIECE, LINK, &err);
		sl_content_end(&w);
	}
	CHECK(!err && nsent > 200);
	compares = false;
	held = 0; /* what was found and passed over */
}

static void ranges(void)
{
	struct sl_content *k;

	start(NULL);
	k = peer.content;
	CHECK(add_range(k, 100, 200) && add_range(k, 200, 300) && k->nranges == 1);
	CHECK(!add_range(k, 250, 350) && k->nranges == 1 && k->ranges[0].to == 350);
	CHECK(add_range(k, 50, 100) && add_range(k, 400, 500) && k->nranges == 2);
	CHECK(!add_range(k, 0, 1000) && k->nranges == 1 && add_range(k, 2000, 2001));
	for (unsigned i = 0; i < SL_CONTENT_RANGES - 2; i++)
		CHECK(add_range(k, 3000 + 2 * i, 3001 + 2 * i));
	CHECK(!add_range(k, 1u << 30, (1u << 30) + 1) && k->nranges == SL_CONTENT_RANGES && add_range(k, 1000, 1001));
}

/* Two copies at a time: one of them goes the usual way. */
static void *beside(void *arg)
{
	struct sl_copy_in c = { .t = &peer, .ctx = 7, .stream = 5, .src = source, .n = 4 * PIECE, .dst = 1 };
	struct sl_content_way w;
	CUresult err = CUDA_SUCCESS;

	sl_content_begin(&w, &c, true);
	CHECK(sl_content_copy(&w, 0, LINK, &err) == 0);
	sl_content_end(&w);
	return arg;
}

static void two(void)
{
	struct sl_copy_in c = { .t = &peer, .ctx = 7, .stream = 5, .src = source, .n = 4 * PIECE };
	struct sl_content_way w;
	CUresult err = CUDA_SUCCESS;
	pthread_t t;

	start(NULL);
	store(source, PIECE);
	store(source + PIECE, PIECE);
	sl_content_begin(&w, &c, true);
	CHECK(sl_content_copy(&w, 0, LINK, &err) == 0 && sl_content_copy(&w, PIECE, LINK, &err) == PIECE);
	CHECK(!pthread_create(&t, NULL, beside, NULL) && !pthread_join(t, NULL));
	CHECK(peer.content->busy);
	sl_content_end(&w);
}

int main(void)
{
	uint64_t seed = 1;

	source = malloc(most);
	CHECK(source);
	for (size_t i = 0; i < most / 8; i++)
		((uint64_t *)(void *)source)[i] = seed += 0x9e3779b97f4a7c15;
	whether();
	ranges();
	two();
	new_content();
	stored_content();
	passed_over();
	no_threads = true;
	processors = 1;
	stored_content();
	passed_over();
	stop();
	printf("test_content: ok\n");
	return 0;
}
