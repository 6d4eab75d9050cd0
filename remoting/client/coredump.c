/*
 * Settings of GPU core dumps. There are none through Sluice: a dump would be a file in the worker's machine. So dumps
 * cannot be switched on, and the other settings are only remembered: those of the process, and those of each context
 * that has set any.
 *
 * Locking: lock guards all settings.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ctx.h"
#include "ctxlocal.h"
#include "entry.h"
#include "gen.h"

enum { ON_EXCEPTION = 1, TRIGGER_HOST, LIGHTWEIGHT, USER_TRIGGER, FILE_NAME, PIPE_NAME, FLAGS };

#define NAME_ROOM 1024

struct settings {
	bool trigger_host, lightweight;
	unsigned int flags;
	char file[NAME_ROOM], pipe[NAME_ROOM];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct settings process = { .trigger_host = true };
static char key; /* its address is that of a context's own settings */

static CUresult copy_text(void *value, size_t *size, const char *text)
{
	if (*size > NAME_ROOM)
		*size = NAME_ROOM;
	if (*size) {
		memcpy(value, text, *size);
		((char *)value)[*size - 1] = 0;
	}
	return CUDA_SUCCESS;
}

static CUresult copy_value(void *value, size_t size, const void *from, size_t n)
{
	if (size != n)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(value, from, n);
	return CUDA_SUCCESS;
}

/* The bytes of a setting; 0 if there is no such setting. */
static size_t size_of(CUcoredumpSettings what)
{
	switch (what) {
	case ON_EXCEPTION: case TRIGGER_HOST: case LIGHTWEIGHT: case USER_TRIGGER:
		return 1;
	case FILE_NAME: case PIPE_NAME:
		return NAME_ROOM;
	case FLAGS:
		return sizeof(unsigned int);
	default:
		return 0;
	}
}

static CUresult get(const struct settings *s, CUcoredumpSettings what, void *value, size_t *size)
{
	static const bool off = false;

	if (!size || !size_of(what))
		return CUDA_ERROR_INVALID_VALUE;
	if (!value) {
		*size = size_of(what);
		return CUDA_SUCCESS;
	}
	switch (what) {
	case TRIGGER_HOST:
		return copy_value(value, *size, &s->trigger_host, 1);
	case LIGHTWEIGHT:
		return copy_value(value, *size, &s->lightweight, 1);
	case FILE_NAME:
		return copy_text(value, size, s->file);
	case PIPE_NAME:
		return copy_text(value, size, s->pipe);
	case FLAGS:
		return copy_value(value, *size, &s->flags, sizeof s->flags);
	default:
		return copy_value(value, *size, &off, 1);
	}
}

static CUresult set(struct settings *s, CUcoredumpSettings what, const void *value, size_t *size)
{
	const uint8_t *b = value;
	char *text = what == FILE_NAME ? s->file : s->pipe;

	if (!size || !size_of(what))
		return CUDA_ERROR_INVALID_VALUE;
	if (!value) {
		*size = size_of(what);
		return CUDA_SUCCESS;
	}
	if (what == FILE_NAME || what == PIPE_NAME) {
		if (*size > NAME_ROOM)
			return CUDA_ERROR_INVALID_VALUE;
		memset(text, 0, NAME_ROOM);
		memcpy(text, value, *size < NAME_ROOM ? *size : NAME_ROOM - 1);
		return CUDA_SUCCESS;
	}
	if (*size != size_of(what))
		return CUDA_ERROR_INVALID_VALUE;
	switch (what) {
	case TRIGGER_HOST:
		s->trigger_host = *b;
		return CUDA_SUCCESS;
	case LIGHTWEIGHT:
		s->lightweight = *b;
		return CUDA_SUCCESS;
	case FLAGS:
		memcpy(&s->flags, value, sizeof s->flags);
		return CUDA_SUCCESS;
	default:
		return *b ? sl_refuse_with("cuCoredumpSetAttribute", "a setting that writes core dumps") : CUDA_SUCCESS;
	}
}

CUresult sl_cuCoredumpGetAttributeGlobal(CUcoredumpSettings attrib, void *value, size_t *size)
{
	CUresult err;

	pthread_mutex_lock(&lock);
	err = get(&process, attrib, value, size);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_cuCoredumpSetAttributeGlobal(CUcoredumpSettings attrib, void *value, size_t *size)
{
	CUresult err;

	pthread_mutex_lock(&lock);
	err = set(&process, attrib, value, size);
	pthread_mutex_unlock(&lock);
	return err;
}

static void ended(CUcontext ctx, void *k, void *value)
{
	(void)ctx, (void)k;
	free(value);
}

/* The settings of the current context, which begin as the process's; with make they become its own. */
static CUresult of_context(struct settings **s, bool make)
{
	void *own = NULL;
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	*s = &process;
	if (err)
		return err;
	if (!sl_local_get(&own, NULL, &key) && own) {
		*s = own;
		return CUDA_SUCCESS;
	}
	if (!make)
		return CUDA_SUCCESS;
	own = malloc(sizeof **s);
	if (!own)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(own, &process, sizeof **s);
	err = sl_local_put(NULL, &key, own, ended);
	if (err)
		free(own);
	else
		*s = own;
	return err;
}

CUresult sl_cuCoredumpGetAttribute(CUcoredumpSettings attrib, void *value, size_t *size)
{
	struct settings *s;
	CUresult err;

	pthread_mutex_lock(&lock);
	err = of_context(&s, false);
	if (!err)
		err = get(s, attrib, value, size);
	pthread_mutex_unlock(&lock);
	return err;
}

CUresult sl_cuCoredumpSetAttribute(CUcoredumpSettings attrib, void *value, size_t *size)
{
	struct settings *s;
	CUresult err;

	pthread_mutex_lock(&lock);
	err = of_context(&s, true);
	if (!err)
		err = set(s, attrib, value, size);
	pthread_mutex_unlock(&lock);
	return err;
}
