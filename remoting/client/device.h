/* The devices that the program sees, by its own ordinals (device.c). */
#ifndef SLUICE_DEVICE_H
#define SLUICE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "snapshot.h"

const struct sl_device *sl_dev(CUdevice dev); /* by the program's ordinal, NULL if none */
int sl_dev_count(void);
bool sl_initialized(void);
int sl_dev_attr(CUdevice dev, unsigned attr); /* 0 if unknown */
void sl_dev_setup(void);		/* after the session started */
/*
 * The worker's ordinal of the device that the program calls dev
 * (CUDA_VISIBLE_DEVICES may have reordered them); dev itself if there is no such
 * device.
 */
int sl_dev_wire(int dev);
/* The program's ordinal of what a session calls dev; CU_DEVICE_INVALID if the program does not see it. */
int sl_dev_of(unsigned session, int dev);
/* The place of such a device in the snapshot, which lists the devices of all owners. */
int sl_dev_place(int dev);

#endif
