/* See fakeslurm.h. No part of the plug-in. */
#include "fakeslurm.h"
#include "plugin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENTRIES 64

struct entries {
	char *name[ENTRIES], *value[ENTRIES];
};

static struct entries job_env, control;
static struct spank_option options[ENTRIES];
static int options_n, context, task, tasks, full, loud;
static uint32_t job_id, step_id;
static char text[16384];

static void clear(struct entries *e)
{
	for (int i = 0; i < ENTRIES; i++) {
		free(e->name[i]);
		free(e->value[i]);
		e->name[i] = e->value[i] = NULL;
	}
}

static const char *get(struct entries *e, const char *name)
{
	for (int i = 0; i < ENTRIES && e->name[i]; i++)
		if (!strcmp(e->name[i], name))
			return e->value[i];
	return NULL;
}

static void put(struct entries *e, const char *name, const char *value)
{
	for (int i = 0; i < ENTRIES; i++) {
		if (e->name[i] && strcmp(e->name[i], name))
			continue;
		free(e->name[i]);
		free(e->value[i]);
		e->name[i] = strdup(name);
		e->value[i] = strdup(value);
		return;
	}
	abort();
}

void fake_reset(int ctx, uint32_t job, uint32_t step, int local_task)
{
	clear(&job_env);
	clear(&control);
	context = ctx;
	job_id = job;
	step_id = step;
	task = local_task;
	tasks = local_task + 1;
	options_n = full = 0;
	text[0] = 0;
}

void fake_setenv(const char *name, const char *value)
{
	put(&job_env, name, value);
}

const char *fake_getenv(const char *name)
{
	return get(&job_env, name);
}

const char *fake_control(const char *name)
{
	return get(&control, name);
}

const char *fake_log(void)
{
	return text;
}

void fake_full(void)
{
	full = 1;
}

void fake_tasks(int local)
{
	tasks = local;
}

void fake_loud(void)
{
	loud = 1;
}

int fake_option(const char *name, const char *value, int remote)
{
	for (int i = 0; i < options_n; i++)
		if (!strcmp(options[i].name, name))
			return options[i].cb(options[i].val, value, remote);
	return -2;
}

/* --- what the plug-in calls --- */

long slurm_api_version(void)
{
	return 42L << 16;
}

spank_context_t spank_context(void)
{
	return (spank_context_t)context;
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *o)
{
	(void)sp;
	if (options_n == ENTRIES)
		return ESPANK_ERROR;
	options[options_n++] = *o;
	return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	spank_err_t err = ESPANK_SUCCESS;
	va_list ap;

	(void)sp;
	va_start(ap, item);
	if (item == S_JOB_ID)
		*va_arg(ap, uint32_t *) = job_id;
	else if (item == S_JOB_STEPID)
		*va_arg(ap, uint32_t *) = step_id;
	else if (item == S_TASK_ID)
		*va_arg(ap, int *) = task;
	else if (item == S_JOB_LOCAL_TASK_COUNT)
		*va_arg(ap, uint32_t *) = (uint32_t)tasks;
	else
		err = ESPANK_BAD_ARG;
	va_end(ap);
	return err;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buf, int len)
{
	const char *v = get(&job_env, name);

	(void)sp;
	if (!v)
		return ESPANK_ENV_NOEXIST;
	if (strlen(v) >= (size_t)len)
		return ESPANK_NOSPACE;
	strcpy(buf, v);
	return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	if (full || !overwrite)
		return ESPANK_ERROR;
	put(&job_env, name, value);
	return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	int last = 0, at = -1;

	(void)sp;
	for (; last < ENTRIES && job_env.name[last]; last++)
		if (!strcmp(job_env.name[last], name))
			at = last;
	if (at < 0)
		return ESPANK_ERROR;
	free(job_env.name[at]);
	free(job_env.value[at]);
	job_env.name[at] = job_env.name[--last];
	job_env.value[at] = job_env.value[last];
	job_env.name[last] = job_env.value[last] = NULL;
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	if (full || !overwrite)
		return ESPANK_ERROR;
	put(&control, name, value);
	return ESPANK_SUCCESS;
}

static void say(const char *format, va_list ap)
{
	size_t n = strlen(text);

	vsnprintf(text + n, sizeof text - n - 1, format, ap);
	strcat(text, "\n");
	if (loud)
		fputs(text + n, stderr);
}

#define LOG(name) \
	void name(const char *format, ...) \
	{ \
		va_list ap; \
		va_start(ap, format); \
		say(format, ap); \
		va_end(ap); \
	}

LOG(slurm_error)
LOG(slurm_verbose)
LOG(slurm_spank_log)
