/*
 * A program can ask for a notice when it uses more memory than the system has left for it. No notice ever comes: a lease's
 * memory is its own for as long as the lease lives. Registrations are remembered so that they can be ended.
 *
 * Locking: lock guards the list.
 */
#include <pthread.h>
#include <stdlib.h>

#include "device.h"
#include "gen.h"

struct registration {
	struct registration *next;
	CUdevice dev;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct registration *list;

CUresult sl_cuDeviceRegisterAsyncNotification(CUdevice device, CUasyncCallback fn, void *userData, CUasyncCallbackHandle *callback)
{
	struct registration *r;

	(void)userData;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!fn || !callback)
		return CUDA_ERROR_INVALID_VALUE;
	r = malloc(sizeof *r);
	if (!r)
		return CUDA_ERROR_OUT_OF_MEMORY;
	r->dev = device;
	pthread_mutex_lock(&lock);
	r->next = list;
	list = r;
	pthread_mutex_unlock(&lock);
	*callback = (CUasyncCallbackHandle)(void *)r;
	return CUDA_SUCCESS;
}

CUresult sl_cuDeviceUnregisterAsyncNotification(CUdevice device, CUasyncCallbackHandle callback)
{
	struct registration *r, **at;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	for (at = &list; *at && ((void *)*at != (void *)callback || (*at)->dev != device); at = &(*at)->next)
		;
	r = *at;
	if (r)
		*at = r->next;
	pthread_mutex_unlock(&lock);
	free(r);
	return r ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
