#!/usr/bin/env bash
# Random driver calls on a real GPU, natively and remotely: every form of call must be answered alike, and memory
# must hold what a model says. The native table is what the simulated GPU is held to (test/e2e/testdata).
#
# Usage: bench/gpu-calls.sh [CALLS]   (1,000,000 on each side by default, in ten sequences)
# Needs: build/bin, build/shim, a GPU with its driver, gcc, python3. No Go.
# Leaves $SLUICE_LOGS/randomcalls.txt. Exit status 0 when nothing differs but the forms in EXPECTED below.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

CALLS=${1:-1000000}
LOG=$LOGS/randomcalls.txt
PROGRAM=$SCRATCH/randomcalls
# Two drivers may answer these forms differently. None does today.
EXPECTED=()

gcc -O1 -I"$ROOT/remoting/api" -o "$PROGRAM" "$ROOT/test/cuda/randomcalls.c" -ldl || exit 1
start_worker calls tcp || exit 1

# side NAME COMMAND...: the ten sequences at once, each a process; the number of those whose memory was wrong is added.
differences=0
side() {
	local name=$1 seed pids=()
	shift
	for seed in 1 2 3 4 5 6 7 8 9 10; do
		"$@" "$PROGRAM" $seed $((CALLS / 10)) >"$SCRATCH/$name.$seed" 2>"$SCRATCH/$name.$seed.err" &
		pids+=($!)
	done
	for seed in 1 2 3 4 5 6 7 8 9 10; do
		wait "${pids[$((seed - 1))]}" || {
			differences=$((differences + 1))
			printf '%s, sequence %s: %s\n' "$name" $seed "$(tail -n 1 "$SCRATCH/$name.$seed")"
			head -n 10 "$SCRATCH/$name.$seed.err"
		}
		rm -f "$SCRATCH/$name.$seed.err"
	done
}

side native env
MEM=4G side remote remote "$ADDR"

# table SIDE: each form with all the results that it had.
table() {
	cat "$SCRATCH/$1".* | grep -v '^randomcalls:' | sed 's/ x[0-9]*$//' | sort -u
}

table native >"$SCRATCH/native"
table remote >"$SCRATCH/remote"
{
	log_header
	echo "$CALLS calls natively in ten sequences (seeds 1 to 10); one line for each form of call and result"
	cat "$SCRATCH/native"
} >"$LOG"
# Both sides make the same calls, so both must have the same forms with the same results.
diff "$SCRATCH/native" "$SCRATCH/remote" | grep '^[<>]' >"$SCRATCH/differ"
for form in "${EXPECTED[@]}"; do
	grep -vF "$form ->" "$SCRATCH/differ" >"$SCRATCH/rest"
	mv "$SCRATCH/rest" "$SCRATCH/differ"
done
head -n 60 "$SCRATCH/differ"
echo "gpu-calls: $CALLS calls on each side, $(wc -l <"$SCRATCH/native") forms and results natively, $(wc -l <"$SCRATCH/differ") lines differ, $differences sequences with wrong memory"
[ ! -s "$SCRATCH/differ" ] && [ "$differences" = 0 ]
