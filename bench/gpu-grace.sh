#!/usr/bin/env bash
# What session.grace costs while no connection is lost: small launches, an MLP and ResNet-50, natively, on a worker whose
# grace is 0 and on one whose grace is 5 minutes, in turn, over loopback TCP; and the memory of a program and its session.
#
# Usage: bench/gpu-grace.sh
# Needs: build/bin, build/shim, a GPU with its driver, nvcc, python3 with torch and torchvision. No Go. Takes about 4 minutes.
# The raw log is grace.jsonl in $SLUICE_LOGS (default build/gpu-logs); bench/grace.py judges it. SLUICE_ROUNDS is how often
# each is run (5), SLUICE_PAIRS how often pair, the MLP with both graces in one process. SLUICE_ONLY names which of
# launch,mlp,resnet50,pair, SLUICE_LAUNCH what stands in for bench/launch.cu.
# Exit status 0 if a grace costs at most 0.005 of native and 0.02 us of a launch.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

LOG=$LOGS/grace.jsonl
LAUNCH=${SLUICE_LAUNCH:-$SCRATCH/launch}
log_header | tee "$LOG"
[ -n "${SLUICE_LAUNCH:-}" ] || build_cu "$BENCH/launch.cu" "$LAUNCH" >"$LOGS/launch.nvcc" 2>&1 || {
	echo 'gpu-grace: bench/launch.cu does not compile'
	show "$LOGS/launch.nvcc"
	exit 1
}
start_worker zero tcp --grace 0 || exit 1
ZERO=$ADDR
start_worker kept tcp --grace 5m || exit 1
KEPT=$ADDR
# A program that names two workers has no lease of sluice run's: these lend to whoever asks.
start_worker pair-zero tcp --grace 0 --mem "${MEM:-4G}" || exit 1
PAIR=$ADDR
start_worker pair-kept tcp --grace 5m --mem "${MEM:-4G}" || exit 1
"$PYTHON" "$BENCH/grace.py" run --sluice "$SLUICE" --shim "$BUILD/shim" --zero "$ZERO" --kept "$KEPT" --pair "$PAIR" "$ADDR" --launch "$LAUNCH" --python "$PYTHON" --rounds "${SLUICE_ROUNDS:-5}" \
	${MEM:+--mem "$MEM"} ${SLUICE_ONLY:+--only "$SLUICE_ONLY"} ${SLUICE_PAIRS:+--pairs "$SLUICE_PAIRS"} >>"$LOG" || fail runs "$(why $?)"
"$PYTHON" "$BENCH/grace.py" report "$LOG" || fail costs 'a grace costs more than it may'
echo "gpu-grace: $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw log ${LOG#"$ROOT"/}"
[ "$FAILED" = 0 ]
