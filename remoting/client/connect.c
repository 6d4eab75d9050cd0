/*
 * The one way to a worker, see connect.h.
 *
 * Flow: find_worker says where it is; dial connects, over the lease's socket or
 * straight; greet sends HELLO and decodes WELCOME; the shared memory's descriptor
 * comes behind it.
 *
 * Locking: nothing is shared that changes once a session has begun, but for the addresses of dial.c, so a forked child may
 * connect whatever the other threads of its parent were doing. Every byte from the worker is bounded before it
 * is used; every wait has an end.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "conf.h"
#include "connect.h"
#include "deadline.h"
#include "dial.h"
#include "exchange.h"
#include "forms.h"
#include "lease.h"
#include "log.h"
#include "reader.h"

#define MAX_ADDRESS 512
#define AGAIN_LEAST_MS 10	/* pauses between attempts */
#define AGAIN_MOST_MS 800	/* less than a second, for nanosleep */

/* ---- where the worker is ---- */

struct where {
	const char *socket;	/* the lease's socket; wins over the addresses */
	const char *workers;	/* addresses with commas */
	uint8_t token[16];	/* the lease's token, for a worker that is asked directly */
};

static const char *from_env(const char *key)
{
	const char *v = getenv(key);

	return v && *v ? v : NULL;
}

static const char *from_conf(const char *key)
{
	const char *v = sl_conf_value(key);

	return v && *v ? v : NULL;
}

static int hex(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool parse_token(uint8_t token[16], const char *s)
{
	if (!s)
		return true;
	if (strlen(s) != 32)
		return false;
	for (int i = 0; i < 16; i++) {
		int a = hex(s[2 * i]), b = hex(s[2 * i + 1]);

		if (a < 0 || b < 0)
			return false;
		token[i] = (uint8_t)(a << 4 | b);
	}
	return true;
}

/* The environment wins over the file: somebody set the variable by hand for a reason. */
static enum sl_connected find_worker(struct where *w)
{
	const char *lease = from_env("SLUICE_LEASE");

	memset(w, 0, sizeof *w);
	w->socket = from_env("SLUICE_SOCKET");
	w->workers = from_env("SLUICE_WORKER");
	if (!w->socket && !w->workers) {
		if (sl_conf_too_large()) {
			sl_log(SL_ERROR, "sluice.conf is larger than %d bytes and is not used", SL_CONF_MAX);
			return SL_NO_ADDRESS;
		}
		w->socket = from_conf("SLUICE_SOCKET");
		w->workers = from_conf("SLUICE_WORKER");
		if (!lease)
			lease = from_conf("SLUICE_LEASE");
	}
	if (!w->socket && !w->workers) {
		sl_log(SL_WARN, "neither SLUICE_SOCKET nor SLUICE_WORKER is set and there is no sluice.conf beside this library; "
		       "start the program with sluice run");
		return SL_NO_ADDRESS;
	}
	/* The daemon knows the lease by its socket; a worker that is asked directly needs the token. */
	if (!w->socket && !parse_token(w->token, lease)) {
		sl_log(SL_ERROR, "SLUICE_LEASE is not 32 hexadecimal digits");
		return SL_DENIED;
	}
	return SL_CONNECTED;
}

/* ---- connecting ---- */

/* Says why a step has failed. */
__attribute__((format(printf, 2, 3)))
static void failed(const struct sl_ask *ask, const char *format, ...)
{
	char text[SL_WHY];
	va_list v;

	va_start(v, format);
	vsnprintf(ask->why ? ask->why : text, SL_WHY, format, v);
	va_end(v);
	if (!ask->why)
		sl_log(ask->quiet ? SL_DEBUG : SL_ERROR, "%s", text);
}

/* When a step ends that begins now. */
static int64_t step_end(const struct sl_ask *ask)
{
	return sl_deadline(ask->patience_ms, ask->until);
}

static int dial_tcp(const char *where, const struct sl_ask *ask)
{
	switch (ask->kind) {
	case SL_SESSION_ATTACH:
		return sl_dial_again(where, ask->owner, step_end(ask), ask->until);
	case SL_SESSION_BULK:
		return sl_dial_beside(ask->owner, step_end(ask));
	default:
		return sl_dial(where, ask->owner, ask->kind == SL_SESSION_COMPUTE, step_end(ask));
	}
}

/* One address of the list. */
static enum sl_connected dial_worker(const char *list, const struct sl_ask *ask, struct sl_connection *c, bool *local)
{
	unsigned skip = ask->owner;
	char where[MAX_ADDRESS];
	size_t n;

	c->owners = 1;
	for (const char *p = list; *p; p++)
		c->owners += *p == ',';
	if (c->owners > SL_MAX_OWNERS) {
		sl_log(SL_ERROR, "SLUICE_WORKER: the lease is spread over %u owners: a program can use %d", c->owners, SL_MAX_OWNERS);
		return SL_NO_ADDRESS;
	}
	for (; skip && *list; list++)
		skip -= *list == ',';
	n = strcspn(list, ",");
	if (n >= sizeof where) {
		sl_log(SL_ERROR, "SLUICE_WORKER: an address is longer than %zu bytes", sizeof where - 1);
		return SL_NO_ADDRESS;
	}
	memcpy(where, list, n);
	where[n] = 0;
	*local = !strncmp(where, "unix:", 5);
	if (*local) {
		c->fd = sl_unix_dial(where + 5, sl_deadline(SL_LEASE_PATIENCE_MS, ask->until), false);
	} else if (!strncmp(where, "tcp:", 4)) {
		c->fd = dial_tcp(where + 4, ask);
	} else {
		sl_log(SL_ERROR, "SLUICE_WORKER=%s: want tcp:HOST:PORT or unix:PATH", where);
		return SL_NO_ADDRESS;
	}
	if (c->fd < 0) {
		failed(ask, "worker %s: %s; is it running and reachable from here?", where, strerror(errno));
		return SL_UNREACHABLE;
	}
	return SL_CONNECTED;
}

/* The result that a status other than SL_STATUS_OK stands for. */
static enum sl_connected refused(uint32_t status)
{
	switch (status) {
	case SL_STATUS_VERSION:
	case SL_STATUS_FINGERPRINT:
		return SL_MISMATCH;
	case SL_STATUS_LEASE:
		return SL_DENIED;
	case SL_STATUS_NO_MEMORY:
		return SL_NO_ROOM;
	default:
		return SL_BROKEN;
	}
}

static enum sl_connected dial_lease(const char *path, const struct sl_ask *ask, struct sl_connection *c, bool *local)
{
	struct sl_lease_answer a;

	c->fd = sl_lease_open(path, ask->kind, ask->owner, ask->patience_ms, ask->until, &a);
	if (c->fd >= 0) {
		*local = a.shm;
		c->owners = a.owners;
		return SL_CONNECTED;
	}
	failed(ask, "%s", a.reason);
	return a.status && a.status != ~0u ? refused(a.status) : SL_UNREACHABLE;
}

/* ---- HELLO and WELCOME ---- */

static bool decode_device(struct sl_reader *r, struct sl_device *d)
{
	struct wire_device_head h;
	uint8_t pad[8];

	sl_read(r, &h, sizeof h);
	if (h.nattr > SL_MAX_ATTRS)
		return false;
	sl_text(d->name, sizeof d->name, h.name, sizeof h.name);
	memcpy(d->uuid, h.uuid, sizeof d->uuid);
	d->total_mem = h.total_mem;
	d->physical_mem = h.physical_mem;
	d->pci_domain = h.pci_domain;
	d->pci_bus = h.pci_bus;
	d->pci_device = h.pci_dev;
	sl_text(d->pci_bus_id, sizeof d->pci_bus_id, h.pci_bus_id, sizeof h.pci_bus_id);
	d->gran_min = h.gran_min;
	d->gran_rec = h.gran_rec;
	d->prio_least = h.prio_least;
	d->prio_greatest = h.prio_greatest;
	d->tex1d_max_width = h.tex1d_max_width;
	memcpy(d->limits, h.limits, sizeof d->limits);
	d->cc_major = h.cc_major;
	d->cc_minor = h.cc_minor;
	d->nattr = h.nattr;
	sl_read(r, d->attr, d->nattr * sizeof d->attr[0]);
	sl_read(r, d->attr_ok, d->nattr);
	sl_read(r, pad, (8 - r->off % 8) % 8);
	return !r->bad;
}

bool sl_snapshot_decode(struct sl_snapshot *s, const void *data, size_t n)
{
	struct sl_reader r = { .p = data, .n = n };
	struct wire_snapshot_head h;

	memset(s, 0, sizeof *s);
	sl_read(&r, &h, sizeof h);
	if (r.bad || h.ndev > SL_MAX_DEVICES || h.keepalive_ms < SL_KEEPALIVE_LEAST_MS || h.keepalive_ms > SL_KEEPALIVE_MOST_MS)
		return false;
	s->driver_version = h.driver_version;
	s->ndev = h.ndev;
	s->keepalive_ms = h.keepalive_ms;
	s->features = h.features;
	sl_text(s->driver_string, sizeof s->driver_string, h.driver_string, sizeof h.driver_string);
	sl_text(s->driver_branch, sizeof s->driver_branch, h.driver_branch, sizeof h.driver_branch);
	for (uint32_t i = 0; i < s->ndev; i++)
		if (!decode_device(&r, &s->dev[i]))
			return false;
	return r.off == r.n;
}

bool sl_snapshot_add(struct sl_snapshot *all, const struct sl_snapshot *one)
{
	if (one->ndev > SL_MAX_DEVICES - all->ndev) {
		sl_log(SL_ERROR, "the lease has more than %d devices", SL_MAX_DEVICES);
		return false;
	}
	if (!all->ndev || one->driver_version < all->driver_version) {
		all->driver_version = one->driver_version;
		memcpy(all->driver_string, one->driver_string, sizeof all->driver_string);
		memcpy(all->driver_branch, one->driver_branch, sizeof all->driver_branch);
	}
	if (!all->ndev) {
		all->keepalive_ms = one->keepalive_ms;
		all->features = one->features;
	}
	memcpy(all->dev + all->ndev, one->dev, one->ndev * sizeof *one->dev);
	all->ndev += one->ndev;
	return true;
}

static bool say_hello(int fd, const struct sl_ask *ask, bool shm, const uint8_t token[16], uint32_t session, int64_t deadline)
{
	struct wire_hello h = {
		.version = SL_VERSION, .kind = ask->kind, .features = shm ? SL_FEATURE_SHM : (ask->resume ? SL_FEATURE_RESUME : 0) | (ask->compress ? SL_FEATURE_COMPRESS : 0) |
			    (ask->rdma ? SL_FEATURE_RDMA : 0),
		.pid = (uint32_t)getpid(), .uid = (uint32_t)geteuid(), .mem = session,
	};

	memcpy(h.magic, SL_HELLO_MAGIC, sizeof h.magic);
	memcpy(h.fingerprint, sl_fingerprint, sizeof h.fingerprint);
	memcpy(h.token, token, sizeof h.token);
	sl_program_name(h.program, sizeof h.program);
	return sl_send_all(fd, &h, sizeof h, deadline);
}

/* Judges a WELCOME, whose payload of w->size bytes is at data. */
static enum sl_connected hear(const struct wire_welcome *w, const uint8_t *data, struct sl_snapshot *snap)
{
	char reason[512];

	if (w->status) {
		sl_text(reason, sizeof reason, data, w->size);
		sl_log(SL_ERROR, "the worker refused this session: %s", reason);
		return refused(w->status);
	}
	if (w->version != SL_VERSION) {
		sl_log(SL_ERROR, "the worker speaks version %u, this library version %d", w->version, SL_VERSION);
		return SL_MISMATCH;
	}
	if (!sl_snapshot_decode(snap, data, w->size)) {
		sl_log(SL_ERROR, "the worker's welcome is malformed");
		return SL_BROKEN;
	}
	return SL_CONNECTED;
}

/* The connection has failed. *lost: another one may do better, which it does not where nobody answers or what came makes no sense. */
static enum sl_connected broken(const struct sl_ask *ask, const char *what, bool *lost)
{
	*lost = errno != ETIMEDOUT && errno != EPROTO;
	failed(ask, "%s: %s", what, strerror(errno));
	return SL_BROKEN;
}

/* Receives a WELCOME and its payload, which the caller frees. */
static enum sl_connected receive(int fd, const struct sl_ask *ask, struct wire_welcome *w, uint8_t **data, int64_t deadline, bool *lost)
{
	enum sl_connected rc;

	if (!sl_recv_all(fd, w, sizeof *w, NULL, deadline))
		return broken(ask, "the worker did not answer", lost);
	if (w->magic != SL_WELCOME_MAGIC || w->size > SL_MAX_WELCOME) {
		sl_log(SL_ERROR, "what answers there is not a Sluice worker");
		return SL_BROKEN;
	}
	*data = malloc(w->size + 1u);
	if (!*data)
		return SL_NO_MEMORY;
	if (sl_recv_all(fd, *data, w->size, NULL, deadline))
		return SL_CONNECTED;
	rc = broken(ask, "the worker's welcome was cut short", lost);
	free(*data);
	return rc;
}

/* What a worker of another release knows. */
static enum sl_connected compare(struct sl_connection *c, const uint8_t *data, size_t n)
{
	unsigned lacking = 0;
	const char *differs;

	c->lacks = sl_forms_compare(data, n, &lacking, &differs);
	if (c->lacks) {
		sl_log(SL_INFO, "the worker is of another release and lacks %u of this library's operations", lacking);
		return SL_CONNECTED;
	}
	if (!differs)
		return SL_NO_MEMORY;
	sl_log(SL_ERROR, "the worker is of another release, which differs in %s: install releases that follow each other, or the same one, on both sides", differs);
	return SL_MISMATCH;
}

static enum sl_connected greet(struct sl_connection *c, const struct sl_ask *ask, bool shm, const uint8_t token[16], struct sl_snapshot *snap, bool *lost)
{
	int64_t deadline = step_end(ask);
	struct wire_welcome w;
	enum sl_connected rc;
	uint8_t *data;

	if (!say_hello(c->fd, ask, shm, token, 0, deadline))
		return broken(ask, "the worker did not answer", lost);
	rc = receive(c->fd, ask, &w, &data, deadline, lost);
	if (!rc && w.status == SL_STATUS_FORMS) {
		rc = compare(c, data, w.size);
		free(data);
		if (!rc)
			rc = receive(c->fd, ask, &w, &data, deadline, lost);
	}
	if (rc)
		return rc;
	rc = hear(&w, data, snap);
	free(data);
	return rc;
}

/*
 * Sets the keep-alive time of the connected socket, for the kernel and for our reads. A worker says something four times in that time, so a
 * read notices a link that is dead. TCP_USER_TIMEOUT would do so too, but it also ends a connection whose other side is alive and takes nothing
 * for so long: the worker of a busy GPU.
 */
static void tune(int fd, uint32_t keepalive_ms)
{
	struct timeval tv = { keepalive_ms / 1000, keepalive_ms % 1000 * 1000 };

	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){ 1 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){ 3 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){ 2 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &(int){ 3 }, sizeof(int));
}

/* The way of the sessions of this process, which are made once. The environment may not be read later: the program may be changing it. */
static struct where known;

static bool remember(const struct where *w)
{
	if (known.socket || known.workers)
		return true;
	memcpy(known.token, w->token, sizeof known.token);
	known.socket = w->socket ? strdup(w->socket) : NULL;
	known.workers = w->workers ? strdup(w->workers) : NULL;
	return known.socket || known.workers;
}

/* Says what the connection is for, by a HELLO and n bytes behind it. The answer's payload has to be of m bytes. */
static enum sl_connected ask_further(int fd, const struct sl_ask *ask, uint32_t session, const void *what, size_t n, void *answer, size_t m, char *reason, size_t cap)
{
	int64_t deadline = step_end(ask);
	struct wire_welcome w;
	uint8_t data[512];

	if (!say_hello(fd, ask, false, known.token, session, deadline) || !sl_send_all(fd, what, n, deadline) ||
	    !sl_recv_all(fd, &w, sizeof w, NULL, deadline) || w.magic != SL_WELCOME_MAGIC || w.size > sizeof data ||
	    !sl_recv_all(fd, data, w.size, NULL, deadline))
		return SL_BROKEN;
	if (w.status) {
		sl_text(reason, cap, data, w.size);
		return refused(w.status);
	}
	if (w.version != SL_VERSION || w.size != m)
		return SL_BROKEN;
	if (m)
		memcpy(answer, data, m);
	return SL_CONNECTED;
}

/* Makes a further connection of a session that this process has. */
static enum sl_connected connect_further(const struct sl_ask *ask, uint32_t session, const void *what, size_t n, void *answer, size_t m,
					 uint32_t keepalive_ms, struct sl_connection *c, char *reason, size_t cap)
{
	struct sl_ask from_lease = *ask;
	enum sl_connected rc;
	bool local;
	int fd;

	*reason = 0;
	from_lease.kind |= session << SL_LEASE_KIND_SHIFT;
	rc = known.socket ? dial_lease(known.socket, &from_lease, c, &local) : dial_worker(known.workers, ask, c, &local);
	if (rc)
		return rc;
	rc = ask_further(c->fd, ask, session, what, n, answer, m, reason, cap);
	if (!rc) {
		tune(c->fd, keepalive_ms);
		if (ask->kind == SL_SESSION_ATTACH)
			sl_dial_made(ask->owner);
		return rc;
	}
	fd = c->fd;
	c->fd = -1;
	close(fd);
	return rc;
}

enum sl_connected sl_connect_again(const struct sl_ask *ask, uint32_t session, const struct wire_attach *attach, uint32_t keepalive_ms,
				   struct sl_connection *c, struct wire_attached *answer, char *reason, size_t cap)
{
	return connect_further(ask, session, attach, sizeof *attach, answer, sizeof *answer, keepalive_ms, c, reason, cap);
}

enum sl_connected sl_connect_bulk(const struct sl_ask *ask, uint32_t session, const struct wire_bulk_key *key, uint32_t keepalive_ms,
				  struct sl_connection *c, char *reason, size_t cap)
{
	struct timeval tv = { keepalive_ms / 1000, keepalive_ms % 1000 * 1000 };
	enum sl_connected rc = connect_further(ask, session, key, sizeof *key, NULL, 0, keepalive_ms, c, reason, cap);
	unsigned ms = keepalive_ms;

	/* Its bytes have another way to go. */
	if (!rc) {
		setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv);
		setsockopt(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
	}
	return rc;
}

/* One attempt. *lost: the connection was lost before everything had come. */
static enum sl_connected connect_once(const struct where *w, const struct sl_ask *ask, struct sl_connection *c, struct sl_snapshot *snap, bool *lost)
{
	enum sl_connected rc;
	bool local = false;
	char byte;

	*c = (struct sl_connection){ .fd = -1, .shm = -1 };
	*lost = false;
	rc = w->socket ? dial_lease(w->socket, ask, c, &local) : dial_worker(w->workers, ask, c, &local);
	if (rc)
		return rc;
	rc = greet(c, ask, local && ask->shm, w->token, snap, lost);
	if (!rc && snap->features & SL_FEATURE_SHM) {
		/* One byte behind WELCOME carries the descriptor. */
		if (!local || !ask->shm || !sl_recv_all(c->fd, &byte, 1, &c->shm, step_end(ask)) || c->shm < 0) {
			sl_log(SL_ERROR, "the worker's shared memory did not come with its welcome");
			rc = SL_BROKEN;
		}
	}
	if (!rc && snap->features & SL_FEATURE_RESUME) {
		errno = EPROTO; /* unless it is the connection that fails */
		c->resumable = ask->resume && !(snap->features & SL_FEATURE_SHM) &&
			       sl_recv_all(c->fd, &c->again, sizeof c->again, NULL, step_end(ask));
		if (!c->resumable)
			rc = broken(ask, "the worker's welcome was cut short", lost);
	}
	if (!rc && ask->kind == SL_SESSION_COMPUTE && c->shm < 0 && !remember(w))
		rc = SL_NO_MEMORY;
	if (rc) {
		close(c->fd);
		if (c->shm >= 0)
			close(c->shm);
		free(c->lacks);
		*c = (struct sl_connection){ .fd = -1, .shm = -1 };
		return rc;
	}
	tune(c->fd, snap->keepalive_ms);
	return SL_CONNECTED;
}

enum sl_connected sl_connect(const struct sl_ask *ask, struct sl_connection *c, struct sl_snapshot *snap)
{
	char why[SL_WHY], first[SL_WHY];
	struct sl_ask attempt = *ask;
	enum sl_connected rc;
	int nap = AGAIN_LEAST_MS;
	struct where w;
	bool lost;

	*c = (struct sl_connection){ .fd = -1, .shm = -1 };
	attempt.why = why;
	rc = find_worker(&w);
	if (rc)
		return rc;
	for (;;) {
		*why = 0;
		rc = connect_once(&w, &attempt, c, snap, &lost);
		/* NVML's sessions last no longer than their connections: a program that polls a broken worker is not to wait each time. */
		if (!rc || !lost || ask->kind != SL_SESSION_COMPUTE)
			break;
		if (attempt.until == ask->until) {
			attempt.until = sl_deadline(ask->patience_ms < SL_LEASE_PATIENCE_MS ? ask->patience_ms : SL_LEASE_PATIENCE_MS, ask->until);
			strcpy(first, why);
			sl_log(SL_WARN, "%s; trying again", why);
		}
		if (sl_now_ms() >= attempt.until)
			break;
		nanosleep(&(struct timespec){ 0, nap * 1000000L }, NULL);
		if ((nap *= 2) > AGAIN_MOST_MS)
			nap = AGAIN_MOST_MS;
	}
	/* That the time is up is no reason; that the lease has ended, or nobody listens any more, is one. */
	if (attempt.until != ask->until && sl_now_ms() >= attempt.until)
		strcpy(why, first);
	if (rc && *why)
		sl_log(ask->quiet ? SL_DEBUG : SL_ERROR, "%s", why);
	return rc;
}
