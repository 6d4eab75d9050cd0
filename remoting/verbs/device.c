/* Finding the device and port that a TCP connection goes over. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device.h"

#define PORTS 4		/* of a device, at most */
#define GIDS 256	/* of a port, that are looked at */

/* The GID that a port of RoCE has for the socket's local address; false if that is of no network. */
static bool gid_of(int sock, struct vb_gid *gid)
{
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} a;
	socklen_t len = sizeof a;

	memset(gid, 0, sizeof *gid);
	if (getsockname(sock, &a.any, &len))
		return false;
	if (a.any.sa_family == AF_INET) {
		memset(gid->raw + 10, 0xff, 2);
		memcpy(gid->raw + 12, &a.v4.sin_addr, 4);
		return true;
	}
	if (a.any.sa_family != AF_INET6)
		return false;
	memcpy(gid->raw, &a.v6.sin6_addr, 16);
	return true;
}

/* Whether an entry is of RoCE version 2, which routers understand. A kernel that does not say has one entry for each address. */
static bool routable(const char *device, int port, int i)
{
	char path[160], text[32] = "";
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%d/gid_attrs/types/%d", device, port, i);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return true;
	n = read(fd, text, sizeof text - 1);
	close(fd);
	return n <= 0 || !strncmp(text, "RoCE v2", 7);
}

/* The index of the entry for gid, -1 if there is none. */
static int find_gid(const struct vb_library *v, struct sl_rdma_device *d, const struct vb_gid *gid)
{
	int found = -1;

	for (int i = 0; i < d->attr.gids && i < GIDS; i++) {
		struct vb_gid g;

		if (v->query_gid(d->context, (uint8_t)d->port, i, &g) || memcmp(g.raw, gid->raw, sizeof g.raw))
			continue;
		if (routable(d->name, d->port, i))
			return i;
		found = i;
	}
	return found;
}

/* Looks for a port of an open device. best is 2 for the port that has the address, and 1 for one of InfiniBand. */
static int look_at_ports(const struct vb_library *v, struct sl_rdma_device *d, const struct vb_gid *gid)
{
	int best = 0;

	for (int port = 1; port <= PORTS && best < 2; port++) {
		struct sl_rdma_device at = *d;

		at.port = port;
		memset(&at.attr, 0, sizeof at.attr);
		if (v->query_port(at.context, (uint8_t)port, &at.attr))
			break;
		if (at.attr.state != VB_PORT_ACTIVE)
			continue;
		at.gid_index = find_gid(v, &at, gid);
		if (at.gid_index >= 0) {
			at.gid = *gid;
			best = 2;
		} else if (!best && at.attr.link_layer == VB_LINK_INFINIBAND && !v->query_gid(at.context, (uint8_t)port, 0, &at.gid)) {
			at.gid_index = 0;
			best = 1;
		} else {
			continue;
		}
		*d = at;
	}
	return best;
}

bool sl_rdma_find(const struct vb_library *v, int sock, const char *only, struct sl_rdma_device *d, char *why, size_t cap)
{
	struct sl_rdma_device best = { 0 };
	struct vb_device **all;
	struct vb_gid gid;
	int n = 0, rank = 0;

	if (!gid_of(sock, &gid)) {
		snprintf(why, cap, "the connection is not of a network");
		return false;
	}
	all = v->get_device_list(&n);
	for (int i = 0; all && i < n && rank < 2; i++) {
		struct sl_rdma_device at = { 0 };
		int r;

		snprintf(at.name, sizeof at.name, "%s", v->get_device_name(all[i]));
		if ((only && strcmp(only, at.name)) || !(at.context = v->open_device(all[i])))
			continue;
		r = look_at_ports(v, &at, &gid);
		if (r <= rank) {
			v->close_device(at.context);
			continue;
		}
		if (rank)
			v->close_device(best.context);
		best = at;
		rank = r;
	}
	if (all)
		v->free_device_list(all);
	if (rank)
		*d = best;
	else if (!n)
		snprintf(why, cap, "there is no device");
	else
		snprintf(why, cap, "no device%s%s has an active port with the connection's local address", only ? " " : "", only ? only : "");
	return rank > 0;
}
