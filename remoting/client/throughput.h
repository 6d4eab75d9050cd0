/*
 * How fast a connection takes what is sent. It is looked at during large copies alone: a stretch of time counts if bytes were
 * waiting in the socket at both of its ends, so that the program was not what it waited for. Of the last SL_STRETCHES
 * stretches the greatest rate is the link's, but for SL_BURSTS of them: a worker or a processor that is busy slows some
 * stretches, a slow link all, and what a network has held back comes in one burst. Where more than SL_STALLS
 * are far below it, no link is what made them slow.
 *
 * Locks: lock guards all fields but those that are said to be atomic. It is never waited for.
 */
#ifndef SLUICE_THROUGHPUT_H
#define SLUICE_THROUGHPUT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct sl_peer;

#define SL_STRETCHES 8
#define SL_BURSTS 2
#define SL_STALLS 2	/* that a lost packet may make */
#define SL_STALLED 4	/* so many times slower than the fastest */

struct sl_throughput {
	pthread_mutex_t lock;
	uint64_t bytes, ns;	/* of the stretch that is being measured */
	unsigned n;		/* stretches so far, up to SL_STRETCHES */
	unsigned next;
	uint64_t rate[SL_STRETCHES]; /* bytes a second */
	uint64_t link;		/* atomic: the link's rate; 0: not known */
	uint64_t written;	/* atomic: bytes written to the connection */
};

/* One look of a thread's. */
struct sl_look {
	bool good;
	bool queued;		/* bytes are waiting */
	bool full;		/* so many that nothing on the way takes more */
	uint64_t ns, done;
	uint64_t seen;		/* bytes that have left since sl_look_begin */
};

/* Whether a TCP connection does not leave the machine: its ends have one address, or it is the loopback interface's. */
bool sl_same_machine(int fd);
/* Whether a link may be slow: nothing that stays in this machine is, unless SLUICE_COMPRESS=1 says that a tunnel begins there. */
bool sl_link_matters(int fd);

void sl_throughput_init(struct sl_throughput *r);
/* Begins to look at the connection, or begins again. */
void sl_look_begin(struct sl_look *l, struct sl_peer *t);
/* Looks, and takes the time since the last look into account. */
void sl_look_again(struct sl_look *l, struct sl_peer *t);
/* Takes a stretch of time into account, or a part of one. */
void sl_throughput_count(struct sl_throughput *r, uint64_t bytes, uint64_t ns);
/* Forgets what was measured. */
void sl_throughput_forget(struct sl_throughput *r);

/* The link's rate in bytes a second, 0 if it is not known. */
static inline uint64_t sl_throughput(const struct sl_throughput *r)
{
	return __atomic_load_n(&r->link, __ATOMIC_RELAXED);
}

#endif
