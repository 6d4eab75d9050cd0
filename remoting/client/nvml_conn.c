/*
 * The NVML library's own light connections, one to each owner of the lease: they
 * observe it, compute nothing, and cost the program nothing before nvmlInit. The
 * devices of all owners are one list, in the order of the owners.
 *
 * Flow: nv_open connects, sends HELLO (observe) and keeps the device snapshots
 * of the WELCOMEs. nv_read and nv_processes ask for one device's readings with
 * an OBSERVE frame when those at hand are older than 200 ms. The socket is
 * used by one thread at a time; there is no thread and no signal of our own.
 * Every exchange has 5 seconds from begin to end. A worker that closed the
 * connection meanwhile (it may drop idle observers) is called again once;
 * when that fails too, callers are told so at once for a while, so that a
 * program that asks forty questions does not wait forty times.
 *
 * Locking: lock guards everything in conn but snapshot, which nv_open fills
 * before anybody may read it. A forked child starts with a fresh lock and no
 * connection, since another thread of the parent may have held either at the
 * fork; the count of nvmlInit lives on, as it does with the real library.
 *
 * Nothing that the worker sends is trusted: sizes are checked before they are
 * used, counts against what the payload can hold, text is cut and cleaned.
 */
#define _GNU_SOURCE
#include "nvml.h"
#include "wire.h"
#include "lease.h"
#include "deadline.h"
#include "version.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* The longest honest reply is an OBSERVE with all processes, below 66 KiB. */
#define FRAME_MAX (128u << 10)
#define EXCHANGE_MS 5000
#define FRESH_MS 200
#define RETRY_MS 1000
#define CONF_MAX 4096

struct cached {
	bool valid;
	int64_t at;	/* ms, monotonic */
	struct nv_readings r;
	uint32_t nproc;
	struct nv_process *proc;
};

/* One owner's connection. */
struct link {
	int fd;			/* -1: none */
	uint32_t call;
	int64_t retry_at;	/* after a failure: not before this */
	uint32_t first, ndev;	/* its devices among all */
};

static struct {
	atomic_int owner;	/* the process that the lock belongs to; negative while it takes over */
	pthread_mutex_t lock;
	atomic_uint opened;
	unsigned nlinks;
	struct link link[NV_MAX_DEVICES];
	struct cached dev[NV_MAX_DEVICES];
	struct nv_snapshot snapshot;
} conn = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- small things ---- */

void nv_log(int level, const char *fmt, ...)
{
	static const char *const names[] = { "error", "warn", "info", "debug" };
	const char *want = getenv("SLUICE_LOG");
	char line[512];
	va_list ap;
	int max = -1, n, k;

	if (!want)
		return;
	for (k = 0; k < 4; k++)
		if (!strcmp(want, names[k]))
			max = k;
	if (level > max)
		return;
	n = snprintf(line, sizeof line, "sluice: nvml: ");
	va_start(ap, fmt);
	k = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	if (k < 0)
		return;
	n += k;
	if ((size_t)n > sizeof line - 2)
		n = sizeof line - 2;
	line[n++] = '\n';
	if (write(2, line, (size_t)n) < 0)
		return; /* a closed stderr is the program's own wish */
}

/* Text of a fixed field: up to its NUL, printable ASCII, always terminated. */
static void take_text(char *dst, size_t cap, const uint8_t *src, size_t n)
{
	size_t i;

	for (i = 0; i < n && i + 1 < cap && src[i]; i++)
		dst[i] = src[i] >= 0x20 && src[i] < 0x7f ? (char)src[i] : '?';
	dst[i] = 0;
}

/* Reads a payload front to back; whatever is past its end reads as 0 and sets bad. */
struct reader {
	const uint8_t *p;
	size_t n, off;
	bool bad;
};

static const uint8_t *take(struct reader *r, size_t n)
{
	static const uint8_t zero[128];
	const uint8_t *p = r->p + r->off;

	if (r->bad || n > r->n - r->off) {
		r->bad = true;
		return zero; /* callers take at most 96 bytes at a time */
	}
	r->off += n;
	return p;
}

static uint32_t take32(struct reader *r)
{
	const uint8_t *p = take(r, 4);

	return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* A message of wire.h; zeroes when it is short. */
static void take_into(struct reader *r, void *p, size_t n)
{
	memset(p, 0, n);
	if (!r->bad && n <= r->n - r->off) {
		memcpy(p, r->p + r->off, n);
		r->off += n;
	} else {
		r->bad = true;
	}
}

static void hang_up(struct link *l)
{
	if (l->fd >= 0)
		close(l->fd);
	l->fd = -1;
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
			for (int i = 0; i < NV_MAX_DEVICES; i++) {
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

/* ---- where the worker is ---- */

struct where {
	char worker[1024];	/* addresses with commas */
	char socket[1024];	/* of the lease; goes before the addresses when not empty */
	uint8_t token[16];
};

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse_token(uint8_t token[16], const char *s)
{
	memset(token, 0, 16);
	if (!*s)
		return true;
	for (int i = 0; i < 32; i++) {
		int v = hex(s[i]);

		if (v < 0)
			return false;
		token[i / 2] = (uint8_t)(token[i / 2] << 4 | v);
	}
	return !s[32];
}

/* The value of key in KEY=VALUE lines, copied to dst; false when absent or too long. */
static bool conf_value(const char *text, const char *key, char *dst, size_t cap)
{
	size_t klen = strlen(key);

	while (*text) {
		const char *end = strchr(text, '\n');
		size_t n = end ? (size_t)(end - text) : strlen(text);

		if (n > klen && !memcmp(text, key, klen) && text[klen] == '=') {
			size_t v = n - klen - 1;

			while (v && (text[klen + v] == ' ' || text[klen + v] == '\r'))
				v--;
			if (v >= cap)
				return false;
			memcpy(dst, text + klen + 1, v);
			dst[v] = 0;
			return true;
		}
		text += end ? n + 1 : n;
	}
	return false;
}

/*
 * sluice.conf beside this library: how a container without our environment finds the worker.
 * Where only the library could be put, it is where a container has it all.
 * O_NONBLOCK: a FIFO in its place must not hang the program.
 */
static int open_conf(void)
{
	const int how = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
	const char *slash;
	char path[4096];
	Dl_info info;
	size_t n;
	int fd = -1;

	if (dladdr((const void *)conf_value, &info) && info.dli_fname && (slash = strrchr(info.dli_fname, '/'))) {
		n = (size_t)(slash - info.dli_fname) + 1;
		if (n + sizeof "sluice.conf" <= sizeof path) {
			memcpy(path, info.dli_fname, n);
			memcpy(path + n, "sluice.conf", sizeof "sluice.conf");
			fd = open(path, how);
		}
	}
	return fd < 0 ? open("/usr/lib/sluice/sluice.conf", how) : fd;
}

static bool read_conf(char text[CONF_MAX])
{
	size_t got = 0;
	int fd = open_conf();

	if (fd < 0)
		return false;
	while (got < CONF_MAX - 1) {
		ssize_t r = read(fd, text + got, CONF_MAX - 1 - got);

		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			break;
		got += (size_t)r;
	}
	close(fd);
	text[got] = 0;
	return got > 0;
}

static bool from_env(const char *key, char *dst, size_t cap)
{
	const char *v = getenv(key);

	if (!v || !*v)
		return true;
	if (strlen(v) >= cap) {
		nv_log(NV_ERROR, "%s is longer than %zu bytes", key, cap - 1);
		return false;
	}
	strcpy(dst, v);
	return true;
}

/* The environment before the file: who sets a variable by hand means it. */
static bool find_worker(struct where *w)
{
	const char *lease = getenv("SLUICE_LEASE");
	char text[CONF_MAX], token[64] = "";

	memset(w, 0, sizeof *w);
	if (!from_env("SLUICE_SOCKET", w->socket, sizeof w->socket) || !from_env("SLUICE_WORKER", w->worker, sizeof w->worker))
		return false;
	if (!*w->socket && !*w->worker) {
		if (!read_conf(text) || (!conf_value(text, "SLUICE_SOCKET", w->socket, sizeof w->socket) &&
					 !conf_value(text, "SLUICE_WORKER", w->worker, sizeof w->worker))) {
			nv_log(NV_ERROR, "neither SLUICE_SOCKET nor SLUICE_WORKER is set and there is no sluice.conf beside this library; start the program with sluice run");
			return false;
		}
		if (!lease && conf_value(text, "SLUICE_LEASE", token, sizeof token))
			lease = token;
	}
	/* The daemon knows the lease by its socket; a worker alone is told. */
	if (!*w->socket && !parse_token(w->token, lease ? lease : "")) {
		nv_log(NV_ERROR, "SLUICE_LEASE is not 32 hexadecimal digits");
		return false;
	}
	return true;
}

/* ---- bytes, each with the exchange's deadline ---- */

static bool send_all(int fd, const uint8_t *p, size_t n, int64_t deadline)
{
	while (n) {
		ssize_t r = send(fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (r > 0) {
			p += r;
			n -= (size_t)r;
		} else if (r < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			if (!sl_wait_fd(fd, POLLOUT, deadline))
				return false;
		} else if (r == 0 || errno != EINTR) {
			return false;
		}
	}
	return true;
}

static bool recv_all(int fd, uint8_t *p, size_t n, int64_t deadline)
{
	while (n) {
		ssize_t r = recv(fd, p, n, MSG_DONTWAIT);

		if (r > 0) {
			p += r;
			n -= (size_t)r;
		} else if (r == 0) {
			errno = ECONNRESET;
			return false;
		} else if (errno == EAGAIN || errno == EWOULDBLOCK) {
			if (!sl_wait_fd(fd, POLLIN, deadline))
				return false;
		} else if (errno != EINTR) {
			return false;
		}
	}
	return true;
}

static int connect_to(const struct sockaddr *sa, socklen_t len, int64_t deadline)
{
	int fd = socket(sa->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int err = 0, one = 1;
	socklen_t elen = sizeof err;

	if (fd < 0)
		return -1;
	if (connect(fd, sa, len) < 0) {
		if (errno != EINPROGRESS || !sl_wait_fd(fd, POLLOUT, deadline))
			goto fail;
		if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &elen) < 0)
			goto fail;
		if (err) {
			errno = err;
			goto fail;
		}
	}
	if (sa->sa_family != AF_UNIX)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	return fd;
fail:
	err = errno;
	close(fd);
	errno = err;
	return -1;
}

/* HOST:PORT, [IPV6]:PORT; the first address that answers. */
static int dial_tcp(const char *addr, int64_t deadline)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *list, *a;
	char host[256];
	const char *colon = strrchr(addr, ':');
	size_t n;
	int fd = -1, e;

	errno = EINVAL;
	if (!colon || colon == addr || (size_t)(colon - addr) >= sizeof host)
		return -1;
	n = (size_t)(colon - addr);
	if (addr[0] == '[' && n > 2 && addr[n - 1] == ']') {
		addr++;
		n -= 2;
	}
	memcpy(host, addr, n);
	host[n] = 0;
	e = getaddrinfo(host, colon + 1, &hints, &list);
	if (e) {
		nv_log(NV_ERROR, "worker %s: the name does not resolve", host);
		errno = EHOSTUNREACH;
		return -1;
	}
	for (a = list; a && fd < 0; a = a->ai_next)
		fd = connect_to(a->ai_addr, a->ai_addrlen, deadline);
	e = errno;
	freeaddrinfo(list);
	errno = e;
	return fd;
}

/* ---- HELLO and WELCOME ---- */

static bool say_hello(int fd, const struct where *w, int64_t deadline)
{
	struct wire_hello h = { .version = SL_VERSION, .kind = SL_SESSION_OBSERVE, .pid = (uint32_t)getpid(), .uid = (uint32_t)geteuid() };
	int comm;

	memcpy(h.magic, SL_HELLO_MAGIC, sizeof h.magic);
	memcpy(h.fingerprint, sl_fingerprint, sizeof h.fingerprint);
	memcpy(h.token, w->token, sizeof h.token);
	comm = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	if (comm >= 0) {
		ssize_t n = read(comm, h.program, sizeof h.program - 1);

		/* The kernel ends the name with a newline. */
		if (n > 0 && h.program[n - 1] == '\n')
			h.program[n - 1] = 0;
		close(comm);
	}
	return send_all(fd, (const uint8_t *)&h, sizeof h, deadline);
}

static bool parse_device(struct reader *r, struct nv_device *d)
{
	struct wire_device_head h;
	uint32_t n, i;

	take_into(r, &h, sizeof h);
	take_text(d->name, sizeof d->name, (const uint8_t *)h.name, sizeof h.name);
	memcpy(d->uuid, h.uuid, sizeof d->uuid);
	d->domain = (uint32_t)h.pci_domain;
	d->bus = (uint32_t)h.pci_bus;
	d->device = (uint32_t)h.pci_dev;
	d->cc_major = h.cc_major;
	d->cc_minor = h.cc_minor;
	n = h.nattr;
	if (n > SL_MAX_ATTRS)
		return false;
	for (i = 0; i < n; i++) {
		int32_t v = (int32_t)take32(r);

		if (i < NV_NATTR)
			d->attr[i] = v;
	}
	for (i = 0; i < n; i++) {
		uint8_t ok = *take(r, 1);

		if (i < NV_NATTR)
			d->attr_ok[i] = ok == 1;
	}
	if (r->off % 8)
		take(r, 8 - r->off % 8);
	return !r->bad;
}

static bool parse_snapshot(const uint8_t *p, size_t n, struct nv_snapshot *s)
{
	struct reader r = { .p = p, .n = n };
	struct wire_snapshot_head h;

	memset(s, 0, sizeof *s);
	take_into(&r, &h, sizeof h);
	s->driver_version = h.driver_version;
	s->ndev = h.ndev;
	take_text(s->driver, sizeof s->driver, (const uint8_t *)h.driver_string, sizeof h.driver_string);
	if (r.bad || s->ndev > NV_MAX_DEVICES)
		return false;
	for (uint32_t i = 0; i < s->ndev; i++)
		if (!parse_device(&r, &s->dev[i]))
			return false;
	return r.off == r.n;
}

/* Reads a WELCOME into a fresh snapshot. */
static nvmlReturn_t hear_welcome(int fd, struct nv_snapshot *s, int64_t deadline)
{
	struct wire_welcome head;
	uint8_t *body;
	char reason[200];
	uint32_t n;
	nvmlReturn_t rc = NVML_ERROR_UNKNOWN;

	if (!recv_all(fd, (uint8_t *)&head, sizeof head, deadline)) {
		nv_log(NV_ERROR, "worker: no welcome: %s", errno == ETIMEDOUT ? "no answer in 5 s" : "connection closed");
		return rc;
	}
	n = head.size;
	if (head.magic != SL_WELCOME_MAGIC) {
		nv_log(NV_ERROR, "worker: not a sluice worker at that address");
		return rc;
	}
	if (n > SL_MAX_WELCOME) {
		nv_log(NV_ERROR, "worker: welcome of %u bytes is beyond the limit", n);
		return rc;
	}
	body = malloc(n ? n : 1);
	if (!body)
		return NVML_ERROR_MEMORY;
	if (!recv_all(fd, body, n, deadline)) {
		nv_log(NV_ERROR, "worker: welcome cut short");
	} else if (head.status) {
		take_text(reason, sizeof reason, body, n);
		nv_log(NV_ERROR, "worker refuses: %s", reason);
		rc = head.status == SL_STATUS_VERSION || head.status == SL_STATUS_FINGERPRINT ? NVML_ERROR_LIB_RM_VERSION_MISMATCH :
		     head.status == SL_STATUS_LEASE ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_UNKNOWN;
	} else if (head.version != SL_VERSION) {
		nv_log(NV_ERROR, "worker speaks version %u, this library %u", head.version, SL_VERSION);
		rc = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	} else if (!parse_snapshot(body, n, s)) {
		nv_log(NV_ERROR, "worker: malformed snapshot");
	} else {
		rc = NVML_SUCCESS;
	}
	free(body);
	return rc;
}

static int dial_lease(const char *path, unsigned owner, unsigned *owners, nvmlReturn_t *rc)
{
	struct sl_lease_answer a;
	int fd = sl_lease_open(path, SL_SESSION_OBSERVE, owner, EXCHANGE_MS, &a);

	if (fd >= 0) {
		*owners = a.owners;
		return fd;
	}
	nv_log(NV_ERROR, "%s", a.reason);
	*rc = a.status == SL_STATUS_LEASE ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_DRIVER_NOT_LOADED;
	return -1;
}

/* An address of SLUICE_WORKER's list. */
static int dial_worker(const char *list, unsigned owner, unsigned *owners, nvmlReturn_t *rc)
{
	int64_t deadline = sl_now_ms() + EXCHANGE_MS;
	char where[sizeof ((struct where *)0)->worker];
	size_t n;
	int fd;

	*rc = NVML_ERROR_DRIVER_NOT_LOADED;
	*owners = 1;
	for (const char *p = list; *p; p++)
		*owners += *p == ',';
	for (; owner && *list; list++)
		owner -= *list == ',';
	n = strcspn(list, ",");
	memcpy(where, list, n);
	where[n] = 0;
	if (!strncmp(where, "unix:", 5)) {
		fd = sl_unix_dial(where + 5, EXCHANGE_MS, false);
	} else if (!strncmp(where, "tcp:", 4)) {
		fd = dial_tcp(where + 4, deadline);
	} else {
		nv_log(NV_ERROR, "SLUICE_WORKER %s is neither tcp:HOST:PORT nor unix:PATH", where);
		return -1;
	}
	if (fd < 0)
		nv_log(NV_ERROR, "worker %s cannot be reached: error %d", where, errno);
	return fd;
}

/* Connects to one owner; on success its link's fd is set and *s filled. Called with the lock held. */
static nvmlReturn_t dial(unsigned owner, unsigned *owners, struct nv_snapshot *s)
{
	int64_t deadline;
	struct where w;
	nvmlReturn_t rc;
	int fd;

	if (!find_worker(&w))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	fd = *w.socket ? dial_lease(w.socket, owner, owners, &rc) : dial_worker(w.worker, owner, owners, &rc);
	if (fd < 0)
		return rc;
	deadline = sl_now_ms() + EXCHANGE_MS;
	if (!say_hello(fd, &w, deadline)) {
		close(fd);
		return NVML_ERROR_UNKNOWN;
	}
	rc = hear_welcome(fd, s, deadline);
	if (rc) {
		close(fd);
		return rc;
	}
	conn.link[owner].fd = fd;
	conn.link[owner].call = 0;
	return NVML_SUCCESS;
}

/* Dials every owner and makes one list of their devices. Called with the lock held. */
static nvmlReturn_t dial_all(void)
{
	struct nv_snapshot *s = malloc(sizeof *s), *all = &conn.snapshot;
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
			*all = (struct nv_snapshot){ .driver_version = s->driver_version };
		if (!i)
			memcpy(all->driver, s->driver, sizeof all->driver);
		/* One library, one driver: the oldest is what all of them can do. */
		if (s->driver_version < all->driver_version) {
			all->driver_version = s->driver_version;
			memcpy(all->driver, s->driver, sizeof all->driver);
		}
		if (owners > NV_MAX_DEVICES || s->ndev > NV_MAX_DEVICES - all->ndev) {
			nv_log(NV_ERROR, "the lease has more than %d owners or devices", NV_MAX_DEVICES);
			rc = NVML_ERROR_INSUFFICIENT_SIZE;
			break;
		}
		conn.link[i].first = all->ndev;
		conn.link[i].ndev = s->ndev;
		memcpy(all->dev + all->ndev, s->dev, s->ndev * sizeof *s->dev);
		all->ndev += s->ndev;
	}
	for (unsigned i = 0; rc && i < conn.nlinks; i++)
		hang_up(&conn.link[i]);
	free(s);
	if (!rc)
		nv_log(NV_INFO, "%s", sl_version);
	return rc;
}

/* Dials again after a loss. The devices must be the ones that the program knows. */
static nvmlReturn_t redial(struct link *l)
{
	struct nv_snapshot *s = malloc(sizeof *s);
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
			nv_log(NV_ERROR, "worker came back with other devices");
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
	struct reader r = { .p = p, .n = n };
	struct nv_readings *v = &c->r;
	struct nv_process *list = NULL;
	struct wire_observe_reply h;
	uint32_t nproc;

	take_into(&r, &h, sizeof h);
	*v = (struct nv_readings){
		.mem_total = h.mem_total, .mem_used = h.mem_used, .mem_free = h.mem_free, .util_gpu = h.util_gpu, .util_mem = h.util_mem,
		.temp_c = h.temp, .power_mw = h.power_mw, .power_limit_mw = h.power_limit_mw, .sm_mhz = h.sm_mhz, .mem_mhz = h.mem_mhz,
		.pstate = h.pstate, .fan = h.fan, .persistence = h.persistence,
	};
	nproc = h.nproc;
	if (r.bad || nproc > NV_MAX_PROCS || r.n - r.off != nproc * sizeof(struct wire_process))
		return false;
	/* Programs subtract these from each other; keep the differences sane. */
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

		take_into(&r, &q, sizeof q);
		list[i].pid = q.pid;
		list[i].used = q.used;
		take_text(list[i].name, sizeof list[i].name, (const uint8_t *)q.name, sizeof q.name);
	}
	free(c->proc);
	c->proc = list;
	c->nproc = nproc;
	return true;
}

struct frame {
	struct wire_reply h;
	uint8_t *body;	/* the caller frees it */
};

static bool recv_frame(int fd, struct frame *f, int64_t deadline)
{
	f->body = NULL;
	if (!recv_all(fd, (uint8_t *)&f->h, sizeof f->h, deadline))
		return false;
	if (f->h.size > FRAME_MAX) {
		nv_log(NV_ERROR, "worker: frame of %u bytes is beyond the limit", f->h.size);
		return false;
	}
	f->body = malloc(f->h.size ? f->h.size : 1);
	if (f->body && recv_all(fd, f->body, f->h.size, deadline))
		return true;
	free(f->body);
	return false;
}

/* One OBSERVE on the open connection; false when the connection is of no use any more. */
static bool observe(struct link *l, uint32_t dev, struct cached *c)
{
	int64_t deadline = sl_now_ms() + EXCHANGE_MS;
	struct { struct wire_request h; struct wire_observe what; } req = { .what.device = dev - l->first };
	struct frame f;
	bool ok;

	if (!++l->call)
		l->call = 1;
	req.h = (struct wire_request){ .size = sizeof req.what, .op = CTL_OBSERVE, .flags = SL_FLAG_WAIT, .call = l->call };
	if (!send_all(l->fd, (const uint8_t *)&req, sizeof req, deadline))
		return false;
	for (;;) {
		if (!recv_frame(l->fd, &f, deadline))
			return false;
		if (f.h.kind == SL_FRAME_REPLY)
			break;
		free(f.body);
		if (f.h.kind == SL_FRAME_BYE) {
			nv_log(NV_WARN, "worker ended the session");
			return false;
		}
		/* A keep-alive, or news of no interest to an observer. */
		if (sl_now_ms() >= deadline)
			return false;
	}
	ok = f.h.call == l->call && !f.h.result && parse_readings(f.body, f.h.size, c);
	if (!ok)
		nv_log(NV_WARN, "worker: no readings of device %u: call %u, result %d, %u bytes", dev, f.h.call, f.h.result, f.h.size);
	free(f.body);
	return ok;
}

/* Makes the device's readings fresh; now: as of this call. Called with the lock held. */
static nvmlReturn_t refresh(unsigned int dev, bool now)
{
	struct cached *c = &conn.dev[dev];
	struct link *l = conn.link;
	nvmlReturn_t rc = NVML_ERROR_GPU_IS_LOST;
	bool idle;

	if (c->valid && !now && sl_now_ms() - c->at < FRESH_MS)
		return NVML_SUCCESS;
	while (dev - l->first >= l->ndev)
		l++;
	if (sl_now_ms() < l->retry_at)
		return NVML_ERROR_GPU_IS_LOST;
	/* The connection may have been closed while it was idle: once more, with a new one. */
	idle = l->fd >= 0;
	for (int tries = idle ? 2 : 1; tries; tries--) {
		if (l->fd < 0) {
			rc = redial(l);
			if (rc)
				break;
		}
		if (observe(l, dev, c)) {
			c->valid = true;
			c->at = sl_now_ms();
			return NVML_SUCCESS;
		}
		rc = NVML_ERROR_GPU_IS_LOST;
		hang_up(l);
	}
	c->valid = false;
	l->retry_at = sl_now_ms() + RETRY_MS;
	return rc;
}

/* ---- for nvml.c ---- */

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
		for (int i = 0; i < NV_MAX_DEVICES; i++) {
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

const struct nv_snapshot *nv_facts(void)
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
