/*
 * How devices reach each other: peer to peer, and by NVLink, as the owner's NVML says. Devices of
 * several owners do not reach each other. NCCL chooses its transports by this.
 */
#include "nvml_answer.h"

#include <stdio.h>
#include <string.h>

/* The links of a device, and the number of another in its session; -1 if that is another owner's. */
static nvmlReturn_t pair(nvmlDevice_t device, nvmlDevice_t other, const void *out, struct nv_links *l, int *at, bool *same)
{
	unsigned int a, b;
	nvmlReturn_t rc = nv_device(device, &a);

	if (!rc)
		rc = nv_device(other, &b);
	if (rc)
		return rc;
	NEED_ARG(out);
	*same = a == b;
	*at = nv_sibling(a, b);
	return *same || *at < 0 ? NVML_SUCCESS : nv_read_links(a, l);
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, unsigned int caps, unsigned int *status)
{
	struct nv_links l;
	nvmlReturn_t rc;
	bool same;
	int at;

	rc = pair(device, other, caps < NVML_P2P_CAPS_INDEX_UNKNOWN ? status : NULL, &l, &at, &same);
	if (rc)
		return rc;
	*status = NVML_P2P_STATUS_NOT_SUPPORTED;
	if (same)
		*status = NVML_P2P_STATUS_OK;
	else if (at >= 0 && l.r.peer[at * NVML_P2P_CAPS_INDEX_UNKNOWN + caps] != NV_NA)
		*status = l.r.peer[at * NVML_P2P_CAPS_INDEX_UNKNOWN + caps];
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, unsigned int *level)
{
	struct nv_links l;
	nvmlReturn_t rc;
	bool same;
	int at;

	rc = pair(device, other, level, &l, &at, &same);
	if (rc)
		return rc;
	if (same)
		return NVML_ERROR_NOT_SUPPORTED; /* as NVML has it */
	*level = NVML_TOPOLOGY_SYSTEM;
	if (at >= 0 && l.r.ancestor[at] != NV_NA)
		*level = l.r.ancestor[at];
	return NVML_SUCCESS;
}

/* The values of one NVLink; NOT_SUPPORTED if the device does not have it. */
static nvmlReturn_t nvlink(nvmlDevice_t device, unsigned int link, const void *out, uint32_t value[SL_NVLINK_VALUES])
{
	struct nv_links l;
	unsigned int index;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(out && link < SL_NVLINK_COUNT);
	rc = nv_read_links(index, &l);
	if (rc)
		return rc;
	memcpy(value, l.r.nvlink + link * SL_NVLINK_VALUES, SL_NVLINK_VALUES * sizeof *value);
	return value[SL_NVLINK_CAPS] == NV_NA ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static nvmlReturn_t one(nvmlDevice_t device, unsigned int link, unsigned int which, unsigned int *out)
{
	uint32_t value[SL_NVLINK_VALUES];
	nvmlReturn_t rc = nvlink(device, link, out, value);

	return rc ? rc : nv_put(out, value[which]);
}

nvmlReturn_t nv_put_link_state(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
	return one(device, link, SL_NVLINK_ACTIVE, active);
}

nvmlReturn_t nv_put_link_count(nvmlDevice_t device, unsigned int *count)
{
	uint32_t value[SL_NVLINK_VALUES];
	nvmlReturn_t rc = NVML_SUCCESS;
	unsigned int n = 0;

	for (unsigned int i = 0; i < SL_NVLINK_COUNT && (!rc || rc == NVML_ERROR_NOT_SUPPORTED); i++) {
		rc = nvlink(device, i, count, value);
		n += !rc;
	}
	if (rc && rc != NVML_ERROR_NOT_SUPPORTED)
		return rc;
	return nv_put(count, n);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
	return nv_put_link_state(device, link, active);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
	return one(device, link, SL_NVLINK_VERSION, version);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type)
{
	return one(device, link, SL_NVLINK_REMOTE_TYPE, type);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, unsigned int capability, unsigned int *has)
{
	unsigned int caps;
	nvmlReturn_t rc = one(device, link, SL_NVLINK_CAPS, capability < NVML_NVLINK_CAP_COUNT && has ? &caps : NULL);

	if (!rc)
		*has = caps >> capability & 1;
	return rc;
}

/* The part of nvmlPciInfo_t that all its layouts begin with. */
static nvmlReturn_t remote(nvmlDevice_t device, unsigned int link, nvmlPciInfo_v2_t *pci)
{
	uint32_t v[SL_NVLINK_VALUES];
	nvmlReturn_t rc = nvlink(device, link, pci, v);

	if (rc)
		return rc;
	/* Where the other end is not on this machine's PCI, the driver says that it is at FFFFFFFF:FF:FF.0. */
	if (v[SL_NVLINK_BUS] == NV_NA)
		return NVML_ERROR_NOT_SUPPORTED;
	pci->domain = v[SL_NVLINK_DOMAIN];
	pci->bus = v[SL_NVLINK_BUS];
	pci->device = v[SL_NVLINK_DEVICE];
	pci->pciDeviceId = v[SL_NVLINK_PCI_ID];
	pci->pciSubSystemId = v[SL_NVLINK_PCI_SUB];
	snprintf(pci->busId, sizeof pci->busId, "%04X:%02X:%02X.0", pci->domain & 0xfffffff, pci->bus & 0xff, pci->device & 0xff);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	nvmlReturn_t rc = remote(device, link, (nvmlPciInfo_v2_t *)pci);

	if (!rc)
		snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xff, pci->device & 0xff);
	return rc;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_v2_t *pci)
{
	return remote(device, link, pci);
}

_Static_assert(offsetof(nvmlPciInfo_t, pciSubSystemId) == offsetof(nvmlPciInfo_v2_t, pciSubSystemId), "both begin alike");
