/*
 * The NVML library's own connections, one to each owner of the lease: they observe
 * the lease, compute nothing, and cost the program nothing before nvmlInit. The
 * devices of all owners are one list, in the order of the owners.
 *
 * Flow: nv_open connects, sends HELLO (observe) and keeps the device snapshots of
 * the WELCOMEs. nv_read and nv_processes ask for one device's readings with an
 * OBSERVE frame when the last ones are older than 200 ms. One thread at a time uses
 * the socket; the library has no thread and no signal handler. Each OBSERVE has 5
 * seconds from begin to end, and so has each step of connecting (connect.h). If the
 * worker has closed the connection meanwhile (it may drop idle observers), one new
 * connection is tried; if that fails too, calls fail at once for a while, so that a
 * program that asks forty questions does not wait forty times.
 *
 * Locking: lock guards everything in conn but snapshot, which nv_open fills before
 * any other call may read it. A forked child starts with a new lock and no
 * connection, since another thread of the parent may have held either at the fork;
 * the count of nvmlInit is kept, as the real library keeps it.
 *
 * Nothing that the worker sends is trusted: sizes are checked before they are used,
 * counts against what the payload can hold, and text is cut and cleaned.
 */
#define _GNU_SOURCE
#include "nvml_conn.h"
#include "wire.h"
#include "connect.h"
#include "deadline.h"
#include "exchange.h"
#include "forms.h"
#include "log.h"
#include "reader.h"
#include "version.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The longest valid reply is an OBSERVE with all processes, below 66 KiB. */
#define FRAME_MAX (128u << 10)
#define EXCHANGE_MS 5000
#define RETRY_MS 1000

struct cached {
	bool valid;
	int64_t at;	/* ms, monotonic */
	struct nv_readings r;
	uint32_t nproc;
	struct nv_process *proc;
	int64_t more_at[2];	/* 0: never; without and with traffic */
	struct nv_more more[2];
	bool linked;
	struct nv_links links;
	bool stated;
	struct nv_facts facts;
};

/* One owner's connection. */
struct link {
	int fd;			/* -1: none */
	uint8_t *lacks;		/* see sl_connection */
	uint32_t call;
	int64_t retry_at;	/* after a failure: do not connect before this time */
	uint32_t first, ndev;	/* its devices among all */
};

static struct {
	atomic_int owner;	/* the process that initialised the lock; negative while it does */
	pthread_mutex_t lock;
	atomic_uint opened;
	unsigned nlinks;
	struct link link[SL_MAX_OWNERS];
	struct cached dev[SL_MAX_DEVICES];
	struct nv_text text;	/* the last that was asked for */
	struct sl_snapshot snapshot;
} conn = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- small things ---- */

/* NVML reports errors by its results: nothing is logged unless SLUICE_LOG asks for it. */
const char sl_log_prefix[] = "sluice: nvml: ";
const int sl_log_default = -1;

static void hang_up(struct link *l)
{
	if (l->fd >= 0)
		close(l->fd);
	l->fd = -1;
	free(l->lacks);
	l->lacks = NULL;
}

/* ---- the lock, across fork ---- */

static void enter(void)
{
	int me = (int)getpid();
	int seen = atomic_load_explicit(&conn.owner, memory_order_acquire);

	while (seen != me) {
		if (seen != -me && atomic_compare_exchange_strong(&conn.owner, &seen, -me)) {
			/* First use in this process. The descriptor is shared with the
			 * parent: closing ours leaves the parent's alone. */
			for (unsigned i = 0; i < conn.nlinks; i++) {
				hang_up(&conn.link[i]);
				conn.link[i].retry_at = 0;
			}
			pthread_mutex_init(&conn.lock, NULL);
			/* A list may be half written; it is leaked rather than trusted. */
			for (int i = 0; i < SL_MAX_DEVICES; i++) {
				conn.dev[i].valid = false;
				conn.dev[i].proc = NULL;
				conn.dev[i].nproc = 0;
			}
			atomic_store_explicit(&conn.owner, me, memory_order_release);
			break;
		}
		seen = atomic_load_explicit(&conn.owner, memory_order_acquire);
	}
	pthread_mutex_lock(&conn.lock);
}

static void leave(void)
{
	pthread_mutex_unlock(&conn.lock);
}

/* ---- the owners ---- */

static nvmlReturn_t connect_error(enum sl_connected rc)
{
	switch (rc) {
	case SL_CONNECTED:
		return NVML_SUCCESS;
	case SL_NO_ADDRESS:
	case SL_UNREACHABLE:
		return NVML_ERROR_DRIVER_NOT_LOADED;
	case SL_MISMATCH:
		return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	case SL_DENIED:
		return NVML_ERROR_NO_PERMISSION;
	case SL_NO_MEMORY:
		return NVML_ERROR_MEMORY;
	default:
		return NVML_ERROR_UNKNOWN;
	}
}

/* Connects to one owner; on success its link's fd is set and *s filled. Called with the lock held. */
static nvmlReturn_t dial(unsigned owner, unsigned *owners, struct sl_snapshot *s)
{
	const struct sl_ask ask = { .kind = SL_SESSION_OBSERVE, .owner = owner, .patience_ms = EXCHANGE_MS };
	struct sl_connection c;
	nvmlReturn_t rc = connect_error(sl_connect(&ask, &c, s));

	if (rc)
		return rc;
	*owners = c.owners;
	conn.link[owner].fd = c.fd;
	conn.link[owner].lacks = c.lacks;
	conn.link[owner].call = 0;
	return NVML_SUCCESS;
}

/* Dials every owner and makes one list of their devices. Called with the lock held. */
static nvmlReturn_t dial_all(void)
{
	struct sl_snapshot *s = malloc(sizeof *s), *all = &conn.snapshot;
	unsigned owners = 1, ignored;
	nvmlReturn_t rc = s ? NVML_SUCCESS : NVML_ERROR_MEMORY;

	conn.nlinks = 0;
	for (unsigned i = 0; !rc && i < owners; i++) {
		conn.link[i] = (struct link){ .fd = -1 };
		rc = dial(i, i ? &ignored : &owners, s);
		if (rc)
			break;
		conn.nlinks = i + 1;
		if (!i)
			all->ndev = 0;
		conn.link[i].first = all->ndev;
		conn.link[i].ndev = s->ndev;
		if (!sl_snapshot_add(all, s))
			rc = NVML_ERROR_INSUFFICIENT_SIZE;
	}
	for (unsigned i = 0; rc && i < conn.nlinks; i++)
		hang_up(&conn.link[i]);
	free(s);
	if (!rc)
		sl_log(SL_INFO, "%s", sl_version);
	return rc;
}

/* Connects again after a lost connection. The devices must be those that the program knows. */
static nvmlReturn_t redial(struct link *l)
{
	struct sl_snapshot *s = malloc(sizeof *s);
	unsigned ignored;
	nvmlReturn_t rc;

	if (!s)
		return NVML_ERROR_MEMORY;
	rc = dial((unsigned)(l - conn.link), &ignored, s);
	if (rc) {
		rc = NVML_ERROR_GPU_IS_LOST;
	} else {
		bool same = s->ndev == l->ndev;

		for (uint32_t i = 0; same && i < s->ndev; i++)
			same = !memcmp(s->dev[i].uuid, conn.snapshot.dev[l->first + i].uuid, 16);
		if (!same) {
			sl_log(SL_ERROR, "the worker has other devices than before; restart the program");
			hang_up(l);
			rc = NVML_ERROR_GPU_IS_LOST;
		}
	}
	free(s);
	return rc;
}

/* ---- OBSERVE ---- */

static bool parse_readings(const uint8_t *p, size_t n, struct cached *c)
{
	struct sl_reader r = { .p = p, .n = n };
	struct nv_readings *v = &c->r;
	struct nv_process *list = NULL;
	struct wire_observe_reply h;
	uint32_t nproc;

	sl_read(&r, &h, sizeof h);
	*v = (struct nv_readings){
		.mem_total = h.mem_total, .mem_used = h.mem_used, .mem_free = h.mem_free, .util_gpu = h.util_gpu, .util_mem = h.util_mem,
		.temp_c = h.temp, .power_mw = h.power_mw, .power_limit_mw = h.power_limit_mw, .sm_mhz = h.sm_mhz, .mem_mhz = h.mem_mhz,
		.pstate = h.pstate, .fan = h.fan, .persistence = h.persistence,
	};
	nproc = h.nproc;
	if (r.bad || nproc > SL_MAX_PROCESSES || r.n - r.off != nproc * sizeof(struct wire_process))
		return false;
	/* Programs subtract these from each other: no difference may be negative. */
	if (v->mem_free > v->mem_total)
		v->mem_free = v->mem_total;
	if (v->mem_used > v->mem_total - v->mem_free)
		v->mem_used = v->mem_total - v->mem_free;
	if (nproc) {
		list = calloc(nproc, sizeof *list);
		if (!list)
			return false;
	}
	for (uint32_t i = 0; i < nproc; i++) {
		struct wire_process q;

		sl_read(&r, &q, sizeof q);
		list[i].pid = q.pid;
		list[i].used = q.used;
		sl_text(list[i].name, sizeof list[i].name, q.name, sizeof q.name);
	}
	free(c->proc);
	c->proc = list;
	c->nproc = nproc;
	return true;
}

static bool parse_more(const uint8_t *p, size_t n, struct nv_more *m)
{
	if (n != sizeof m->value)
		return false;
	memcpy(m->value, p, n);
	return true;
}

static bool parse_links(const uint8_t *p, size_t n, struct nv_links *l)
{
	if (n != sizeof l->r)
		return false;
	memcpy(&l->r, p, n);
	return true;
}

static bool parse_facts(const uint8_t *p, size_t n, struct nv_facts *f)
{
	if (n != sizeof f->value)
		return false;
	memcpy(f->value, p, n);
	return true;
}

static bool parse_text(const uint8_t *p, size_t n, struct nv_text *t)
{
	if (n != sizeof t->s)
		return false;
	sl_text(t->s, sizeof t->s, p, n);
	return true;
}

struct frame {
	struct wire_reply h;
	uint8_t *body;	/* the caller frees it */
};

static bool recv_frame(int fd, struct frame *f, int64_t deadline)
{
	f->body = NULL;
	if (!sl_recv_all(fd, &f->h, sizeof f->h, NULL, deadline))
		return false;
	if (f->h.size > FRAME_MAX) {
		sl_log(SL_ERROR, "worker: frame of %u bytes is beyond the limit", f->h.size);
		return false;
	}
	f->body = malloc(f->h.size ? f->h.size : 1);
	if (f->body && sl_recv_all(fd, f->body, f->h.size, NULL, deadline))
		return true;
	free(f->body);
	return false;
}

enum what { OBSERVE, MORE, MORE_TRAFFIC, LINKS, FACTS, TEXT };

static const uint16_t op_of[] = {
	CTL_OBSERVE, CTL_OBSERVE_MORE, CTL_OBSERVE_MORE, CTL_OBSERVE_LINKS, CTL_OBSERVE_FACTS, CTL_OBSERVE_TEXT,
};

static bool parse(const struct frame *f, enum what what, struct cached *c)
{
	switch (what) {
	case OBSERVE:
		return parse_readings(f->body, f->h.size, c);
	case LINKS:
		return parse_links(f->body, f->h.size, &c->links);
	case FACTS:
		return parse_facts(f->body, f->h.size, &c->facts);
	case TEXT:
		return parse_text(f->body, f->h.size, &conn.text);
	default:
		return parse_more(f->body, f->h.size, &c->more[what == MORE_TRAFFIC]);
	}
}

/* Sends one question, with its argument if it has one, on the open connection; false if the connection can no longer be used. */
static bool observe(struct link *l, uint32_t dev, enum what what, uint32_t arg, struct cached *c)
{
	int64_t deadline = sl_now_ms() + EXCHANGE_MS;
	struct { struct wire_request h; struct wire_observe_text what; } req = { .what = { .device = dev - l->first, .which = arg } };
	bool with_arg = what == MORE || what == MORE_TRAFFIC || what == TEXT;
	uint32_t size = with_arg ? sizeof(struct wire_observe_text) : sizeof(struct wire_observe);
	struct frame f;
	bool ok;

	if (!++l->call)
		l->call = 1;
	req.h = (struct wire_request){ .size = size, .op = op_of[what], .flags = SL_FLAG_WAIT, .call = l->call };
	if (!sl_send_all(l->fd, &req, sizeof req.h + size, deadline))
		return false;
	for (;;) {
		if (!recv_frame(l->fd, &f, deadline))
			return false;
		if (f.h.kind == SL_FRAME_REPLY)
			break;
		free(f.body);
		if (f.h.kind == SL_FRAME_BYE) {
			sl_log(SL_WARN, "worker ended the session");
			return false;
		}
		/* A keep-alive, or a frame that does not concern an observer. */
		if (sl_now_ms() >= deadline)
			return false;
	}
	ok = f.h.call == l->call && !f.h.result;
	ok = ok && parse(&f, what, c);
	if (!ok)
		sl_log(SL_WARN, "worker: no readings of device %u: call %u, result %d, %u bytes", dev, f.h.call, f.h.result, f.h.size);
	free(f.body);
	return ok;
}

/* Asks the device's worker. Called with the lock held. */
static nvmlReturn_t ask(unsigned int dev, enum what what, uint32_t arg)
{
	struct cached *c = &conn.dev[dev];
	struct link *l = conn.link;
	nvmlReturn_t rc = NVML_ERROR_GPU_IS_LOST;
	bool idle;

	while (dev - l->first >= l->ndev)
		l++;
	if (sl_now_ms() < l->retry_at)
		return NVML_ERROR_GPU_IS_LOST;
	/* The worker may have closed an idle connection: try once more with a new one. */
	idle = l->fd >= 0;
	for (int tries = idle ? 2 : 1; tries; tries--) {
		if (l->fd < 0) {
			rc = redial(l);
			if (rc)
				break;
		}
		if (l->lacks && sl_forms_lack(l->lacks, op_of[what]))
			return NVML_ERROR_NOT_SUPPORTED;
		if (observe(l, dev, what, arg, c))
			return NVML_SUCCESS;
		rc = NVML_ERROR_GPU_IS_LOST;
		hang_up(l);
	}
	c->valid = false;
	l->retry_at = sl_now_ms() + RETRY_MS;
	return rc;
}

/* Makes sure that the device's readings are fresh; now: read during this call. Called with the lock held. */
static nvmlReturn_t refresh(unsigned int dev, bool now)
{
	struct cached *c = &conn.dev[dev];
	nvmlReturn_t rc;

	if (c->valid && !now && sl_now_ms() - c->at < FRESH_MS)
		return NVML_SUCCESS;
	rc = ask(dev, OBSERVE, 0);
	if (!rc) {
		c->valid = true;
		c->at = sl_now_ms();
	}
	return rc;
}

/* ---- for NVML's functions ---- */

nvmlReturn_t nv_open(void)
{
	nvmlReturn_t rc = NVML_SUCCESS;

	enter();
	if (!atomic_load(&conn.opened))
		rc = dial_all();
	if (!rc)
		atomic_fetch_add(&conn.opened, 1);
	leave();
	return rc;
}

nvmlReturn_t nv_close(void)
{
	nvmlReturn_t rc = NVML_SUCCESS;

	enter();
	if (!atomic_load(&conn.opened)) {
		rc = NVML_ERROR_UNINITIALIZED;
	} else if (atomic_fetch_sub(&conn.opened, 1) == 1) {
		for (unsigned i = 0; i < conn.nlinks; i++)
			hang_up(&conn.link[i]);
		for (int i = 0; i < SL_MAX_DEVICES; i++) {
			free(conn.dev[i].proc);
			conn.dev[i] = (struct cached){ 0 };
		}
	}
	leave();
	return rc;
}

bool nv_opened(void)
{
	return atomic_load_explicit(&conn.opened, memory_order_acquire) > 0;
}

const struct sl_snapshot *nv_facts(void)
{
	return &conn.snapshot;
}

nvmlReturn_t nv_read(unsigned int dev, bool now, struct nv_readings *r)
{
	nvmlReturn_t rc;

	enter();
	rc = refresh(dev, now);
	if (!rc)
		*r = conn.dev[dev].r;
	leave();
	return rc;
}

nvmlReturn_t nv_read_more(unsigned int dev, bool traffic, unsigned int age, struct nv_more *m)
{
	struct cached *c = &conn.dev[dev];
	nvmlReturn_t rc = NVML_SUCCESS;

	enter();
	if (!c->more_at[traffic] || sl_now_ms() - c->more_at[traffic] >= age) {
		rc = ask(dev, traffic ? MORE_TRAFFIC : MORE, traffic);
		c->more_at[traffic] = rc ? 0 : sl_now_ms();
	}
	if (!rc)
		*m = c->more[traffic];
	leave();
	return rc;
}

nvmlReturn_t nv_read_links(unsigned int dev, struct nv_links *l)
{
	struct cached *c = &conn.dev[dev];
	nvmlReturn_t rc = NVML_SUCCESS;

	enter();
	if (!c->linked)
		rc = ask(dev, LINKS, 0);
	if (!rc) {
		c->linked = true;
		*l = c->links;
	}
	leave();
	return rc;
}

nvmlReturn_t nv_read_facts(unsigned int dev, struct nv_facts *f)
{
	struct cached *c = &conn.dev[dev];
	nvmlReturn_t rc = NVML_SUCCESS;

	enter();
	if (!c->stated)
		rc = ask(dev, FACTS, 0);
	if (!rc) {
		c->stated = true;
		*f = c->facts;
	}
	leave();
	return rc;
}

nvmlReturn_t nv_read_text(unsigned int dev, unsigned int which, struct nv_text *t)
{
	nvmlReturn_t rc;

	enter();
	rc = ask(dev, TEXT, which);
	if (!rc)
		*t = conn.text;
	leave();
	return rc;
}

int nv_sibling(unsigned int dev, unsigned int other)
{
	for (unsigned i = 0; i < conn.nlinks; i++) {
		const struct link *l = &conn.link[i];

		if (dev - l->first < l->ndev)
			return other - l->first < l->ndev ? (int)(other - l->first) : -1;
	}
	return -1;
}

nvmlReturn_t nv_processes(unsigned int dev, struct nv_process **list, unsigned int *n)
{
	nvmlReturn_t rc;

	*list = NULL;
	*n = 0;
	enter();
	rc = refresh(dev, true);
	if (!rc && conn.dev[dev].nproc) {
		size_t bytes = conn.dev[dev].nproc * sizeof **list;

		*list = malloc(bytes);
		if (*list) {
			memcpy(*list, conn.dev[dev].proc, bytes);
			*n = conn.dev[dev].nproc;
		} else {
			rc = NVML_ERROR_MEMORY;
		}
	}
	leave();
	return rc;
}
