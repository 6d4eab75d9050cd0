/*
 * Finding the worker and shaking hands. Every byte from the worker is bounded
 * before it is used; every wait has an end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "connect.h"
#include "lease.h"

#define CONNECT_MS 10000
#define MAX_CONF (16u << 10)

static char conf[MAX_CONF];

/* Where a container has the library too, should the file not be beside the one that was loaded. */
#define USUAL_CONF "/usr/lib/sluice/sluice.conf"

/* O_NONBLOCK: a FIFO in its place must not hang the program. */
static int open_conf(void)
{
	const int how = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
	char path[4096];
	const char *slash;
	Dl_info info;
	int n, fd = -1;

	if (dladdr((void *)(uintptr_t)sl_config, &info) && info.dli_fname && (slash = strrchr(info.dli_fname, '/'))) {
		n = snprintf(path, sizeof path, "%.*s/sluice.conf", (int)(slash - info.dli_fname), info.dli_fname);
		if (n > 0 && (size_t)n < sizeof path)
			fd = open(path, how);
	}
	return fd < 0 ? open(USUAL_CONF, how) : fd;
}

static void read_conf(void)
{
	int fd = open_conf();
	ssize_t n;

	if (fd < 0)
		return;
	n = read(fd, conf, sizeof conf - 1);
	close(fd);
	conf[n > 0 ? n : 0] = 0;
	for (char *p = conf; *p; p++)
		if (*p == '\n')
			*p = 0, p[0] = '\1';	/* lines end in 1, values are cut there on use */
}

const char *sl_config(const char *key)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	static char values[8][512];
	static const char *keys[8];
	static int nkeys;
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	const char *v = getenv(key), *p;
	size_t n = strlen(key);

	if (v)
		return v;
	pthread_once(&once, read_conf);
	pthread_mutex_lock(&lock);
	for (int i = 0; i < nkeys && !v; i++)
		if (!strcmp(keys[i], key))
			v = values[i];
	for (p = conf; !v && p && *p && nkeys < 8; p = strchr(p, '\1'), p = p ? p + 1 : NULL)
		if (!strncmp(p, key, n) && p[n] == '=') {
			size_t len = strcspn(p + n + 1, "\1");

			if (len >= sizeof values[0])
				len = sizeof values[0] - 1;
			memcpy(values[nkeys], p + n + 1, len);
			keys[nkeys] = key;
			v = values[nkeys++];
		}
	pthread_mutex_unlock(&lock);
	return v;
}

/* Blocking I/O on a non-blocking socket, with a deadline for each step. */
static bool ready(int fd, short what)
{
	struct pollfd p = { .fd = fd, .events = what };
	int n;

	do
		n = poll(&p, 1, CONNECT_MS);
	while (n < 0 && errno == EINTR);
	if (n == 0)
		errno = ETIMEDOUT;
	return n > 0;
}

static bool transfer(int fd, void *buf, size_t n, bool out)
{
	char *p = buf;

	while (n) {
		ssize_t r = out ? send(fd, p, n, MSG_NOSIGNAL) : recv(fd, p, n, 0);

		if (r > 0) {
			p += r;
			n -= (size_t)r;
		} else if (r == 0) {
			errno = ECONNRESET;
			return false;
		} else if (errno == EAGAIN || errno == EWOULDBLOCK) {
			if (!ready(fd, out ? POLLOUT : POLLIN))
				return false;
		} else if (errno != EINTR) {
			return false;
		}
	}
	return true;
}

static int dial(int family, const struct sockaddr *a, socklen_t n)
{
	int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), err = 0;
	socklen_t len = sizeof err;

	if (fd < 0)
		return -1;
	if (!connect(fd, a, n))
		return fd;
	if (errno == EINPROGRESS && ready(fd, POLLOUT)) {
		if (!getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &len) && !err)
			return fd;
		errno = err;
	}
	err = errno;
	close(fd);
	errno = err;
	return -1;
}

static int dial_tcp(const char *where)
{
	struct addrinfo hint = { .ai_socktype = SOCK_STREAM }, *list, *a;
	char host[256];
	const char *colon = strrchr(where, ':');
	size_t n;
	int fd = -1;

	if (!colon || colon == where || (n = (size_t)(colon - where)) >= sizeof host) {
		errno = EINVAL;
		return -1;
	}
	if (where[0] == '[' && colon[-1] == ']') {
		where++;
		n -= 2;
	}
	memcpy(host, where, n);
	host[n] = 0;
	if (getaddrinfo(host, colon + 1, &hint, &list)) {
		errno = EHOSTUNREACH;
		return -1;
	}
	for (a = list; a && fd < 0; a = a->ai_next)
		fd = dial(a->ai_family, a->ai_addr, a->ai_addrlen);
	freeaddrinfo(list);
	return fd;
}

static int hex(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool fill_hello(struct wire_hello *h, uint32_t kind, uint32_t features, const char *lease)
{
	int fd;

	memset(h, 0, sizeof *h);
	memcpy(h->magic, SL_HELLO_MAGIC, sizeof h->magic);
	h->version = SL_VERSION;
	h->kind = kind;
	h->features = features;
	memcpy(h->fingerprint, sl_fingerprint, 32);
	h->pid = (uint32_t)getpid();
	h->uid = (uint32_t)geteuid();
	fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		ssize_t n = read(fd, h->program, sizeof h->program - 1);

		close(fd);
		h->program[n > 0 ? n - 1 : 0] = 0;
	}
	if (!lease || !*lease)
		return true;
	if (strlen(lease) != 32)
		return false;
	for (int i = 0; i < 16; i++) {
		int a = hex(lease[2 * i]), b = hex(lease[2 * i + 1]);

		if (a < 0 || b < 0)
			return false;
		h->token[i] = (uint8_t)(a << 4 | b);
	}
	return true;
}

static bool parse_device(sl_reply *r, struct sl_device *d)
{
	const uint8_t *p;

	sl_get_bytes(r, d->name, 96);
	d->name[96] = 0;
	sl_get_bytes(r, d->uuid, 16);
	d->total_mem = sl_get_u64(r);
	d->physical_mem = sl_get_u64(r);
	d->pci_domain = sl_get_i32(r);
	d->pci_bus = sl_get_i32(r);
	d->pci_device = sl_get_i32(r);
	sl_get_u32(r);
	sl_get_bytes(r, d->pci_bus_id, 24);
	d->pci_bus_id[24] = 0;
	d->gran_min = sl_get_u64(r);
	d->gran_rec = sl_get_u64(r);
	d->prio_least = sl_get_i32(r);
	d->prio_greatest = sl_get_i32(r);
	d->tex1d_max_width = sl_get_u64(r);
	for (int i = 0; i < SL_NUM_LIMITS; i++)
		d->limits[i] = sl_get_u64(r);
	d->cc_major = sl_get_i32(r);
	d->cc_minor = sl_get_i32(r);
	d->nattr = sl_get_u32(r);
	if (d->nattr > SL_MAX_ATTRS)
		return false;
	sl_get_bytes(r, d->attr, d->nattr * sizeof d->attr[0]);
	if ((p = sl_get_ref(r, d->nattr)))
		memcpy(d->attr_ok, p, d->nattr);
	sl_get_ref(r, (8 - r->off % 8) % 8);
	return !r->bad;
}

static bool parse_snapshot(uint8_t *data, size_t n, struct sl_snapshot *s)
{
	sl_reply r = { .data = data, .n = n };

	memset(s, 0, sizeof *s);
	s->driver_version = sl_get_u32(&r);
	s->ndev = sl_get_u32(&r);
	s->keepalive_ms = sl_get_u32(&r);
	s->features = sl_get_u32(&r);
	sl_get_bytes(&r, s->driver_string, 32);
	if (r.bad || s->ndev > SL_MAX_DEVICES || s->keepalive_ms < SL_KEEPALIVE_LEAST_MS || s->keepalive_ms > SL_KEEPALIVE_MOST_MS)
		return false;
	for (uint32_t i = 0; i < s->ndev; i++)
		if (!parse_device(&r, &s->dev[i]))
			return false;
	return true;
}

static CUresult refused(uint32_t status, const char *reason)
{
	sl_log(SL_ERROR, "the worker refused this session: %s", reason);
	switch (status) {
	case SL_STATUS_VERSION:
	case SL_STATUS_FINGERPRINT:
		return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	case SL_STATUS_LEASE:
		return CUDA_ERROR_NOT_PERMITTED;
	case SL_STATUS_NO_MEMORY:
		return CUDA_ERROR_OUT_OF_MEMORY;
	default:
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
}

/* Sends HELLO and reads WELCOME. */
static CUresult handshake(int fd, uint32_t kind, uint32_t features, const char *lease, struct sl_snapshot *snap)
{
	struct wire_welcome w;
	struct wire_hello h;
	uint8_t *data;
	CUresult err = CUDA_ERROR_SYSTEM_NOT_READY;

	if (!fill_hello(&h, kind, features, lease)) {
		sl_log(SL_ERROR, "SLUICE_LEASE is not 32 hexadecimal digits");
		return CUDA_ERROR_NOT_PERMITTED;
	}
	if (!transfer(fd, &h, sizeof h, true) || !transfer(fd, &w, sizeof w, false)) {
		sl_log(SL_ERROR, "the worker did not answer: %s", strerror(errno));
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	if (w.magic != SL_WELCOME_MAGIC || w.size > SL_MAX_WELCOME) {
		sl_log(SL_ERROR, "what answers there is not a Sluice worker");
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	data = malloc(w.size + 1u);
	if (!data)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!transfer(fd, data, w.size, false)) {
		sl_log(SL_ERROR, "the worker broke off its welcome: %s", strerror(errno));
	} else if (w.status) {
		data[w.size] = 0;
		err = refused(w.status, (char *)data);
	} else if (w.version != SL_VERSION || !parse_snapshot(data, w.size, snap)) {
		sl_log(SL_ERROR, "the worker's welcome is malformed");
	} else {
		err = CUDA_SUCCESS;
	}
	free(data);
	return err;
}

/* The one byte behind WELCOME that carries the shared memory's descriptor. */
static int take_descriptor(int fd)
{
	char c, control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = { &c, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *h;
	ssize_t n;
	int got = -1;

	do
		n = ready(fd, POLLIN) ? recvmsg(fd, &m, MSG_CMSG_CLOEXEC) : -1;
	while (n < 0 && errno == EINTR);
	if (n == 1 && (h = CMSG_FIRSTHDR(&m)) && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS &&
	    h->cmsg_len == CMSG_LEN(sizeof got))
		memcpy(&got, CMSG_DATA(h), sizeof got);
	return got;
}

/* Keep-alive of the connected socket, in the kernel and for our reads. */
static void tune(int fd, uint32_t keepalive_ms)
{
	struct timeval tv = { keepalive_ms / 1000, keepalive_ms % 1000 * 1000 };
	unsigned ms = keepalive_ms;

	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){ 1 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){ 3 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){ 2 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &(int){ 3 }, sizeof(int));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
}

/* The environment before the file: who sets a variable by hand means it. */
static bool by_lease(const char **where)
{
	const char *worker = getenv("SLUICE_WORKER"), *socket = getenv("SLUICE_SOCKET");

	if (!(socket && *socket) && !(worker && *worker))
		socket = sl_config("SLUICE_SOCKET");
	if (socket && *socket) {
		*where = socket;
		return true;
	}
	*where = sl_config("SLUICE_WORKER");
	return false;
}

static CUresult dial_lease(const char *path, uint32_t kind, unsigned owner, int *fd, bool *local, unsigned *owners)
{
	struct sl_lease_answer a;

	*fd = sl_lease_open(path, kind, owner, CONNECT_MS, &a);
	if (*fd >= 0) {
		*local = a.shm;
		if (owners)
			*owners = a.owners;
		return CUDA_SUCCESS;
	}
	if (a.status && a.status != ~0u)
		return refused(a.status, a.reason);
	sl_log(SL_ERROR, "%s", a.reason);
	return CUDA_ERROR_SYSTEM_NOT_READY;
}

static CUresult dial_worker(const char *list, unsigned owner, int *fd, bool *local)
{
	char where[512];
	size_t n;

	for (; owner && *list; list++)
		owner -= *list == ',';
	n = strcspn(list, ",");
	if (n >= sizeof where) {
		sl_log(SL_ERROR, "SLUICE_WORKER: an address is longer than %zu bytes", sizeof where - 1);
		return CUDA_ERROR_NO_DEVICE;
	}
	memcpy(where, list, n);
	where[n] = 0;
	*local = !strncmp(where, "unix:", 5);
	if (*local) {
		*fd = sl_unix_dial(where + 5, SL_LEASE_PATIENCE_MS, false);
	} else if (!strncmp(where, "tcp:", 4)) {
		*fd = dial_tcp(where + 4);
	} else {
		sl_log(SL_ERROR, "SLUICE_WORKER=%s: want tcp:HOST:PORT or unix:PATH", where);
		return CUDA_ERROR_NO_DEVICE;
	}
	if (*fd < 0) {
		sl_log(SL_ERROR, "worker %s: %s; is it running and reachable from here?", where, strerror(errno));
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	return CUDA_SUCCESS;
}

CUresult sl_connect(uint32_t kind, unsigned owner, int *fd, struct sl_snapshot *snap, int *shm, unsigned *owners)
{
	const char *where, *lease = NULL;
	bool local = false;
	CUresult err;
	int s = -1;

	if (by_lease(&where)) {
		err = dial_lease(where, kind, owner, &s, &local, owners);
	} else {
		if (!where || !*where)
			return CUDA_ERROR_NO_DEVICE;
		/* The daemon knows the lease by its socket; a worker alone is told. */
		lease = sl_config("SLUICE_LEASE");
		err = dial_worker(where, owner, &s, &local);
		if (owners) {
			*owners = 1;
			for (const char *p = where; *p; p++)
				*owners += *p == ',';
		}
	}
	if (err)
		return err;
	err = handshake(s, kind, local && shm ? SL_FEATURE_SHM : 0, lease, snap);
	if (shm)
		*shm = -1;
	if (!err && shm && snap->features & SL_FEATURE_SHM && (*shm = take_descriptor(s)) < 0) {
		sl_log(SL_ERROR, "the worker's shared memory did not come with its welcome");
		err = CUDA_ERROR_SYSTEM_NOT_READY;
	}
	if (err) {
		close(s);
		return err;
	}
	tune(s, snap->keepalive_ms);
	*fd = s;
	return CUDA_SUCCESS;
}
