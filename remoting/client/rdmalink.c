#include "rdmalink.h"
#include "../verbs/rdma.h"
#include "conf.h"
#include "deadline.h"
#include "exchange.h"
#include "log.h"
#include "peer.h"

#include <string.h>

#define PATIENCE_MS 10000	/* for the worker's card */
#define MEET_MS 3000		/* for the first messages */

/* The device to use, or NULL for the one that fits. */
static const char *device(void)
{
	const char *v = sl_config("SLUICE_RDMA");

	return v && strcmp(v, "1") && strcmp(v, "on") ? v : NULL;
}

bool sl_rdma_offers(void)
{
	const char *v = sl_config("SLUICE_RDMA");

	return v && strcmp(v, "0") && strcmp(v, "off");
}

void sl_rdma_drop(struct sl_peer *t)
{
	struct sl_rdma *r = t->rdma;

	t->rdma = NULL; /* first: a child that another thread makes now closes what is there */
	sl_rdma_free(r);
}

bool sl_rdma_agree(struct sl_peer *t)
{
	struct wire_verbs_card theirs, mine = { 0 };
	int64_t deadline = sl_now_ms() + PATIENCE_MS;
	char why[256];
	uint8_t works;

	if (!sl_recv_all(t->fd, &theirs, sizeof theirs, NULL, deadline))
		return false;
	t->rdma = sl_rdma_open(t->fd, device(), why, sizeof why);
	if (t->rdma && sl_rdma_join(t->rdma, &theirs, why, sizeof why))
		sl_rdma_card(t->rdma, &mine);
	if (!sl_send_all(t->fd, &mine, sizeof mine, deadline))
		return false;
	if (mine.qpn) {
		/* The worker can receive once it has sent. */
		works = sl_rdma_met(t->rdma, MEET_MS) && sl_rdma_greet(t->rdma) && sl_rdma_met(t->rdma, MEET_MS);
		if (!sl_send_all(t->fd, &works, sizeof works, deadline))
			return false;
		if (works) {
			sl_log(SL_INFO, "the session goes over RDMA, by %s", sl_rdma_name(t->rdma));
			return true;
		}
		strcpy(why, "the first messages did not get through");
	}
	sl_log(SL_WARN, "the session goes over TCP and not over RDMA: %s", why);
	sl_rdma_drop(t);
	return true;
}
