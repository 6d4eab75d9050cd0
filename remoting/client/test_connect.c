/*
 * The decoder of a snapshot: what is right, what is too much, and every length
 * that is too short or too long. And the list that several owners' devices make.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "connect.h"
#include "log.h"
#include "test.h"

const char sl_log_prefix[] = "test_connect: ";
const int sl_log_default = -1;

static uint8_t data[1 << 18];
static size_t size;

static void add(const void *p, size_t n)
{
	memcpy(data + size, p, n);
	size += n;
}

/* A snapshot of some devices, each with some attributes. */
static void make(uint32_t ndev, uint32_t nattr)
{
	struct wire_snapshot_head h = { .driver_version = 13000, .ndev = ndev, .keepalive_ms = 10000, .driver_string = "580.159.04" };

	size = 0;
	add(&h, sizeof h);
	for (uint32_t d = 0; d < ndev; d++) {
		struct wire_device_head v = { .name = "a\x1bGPU", .total_mem = 1000 + d, .pci_bus = 0x41, .pci_bus_id = "0000:41:00.0",
					      .prio_greatest = -5, .cc_major = 9, .nattr = nattr };

		v.limits[7] = SL_UNSUPPORTED;
		v.uuid[0] = (uint8_t)d;
		add(&v, sizeof v);
		for (uint32_t i = 0; i < nattr; i++)
			add(&(int32_t){ (int32_t)(100 * d + i) }, 4);
		for (uint32_t i = 0; i < nattr; i++)
			add(&(uint8_t){ i & 1 }, 1);
		while (size % 8)
			add("", 1);
	}
}

static bool decoded(struct sl_snapshot *s, size_t n)
{
	/* As large as the message, so that the sanitizer sees a byte read behind it. */
	uint8_t *p = malloc(n ? n : 1);
	bool ok;

	memcpy(p, data, n);
	ok = sl_snapshot_decode(s, p, n);
	free(p);
	return ok;
}

int main(void)
{
	static struct sl_snapshot s, all;
	struct wire_snapshot_head *h = (void *)data;

	make(2, 3);
	CHECK(decoded(&s, size));
	CHECK(s.ndev == 2 && s.driver_version == 13000 && s.keepalive_ms == 10000 && !strcmp(s.driver_string, "580.159.04"));
	CHECK(!strcmp(s.dev[0].name, "a?GPU") && s.dev[1].total_mem == 1001 && s.dev[1].uuid[0] == 1 && s.dev[1].pci_bus == 0x41);
	CHECK(!strcmp(s.dev[1].pci_bus_id, "0000:41:00.0") && s.dev[1].prio_greatest == -5 && s.dev[1].limits[7] == SL_UNSUPPORTED);
	CHECK(s.dev[1].nattr == 3 && s.dev[1].attr[2] == 102 && s.dev[1].attr_ok[1] == 1 && !s.dev[1].attr_ok[2] && !s.dev[1].attr[3]);
	for (size_t n = 0; n < size; n++)
		CHECK(!decoded(&s, n));
	add("", 1);
	CHECK(!decoded(&s, size));

	make(SL_MAX_DEVICES, SL_MAX_ATTRS);
	CHECK(decoded(&s, size) && s.ndev == SL_MAX_DEVICES);
	make(SL_MAX_DEVICES + 1, 1);
	CHECK(!decoded(&s, size));
	make(1, SL_MAX_ATTRS + 1);
	CHECK(!decoded(&s, size));
	make(1, 1);
	h->keepalive_ms = SL_KEEPALIVE_LEAST_MS - 1;
	CHECK(!decoded(&s, size));
	h->keepalive_ms = SL_KEEPALIVE_MOST_MS + 1;
	CHECK(!decoded(&s, size));

	/* Two owners: one list, and the older driver. */
	make(10, 1);
	CHECK(decoded(&s, size) && sl_snapshot_add(&all, &s) && all.ndev == 10 && all.driver_version == 13000 && all.keepalive_ms == 10000);
	make(6, 1);
	h->driver_version = 12040;
	strcpy(h->driver_string, "550.1");
	CHECK(decoded(&s, size) && sl_snapshot_add(&all, &s) && all.ndev == 16 && all.driver_version == 12040);
	CHECK(!strcmp(all.driver_string, "550.1") && all.dev[10].total_mem == 1000);
	CHECK(!sl_snapshot_add(&all, &s) && all.ndev == 16);
	printf("test_connect: ok\n");
	return 0;
}
