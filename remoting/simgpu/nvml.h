/* What the parts of the simulated libnvidia-ml share. Names and numbers are NVML's. */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#define API __attribute__((visibility("default")))

typedef int nvmlReturn_t;
enum {
	NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7, NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_GPU_IS_LOST = 15, NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25, NVML_ERROR_UNKNOWN = 999,
};

typedef struct dev *nvmlDevice_t;

struct dev { int index; };

/* NVML_SUCCESS between nvmlInit and nvmlShutdown. */
nvmlReturn_t nvml_up(void);
/* Checks the library, a device handle, and the pointer for the answer. */
nvmlReturn_t nvml_check(nvmlDevice_t d, const void *out);
/* What SLUICE_SIM_ERRORS says of a device under that name; none if it says nothing. */
unsigned long long nvml_errors(nvmlDevice_t d, const char *name, unsigned long long none);
/* Writes a text with its NUL into n bytes. */
nvmlReturn_t nvml_text(char *out, unsigned int n, const char *s);

#endif
