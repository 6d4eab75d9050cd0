#!/usr/bin/env bash
# Training whose network is cut: ResNet-50 and a transformer, both with a DataLoader and side by side, natively, remotely,
# and remotely with ten cuts of a minute at random moments; then a cut that is longer than the worker's grace.
#
# Usage: bench/gpu-cuts.sh [--only train,over] [--list]
# Needs: build/bin, build/shim, a GPU with its driver, python3 with torch and torchvision. No Go. Takes about 14 minutes.
# The raw log is cuts.jsonl in $SLUICE_LOGS (default build/gpu-logs); bench/cuts.py judges it. SLUICE_CUTS is the number of
# cuts (10), SLUICE_CUT_SECONDS the length of each (60), SLUICE_MEM the memory of each program's lease (20G), SLUICE_TRAIN_SECONDS how long the programs train natively (45),
# SLUICE_CUT_GRACE the grace of the last one in seconds (10), SLUICE_CUT_PROGRAM what stands in for cut_train.py.
# Exit status 0 if every loss is the same to the bit, no cut costs more than a second beside its length, and the error and
# the memory of the last one come in time.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

# shellcheck disable=SC2034 # read by choose_parts
PARTS=(train over)
choose_parts "$@"
LOG=$LOGS/cuts.jsonl
GRACE=${SLUICE_CUT_GRACE:-10}
MEM=${MEM:-20G} # two programs have a lease each

log_header | tee "$LOG"
for part in "${CHOSEN[@]}"; do
	if [ "$part" = train ]; then
		start_worker train tcp --grace 5m || exit 1
		args=(--cuts "${SLUICE_CUTS:-10}" --length "${SLUICE_CUT_SECONDS:-60}" --seconds "${SLUICE_TRAIN_SECONDS:-45}")
	else
		start_worker over tcp --grace "${GRACE}s" || exit 1
		args=(--grace "$GRACE")
	fi
	"$PYTHON" "$BENCH/cuts.py" "$part" --sluice "$SLUICE" --worker "$ADDR" --relay "$RELAY" --scratch "$SCRATCH" ${MEM:+--mem "$MEM"} \
		${SLUICE_CUT_PROGRAM:+--program "$SLUICE_CUT_PROGRAM"} "${args[@]}" >>"$LOG" || fail "$part" "$(why $?)"
	stop "$part"
done
"$PYTHON" "$BENCH/cuts.py" report "$LOG" || FAILED=$((FAILED + 1))
echo "gpu-cuts: $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw log ${LOG#"$ROOT"/}"
[ "$FAILED" = 0 ]
