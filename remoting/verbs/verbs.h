/*
 * What libibverbs looks like to a program that opens it by dlopen: the layout of the structures that are passed to it and come from it,
 * and the functions that are used here. The layouts and numbers are those of libibverbs.so.1, whose ABI (IBVERBS_1.1) has not
 * changed since 2006; `test_layout.c` compares them with a header of the distribution's. Only what is used has a name.
 */
#ifndef SLUICE_VERBS_H
#define SLUICE_VERBS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct vb_device;
struct vb_pd;
struct vb_cq;
struct vb_qp;
struct vb_wc;
struct vb_send;
struct vb_recv;

/* A device that is open. The functions that move data are not symbols of the library but stand in this table. */
struct vb_context {
	struct vb_device *device;
	struct {
		void *before[11];
		int (*poll_cq)(struct vb_cq *, int, struct vb_wc *);
		int (*req_notify_cq)(struct vb_cq *, int solicited);
		void *between[12];
		int (*post_send)(struct vb_qp *, struct vb_send *, struct vb_send **bad);
		int (*post_recv)(struct vb_qp *, struct vb_recv *, struct vb_recv **bad);
		void *behind[5];
	} ops;
	int cmd_fd, async_fd, vectors;
	/* more */
};

struct vb_channel {
	struct vb_context *context;
	int fd;
	int references;
};

struct vb_mr {
	struct vb_context *context;
	struct vb_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

struct vb_qp {
	struct vb_context *context;
	void *user;
	struct vb_pd *pd;
	struct vb_cq *send_cq, *recv_cq;
	void *srq;
	uint32_t handle, qp_num;
	/* more */
};

struct vb_gid { _Alignas(8) uint8_t raw[16]; };

enum { VB_PORT_ACTIVE = 4 };
enum { VB_LINK_INFINIBAND = 1, VB_LINK_ETHERNET = 2 };

struct vb_port {
	int state, max_mtu, active_mtu, gids;
	uint32_t caps, max_msg, bad_pkeys, qkey_violations;
	uint16_t pkeys, lid, sm_lid;
	uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type, width, speed, phys_state, link_layer, flags;
	uint16_t caps2;
};

enum { VB_ACCESS_LOCAL_WRITE = 1, VB_ACCESS_REMOTE_WRITE = 2 };

struct vb_cap { uint32_t max_send, max_recv, max_send_sge, max_recv_sge, max_inline; };

enum { VB_QPT_RC = 2 };

struct vb_qp_init {
	void *user;
	struct vb_cq *send_cq, *recv_cq;
	void *srq;
	struct vb_cap cap;
	int type;
	int signal_all;
};

struct vb_ah {
	struct {
		struct vb_gid dgid;
		uint32_t flow_label;
		uint8_t sgid_index, hop_limit, traffic_class;
	} grh;
	uint16_t dlid;
	uint8_t sl, src_path_bits, static_rate, is_global, port;
};

enum { VB_QPS_INIT = 1, VB_QPS_RTR = 2, VB_QPS_RTS = 3, VB_QPS_ERR = 6 };

struct vb_qp_attr {
	int state, current_state, path_mtu, migration;
	uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
	unsigned access;
	struct vb_cap cap;
	struct vb_ah ah, alt_ah;
	uint16_t pkey_index, alt_pkey_index;
	uint8_t notify_sqd, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port, timeout, retries, rnr_retries, alt_port, alt_timeout;
	uint32_t rate_limit;
};

enum {
	VB_SET_STATE = 1 << 0, VB_SET_ACCESS = 1 << 3, VB_SET_PKEY = 1 << 4, VB_SET_PORT = 1 << 5, VB_SET_AH = 1 << 7, VB_SET_MTU = 1 << 8,
	VB_SET_TIMEOUT = 1 << 9, VB_SET_RETRIES = 1 << 10, VB_SET_RNR_RETRIES = 1 << 11, VB_SET_RQ_PSN = 1 << 12, VB_SET_RD_ATOMIC = 1 << 13,
	VB_SET_RNR_TIMER = 1 << 15, VB_SET_SQ_PSN = 1 << 16, VB_SET_DEST_RD_ATOMIC = 1 << 17, VB_SET_DEST_QP = 1 << 20,
};

struct vb_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

enum { VB_WRITE_WITH_IMM = 1 };
enum { VB_SIGNALED = 2, VB_INLINE = 8 };

struct vb_send {
	uint64_t id;
	struct vb_send *next;
	struct vb_sge *list;
	int sges, opcode;
	unsigned flags;
	uint32_t imm; /* in network order */
	struct { uint64_t remote_addr; uint32_t rkey; } rdma;
	uint64_t others[10]; /* of other opcodes */
};

struct vb_recv {
	uint64_t id;
	struct vb_recv *next;
	struct vb_sge *list;
	int sges;
};

enum { VB_WC_RECV = 128, VB_WC_RECV_WITH_IMM = 129 }; /* the former is a bit of every receive's */
enum { VB_WC_SUCCESS = 0, VB_WC_FLUSHED = 5 };

struct vb_wc {
	uint64_t id;
	int status, opcode;
	uint32_t vendor_error, length, imm, qp_num, src_qp;
	unsigned flags;
	uint16_t pkey_index, slid;
	uint8_t sl, path_bits;
};

/* The functions that are symbols: result, name, parameters. */
#define VB_FUNCTIONS(F) \
	F(int, fork_init, (void)) \
	F(struct vb_device **, get_device_list, (int *n)) \
	F(void, free_device_list, (struct vb_device **)) \
	F(const char *, get_device_name, (struct vb_device *)) \
	F(struct vb_context *, open_device, (struct vb_device *)) \
	F(int, close_device, (struct vb_context *)) \
	F(int, query_port, (struct vb_context *, uint8_t port, struct vb_port *)) \
	F(int, query_gid, (struct vb_context *, uint8_t port, int i, struct vb_gid *)) \
	F(struct vb_pd *, alloc_pd, (struct vb_context *)) \
	F(int, dealloc_pd, (struct vb_pd *)) \
	F(struct vb_mr *, reg_mr, (struct vb_pd *, void *, size_t, int access)) \
	F(int, dereg_mr, (struct vb_mr *)) \
	F(struct vb_channel *, create_comp_channel, (struct vb_context *)) \
	F(int, destroy_comp_channel, (struct vb_channel *)) \
	F(struct vb_cq *, create_cq, (struct vb_context *, int n, void *user, struct vb_channel *, int vector)) \
	F(int, destroy_cq, (struct vb_cq *)) \
	F(int, get_cq_event, (struct vb_channel *, struct vb_cq **, void **user)) \
	F(void, ack_cq_events, (struct vb_cq *, unsigned n)) \
	F(struct vb_qp *, create_qp, (struct vb_pd *, struct vb_qp_init *)) \
	F(int, modify_qp, (struct vb_qp *, struct vb_qp_attr *, int set)) \
	F(int, destroy_qp, (struct vb_qp *))

struct vb_library {
#define VB_POINTER(result, name, parameters) result (*name) parameters;
	VB_FUNCTIONS(VB_POINTER)
#undef VB_POINTER
};

/* The library, opened at the first call; NULL if it is not there, or is not whole. Any thread. */
const struct vb_library *vb_library(void);

#endif
