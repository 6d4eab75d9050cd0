#!/usr/bin/env bash
# What this build costs against an older one, in turn on one GPU over loopback TCP: small launches, an MLP, ResNet-50 and
# the opening of a session, each by the shim, `sluice run` and worker of one build.
#
# Usage: bench/gpu-cost.sh OLD
# OLD is a folder with the bin/sluice, bin/sluice-worker, shim and version (its commit, one line) of the older build.
# Needs: build/bin, build/shim, a GPU with its driver, nvcc or launch and open prebuilt in build/cost, python3 with torch and torchvision. No Go.
# It goes on, one pair of runs after another, for SLUICE_SECONDS (180), which includes what it needs to start, or until
# SLUICE_CYCLES cycles of cost.py are over.
# The raw log is cost.jsonl in $SLUICE_LOGS (default build/gpu-logs); bench/cost.py judges it. SLUICE_ONLY names which of
# launch,open,mlp,resnet50; SLUICE_LAUNCH and SLUICE_OPEN what stands in for bench/launch.cu and bench/open.cu.
# Exit status 0 if nothing is worse by more than 1 %.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

OLD=${1:-}
LOG=$LOGS/cost.jsonl
for f in bin/sluice bin/sluice-worker shim/libcuda.so.1 version; do
	[ -e "$OLD/$f" ] || {
		echo "gpu-cost: there is no ${OLD:-OLD}/$f; see the head of $0" >&2
		exit 2
	}
done

# built NAME GIVEN: the path of bench/NAME.cu's program: what was given, what is prebuilt, or what is built now.
built() {
	local at=${2:-$BUILD/cost/$1}
	if [ ! -x "$at" ]; then
		at=$SCRATCH/$1
		build_cu "$BENCH/$1.cu" "$at" >"$LOGS/$1.nvcc" 2>&1 || return 1
	fi
	echo "$at"
}

log_header | tee "$LOG"
if ! LAUNCH=$(built launch "${SLUICE_LAUNCH:-}") || ! OPEN=$(built open "${SLUICE_OPEN:-}"); then
	echo 'gpu-cost: bench/launch.cu or bench/open.cu does not compile'
	show "$LOGS/launch.nvcc"
	show "$LOGS/open.nvcc"
	exit 1
fi
DRIVER=(${SLUICE_OWNER_LIBCUDA:+--libcuda "$SLUICE_OWNER_LIBCUDA" --libnvml "${SLUICE_OWNER_LIBNVML:-}"})
start_worker new tcp "${DRIVER[@]}" || exit 1
NEW_AT=$ADDR
WORKER=$OLD/bin/sluice-worker STORE=$SCRATCH/store-old
install -d -m 0700 "$STORE"
start_worker old tcp "${DRIVER[@]}" || exit 1
"$PYTHON" "$BENCH/cost.py" run --old "$OLD" "$ADDR" "${STARTED[old]}" --new "$BUILD" "$NEW_AT" "${STARTED[new]}" --launch "$LAUNCH" --open "$OPEN" --python "$PYTHON" \
	--seconds $((${SLUICE_SECONDS:-180} - SECONDS)) ${MEM:+--mem "$MEM"} ${SLUICE_CYCLES:+--cycles "$SLUICE_CYCLES"} ${SLUICE_ONLY:+--only "$SLUICE_ONLY"} >>"$LOG" 2>"$LOGS/cost.err" || {
	fail runs "$(why $?)"
	show "$LOGS/cost.err"
}
"$PYTHON" "$BENCH/cost.py" report "$LOG" || fail costs 'this build costs more than it may, or the spread is too wide to tell'
echo "gpu-cost: $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw log ${LOG#"$ROOT"/}"
[ "$FAILED" = 0 ]
