/*
 * How an NVML function checks its arguments and returns its answer. nvml_find.c,
 * nvml_device.c, nvml_readings.c and nvml_processes.c use it to answer from
 * nvml_conn.h.
 */
#ifndef SLUICE_NVML_ANSWER_H
#define SLUICE_NVML_ANSWER_H

#include "nvml_conn.h"

/* CUDA device attributes that answer NVML functions. */
enum {
	ATTR_CLOCK_RATE = 13,
	ATTR_SM_COUNT = 16,
	ATTR_COMPUTE_MODE = 20,
	ATTR_ECC_ENABLED = 32,
	ATTR_MEMORY_CLOCK_RATE = 36,
	ATTR_MEMORY_BUS_WIDTH = 37,
	ATTR_MULTI_GPU_BOARD = 84,
	ATTR_GPU_PCI_DEVICE_ID = 139,
	ATTR_GPU_PCI_SUBSYSTEM_ID = 140,
};

#define NEED_INIT() \
	do { \
		if (!nv_opened()) \
			return NVML_ERROR_UNINITIALIZED; \
	} while (0)

#define NEED_ARG(p) \
	do { \
		if (!(p)) \
			return NVML_ERROR_INVALID_ARGUMENT; \
	} while (0)

/* An NVLink's state, and how many the device has, for the field values too. */
nvmlReturn_t nv_put_link_state(nvmlDevice_t device, unsigned int link, unsigned int *active);
nvmlReturn_t nv_put_link_count(nvmlDevice_t device, unsigned int *count);

nvmlDevice_t nv_handle(unsigned int index);
/* The index of a handle; UNINITIALIZED or INVALID_ARGUMENT if there is none. */
nvmlReturn_t nv_device(nvmlDevice_t h, unsigned int *index);
/* A reading, NOT_SUPPORTED if the device does not have it. */
nvmlReturn_t nv_put(unsigned int *out, uint32_t v);
/* One of the worker's further readings (SL_READING_). */
nvmlReturn_t nv_put_more(nvmlDevice_t device, unsigned int which, unsigned int *out);
/* A text with its NUL into cap bytes, or INSUFFICIENT_SIZE. */
nvmlReturn_t nv_put_text(char *dst, unsigned int cap, const char *s);
/* An attribute as CUDA gives it; false if the worker did not send it. */
bool nv_attr(const struct sl_device *d, int a, int32_t *v);
/* "GPU-" and the UUID's usual form: 41 bytes with the NUL. */
void nv_uuid_text(const uint8_t u[16], char text[41]);

/* Begins every function about a device: checks the library, the handle and the pointer for the answer. */
#define DEVICE(d, h, out) \
	const struct sl_device *d; \
	do { \
		unsigned int index_; \
		nvmlReturn_t rc_ = nv_device(h, &index_); \
		if (rc_) \
			return rc_; \
		NEED_ARG(out); \
		d = &nv_facts()->dev[index_]; \
		(void)d; \
	} while (0)

/* The same for functions that answer from the worker's readings. */
#define READINGS(r, h, out) READINGS_(r, h, out, false)
#define READINGS_NOW(r, h, out) READINGS_(r, h, out, true)
#define READINGS_(r, h, out, now) \
	struct nv_readings r; \
	do { \
		unsigned int index_; \
		nvmlReturn_t rc_ = nv_device(h, &index_); \
		if (rc_) \
			return rc_; \
		NEED_ARG(out); \
		rc_ = nv_read(index_, now, &r); \
		if (rc_) \
			return rc_; \
	} while (0)

#endif
