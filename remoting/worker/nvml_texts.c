/* What NVML says of devices in words, and in numbers that hardly ever change. What it does not say stays as it was. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <string.h>

/* NVML's layouts, as its documentation describes them. */
struct nvml_words { unsigned int version; char text[sizeof(((struct wire_observe_text_reply *)0)->text)]; };
struct nvml_capabilities { unsigned int version, mask; };

#define VERSION_1(type) ((unsigned int)sizeof(type) | 1u << 24)
#define CORRUPTED_INFOROM 14

static struct {
	int (*vbios)(void *, char *, unsigned int);
	int (*board)(void *, char *, unsigned int);
	int (*image)(void *, char *, unsigned int);
	int (*object)(void *, unsigned int, char *, unsigned int);
	int (*gsp)(void *, char *);
	int (*clocks)(void *, struct nvml_words *);
	int (*modes)(void *, struct nvml_words *);
	int (*module)(void *, unsigned int *);
	int (*checksum)(void *, unsigned int *);
	int (*capabilities)(void *, struct nvml_capabilities *);
	int (*fans)(void *, unsigned int *);
	int (*rows)(void *, unsigned int *, unsigned int *, unsigned int *, unsigned int *);
	int (*gsp_mode)(void *, unsigned int *, unsigned int *);
	int (*validate)(void *);
} nv;

void sl_nvml_find_texts(void *library)
{
#define LOAD(field, name) *(void **)&nv.field = dlsym(library, name)
	LOAD(vbios, "nvmlDeviceGetVbiosVersion");
	LOAD(board, "nvmlDeviceGetBoardPartNumber");
	LOAD(image, "nvmlDeviceGetInforomImageVersion");
	LOAD(object, "nvmlDeviceGetInforomVersion");
	LOAD(gsp, "nvmlDeviceGetGspFirmwareVersion");
	LOAD(clocks, "nvmlDeviceGetCurrentClockFreqs");
	LOAD(modes, "nvmlDeviceGetPerformanceModes");
	LOAD(module, "nvmlDeviceGetModuleId");
	LOAD(checksum, "nvmlDeviceGetInforomConfigurationChecksum");
	LOAD(capabilities, "nvmlDeviceGetCapabilities");
	LOAD(fans, "nvmlDeviceGetNumFans");
	LOAD(rows, "nvmlDeviceGetRemappedRows");
	LOAD(gsp_mode, "nvmlDeviceGetGspFirmwareMode");
	LOAD(validate, "nvmlDeviceValidateInforom");
#undef LOAD
}

static void take_words(int (*f)(void *, struct nvml_words *), void *dev, char *text)
{
	struct nvml_words w = { .version = VERSION_1(struct nvml_words) };

	if (f && !f(dev, &w))
		memcpy(text, w.text, sizeof w.text);
}

void sl_nvml_text(void *dev, uint32_t which, char *text)
{
	char s[128] = "";
	int rc = -1;

	switch (which) {
	case SL_TEXT_VBIOS:
		rc = nv.vbios ? nv.vbios(dev, s, 32) : -1;
		break;
	case SL_TEXT_BOARD_PART:
		rc = nv.board ? nv.board(dev, s, 80) : -1;
		break;
	case SL_TEXT_INFOROM_IMAGE:
		rc = nv.image ? nv.image(dev, s, 16) : -1;
		break;
	case SL_TEXT_INFOROM_OEM:
	case SL_TEXT_INFOROM_ECC:
	case SL_TEXT_INFOROM_POWER:
		rc = nv.object ? nv.object(dev, which - SL_TEXT_INFOROM_OEM, s, 16) : -1;
		break;
	case SL_TEXT_GSP:
		rc = nv.gsp ? nv.gsp(dev, s) : -1;
		break;
	case SL_TEXT_CLOCK_FREQS:
		take_words(nv.clocks, dev, text);
		break;
	case SL_TEXT_PERFORMANCE_MODES:
		take_words(nv.modes, dev, text);
		break;
	}
	if (!rc)
		memcpy(text, s, sizeof s);
}

void sl_nvml_facts(void *dev, uint32_t value[SL_FACT_COUNT])
{
	struct nvml_capabilities caps = { .version = VERSION_1(struct nvml_capabilities) };
	unsigned int a, b, c, d;
	int rc;

	if (nv.module && !nv.module(dev, &a))
		value[SL_FACT_MODULE_ID] = a;
	if (nv.checksum && !nv.checksum(dev, &a))
		value[SL_FACT_INFOROM_CHECKSUM] = a;
	if (nv.capabilities && !nv.capabilities(dev, &caps))
		value[SL_FACT_CAPABILITIES] = caps.mask;
	if (nv.fans && !nv.fans(dev, &a))
		value[SL_FACT_FANS] = a;
	if (nv.rows && !nv.rows(dev, &a, &b, &c, &d)) {
		value[SL_FACT_ROWS_CORRECTED] = a;
		value[SL_FACT_ROWS_UNCORRECTED] = b;
		value[SL_FACT_ROWS_PENDING] = c;
		value[SL_FACT_ROWS_FAILED] = d;
	}
	if (nv.gsp_mode && !nv.gsp_mode(dev, &a, &b)) {
		value[SL_FACT_GSP_ENABLED] = a;
		value[SL_FACT_GSP_DEFAULT] = b;
	}
	rc = nv.validate ? nv.validate(dev) : -1;
	if (!rc || rc == CORRUPTED_INFOROM)
		value[SL_FACT_INFOROM_VALID] = !rc;
}
