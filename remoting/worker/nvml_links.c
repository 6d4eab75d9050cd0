/* What NVML says of how devices reach each other. Values that it does not give stay as they are. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>

/* NVML's layouts, as its documentation describes them. */
struct nvml_pci {
	char id_legacy[16];
	unsigned int domain, bus, device, pci_id, pci_sub;
	char id[32];
};

struct nvml_field_of_link {
	unsigned int id, scope;
	long long stamp, latency;
	unsigned int type;
	int result;
	union {
		unsigned int value;
		unsigned long long wide;
	};
};

#define FIELD_NVLINK_STATE 165	/* since Hopper; nvmlDeviceGetNvLinkState before */
#define CAPS 6

static struct {
	int (*p2p)(void *, void *, unsigned int, unsigned int *);
	int (*ancestor)(void *, void *, unsigned int *);
	int (*state)(void *, unsigned int, unsigned int *);
	int (*caps)(void *, unsigned int, unsigned int, unsigned int *);
	int (*version)(void *, unsigned int, unsigned int *);
	int (*type)(void *, unsigned int, unsigned int *);
	int (*pci)(void *, unsigned int, struct nvml_pci *);
	int (*fields)(void *, int, struct nvml_field_of_link *);
} nv;

void sl_nvml_find_links(void *library)
{
#define LOAD(field, name) *(void **)&nv.field = dlsym(library, name)
	LOAD(p2p, "nvmlDeviceGetP2PStatus");
	LOAD(ancestor, "nvmlDeviceGetTopologyCommonAncestor");
	LOAD(state, "nvmlDeviceGetNvLinkState");
	LOAD(caps, "nvmlDeviceGetNvLinkCapability");
	LOAD(version, "nvmlDeviceGetNvLinkVersion");
	LOAD(type, "nvmlDeviceGetNvLinkRemoteDeviceType");
	LOAD(pci, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
	LOAD(fields, "nvmlDeviceGetFieldValues");
#undef LOAD
}

void sl_nvml_peer(void *dev, void *other, uint32_t status[5], uint32_t *ancestor)
{
	unsigned int v;

	for (unsigned int i = 0; nv.p2p && i < 5; i++)
		if (!nv.p2p(dev, other, i, &v))
			status[i] = v;
	if (nv.ancestor && !nv.ancestor(dev, other, &v))
		*ancestor = v;
}

static void link_up(void *dev, uint32_t link, uint32_t *value)
{
	struct nvml_field_of_link f = { .id = FIELD_NVLINK_STATE, .scope = link };
	unsigned int v;

	if (nv.fields && !nv.fields(dev, 1, &f) && !f.result)
		*value = f.value;
	else if (nv.state && !nv.state(dev, link, &v))
		*value = v;
}

void sl_nvml_link(void *dev, uint32_t link, uint32_t value[SL_NVLINK_VALUES])
{
	struct nvml_pci pci = { .domain = 0 };
	unsigned int v, caps = 0, known = 0;

	for (unsigned int i = 0; nv.caps && i < CAPS; i++)
		if (!nv.caps(dev, link, i, &v)) {
			known = 1;
			caps |= (v != 0) << i;
		}
	if (!known)
		return;	/* no such link */
	value[SL_NVLINK_CAPS] = caps;
	link_up(dev, link, &value[SL_NVLINK_ACTIVE]);
	if (nv.version && !nv.version(dev, link, &v))
		value[SL_NVLINK_VERSION] = v;
	if (nv.type && !nv.type(dev, link, &v))
		value[SL_NVLINK_REMOTE_TYPE] = v;
	if (nv.pci && !nv.pci(dev, link, &pci)) {
		value[SL_NVLINK_DOMAIN] = pci.domain;
		value[SL_NVLINK_BUS] = pci.bus;
		value[SL_NVLINK_DEVICE] = pci.device;
		value[SL_NVLINK_PCI_ID] = pci.pci_id;
		value[SL_NVLINK_PCI_SUB] = pci.pci_sub;
	}
}
