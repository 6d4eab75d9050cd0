/*
 * slurmstepd, once for each step on a node; the batch script is a step. user_init runs as
 * the user before the tasks are forked, task_init in each of them.
 *
 * A failure in user_init would drain the node and, with Slurm 22.05, leave a batch job
 * COMPLETED that never ran. So an error there is remembered, and task_init ends the task
 * with it: the job is FAILED, the node unchanged. task_init ends the process itself, as
 * Slurm does for a plug-in that is `required`: Slurm ignores a failure of an `optional`
 * plug-in, and the program would run without its GPU.
 */
#include "plugin.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Equal in all releases, but not defined by all headers. */
#define STEP_EXTERN 0xfffffffcu
#define STEP_BATCH 0xfffffffbu
#define STEP_INTERACTIVE 0xfffffffau
#define ANSWER_MS 2000
#define OWN_MS 6000	/* for a step that may have a gres of its own: daemon/internal/jobsock says what the daemon does meanwhile */
#define ABSENT_MS 5000	/* wait for a daemon that is being restarted, for a job that needs it */
#define RECORD "SLUICE_ENV"
#define RECORD_MAX 8192 /* limits of its bytes and changes: a user may have invented it */
#define RECORD_CHANGES 64
#define VALUE_MAX (128 * 1024) /* of one variable: the limit of execve(2) */

static char failure[SL_TEXT_MAX + 256];
static bool doubtful; /* whether the job needs the daemon that did not answer */

/* A variable of the job's environment, malloc'd; NULL if there is none. */
static char *job_getenv(spank_t sp, const char *name)
{
	for (int size = 4096; size <= VALUE_MAX; size *= 2) {
		char *v = malloc((size_t)size);
		spank_err_t err = v ? spank_getenv(sp, name, v, size) : ESPANK_ERROR;

		if (err == ESPANK_SUCCESS)
			return v;
		free(v);
		if (err != ESPANK_NOSPACE)
			return NULL;
	}
	return NULL;
}

/*
 * Whether the daemon has noted, in a file beside its socket, that the job has a lease.
 * The options do not tell: a job that is submitted within another inherits those.
 */
static bool noted(const struct sl_settings *s, uint32_t job)
{
	char path[sizeof s->socket + 32];
	const char *slash = strrchr(s->socket, '/');

	snprintf(path, sizeof path, "%.*s/jobs/%u", (int)(slash - s->socket), s->socket, job);
	return access(path, F_OK) == 0;
}

/*
 * Slurm passes a task its job's licences from 23.02 on, and passes them to nothing that runs
 * before the task. What separates them is form.HasLicence's list.
 */
static bool licensed(spank_t sp)
{
	char licences[4096] = "", *rest = licences, *name;

	spank_getenv(sp, "SLURM_JOB_LICENSES", licences, sizeof licences);
	while ((name = strsep(&rest, ",;|()[] \t")))
		if (!strncmp(name, SL_GRES, strlen(SL_GRES)))
			return true;
	return false;
}

static bool apply(spank_t sp, const struct sl_change *c)
{
	char *old = c->separator ? job_getenv(sp, c->name) : NULL;
	char *value = sl_list_change(c->value, old ? old : "", c->separator, true);
	bool ok = value && spank_setenv(sp, c->name, value, 1) == ESPANK_SUCCESS;

	free(old);
	free(value);
	return ok;
}

/*
 * Jobs that are submitted within this one inherit what is set here. They may ask
 * for no GPU, or for a real one, and must not find our driver. So a record of the changes,
 * with '|' for their newlines, goes along and is undone first. Each change costs a walk
 * through the environment: an invented record without a limit would keep slurmstepd busy
 * for a minute, during which scancel has no effect, and a step that cannot be killed
 * drains its node.
 */
static void record(spank_t sp, const struct sl_answer *a)
{
	char *r = a->len <= RECORD_MAX ? strndup(a->body, a->len) : NULL;

	if (r && !strchr(r, '|')) {
		for (char *c = strchr(r, '\n'); c; c = strchr(c, '\n'))
			*c = '|';
		spank_setenv(sp, RECORD, r, 1);
	}
	free(r);
}

static void undo(spank_t sp)
{
	char *r = job_getenv(sp, RECORD);
	struct sl_answer a = { .kind = SL_ENV, .body = r, .len = r ? strlen(r) : 0 };
	struct sl_change c;
	int n = 0;

	for (char *p = r; p && (p = strchr(p, '|'));)
		*p = '\n';
	if (a.len > RECORD_MAX)
		a.len = 0;
	while (n++ < RECORD_CHANGES && sl_answer_next(&a, &c)) {
		char *old = job_getenv(sp, c.name), *left = NULL;

		if (old && c.separator)
			left = sl_list_change(c.value, old, c.separator, false);
		if (left && *left)
			spank_setenv(sp, c.name, left, 1);
		else if (old && (left || !strcmp(old, c.value)))
			spank_unsetenv(sp, c.name);
		free(old);
		free(left);
	}
	if (r)
		spank_unsetenv(sp, RECORD);
	free(r);
}

/* What the daemon is to know of the step's own gres. The variable's text may be anybody's. */
static void own_gres(spank_t sp, uint32_t step, char own[100])
{
	char text[80] = "", mem[80];

	own[0] = 0;
	spank_getenv(sp, SL_STEP_ENV, text, sizeof text);
	spank_unsetenv(sp, SL_STEP_ENV);
	if (step == STEP_BATCH || step == STEP_INTERACTIVE || strncmp(text, "gres", 4) != 0)
		return;
	strcpy(own, " gres");
	if (text[4] == ':' && sl_option_parse(SL_RGPU_MEM, text + 5, mem))
		snprintf(own, 100, " gres mem=%s", mem);
}

int sl_remote_user_init(spank_t sp, const struct sl_settings *s)
{
	uint32_t job = 0, step = 0;
	struct sl_answer a;
	struct sl_change c;
	bool asked;
	char *memory, own[100];
	int patience;

	failure[0] = 0;
	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS || spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
	    step == STEP_EXTERN)
		return 0;
	undo(sp);
	own_gres(sp, step, own);
	patience = *own ? OWN_MS : ANSWER_MS;
	memory = sl_ask(&a, s->socket, job, step, own, 0, patience);
	asked = noted(s, job);
	if (a.kind == SL_SILENT && asked) {
		free(memory);
		memory = sl_ask(&a, s->socket, job, step, own, ABSENT_MS, ABSENT_MS + patience);
	}
	if (a.kind == SL_ENV)
		record(sp, &a);
	while (sl_answer_next(&a, &c))
		if (!apply(sp, &c)) {
			a.kind = SL_ERROR; /* ends the loop too */
			snprintf(a.text, sizeof a.text, "%.128s of the job's environment cannot be set; is it too large?", c.name);
		}
	if (a.kind == SL_ERROR)
		snprintf(failure, sizeof failure, "job %u: %s", job, a.text);
	else if (a.kind == SL_SILENT)
		snprintf(failure, sizeof failure, "job %u asks for a fraction of a GPU, and %s; the administrator sees why with: sluice health", job, a.text);
	doubtful = a.kind == SL_SILENT && !asked;
	if (doubtful)
		slurm_verbose("sluice: job %u: %s", job, a.text);
	free(memory);
	return 0;
}

/* A number of at most most; most + 1 for another text. */
static unsigned number(const char *text, unsigned most)
{
	char *end = "";
	unsigned long n = most + 1ul;

	if (text[0] >= '0' && text[0] <= '9')
		n = strtoul(text, &end, 10);
	return n > most || *end ? most + 1 : (unsigned)n;
}

/*
 * The GPUs that the step's programs are to see, by their numbers in the job's lease: those of its own if it has some (daemon/internal/jobnode),
 * else all. Returns how many; 0 if the job has none, or if a variable is not as the daemon sets it.
 */
static unsigned step_devices(spank_t sp, unsigned devices[SL_GPUS_MAX])
{
	char text[128] = "", *rest = text, *word;
	unsigned n = 0, all;

	spank_getenv(sp, "SLUICE_GPUS", text, sizeof text);
	all = number(text, SL_GPUS_MAX);
	if (all > SL_GPUS_MAX)
		return 0;
	text[0] = 0;
	if (spank_getenv(sp, "SLUICE_STEP_DEVICES", text, sizeof text) != ESPANK_SUCCESS) {
		for (; n < all; n++)
			devices[n] = n;
		return n;
	}
	while ((word = strsep(&rest, ","))) {
		if (n == all || (devices[n] = number(word, SL_GPUS_MAX)) >= all)
			return 0;
		n++;
	}
	return n;
}

/* Whether each task is to see its part of the GPUs alone. The step's environment decides (see local.c), else the option, else the job's. */
static bool bound(spank_t sp)
{
	char how[80] = "", value[80];

	if (spank_getenv(sp, "SLURM_RGPU_BIND", how, sizeof how) == ESPANK_SUCCESS && sl_option_parse(SL_RGPU_BIND, how, value))
		return !strcmp(value, "task");
	if (sl_option_value(SL_RGPU_BIND))
		return !strcmp(sl_option_value(SL_RGPU_BIND), "task");
	how[0] = 0;
	spank_getenv(sp, "SLUICE_BIND", how, sizeof how);
	return !strcmp(how, "task");
}

/*
 * The tasks of a step on this node share its GPUs out in their order: parts of the same size, or one that is off by one. Where there
 * are more tasks than GPUs, neighbours share one. The batch script and a shell are not tasks of a step.
 */
static void bind_task(spank_t sp)
{
	char list[128] = "";
	unsigned devices[SL_GPUS_MAX], gpus, first, end;
	uint32_t step = 0, tasks = 0;
	int task = 0;

	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step == STEP_BATCH || step == STEP_INTERACTIVE || step == STEP_EXTERN ||
	    spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS || spank_get_item(sp, S_TASK_ID, &task) != ESPANK_SUCCESS ||
	    task < 0 || (uint32_t)task >= tasks || !bound(sp))
		return;
	gpus = step_devices(sp, devices);
	first = (unsigned)((uint64_t)(unsigned)task * gpus / tasks);
	end = (unsigned)((uint64_t)((unsigned)task + 1) * gpus / tasks);
	for (unsigned i = first, n = 0; gpus && (i < end || i == first); i++)
		n += (unsigned)snprintf(list + n, sizeof list - n, "%s%u", n ? "," : "", devices[i]);
	if (gpus)
		spank_setenv(sp, "CUDA_VISIBLE_DEVICES", list, 1);
}

int sl_remote_task_init(spank_t sp)
{
	int task = 0;

	if (!failure[0] || (doubtful && !licensed(sp))) {
		bind_task(sp);
		return 0;
	}
	/* One task on each node prints it. */
	if (spank_get_item(sp, S_TASK_ID, &task) != ESPANK_SUCCESS || task == 0)
		slurm_spank_log("sluice: %s", failure);
	_exit(1);
}
