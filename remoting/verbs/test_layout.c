//go:build ignore

/* Compares verbs.h with the header of libibverbs-dev: cc -fsyntax-only -I/usr/include test_layout.c */
#include <infiniband/verbs.h>

#include "verbs.h"

#define AT(a, f, b, g) _Static_assert(offsetof(a, f) == offsetof(b, g), #b "." #g)
#define SIZE(a, b) _Static_assert(sizeof(a) == sizeof(b), #b)

AT(struct ibv_context, ops.poll_cq, struct vb_context, ops.poll_cq);
AT(struct ibv_context, ops.req_notify_cq, struct vb_context, ops.req_notify_cq);
AT(struct ibv_context, ops.post_send, struct vb_context, ops.post_send);
AT(struct ibv_context, ops.post_recv, struct vb_context, ops.post_recv);
AT(struct ibv_context, cmd_fd, struct vb_context, cmd_fd);
AT(struct ibv_context, async_fd, struct vb_context, async_fd);
AT(struct ibv_comp_channel, fd, struct vb_channel, fd);
AT(struct ibv_mr, lkey, struct vb_mr, lkey);
AT(struct ibv_mr, rkey, struct vb_mr, rkey);
AT(struct ibv_qp, context, struct vb_qp, context);
AT(struct ibv_qp, qp_num, struct vb_qp, qp_num);
AT(struct ibv_port_attr, active_mtu, struct vb_port, active_mtu);
AT(struct ibv_port_attr, gid_tbl_len, struct vb_port, gids);
AT(struct ibv_port_attr, lid, struct vb_port, lid);
AT(struct ibv_port_attr, link_layer, struct vb_port, link_layer);
SIZE(struct ibv_port_attr, struct vb_port);
AT(struct ibv_qp_init_attr, send_cq, struct vb_qp_init, send_cq);
AT(struct ibv_qp_init_attr, cap.max_inline_data, struct vb_qp_init, cap.max_inline);
AT(struct ibv_qp_init_attr, qp_type, struct vb_qp_init, type);
SIZE(struct ibv_qp_init_attr, struct vb_qp_init);
AT(struct ibv_qp_attr, path_mtu, struct vb_qp_attr, path_mtu);
AT(struct ibv_qp_attr, rq_psn, struct vb_qp_attr, rq_psn);
AT(struct ibv_qp_attr, dest_qp_num, struct vb_qp_attr, dest_qp_num);
AT(struct ibv_qp_attr, qp_access_flags, struct vb_qp_attr, access);
AT(struct ibv_qp_attr, ah_attr.grh.sgid_index, struct vb_qp_attr, ah.grh.sgid_index);
AT(struct ibv_qp_attr, ah_attr.dlid, struct vb_qp_attr, ah.dlid);
AT(struct ibv_qp_attr, ah_attr.is_global, struct vb_qp_attr, ah.is_global);
AT(struct ibv_qp_attr, ah_attr.port_num, struct vb_qp_attr, ah.port);
AT(struct ibv_qp_attr, pkey_index, struct vb_qp_attr, pkey_index);
AT(struct ibv_qp_attr, max_rd_atomic, struct vb_qp_attr, max_rd_atomic);
AT(struct ibv_qp_attr, min_rnr_timer, struct vb_qp_attr, min_rnr_timer);
AT(struct ibv_qp_attr, port_num, struct vb_qp_attr, port);
AT(struct ibv_qp_attr, timeout, struct vb_qp_attr, timeout);
AT(struct ibv_qp_attr, retry_cnt, struct vb_qp_attr, retries);
AT(struct ibv_qp_attr, rnr_retry, struct vb_qp_attr, rnr_retries);
SIZE(struct ibv_qp_attr, struct vb_qp_attr);
SIZE(struct ibv_sge, struct vb_sge);
AT(struct ibv_send_wr, sg_list, struct vb_send, list);
AT(struct ibv_send_wr, num_sge, struct vb_send, sges);
AT(struct ibv_send_wr, opcode, struct vb_send, opcode);
AT(struct ibv_send_wr, send_flags, struct vb_send, flags);
AT(struct ibv_send_wr, imm_data, struct vb_send, imm);
AT(struct ibv_send_wr, wr.rdma.remote_addr, struct vb_send, rdma.remote_addr);
AT(struct ibv_send_wr, wr.rdma.rkey, struct vb_send, rdma.rkey);
_Static_assert(sizeof(struct vb_send) >= sizeof(struct ibv_send_wr), "struct vb_send");
SIZE(struct ibv_recv_wr, struct vb_recv);
AT(struct ibv_wc, imm_data, struct vb_wc, imm);
AT(struct ibv_wc, wc_flags, struct vb_wc, flags);
SIZE(struct ibv_wc, struct vb_wc);

_Static_assert(VB_PORT_ACTIVE == (int)IBV_PORT_ACTIVE && VB_LINK_INFINIBAND == (int)IBV_LINK_LAYER_INFINIBAND && VB_LINK_ETHERNET == (int)IBV_LINK_LAYER_ETHERNET, "ports");
_Static_assert(VB_ACCESS_LOCAL_WRITE == (int)IBV_ACCESS_LOCAL_WRITE && VB_ACCESS_REMOTE_WRITE == (int)IBV_ACCESS_REMOTE_WRITE, "access");
_Static_assert(VB_QPT_RC == (int)IBV_QPT_RC && VB_QPS_INIT == (int)IBV_QPS_INIT && VB_QPS_RTR == (int)IBV_QPS_RTR && VB_QPS_RTS == (int)IBV_QPS_RTS && VB_QPS_ERR == (int)IBV_QPS_ERR, "states");
_Static_assert(VB_SET_STATE == (int)IBV_QP_STATE && VB_SET_ACCESS == (int)IBV_QP_ACCESS_FLAGS && VB_SET_PKEY == (int)IBV_QP_PKEY_INDEX &&
	       VB_SET_PORT == (int)IBV_QP_PORT && VB_SET_AH == (int)IBV_QP_AV && VB_SET_MTU == (int)IBV_QP_PATH_MTU && VB_SET_TIMEOUT == (int)IBV_QP_TIMEOUT &&
	       VB_SET_RETRIES == (int)IBV_QP_RETRY_CNT && VB_SET_RNR_RETRIES == (int)IBV_QP_RNR_RETRY && VB_SET_RQ_PSN == (int)IBV_QP_RQ_PSN &&
	       VB_SET_RD_ATOMIC == (int)IBV_QP_MAX_QP_RD_ATOMIC && VB_SET_RNR_TIMER == (int)IBV_QP_MIN_RNR_TIMER && VB_SET_SQ_PSN == (int)IBV_QP_SQ_PSN &&
	       VB_SET_DEST_RD_ATOMIC == (int)IBV_QP_MAX_DEST_RD_ATOMIC && VB_SET_DEST_QP == (int)IBV_QP_DEST_QPN, "attributes");
_Static_assert(VB_WRITE_WITH_IMM == (int)IBV_WR_RDMA_WRITE_WITH_IMM && VB_SIGNALED == (int)IBV_SEND_SIGNALED && VB_INLINE == (int)IBV_SEND_INLINE, "sends");
_Static_assert(VB_WC_RECV == (int)IBV_WC_RECV && VB_WC_RECV_WITH_IMM == (int)IBV_WC_RECV_RDMA_WITH_IMM && VB_WC_FLUSHED == (int)IBV_WC_WR_FLUSH_ERR, "completions");
