#!/usr/bin/env bash
# The rate of copies between host and device on a real GPU: natively, over loopback TCP and over a Unix socket, pinned and
# pageable, both ways, 4 KiB to 1 GiB; five repeats of each. copies.py judges the large ones.
#
# Usage: bench/gpu-copies.sh [BYTES,BYTES...]
# Needs: build/bin, build/shim, a GPU with its driver, gcc, python3. No Go.
# Leaves $SLUICE_LOGS/copies.jsonl: a line for each place, kind of memory, direction and size.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

SIZES=${1:-4096,1048576,67108864,1073741824}
LOG=$LOGS/copies.jsonl
PROGRAM=$SCRATCH/copies
MEM=${MEM:-4G}

gcc -O2 -o "$PROGRAM" "$ROOT/test/cuda/copies.c" -ldl || exit 1
start_worker copies tcp || exit 1
AT[loopback]=$ADDR
start_worker copies-unix unix || exit 1
AT[unix]=$ADDR

log_header >"$LOG"
for place in native loopback unix; do
	if [ $place = native ]; then
		limited 120 "$PROGRAM" --sizes "$SIZES"
	else
		limited 120 remote "${AT[$place]}" "$PROGRAM" --sizes "$SIZES"
	fi >"$SCRATCH/$place" 2>"$LOGS/copies-$place.err" || {
		fail "copies-$place" "$(why $?)"
		show "$LOGS/copies-$place.err"
		continue
	}
	sed "s/^{/{\"place\": \"$place\", /" "$SCRATCH/$place" >>"$LOG"
	pass "copies-$place" "$(wc -l <"$SCRATCH/$place") rates"
done

echo 'GB/s, median of five (least to greatest) and the share of native; the time of one copy'
"$PYTHON" "$BENCH/copies.py" "$LOG" || fail rates 'a bar is missed'
[ "$FAILED" = 0 ]
