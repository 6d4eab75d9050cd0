#!/usr/bin/env bash
# First contact with a GPU: a handful of programs on a worker, from the smallest
# to five steps of ResNet-50. Whatever fails is run again with the debug log and
# the ends of all logs are printed; nothing stops the rest.
# Usage: bench/gpu-smoke.sh        (needs build/bin, build/shim, a GPU; nvcc for the C programs)
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"
# shellcheck disable=SC2034 # read by start_worker
WORKER_LOG=${SLUICE_WORKER_LOG:-debug}
MEM=${MEM:-20G}
: >"$LOGS/results.txt"

log_header
for f in "$SLUICE" "$WORKER" "$BUILD/shim/libcuda.so.1" "$BUILD/shim/libnvidia-ml.so.1"; do
	if [ -e "$f" ]; then ldd "$f" 2>&1 | grep 'not found' | sed "s|^|${f##*/}: |"; else echo "missing: $f"; fi
done

echo "== worker"
if ! start_worker smoke tcp; then
	show "$LOGS/worker-smoke.log" 60
	exit 1
fi
echo "worker at $ADDR, pid ${STARTED[smoke]}"

# try NAME SECONDS PROGRAM...
try() {
	local name=$1 seconds=$2 status begun=$SECONDS before
	shift 2
	before=$(wc -l <"$LOGS/worker-smoke.log")
	if ! kill -0 "${STARTED[smoke]}" 2>/dev/null; then
		echo "     the worker is gone, starting another"
		mv "$LOGS/worker-smoke.log" "$LOGS/worker-smoke-before-$name.log"
		unset "STARTED[smoke]"
		start_worker smoke tcp || return
		before=0
	fi
	SLUICE_TRACE=1 limited "$seconds" remote "$ADDR" "$@" >"$LOGS/$name.out" 2>"$LOGS/$name.err"
	status=$?
	if [ $status = 0 ]; then
		pass "$name" "$((SECONDS - begun)) s; $(tail -n 1 "$LOGS/$name.out" | cut -c1-240)"
		tail -n 3 "$LOGS/$name.err" | sed 's/^/     /'
		return
	fi
	fail "$name" "$(why $status) after $((SECONDS - begun)) s"
	show "$LOGS/$name.out" 10
	show "$LOGS/$name.err" 25
	tail -n "+$((before + 1))" "$LOGS/worker-smoke.log" >"$LOGS/$name.worker"
	show "$LOGS/$name.worker" 40
	SLUICE_LOG=debug limited "$seconds" remote "$ADDR" "$@" >"$LOGS/$name.debug" 2>&1
	echo "     again with SLUICE_LOG=debug: $(why $?)"
	show "$LOGS/$name.debug" 40
}

echo "== native"
limited 60 "$PYTHON" "$BENCH/torch-hello.py" || echo "PyTorch does not work natively here"

echo "== remote"
try smi-list 30 nvidia-smi -L
try smi 30 nvidia-smi
for f in "$ROOT"/test/cuda/vec*.cu "$BENCH/launch.cu"; do
	[ -e "$f" ] || continue
	name=$(basename "$f" .cu)
	if build_cu "$f" "$SCRATCH/$name" >"$LOGS/$name.nvcc" 2>&1; then
		limited 60 "$SCRATCH/$name" >"$LOGS/$name.native" 2>&1 || echo "$name fails natively: $(tail -n 2 "$LOGS/$name.native")"
		try "$name" 60 "$SCRATCH/$name"
	else
		fail "$name" "does not compile"
		show "$LOGS/$name.nvcc"
	fi
done
for f in "$BUILD"/gpu/*/vec*; do
	[ -x "$f" ] || continue
	try "$(basename "$(dirname "$f")")-$(basename "$f")" 60 "$f"
done
try torch-hello 120 "$PYTHON" "$BENCH/torch-hello.py"
try torch-tiny 120 "$PYTHON" "$BENCH/torch-tiny.py"
try resnet50 180 "$PYTHON" "$BENCH/resnet50.py" --batch 32 --steps 5 --warmup 2 --repeats 1

echo "== worker's log ends"
show "$LOGS/worker-smoke.log" 20
echo "smoke: $PASSED passed, $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}"
[ "$FAILED" = 0 ]
