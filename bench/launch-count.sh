#!/usr/bin/env bash
# How many instructions of the shim a kernel launch takes, for this build and an older one: valgrind counts them, so the figure
# does not depend on what else the machine does. Simulated GPU; no other part of the launch is counted.
#
# Usage: bench/launch-count.sh OLD
# OLD is a folder with the bin/sluice, bin/sluice-worker, shim and version (its commit, one line) of the older build.
# Needs: build/bin, build/shim, build/simgpu and build/test/twins.so (`make all cuda-programs`), nvcc, or its path in NVCC, valgrind.
# Exit status 0 if a launch takes no more than 1 % more.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

OLD=${1:-}
PROGRAM=$SCRATCH/launch
for f in "$OLD/bin/sluice" "$OLD/bin/sluice-worker" "$OLD/shim/libcuda.so.1" "$OLD/version" "$BUILD/test/twins.so"; do
	[ -e "$f" ] || {
		echo "launch-count: there is no $f; see the head of $0" >&2
		exit 2
	}
done
build_cu "$BENCH/launch.cu" "$PROGRAM" || exit 1
export SLUICE_SIM_STATE=$SCRATCH/gpu SLUICE_SIM_KERNELS=$BUILD/test/twins.so

# counted FOLDER: the instructions of a launch with that build, and of how many launches it is the mean.
counted() {
	SLUICE=$1/bin/sluice WORKER=$1/bin/sluice-worker STORE=$SCRATCH/store-$2
	install -d -m 0700 "$STORE"
	start_worker "$2" unix --libcuda "$BUILD/simgpu/libcuda.so.1" --libnvml "$BUILD/simgpu/libnvidia-ml.so.1" || exit 1
	"$SLUICE" run --lib "$1/shim" --worker "$ADDR" -- valgrind -q --tool=callgrind --callgrind-out-file="$SCRATCH/$2.out" "$PROGRAM" 1 >"$LOGS/$2.out" 2>&1 || {
		show "$LOGS/$2.out"
		exit 1
	}
	stop "$2"
	# Callgrind gives a call as two lines: "calls=COUNT ..." and then "LINE COST" with all below it; names are told once.
	awk '/^c?fn=/ { n = $0; callee = sub(/^cfn=/, "", n); sub(/^fn=/, "", n); id = n; sub(/ .*/, "", id); if (sub(/^[^ ]* /, "", n)) name[id] = n; if (callee) fn = name[id] }
		/^calls=/ { sub(/^calls=/, ""); calls = $1; getline; if (fn ~ /^cuLaunchKernel(_ptsz)?$/) { n_all += calls; cost += $2 } }
		END { printf "%.1f %d\n", cost / n_all, n_all }' "$SCRATCH/$2.out"
}

SLUICE_BUILD=$BUILD python3 "$BENCH/rawlog.py" gpu=simulated driver=none
echo "bench/launch-count.sh: bench/launch.cu, valgrind $(valgrind --version | sed 's/^valgrind-//')"
NEW_VERSION=$(cat "$BUILD/version")
read -r was launches <<<"$(counted "$OLD" old)"
echo "$(cat "$OLD/version"): $was instructions for each of $launches launches"
read -r is launches <<<"$(counted "$BUILD" new)"
echo "$NEW_VERSION: $is instructions for each of $launches launches"
awk -v was="$was" -v is="$is" 'BEGIN { printf "%+.1f %%\n", (is / was - 1) * 100; exit !(is <= was * 1.01) }'
