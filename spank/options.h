/* Generated from spank/options/options.go by go run ./spank/cmd/spankgen; do not edit. */
#ifndef SLUICE_SPANK_OPTIONS_H
#define SLUICE_SPANK_OPTIONS_H

#define SL_GRES "rgpu" /* and how the names of all our licences begin */
#define WISHES 5
#define WISH_MIN_MIB 2ull
#define WISH_MAX_MIB 16777216ull
#define WISH_NAME_MAX 63

enum wish_kind { WISH_SIZE, WISH_CHOICE, WISH_NAME, WISH_FLAG };

struct wish {
	const char *name, *arg, *env, *help, *want;
	enum wish_kind kind;
	const char *choices[8];
};

static const struct wish wishes[WISHES] = {
	{ "rgpu-mem", "SIZE", "RGPU_MEM", "device memory of each fraction, as 20G",
	  "a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G",
	  WISH_SIZE, { NULL } },
	{ "rgpu-policy", "POLICY", "RGPU_POLICY", "compute share: fixed, equal or best-effort",
	  "one of best-effort, equal, equal-lend, fixed, fixed-lend",
	  WISH_CHOICE, { "best-effort", "equal", "equal-lend", "fixed", "fixed-lend", NULL } },
	{ "rgpu-pool", "NAME", "RGPU_POOL", "take the GPUs from this pool",
	  "a pool's name: letters, digits, '.', '-' and '_', at most 63, the first a letter or a digit",
	  WISH_NAME, { NULL } },
	{ "rgpu-spread", NULL, "RGPU_SPREAD", "take the emptiest GPUs first, not the fullest",
	  "no value",
	  WISH_FLAG, { NULL } },
	{ "rgpu-report", NULL, "RGPU_REPORT", "report GPU use at the end of the job's output",
	  "no value",
	  WISH_FLAG, { NULL } },
};

#endif
