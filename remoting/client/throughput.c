/* See throughput.h. */
#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#include "throughput.h"
#include "conf.h"
#include "deadline.h"
#include "peer.h"

#define STRETCH (1u << 20)	/* bytes at least */
#define ABSORBED (4u << 20)	/* what buffers on the way may take at once when nothing was sent before: it says nothing of the link */

#define FULL (64u << 10)	/* bytes that were not sent yet: those buffers are full */

/* Places in the kernel's struct tcp_info (linux/tcp.h), of which older C libraries know the beginning only. */
enum { UNACKED = 24, BYTES_ACKED = 120, NOTSENT = 144, INFO_SIZE = 148 };

bool sl_same_machine(int fd)
{
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} here, there;
	socklen_t n = sizeof here, m = sizeof there;

	if (getsockname(fd, &here.any, &n) || getpeername(fd, &there.any, &m) || here.any.sa_family != there.any.sa_family)
		return false;
	if (there.any.sa_family == AF_INET)
		return ntohl(there.v4.sin_addr.s_addr) >> 24 == 127 || there.v4.sin_addr.s_addr == here.v4.sin_addr.s_addr;
	return there.any.sa_family == AF_INET6 && !memcmp(&there.v6.sin6_addr, &here.v6.sin6_addr, sizeof here.v6.sin6_addr);
}

bool sl_link_matters(int fd)
{
	const char *v = sl_config("SLUICE_COMPRESS");

	return !sl_same_machine(fd) || (v && !strcmp(v, "1"));
}

void sl_throughput_init(struct sl_throughput *r)
{
	memset(r, 0, sizeof *r);
	pthread_mutex_init(&r->lock, NULL);
}

/* Since Linux 4.6 TCP says what has been acknowledged; of other sockets it is known what they hold. */
static bool look(struct sl_look *l, struct sl_peer *t)
{
	uint8_t info[256];
	socklen_t len = sizeof info;
	uint32_t unacked, notsent;
	int held;

	if (t->rdma)
		return false;
	if (!getsockopt(t->fd, IPPROTO_TCP, TCP_INFO, info, &len) && len >= INFO_SIZE) {
		memcpy(&unacked, info + UNACKED, sizeof unacked);
		memcpy(&notsent, info + NOTSENT, sizeof notsent);
		memcpy(&l->done, info + BYTES_ACKED, sizeof l->done);
		l->queued = unacked || notsent;
		l->full = notsent >= FULL;
	} else if (!ioctl(t->fd, SIOCOUTQ, &held) && held >= 0) {
		l->done = __atomic_load_n(&t->uploads.throughput.written, __ATOMIC_RELAXED) - (uint64_t)held;
		l->queued = l->full = held > 0;
	} else {
		return false;
	}
	l->ns = (uint64_t)sl_now_ns();
	return true;
}

void sl_look_begin(struct sl_look *l, struct sl_peer *t)
{
	l->good = look(l, t);
	l->seen = l->good && l->full ? ABSORBED : 0;
}

/* The rate of the link, by the stretches there are; 0: they do not say. */
static uint64_t judge(const struct sl_throughput *r)
{
	uint64_t most[SL_BURSTS + 1] = { 0 }; /* the greatest ones, greatest first */
	unsigned stalls = 0;

	if (r->n < SL_STRETCHES)
		return 0;
	for (unsigned i = 0; i < SL_STRETCHES; i++) {
		uint64_t v = r->rate[i];

		for (unsigned k = 0; k <= SL_BURSTS; k++)
			if (v > most[k]) {
				uint64_t less = most[k];

				most[k] = v;
				v = less;
			}
	}
	for (unsigned i = 0; i < SL_STRETCHES; i++)
		stalls += r->rate[i] < most[SL_BURSTS] / SL_STALLED;
	return stalls > SL_STALLS ? 0 : most[SL_BURSTS];
}

void sl_throughput_count(struct sl_throughput *r, uint64_t bytes, uint64_t ns)
{
	if (pthread_mutex_trylock(&r->lock))
		return;
	r->bytes += bytes;
	r->ns += ns;
	if (r->bytes >= STRETCH && r->ns) {
		r->rate[r->next] = (uint64_t)((double)r->bytes * 1e9 / (double)r->ns);
		r->next = (r->next + 1) % SL_STRETCHES;
		r->n += r->n < SL_STRETCHES;
		r->bytes = r->ns = 0;
		__atomic_store_n(&r->link, judge(r), __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&r->lock);
}

void sl_look_again(struct sl_look *l, struct sl_peer *t)
{
	struct sl_look last = *l;

	l->good = look(l, t);
	/* Another connection in its place begins at 0. */
	if (!l->good || !last.good || l->done < last.done)
		return;
	l->seen += l->done - last.done;
	if (last.queued && l->queued && l->seen > ABSORBED)
		sl_throughput_count(&t->uploads.throughput, l->done - last.done, l->ns - last.ns);
}

void sl_throughput_forget(struct sl_throughput *r)
{
	if (pthread_mutex_trylock(&r->lock))
		return;
	r->n = r->next = 0;
	r->bytes = r->ns = 0;
	__atomic_store_n(&r->link, 0, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&r->lock);
}
