#!/usr/bin/env bash
# How many instructions of the shim a kernel launch takes, for this build and an older one, or without a grace and with one:
# valgrind counts them, so the figure does not depend on what else the machine does. Simulated GPU; no other part of the launch is
# counted. With a grace, other threads of the program have work as well, so all its instructions are counted too.
#
# Usage: bench/launch-count.sh OLD | --grace
# OLD is a folder with the bin/sluice, bin/sluice-worker, shim and version (its commit, one line) of the older build.
# Needs: build/bin, build/shim, build/simgpu and build/test/twins.so (`make all cuda-programs`), nvcc, or its path in NVCC, valgrind.
# Exit status 0 if a launch takes no more than 1 % more, or with a grace 60 instructions, which take a processor of 3 GHz 0.02 us.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

OLD=${1:-}
NEW_VERSION=$(cat "$BUILD/version")
[ "$OLD" != --grace ] || OLD=$BUILD
PROGRAM=$SCRATCH/launch
for f in "$OLD/bin/sluice" "$OLD/bin/sluice-worker" "$OLD/shim/libcuda.so.1" "$OLD/version" "$BUILD/test/twins.so"; do
	[ -e "$f" ] || {
		echo "launch-count: there is no $f; see the head of $0" >&2
		exit 2
	}
done
build_cu "$BENCH/launch.cu" "$PROGRAM" || exit 1
export SLUICE_SIM_STATE=$SCRATCH/gpu SLUICE_SIM_KERNELS=$BUILD/test/twins.so

# counted FOLDER NAME unix|tcp [OPTION...]: the instructions of a launch with that build and a worker with those options, of how many
# launches it is the mean, and the instructions of the whole program for each.
counted() {
	local name=$2
	SLUICE=$1/bin/sluice WORKER=$1/bin/sluice-worker STORE=$SCRATCH/store-$2
	install -d -m 0700 "$STORE"
	start_worker "$name" "${@:3}" --libcuda "$BUILD/simgpu/libcuda.so.1" --libnvml "$BUILD/simgpu/libnvidia-ml.so.1" || exit 1
	"$SLUICE" run --lib "$1/shim" --worker "$ADDR" -- valgrind -q --tool=callgrind --callgrind-out-file="$SCRATCH/$name.out" "$PROGRAM" 1 >"$LOGS/$name.out" 2>&1 || {
		show "$LOGS/$name.out"
		exit 1
	}
	stop "$name"
	# Callgrind gives a call as two lines: "calls=COUNT ..." and then "LINE COST" with all below it; names are told once.
	awk '/^c?fn=/ { n = $0; callee = sub(/^cfn=/, "", n); sub(/^fn=/, "", n); id = n; sub(/ .*/, "", id); if (sub(/^[^ ]* /, "", n)) name[id] = n; if (callee) fn = name[id] }
		/^calls=/ { sub(/^calls=/, ""); calls = $1; getline; if (fn ~ /^cuLaunchKernel(_ptsz)?$/) { n_all += calls; cost += $2 } }
		/^(totals|summary):/ { all = $2 }
		END { printf "%.1f %d %.1f\n", cost / n_all, n_all, all / n_all }' "$SCRATCH/$name.out"
}

SLUICE_BUILD=$BUILD python3 "$BENCH/rawlog.py" gpu=simulated driver=none
echo "bench/launch-count.sh: bench/launch.cu, valgrind $(valgrind --version | sed 's/^valgrind-//')"
# told WHAT OF-A-LAUNCH LAUNCHES OF-ALL
told() { echo "$1: $2 instructions for each of $3 launches, $4 with all that the program does"; }

if [ "${1:-}" = --grace ]; then
	read -r was launches all <<<"$(counted "$BUILD" zero tcp --grace 0)"
	told "$NEW_VERSION, no grace" "$was" "$launches" "$all"
	read -r is launches whole <<<"$(counted "$BUILD" kept tcp --grace 5m)"
	told "$NEW_VERSION, a grace of 5m" "$is" "$launches" "$whole"
	awk -v was="$all" -v is="$whole" 'BEGIN { printf "%+.1f instructions\n", is - was; exit !(is <= was + 60) }'
	exit
fi
read -r was launches all <<<"$(counted "$OLD" old unix)"
told "$(cat "$OLD/version")" "$was" "$launches" "$all"
read -r is launches whole <<<"$(counted "$BUILD" new unix)"
told "$NEW_VERSION" "$is" "$launches" "$whole"
awk -v was="$was" -v is="$is" 'BEGIN { printf "%+.1f %%\n", (is / was - 1) * 100; exit !(is <= was * 1.01) }'
