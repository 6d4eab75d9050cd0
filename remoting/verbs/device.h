#ifndef SLUICE_RDMA_DEVICE_H
#define SLUICE_RDMA_DEVICE_H

#include <stdbool.h>

#include "verbs.h"

struct sl_rdma_device {
	char name[64];
	struct vb_context *context; /* open */
	int port, gid_index;
	struct vb_gid gid;
	struct vb_port attr;
};

/* Finds and opens the device for a socket, as sl_rdma_open says. */
bool sl_rdma_find(const struct vb_library *v, int sock, const char *only, struct sl_rdma_device *d, char *why, size_t cap);

#endif
