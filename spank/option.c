/*
 * The options. Slurm calls back for each option that is given: first for those in the
 * environment that a job's processes inherit, then for those of #SBATCH lines and the
 * command line; the last one counts. A bad value is refused in the callback, which ends
 * srun, sbatch and salloc before anything is submitted.
 */
#include "plugin.h"
#include "options.h"

#include <errno.h> /* program_invocation_short_name */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char given[SL_OPTIONS][80]; /* in normal form; "" not given */
static bool called[SL_OPTIONS];

/* Whether s is what may follow a unit: nothing, B or iB, in upper or lower case, in any locale. */
static bool unit_ends(const char *s)
{
	if (*s == 'i' || *s == 'I') {
		s++;
		if (*s != 'b' && *s != 'B')
			return false;
	}
	if (*s == 'b' || *s == 'B')
		s++;
	return !*s;
}

static bool parse_size(const char *v, char out[80])
{
	static const char units[] = "MGT";
	unsigned long long n = 0;
	size_t digits;
	const char *unit;
	char c;

	while (v[0] == '0' && v[1] >= '0' && v[1] <= '9')
		v++;
	digits = strspn(v, "0123456789");
	c = v[digits];
	if (!digits || digits > 18 || !c || !unit_ends(v + digits + 1))
		return false;
	if (c >= 'a')
		c -= 'a' - 'A';
	unit = strchr(units, c);
	if (!unit)
		return false;
	for (size_t i = 0; i < digits; i++)
		n = n * 10 + (unsigned)(v[i] - '0');
	snprintf(out, 80, "%llu%c", n, *unit);
	if (n > SL_OPTION_MAX_MIB)
		return false;
	n <<= 10 * (unit - units);
	return n >= SL_OPTION_MIN_MIB && n <= SL_OPTION_MAX_MIB;
}

static bool parse_time(const char *v, char out[80])
{
	static const char units[] = "smh";
	static const unsigned seconds[] = { 1, 60, 3600 };
	size_t digits = strspn(v, "0123456789");
	const char *unit;
	unsigned n = 0;

	if (!digits || digits > 5)
		return false;
	for (size_t i = 0; i < digits; i++)
		n = n * 10 + (unsigned)(v[i] - '0');
	snprintf(out, 80, "%s", v);
	if (!strcmp(v, "0"))
		return true;
	unit = v[digits] ? strchr(units, v[digits]) : NULL;
	return unit && !v[digits + 1] && n <= SL_OPTION_MAX_SECONDS / seconds[unit - units];
}

/* Unlike isalnum(3), the same in every locale. */
static bool letter_or_digit(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool sl_option_parse(int i, const char *value, char out[80])
{
	const struct sl_option *w = &sl_options[i];

	switch (w->kind) {
	case SL_OPTION_SIZE:
		return parse_size(value, out);
	case SL_OPTION_TIME:
		return parse_time(value, out);
	case SL_OPTION_CHOICE:
		for (const char *const *c = w->choices; *c; c++)
			if (!strcmp(*c, value)) {
				strcpy(out, value);
				return true;
			}
		return false;
	case SL_OPTION_NAME:
		if (!letter_or_digit(value[0]) || strlen(value) > SL_OPTION_NAME_MAX)
			return false;
		for (const char *c = value; *c; c++)
			if (!letter_or_digit(*c) && !strchr(".-_", *c))
				return false;
		strcpy(out, value);
		return true;
	case SL_OPTION_FLAG:
		strcpy(out, "1");
		return true;
	}
	return false;
}

/*
 * Whether this callback is for an option inherited from the environment: it is the first
 * one, and there is such a variable. A job's options are not those of the jobs that it
 * submits: most of those ask for no GPU.
 */
static bool inherited(int i)
{
	char name[80];
	bool first = !called[i];

	called[i] = true;
	snprintf(name, sizeof name, "SLURM_SPANK__SLURM_SPANK_OPTION_sluice_%s", sl_options[i].name);
	for (char *c = strchr(name, '-'); c; c = strchr(c, '-'))
		*c = '_';
	return first && getenv(name);
}

/* Slurm's callback for option val. In slurmstepd nothing is refused. */
static int option_given(int val, const char *optarg, int remote)
{
	const char *value = optarg ? optarg : "";
	char out[80];

	if (val < 0 || val >= SL_OPTIONS)
		return -1;
	if (!remote && inherited(val))
		return 0;
	if (sl_option_parse(val, value, out)) {
		strcpy(given[val], out);
		return 0;
	}
	if (remote)
		return 0;
	slurm_spank_log("sluice: --%s=%.80s: want %s", sl_options[val].name, value, sl_options[val].want);
	return -1;
}

void sl_option_register(spank_t sp)
{
	for (int i = 0; i < SL_OPTIONS; i++) {
		/* Slurm copies the strings; its type just lacks the const. */
		struct spank_option o = {
			.name = (char *)sl_options[i].name,
			.arginfo = (char *)sl_options[i].arg,
			.usage = (char *)sl_options[i].help,
			.has_arg = sl_options[i].arg ? 1 : 0,
			.val = i,
			.cb = option_given,
		};

		given[i][0] = 0;
		called[i] = false;
		if (spank_option_register(sp, &o) != ESPANK_SUCCESS)
			slurm_error("sluice: Slurm refuses the option --%s", sl_options[i].name);
	}
}

const char *sl_option_value(int i)
{
	return given[i][0] ? given[i] : NULL;
}

/*
 * An option that was not given may stand in the environment, as Slurm's own may: SBATCH_RGPU_MEM for sbatch,
 * SALLOC_RGPU_MEM for salloc, SLURM_RGPU_MEM for srun. A flag is on unless its value is 0 or no. Returns the variable's name and its
 * value, NULL if there is none. name has 80 bytes.
 */
static const char *variable(int i, char *name)
{
	const struct sl_option *o = &sl_options[i];
	const char *tool = spank_context() == S_CTX_LOCAL ? "SLURM" : strcmp(program_invocation_short_name, "salloc") ? "SBATCH" : "SALLOC";
	const char *value;

	snprintf(name, 80, "%s_%s", tool, o->env);
	value = getenv(name);
	if (!value || !*value || (o->kind == SL_OPTION_FLAG && (!strcmp(value, "0") || !strcmp(value, "no"))))
		return NULL;
	return value;
}

bool sl_option_variable_ok(int i)
{
	char name[80], out[80];
	const char *value = variable(i, name);

	if (!value || sl_option_parse(i, value, out))
		return true;
	slurm_spank_log("sluice: %s=%.60s: want %s", name, value, sl_options[i].want);
	return false;
}

/*
 * Slurm ignores it if an `optional` plug-in fails here: the job would be submitted without the option. So a bad value of a variable is
 * passed on as it is, and job_submit.lua refuses the job, or the daemon at its start.
 */
int sl_option_send(spank_t sp)
{
	for (int i = 0; i < SL_OPTIONS; i++) {
		char name[80];
		const char *value = sl_option_value(i) ? NULL : variable(i, name);

		if (value && !sl_option_parse(i, value, given[i])) {
			sl_option_variable_ok(i);
			snprintf(given[i], sizeof given[i], "%s", value);
		}
	}
	for (int i = 0; i < SL_OPTIONS; i++) {
		if (!sl_option_value(i))
			continue;
		if (spank_job_control_setenv(sp, sl_options[i].env, given[i], 1) != ESPANK_SUCCESS) {
			slurm_spank_log("sluice: --%s: Slurm cannot pass it on to the job", sl_options[i].name);
			return -1;
		}
	}
	return 0;
}
