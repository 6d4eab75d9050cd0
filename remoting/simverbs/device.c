/*
 * The device, what the environment says of it, and fork.
 *
 * A child of fork has neither the threads nor the locks of its parent's objects: calls for these do nothing there. A context's
 * generation says which process made it. The child closes its copies of the sockets at once: they would keep a connection open after the
 * parent has died.
 */
#include "simverbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static struct vb_device sim0 = { .node_type = 1, .name = "sim0", .dev_name = "uverbs0" };
static _Atomic int generation;
static _Atomic uint64_t messages;	/* that this process has sent, for the fault "cut" */

static struct {
	pthread_mutex_t lock;
	int *fd, n, room;
} sockets = { .lock = PTHREAD_MUTEX_INITIALIZER };

void sim_die(const char *format, ...)
{
	va_list ap;

	flockfile(stderr);
	fprintf(stderr, "simverbs: ");
	va_start(ap, format);
	vfprintf(stderr, format, ap);
	va_end(ap);
	fprintf(stderr, "\n");
	funlockfile(stderr);
	abort();
}

uint64_t sim_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

uint32_t sim_random(void)
{
	uint32_t r;

	if (getrandom(&r, sizeof(r), 0) != sizeof(r))
		sim_die("no random number: %s", strerror(errno));
	return r;
}

/* --- fork --- */

static void before_fork(void)
{
	pthread_mutex_lock(&sockets.lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&sockets.lock);
}

static void in_child(void)
{
	for (int i = 0; i < sockets.n; i++)
		close(sockets.fd[i]);
	sockets.n = 0;
	generation++;
	messages = 0;
	pthread_mutex_unlock(&sockets.lock);
}

__attribute__((constructor)) static void begin(void)
{
	pthread_atfork(before_fork, after_fork, in_child);
}

/* The lock is held from the system call to the entry in the list: a fork between them would leak the descriptor into the child. */
static int keep(int fd)
{
	if (fd < 0)
		return fd;
	if (sockets.n == sockets.room) {
		sockets.room = sockets.room ? 2 * sockets.room : 64;
		sockets.fd = realloc(sockets.fd, (size_t)sockets.room * sizeof(int));
		if (!sockets.fd)
			sim_die("out of memory");
	}
	sockets.fd[sockets.n++] = fd;
	return fd;
}

int sim_socket(void)
{
	int fd;

	pthread_mutex_lock(&sockets.lock);
	fd = keep(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
	pthread_mutex_unlock(&sockets.lock);
	return fd;
}

/* The listener must not block. */
int sim_accept(int listener)
{
	int fd;

	pthread_mutex_lock(&sockets.lock);
	fd = keep(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
	pthread_mutex_unlock(&sockets.lock);
	return fd;
}

void sim_close(int fd)
{
	if (fd < 0)
		return;
	pthread_mutex_lock(&sockets.lock);
	for (int i = 0; i < sockets.n; i++) {
		if (sockets.fd[i] == fd) {
			sockets.fd[i] = sockets.fd[--sockets.n];
			break;
		}
	}
	close(fd);
	pthread_mutex_unlock(&sockets.lock);
}

struct sim_context *sim_context(struct vb_context *c)
{
	return (struct sim_context *)c;
}

/* Whether this is a child of the process that opened the context. */
bool sim_stale(struct vb_context *c)
{
	return sim_context(c)->generation != generation;
}

/* --- the environment --- */

/* Whether SLUICE_SIMVERBS_FAULT, a list with commas, has this name; and the number behind its '='. */
bool sim_fault(const char *name, uint64_t *value)
{
	const char *s = getenv("SLUICE_SIMVERBS_FAULT");
	size_t n = strlen(name);

	for (; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL) {
		if (strncmp(s, name, n) || (s[n] && s[n] != ',' && s[n] != '='))
			continue;
		if (value)
			*value = s[n] == '=' ? strtoull(s + n + 1, NULL, 10) : 0;
		return true;
	}
	return false;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *s = getenv(name);

	return s && *s ? strtoull(s, NULL, 10) : otherwise;
}

/* Index 0 is fe80::1, index 1 the IPv4 address as an IPv6 address has it. */
static int addresses(struct vb_gid *gid)
{
	const char *s = getenv("SLUICE_SIMVERBS_ADDR");

	inet_pton(AF_INET6, "fe80::1", gid[0].raw);
	memset(gid[1].raw + 10, 0xff, 2);
	return inet_pton(AF_INET, s && *s ? s : "127.0.0.1", gid[1].raw + 12) == 1 ? 0 : -1;
}

/* Counts a message, and says when it was sent. False: the link is down. */
bool sim_may_send(struct sim_context *c, uint64_t *at)
{
	uint64_t n = messages;

	do {
		if (n >= c->cut)
			return false;
	} while (!atomic_compare_exchange_weak(&messages, &n, n + 1));
	*at = sim_now();
	/* What was sent until now still arrives, on this side too. */
	if (n + 1 >= c->cut)
		c->down_at = sim_now();
	return true;
}

/* --- the device --- */

/* A child's copies are its own: see the handlers for fork. */
int ibv_fork_init(void)
{
	return 0;
}

struct vb_device **ibv_get_device_list(int *n)
{
	struct vb_device **list = calloc(2, sizeof(*list));
	bool none = sim_fault("none", NULL);

	if (!list)
		return NULL;
	if (!none)
		list[0] = &sim0;
	if (n)
		*n = !none;
	return list;
}

void ibv_free_device_list(struct vb_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct vb_device *d)
{
	return d->name;
}

static void read_environment(struct sim_context *c)
{
	c->fail_create_qp = sim_fault("create_qp", NULL);
	c->fail_reg_mr = sim_fault("reg_mr", NULL);
	c->fail_modify_qp = sim_fault("modify_qp", NULL);
	c->cut = UINT64_MAX;
	sim_fault("cut", &c->cut);
	c->down_at = messages >= c->cut ? sim_now() : UINT64_MAX;
	c->memlock = number("SLUICE_SIMVERBS_MEMLOCK", UINT64_MAX);
	c->latency = number("SLUICE_SIMVERBS_LATENCY_US", 0) * 1000;
}

struct vb_context *ibv_open_device(struct vb_device *d)
{
	struct sim_context *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	if (addresses(c->gids)) {
		fprintf(stderr, "simverbs: SLUICE_SIMVERBS_ADDR is no IPv4 address\n");
		free(c);
		errno = EINVAL;
		return NULL;
	}
	read_environment(c);
	c->generation = generation;
	c->vb.device = d;
	c->vb.ops.poll_cq = cq_poll;
	c->vb.ops.req_notify_cq = cq_arm;
	c->vb.ops.post_send = qp_post_send;
	c->vb.ops.post_recv = qp_post_recv;
	c->vb.cmd_fd = -1;
	c->vb.async_fd = eventfd(0, EFD_CLOEXEC);	/* it never has an event */
	c->vb.vectors = 1;
	pthread_mutex_init(&c->mutex, NULL);
	pthread_mutex_init(&c->lock, NULL);
	pthread_rwlock_init(&c->regions, NULL);
	return &c->vb;
}

int ibv_close_device(struct vb_context *vb)
{
	struct sim_context *c = sim_context(vb);
	bool busy;

	if (sim_stale(vb))
		return 0;
	pthread_mutex_lock(&c->lock);
	busy = c->pds || c->cqs || c->channels;
	pthread_mutex_unlock(&c->lock);
	if (busy)
		return EBUSY;
	close(vb->async_fd);
	pthread_rwlock_destroy(&c->regions);
	pthread_mutex_destroy(&c->lock);
	pthread_mutex_destroy(&c->mutex);
	free(c);
	return 0;
}

void sim_count(struct vb_context *vb, int *count, int by)
{
	struct sim_context *c = sim_context(vb);

	pthread_mutex_lock(&c->lock);
	*count += by;
	pthread_mutex_unlock(&c->lock);
}

/* The library's symbol does not write what was added behind `flags` later, nor does this one. */
int ibv_query_port(struct vb_context *c, uint8_t port, struct vb_port *p)
{
	(void)c;
	if (port != 1)
		return EINVAL;
	memset(p, 0, offsetof(struct vb_port, flags) + 1);
	p->state = VB_PORT_ACTIVE;
	p->max_mtu = p->active_mtu = SIM_MTU;
	p->gids = 2;
	p->max_msg = SIM_MAX_MESSAGE;
	p->pkeys = 1;
	p->max_vl = 1;
	p->width = 2;		/* 4X */
	p->speed = 32;		/* EDR */
	p->phys_state = 5;	/* the link is up */
	p->link_layer = VB_LINK_ETHERNET;
	return 0;
}

int ibv_query_gid(struct vb_context *c, uint8_t port, int i, struct vb_gid *gid)
{
	if (port != 1 || i < 0 || i > 1) {
		errno = EINVAL;
		return -1;
	}
	*gid = sim_context(c)->gids[i];
	return 0;
}
