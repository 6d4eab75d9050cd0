/*
 * The options. Slurm calls back for each that is given, first in the environment that a
 * job's processes inherit, then in #SBATCH lines and on the command line; the last one
 * counts. A bad value is refused there, which ends srun, sbatch and salloc before
 * anything is submitted.
 */
#include "plugin.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char given[WISHES][80]; /* in normal form; "" not given */
static bool called[WISHES];

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
	if (!digits || digits > 18 || !c || v[digits + 1])
		return false;
	if (c >= 'a')
		c -= 'a' - 'A';
	unit = strchr(units, c);
	if (!unit)
		return false;
	for (size_t i = 0; i < digits; i++)
		n = n * 10 + (unsigned)(v[i] - '0');
	snprintf(out, 80, "%llu%c", n, *unit);
	if (n > WISH_MAX_MIB)
		return false;
	n <<= 10 * (unit - units);
	return n >= WISH_MIN_MIB && n <= WISH_MAX_MIB;
}

/* Not isalnum(3), which the user's locale would widen. */
static bool letter_or_digit(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool sl_wish_parse(int i, const char *value, char out[80])
{
	const struct wish *w = &wishes[i];

	switch (w->kind) {
	case WISH_SIZE:
		return parse_size(value, out);
	case WISH_CHOICE:
		for (const char *const *c = w->choices; *c; c++)
			if (!strcmp(*c, value)) {
				strcpy(out, value);
				return true;
			}
		return false;
	case WISH_NAME:
		if (!letter_or_digit(value[0]) || strlen(value) > WISH_NAME_MAX)
			return false;
		for (const char *c = value; *c; c++)
			if (!letter_or_digit(*c) && !strchr(".-_", *c))
				return false;
		strcpy(out, value);
		return true;
	case WISH_FLAG:
		strcpy(out, "1");
		return true;
	}
	return false;
}

/*
 * Whether this is the first callback, and there is an inherited option for it to be of. The
 * wishes of a job are not those of the jobs that it submits: most of those ask for no GPU.
 */
static bool inherited(int i)
{
	char name[80];
	bool first = !called[i];

	called[i] = true;
	snprintf(name, sizeof name, "SLURM_SPANK__SLURM_SPANK_OPTION_sluice_%s", wishes[i].name);
	for (char *c = strchr(name, '-'); c; c = strchr(c, '-'))
		*c = '_';
	return first && getenv(name);
}

/* Slurm's callback for option val. In slurmstepd nothing is refused any more. */
static int option_given(int val, const char *optarg, int remote)
{
	const char *value = optarg ? optarg : "";
	char out[80];

	if (val < 0 || val >= WISHES)
		return -1;
	if (!remote && inherited(val))
		return 0;
	if (sl_wish_parse(val, value, out)) {
		strcpy(given[val], out);
		return 0;
	}
	if (remote)
		return 0;
	slurm_spank_log("sluice: --%s=%.80s: want %s", wishes[val].name, value, wishes[val].want);
	return -1;
}

void sl_wish_register(spank_t sp)
{
	for (int i = 0; i < WISHES; i++) {
		/* Slurm copies it; its own type has no const. */
		struct spank_option o = {
			.name = (char *)wishes[i].name,
			.arginfo = (char *)wishes[i].arg,
			.usage = (char *)wishes[i].help,
			.has_arg = wishes[i].arg ? 1 : 0,
			.val = i,
			.cb = option_given,
		};

		given[i][0] = 0;
		called[i] = false;
		if (spank_option_register(sp, &o) != ESPANK_SUCCESS)
			slurm_error("sluice: Slurm does not take the option --%s", wishes[i].name);
	}
}

const char *sl_wish_value(int i)
{
	return given[i][0] ? given[i] : NULL;
}

int sl_wish_send(spank_t sp)
{
	for (int i = 0; i < WISHES; i++) {
		if (!sl_wish_value(i))
			continue;
		if (spank_job_control_setenv(sp, wishes[i].env, given[i], 1) != ESPANK_SUCCESS) {
			slurm_spank_log("sluice: --%s: Slurm does not pass it on", wishes[i].name);
			return -1;
		}
	}
	return 0;
}
