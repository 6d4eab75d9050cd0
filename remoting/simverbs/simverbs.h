/*
 * What the files of the simulated libibverbs share. device.c: the device, contexts, faults, fork. memory.c: protection domains and
 * memory regions. cq.c: completions and their events. qp.c: queue pairs. link.c: what carries the messages.
 *
 * Locks, outermost first: a QP's `lock`, its context's `regions`, a CQ's `lock`, a channel's `lock`. The context's `lock` and the list of
 * descriptors in device.c are held for some lines of code, in which no other lock is taken.
 *
 * The first members of each structure are those that libibverbs's own header names, so that a program compiled with it works as well.
 */
#ifndef SLUICE_SIMVERBS_H
#define SLUICE_SIMVERBS_H

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>

#include "../verbs/verbs.h"

/* What verbs.h has no name for, by the numbers of the same ABI. */
enum { ACCESS_REMOTE_READ = 4 };
enum { QPS_RESET = 0 };
enum { OP_WRITE = 0, OP_SEND = 2, OP_SEND_WITH_IMM = 3, OP_READ = 4 };
enum { WC_SEND = 0, WC_WRITE = 1, WC_READ = 2, WC_WITH_IMM = 2 };
enum {
	WC_LOCAL_LENGTH = 1, WC_LOCAL_PROTECTION = 4, WC_REMOTE_INVALID = 9, WC_REMOTE_ACCESS = 10, WC_REMOTE_OPERATION = 11,
	WC_RETRY_EXCEEDED = 12, WC_RNR_EXCEEDED = 13,
};

enum { SIM_INLINE = 256, SIM_MAX_WR = 16384, SIM_MAX_SGE = 30, SIM_MAX_CQE = 1 << 22, SIM_MAX_RD = 16, SIM_MTU = 5 };
#define SIM_MAX_MESSAGE (1U << 30)

#define MS 1000000ULL	/* in ns */

struct vb_device {
	void *ops[2];
	int node_type, transport_type;
	char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct sim_context {
	struct vb_context vb;
	pthread_mutex_t mutex;
	void *abi_compat;
	/* here the simulator's own begins */
	int generation;			/* of the process that opened it, see device.c */
	struct vb_gid gids[2];
	bool fail_create_qp, fail_reg_mr, fail_modify_qp;
	uint64_t memlock;		/* bytes that may be registered at once */
	uint64_t latency;		/* ns */
	uint64_t cut;			/* messages of this process until the link is down */
	_Atomic uint64_t down_at;	/* when it went down; UINT64_MAX: it is up */
	pthread_rwlock_t regions;	/* guards the list of regions of each PD, and what is copied to and from them */
	pthread_mutex_t lock;		/* guards what follows, and the counts in PDs, CQs and channels */
	int pds, cqs, channels;
	uint64_t locked;
};

struct sim_mr {
	struct vb_mr vb;
	int access;
	struct sim_mr *next;
};

struct vb_pd {
	struct vb_context *context;
	uint32_t handle;
	int qps;
	struct sim_mr *mrs;
};

struct sim_qp;

/* A completion that waits to be polled; that frees the queue's slots up to `freed`. */
struct sim_cqe {
	struct vb_wc wc;
	struct sim_qp *qp;
	_Atomic uint64_t *slots;
	uint64_t freed;
};

struct vb_cq {
	struct vb_context *context;
	struct vb_channel *channel;
	void *user;
	uint32_t handle;
	int size;
	int qps;
	pthread_mutex_t lock;
	struct sim_cqe *ring;
	uint64_t added, polled;
	bool armed;
	/* The channel's lock guards these. */
	unsigned waiting, got, acked;	/* events: in the channel, given to the program, acknowledged by it */
	struct vb_cq *next;		/* in the channel's list of CQs whose events wait */
};

struct sim_channel {
	struct vb_channel vb;
	pthread_mutex_t lock;
	struct vb_cq *first, *last;
};

struct sim_send {
	uint64_t id, addr;
	int opcode, sges;
	unsigned flags;
	uint32_t imm, rkey, length;
	struct vb_sge *list;
	uint8_t *data;			/* of an inline send */
};

struct sim_recv {
	uint64_t id;
	int sges;
	struct vb_sge *list;
};

/*
 * The queues count upwards for ever; slot i of a queue is i modulo its size. In the send queue freed <= done <= sent <= posted: the program
 * has polled it or one behind it, the peer has acknowledged it, the thread has begun to send it, it was posted.
 */
struct sim_qp {
	struct vb_qp vb;
	int state, type;
	struct vb_cap cap;
	bool signal_all;
	pthread_mutex_t lock;		/* guards all that follows */
	pthread_cond_t changed;
	struct vb_qp_attr attr;
	bool closing;
	struct sim_send *sends;
	uint64_t sq_posted, sq_sent, sq_done;
	_Atomic uint64_t sq_freed;
	struct sim_recv *recvs;
	uint64_t rq_posted, rq_done;
	_Atomic uint64_t rq_freed;
	int listen_fd, in_fd, out_fd;	/* closed by destroy_qp alone, when no thread is left, but for in_fd, which is -1 if there is none */
	bool connected;			/* or tried */
	bool linked;			/* the peer has answered */
	bool lost;			/* and will not answer any more */
	pthread_t tx, acks, rx;
	uint8_t *tx_buf, *acks_buf, *rx_buf;
};

/* Memory that is named by keys: an SGE list of a work request, or one remote range. */
struct sim_area {
	const struct vb_sge *list;
	int sges;
	int access;	/* what its regions must allow */
	bool remote;	/* the keys are rkeys */
};

/* device.c */
struct sim_context *sim_context(struct vb_context *c);
bool sim_stale(struct vb_context *c);
uint64_t sim_now(void);
uint32_t sim_random(void);
bool sim_fault(const char *name, uint64_t *value);
bool sim_may_send(struct sim_context *c, uint64_t *at);
void sim_count(struct vb_context *c, int *count, int by);
int sim_socket(void);
int sim_accept(int listener);
void sim_close(int fd);
__attribute__((noreturn, format(printf, 1, 2))) void sim_die(const char *format, ...);

/* memory.c */
bool area_valid(struct vb_pd *pd, const struct sim_area *a);
bool area_copy(struct vb_pd *pd, const struct sim_area *a, uint64_t offset, void *buf, size_t n, bool into);

/* cq.c */
void cq_add(struct vb_cq *cq, const struct sim_cqe *e);
void cq_forget(struct vb_cq *cq, struct sim_qp *qp);
int cq_poll(struct vb_cq *cq, int n, struct vb_wc *wc);
int cq_arm(struct vb_cq *cq, int solicited);

/* qp.c; with the QP's lock held unless it says otherwise */
struct sim_send *qp_oldest(struct sim_qp *qp);
void qp_sent(struct sim_qp *qp, int status);
void qp_received(struct sim_qp *qp, int status, int opcode, const uint32_t *imm, uint32_t length);
void qp_fail(struct sim_qp *qp, int status);
bool qp_alive(const struct sim_qp *qp);
bool qp_wait(struct sim_qp *qp, uint64_t until);
int qp_post_send(struct vb_qp *q, struct vb_send *wr, struct vb_send **bad);	/* without the lock */
int qp_post_recv(struct vb_qp *q, struct vb_recv *wr, struct vb_recv **bad);	/* without the lock */

/* link.c; without the QP's lock */
int link_open(struct sim_qp *qp);
void link_close(struct sim_qp *qp);

#define VB_DECLARE(result, name, parameters) __attribute__((visibility("default"))) result ibv_##name parameters;
VB_FUNCTIONS(VB_DECLARE)
#undef VB_DECLARE

#endif
