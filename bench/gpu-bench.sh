#!/usr/bin/env bash
# What remoting costs on a real GPU: the same programs natively, over loopback
# TCP, over a Unix socket, and through a relay that makes the link a slower one.
#
# Usage: bench/gpu-bench.sh [--only PART,PART...] [--list]
# Needs what gpu-test.sh needs, and build/bin/relay. The raw log is bench.jsonl in
# $SLUICE_LOGS/bench (default build/gpu-logs/bench); bench/report.py makes the
# lines printed here, and the tables of docs/benchmarks.md, from it.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

# shellcheck disable=SC2034 # read by choose_parts
PARTS=(launch resnet32 resnet16 resnet32copy mlp)
BUDGET=${SLUICE_BUDGET:-530} # seconds; no run begins after that
MEM=${MEM:-40G}
choose_parts "$@"
RAW=$LOGS/bench
LOG=$RAW/bench.jsonl
mkdir -p "$RAW"

# part PART SECONDS PROGRAM...: native before and after the remote runs, so that
# drift of the machine shows. A second, short run of each gives the counts per
# step: what is left when start and synchronisations are subtracted.
part() {
	local part=$1 seconds=$2 v
	shift 2
	one "$part.native.1" "$seconds" "$@"
	# Once unmeasured, so that the module store holds what the program needs.
	limited "$seconds" remote "${AT[loopback]}" "$@" --steps 1 --repeats 1 >"$RAW/$part.first" 2>&1 || true
	for v in loopback unix fast lan wan; do
		[ -n "${AT[$v]:-}" ] || continue
		one "$part.$v.1" "$seconds" "$@" && one "$part.$v.short" "$seconds" "$@" --steps 5
	done
	one "$part.native.2" "$seconds" "$@"
	"$PYTHON" "$BENCH/report.py" --text gpu "$LOG" --part "$part"
}

part_resnet32() { part resnet32 100 "$PYTHON" "$BENCH/resnet50.py" --batch 32; }
part_resnet16() { part resnet16 100 "$PYTHON" "$BENCH/resnet50.py" --batch 16; }
part_resnet32copy() { part resnet32copy 100 "$PYTHON" "$BENCH/resnet50.py" --batch 32 --copy --steps 20; }
part_mlp() { part mlp 60 "$PYTHON" "$BENCH/mlp.py" --steps 300; }

part_launch() {
	local v
	if ! build_cu "$BENCH/launch.cu" "$SCRATCH/launch" >"$LOGS/launch.nvcc" 2>&1; then
		fail launch 'does not compile'
		show "$LOGS/launch.nvcc"
		return
	fi
	one launch.native.1 60 "$SCRATCH/launch"
	for v in loopback unix fast lan wan; do
		[ -n "${AT[$v]:-}" ] || continue
		# Fewer of the calls that wait, the longer one waits.
		case $v in
		lan) one launch.lan.1 60 "$SCRATCH/launch" 20 ;;
		wan) one launch.wan.1 60 "$SCRATCH/launch" 1 ;;
		*) one "launch.$v.1" 60 "$SCRATCH/launch" ;;
		esac
	done
	one launch.native.2 60 "$SCRATCH/launch"
	"$PYTHON" "$BENCH/report.py" --text gpu "$LOG" --part launch
}

log_header | tee "$LOG"
start_links || exit 1
for p in "${CHOSEN[@]}"; do
	echo "== $p ($SECONDS s)"
	"part_$p"
done
echo "gpu-bench: $FAILED runs failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw logs in ${RAW#"$ROOT"/}"
[ "$FAILED" = 0 ]
