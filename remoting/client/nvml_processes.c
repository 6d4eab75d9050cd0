/*
 * The processes that use a device: the lease's sessions, under the names they
 * announced. nvidia-smi reads the list by a private table of functions, at the end.
 */
#include "nvml_answer.h"

#include <stdlib.h>
#include <string.h>

/* No MIG instance, in the process lists. */
#define NO_INSTANCE 0xffffffffu

/*
 * Lists the sessions of the lease, by the pids that the processes have in the job.
 * *count is the room on the way in, the number of processes on the way out. write
 * puts one of them at its place.
 */
static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned int *count, void *infos,
				   void (*write)(void *infos, unsigned int i, const struct nv_process *p))
{
	struct nv_process *list;
	unsigned int index, n, room;
	nvmlReturn_t rc = nv_device(device, &index);

	if (rc)
		return rc;
	NEED_ARG(count);
	room = *count;
	if (room && !infos)
		return NVML_ERROR_INVALID_ARGUMENT;
	rc = nv_processes(index, &list, &n);
	if (rc)
		return rc;
	*count = n;
	if (n > room)
		rc = NVML_ERROR_INSUFFICIENT_SIZE;
	else
		for (unsigned int i = 0; i < n; i++)
			write(infos, i, &list[i]);
	free(list);
	return rc;
}

static void write_v1(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessInfo_v1_t *)infos)[i] = (nvmlProcessInfo_v1_t){ .pid = p->pid, .usedGpuMemory = p->used };
}

static void write_v2(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessInfo_v2_t *)infos)[i] = (nvmlProcessInfo_v2_t){
		.pid = p->pid, .usedGpuMemory = p->used,
		.gpuInstanceId = NO_INSTANCE, .computeInstanceId = NO_INSTANCE,
	};
}

static void write_detail(void *infos, unsigned int i, const struct nv_process *p)
{
	((nvmlProcessDetail_v1_t *)infos)[i] = (nvmlProcessDetail_v1_t){
		.pid = p->pid, .usedGpuMemory = p->used,
		.gpuInstanceId = NO_INSTANCE, .computeInstanceId = NO_INSTANCE,
	};
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos)
{
	return list_processes(device, count, infos, write_v1);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
	return list_processes(device, count, infos, write_v2);
}

/* The third version has the second's layout. */
NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
	return list_processes(device, count, infos, write_v2);
}

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
	DEVICE(d, device, list);
	if (list->version != NVML_VERSION_OF(nvmlProcessDetailList_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	switch (list->mode) {
	case NVML_PROCESS_MODE_COMPUTE:
	case NVML_PROCESS_MODE_ALL:
		return list_processes(device, &list->numProcArrayEntries, list->procArray, write_detail);
	case NVML_PROCESS_MODE_GRAPHICS:
	case NVML_PROCESS_MODE_MPS:
		list->numProcArrayEntries = 0;
		return NVML_SUCCESS;
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

/* A lease has no graphics and no MPS processes. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned int *count)
{
	DEVICE(d, device, count);
	*count = 0;
	return NVML_SUCCESS;
}

#define NO_PROCESSES(name) \
	NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, void *infos) \
	{ \
		(void)infos; \
		return no_processes(device, count); \
	}

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* Known for processes that compute on the lease: their sessions announced the names. */
NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	nvmlReturn_t rc = NVML_ERROR_NOT_FOUND;

	NEED_INIT();
	NEED_ARG(name && length);
	for (unsigned int i = 0; i < nv_facts()->ndev && rc == NVML_ERROR_NOT_FOUND; i++) {
		struct nv_process *list;
		unsigned int n;

		if (nv_processes(i, &list, &n))
			continue;
		for (unsigned int k = 0; k < n; k++)
			if (list[k].pid == pid) {
				rc = nv_put_text(name, length, list[k].name);
				break;
			}
		free(list);
	}
	return rc;
}

/* ---- nvidia-smi's private table ---- */

/*
 * nvidia-smi asks for a private table of functions, does not run without it, and
 * takes its process list from it. It reads a table as its size in bytes and then
 * function pointers, and an empty slot as "not supported". Ours is empty but for
 * the lists of compute, graphics and MPS processes, each (device, count, entries)
 * with the entry below, and the question whether a device can be monitored (device,
 * answer), without which dmon and pmon refuse. The slots are the same in 535, 550
 * and 555. A later nvidia-smi may use them for something else, so a call whose
 * first argument is not one of our handles touches nothing.
 */
#define TABLE_PLACES 1024
#define PLACE_MONITORED (0x240 / sizeof(void *))
#define PLACE_COMPUTE (0x6a8 / sizeof(void *))
#define PLACE_GRAPHICS (0x6b0 / sizeof(void *))
#define PLACE_MPS (0x6b8 / sizeof(void *))

struct smi_process {
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu_instance, compute_instance;
	unsigned long long used_protected;
	char name[4096];
};

_Static_assert(sizeof(struct smi_process) == 0x1020, "nvidia-smi's process entry");

static void write_smi(void *infos, unsigned int i, const struct nv_process *p)
{
	struct smi_process *e = (struct smi_process *)infos + i;

	e->pid = p->pid;
	e->used = p->used;
	e->gpu_instance = e->compute_instance = NO_INSTANCE;
	e->used_protected = 0;
	memcpy(e->name, p->name, sizeof p->name);
}

static nvmlReturn_t smi_compute(nvmlDevice_t device, unsigned int *count, void *infos)
{
	return list_processes(device, count, infos, write_smi);
}

static nvmlReturn_t smi_none(nvmlDevice_t device, unsigned int *count, void *infos)
{
	(void)infos;
	return no_processes(device, count);
}

static nvmlReturn_t smi_monitored(nvmlDevice_t device, unsigned int *yes)
{
	DEVICE(d, device, yes);
	*yes = 1;
	return NVML_SUCCESS;
}

static const union {
	size_t size;
	nvmlReturn_t (*list)(nvmlDevice_t device, unsigned int *count, void *infos);
	nvmlReturn_t (*ask)(nvmlDevice_t device, unsigned int *answer);
} smi_table[TABLE_PLACES] = {
	[0] = { .size = sizeof smi_table },
	[PLACE_MONITORED] = { .ask = smi_monitored },
	[PLACE_COMPUTE] = { .list = smi_compute },
	[PLACE_GRAPHICS] = { .list = smi_none },
	[PLACE_MPS] = { .list = smi_none },
};

NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
	static const uint8_t smi[16] = {
		0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
	};

	NEED_ARG(table && id);
	*table = NULL;
	if (memcmp(id, smi, sizeof smi))
		return NVML_ERROR_NOT_FOUND;
	*table = smi_table;
	return NVML_SUCCESS;
}
