/* The driver's answer to the runtime's check that it is a genuine driver. */
#ifndef SLUICE_INTEGRITY_H
#define SLUICE_INTEGRITY_H

#include <stddef.h>
#include <stdint.h>

struct sl_integrity_device {
	uint8_t uuid[16];
	uint32_t domain, bus, device;
};

struct sl_integrity {
	uint32_t driver, version, pid, thread;
	uint64_t table_runtime, table_check, function;
	uint64_t seconds;
};

void sl_md2(const void *p, size_t n, uint8_t out[16]);
void sl_integrity_answer(const struct sl_integrity *in, const struct sl_integrity_device *dev, unsigned ndev, uint8_t out[16]);

#endif
