/* Generated from spank/options/options.go by go run ./spank/cmd/spankgen; do not edit. */
#ifndef SLUICE_SPANK_OPTIONS_H
#define SLUICE_SPANK_OPTIONS_H

#define SL_GRES "rgpu" /* and how the names of all our licences begin */
#define SL_OPTIONS 6
#define SL_OPTION_MIN_MIB 2ull
#define SL_OPTION_MAX_MIB 16777216ull
#define SL_OPTION_MAX_SECONDS 86400u
#define SL_OPTION_NAME_MAX 63

enum sl_option_kind { SL_OPTION_SIZE, SL_OPTION_CHOICE, SL_OPTION_NAME, SL_OPTION_TIME, SL_OPTION_FLAG };

struct sl_option {
	const char *name, *arg, *env, *help, *want;
	enum sl_option_kind kind;
	const char *choices[8];
};

static const struct sl_option sl_options[SL_OPTIONS] = {
	{ "rgpu-mem", "SIZE", "RGPU_MEM", "device memory of each fraction, as 20G",
	  "a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G",
	  SL_OPTION_SIZE, { NULL } },
	{ "rgpu-policy", "POLICY", "RGPU_POLICY", "compute share: fixed, equal or best-effort",
	  "one of best-effort, equal, equal-lend, fixed, fixed-lend",
	  SL_OPTION_CHOICE, { "best-effort", "equal", "equal-lend", "fixed", "fixed-lend", NULL } },
	{ "rgpu-pool", "NAME", "RGPU_POOL", "take the GPUs from this pool",
	  "a pool's name: letters, digits, '.', '-' and '_', at most 63, the first a letter or a digit",
	  SL_OPTION_NAME, { NULL } },
	{ "rgpu-grace", "TIME", "RGPU_GRACE", "how long to wait for a lost network, as 30m",
	  "0, or a whole number with s, m or h behind it up to 24h, as 30m",
	  SL_OPTION_TIME, { NULL } },
	{ "rgpu-spread", NULL, "RGPU_SPREAD", "take the emptiest GPUs first, not the fullest",
	  "no value",
	  SL_OPTION_FLAG, { NULL } },
	{ "rgpu-report", NULL, "RGPU_REPORT", "report GPU use at the end of the job's output",
	  "no value",
	  SL_OPTION_FLAG, { NULL } },
};

#endif
