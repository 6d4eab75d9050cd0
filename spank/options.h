/* Generated from spank/options/options.go by go run ./spank/cmd/spankgen; do not edit. */
#ifndef SLUICE_SPANK_OPTIONS_H
#define SLUICE_SPANK_OPTIONS_H

#include <stdbool.h>

#define SL_GRES "rgpu" /* and how the names of all our licences begin */
#define SL_GPUS_MAX 16 /* of one lease */
#define SL_OPTIONS 7
#define SL_OPTION_MIN_MIB 2ull
#define SL_OPTION_MAX_MIB 16777216ull
#define SL_OPTION_MAX_SECONDS 86400u
#define SL_OPTION_NAME_MAX 63
#define SL_TEXT_MAX 1024 /* bytes of an error in an answer on the job socket */
#define SL_BODY_MAX 65536 /* bytes of the changes in one */

enum sl_option_kind { SL_OPTION_SIZE, SL_OPTION_CHOICE, SL_OPTION_NAME, SL_OPTION_TIME, SL_OPTION_FLAG };

enum { SL_RGPU_MEM, SL_RGPU_POLICY, SL_RGPU_POOL, SL_RGPU_GRACE, SL_RGPU_BIND, SL_RGPU_SPREAD, SL_RGPU_REPORT, }; /* places in the table */

struct sl_option {
	const char *name, *arg, *env, *help, *want;
	enum sl_option_kind kind;
	bool step; /* may be given to a step */
	const char *choices[8];
};

static const struct sl_option sl_options[SL_OPTIONS] = {
	{ "rgpu-mem", "SIZE", "RGPU_MEM", "device memory of each fraction, as 20G",
	  "a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G",
	  SL_OPTION_SIZE, false, { NULL } },
	{ "rgpu-policy", "POLICY", "RGPU_POLICY", "compute share: fixed, equal or best-effort",
	  "one of best-effort, equal, equal-lend, fixed, fixed-lend",
	  SL_OPTION_CHOICE, false, { "best-effort", "equal", "equal-lend", "fixed", "fixed-lend", NULL } },
	{ "rgpu-pool", "NAME", "RGPU_POOL", "take the GPUs from this pool",
	  "a pool's name: letters, digits, '.', '-' and '_', at most 63, the first a letter or a digit",
	  SL_OPTION_NAME, false, { NULL } },
	{ "rgpu-grace", "TIME", "RGPU_GRACE", "how long to wait for a lost network, as 30m",
	  "0, or a whole number with s, m or h behind it up to 24h, as 30m",
	  SL_OPTION_TIME, false, { NULL } },
	{ "rgpu-bind", "HOW", "RGPU_BIND", "all: each task sees all GPUs; task: its part of them",
	  "one of all, task",
	  SL_OPTION_CHOICE, true, { "all", "task", NULL } },
	{ "rgpu-spread", NULL, "RGPU_SPREAD", "take the emptiest GPUs first, not the fullest",
	  "no value",
	  SL_OPTION_FLAG, false, { NULL } },
	{ "rgpu-report", NULL, "RGPU_REPORT", "report GPU use at the end of the job's output",
	  "no value",
	  SL_OPTION_FLAG, false, { NULL } },
};

#endif
