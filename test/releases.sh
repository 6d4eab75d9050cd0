#!/bin/bash
# Runs programs with the shim of one commit and the worker of another, both ways round. What it prints is a raw log.
#
#   test/releases.sh COMMIT [PROGRAM...]
#
# The other side is this tree, which has to be built (make all cuda-programs). COMMIT is built in a folder of its own, on the
# simulated GPU of this tree, and must know how to work with other releases. Each PROGRAM is a test program below build/test/cuda-11.8,
# all that print PASS if none is given. A function that one side lacks is refused by name; such programs are listed apart.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.."
top=$PWD commit=$(git rev-parse --verify "$1^{commit}")
shift
if [ ! -x build/bin/sluice-worker ] || [ ! -e build/shim/libcuda.so.1 ]; then
	echo "releases: run make all cuda-programs first" >&2
	exit 1
fi
programs=("$@")
if [ ${#programs[@]} = 0 ]; then
	for p in test/cuda/*.cu; do
		n=$(basename "$p" .cu)
		case $n in
		churn | steady) continue ;; # they run until they are stopped
		# It expects what CUDA 11's own cuGraphExecUpdate refuses; a worker that has only the later one makes those updates.
		graphnode) git grep -q '// cuGraphExecUpdate$' "$commit" -- remoting/worker/gen_forms.go || continue ;;
		esac
		[ ! -x "build/test/cuda-11.8/$n" ] || programs+=("$n")
	done
fi
bench/rawlog.py gpu=simulated driver=none
dir=$(mktemp -d)
worker=
trap 'kill $worker 2>/dev/null || :; wait; rm -rf "$dir"' EXIT
mkdir "$dir/tree"
git archive "$commit" | tar -x -C "$dir/tree"
echo "releases: building ${commit:0:12}"
make -s -C "$dir/tree" VERSION="${commit:0:12}" shim >"$dir/log" 2>&1 || { tail -20 "$dir/log"; exit 1; }
(cd "$dir/tree" && go build -buildvcs=false -o "$dir/other-worker" ./remoting/worker/cmd/sluice-worker)

# both SHIM WORKER: every program by that shim on that worker.
both() {
	local shim=$1 exe=$2 pass=0 refused=() failed=()
	SLUICE_SIM_STATE=$dir/sim SLUICE_SIM_MEM=8G SLUICE_SIM_DEVICES=2 SLUICE_SIM_KERNELS=$top/build/test/twins.so \
		"$exe" --listen "unix:$dir/w.sock" --device 0,1 --mem 6G --store "$dir/store" --libcuda "$top/build/simgpu/libcuda.so.1" \
		--libnvml "$top/build/simgpu/libnvidia-ml.so.1" >"$dir/worker.log" 2>&1 &
	worker=$!
	for _ in $(seq 200); do [ ! -S "$dir/w.sock" ] || break; sleep 0.05; done
	for p in "${programs[@]}"; do
		if (cd "$dir" && SLUICE_LOG=warn SLUICE_WORKER=unix:$dir/w.sock LD_LIBRARY_PATH=$shim:$top/build/test/cuda-11.8 timeout 120 "$top/build/test/cuda-11.8/$p") \
			>"$dir/out" 2>&1; then
			pass=$((pass + 1))
		elif grep -q 'a worker of another release is not supported' "$dir/out"; then
			refused+=("$p: $(grep -o '[A-Za-z0-9_]* with a worker of another release' "$dir/out" | head -1)")
		else
			failed+=("$p: $(tail -1 "$dir/out")")
		fi
	done
	kill $worker
	wait $worker 2>/dev/null || :
	worker=
	echo "shim of $3, worker of $4: $pass passed, ${#refused[@]} refused by name, ${#failed[@]} failed"
	for p in "${refused[@]}" "${failed[@]}"; do echo "  $p"; done
	[ ${#failed[@]} = 0 ]
}
rc=0
here=$(cat build/version)
both "$top/build/shim" "$top/build/bin/sluice-worker" "$here" "$here" || echo "  (these fail without another release too)"
both "$dir/tree/build/shim" "$top/build/bin/sluice-worker" "${commit:0:12}" "$here" || rc=1
both "$top/build/shim" "$dir/other-worker" "$here" "${commit:0:12}" || rc=1
exit $rc
