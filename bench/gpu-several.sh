#!/usr/bin/env bash
# Two GPUs of one machine, natively and through a worker that lends both, in one run: NCCL's collectives between two
# processes, one process with both GPUs, DDP, FSDP2, tensor parallel, DataParallel, torch.multiprocessing, peer copies,
# and a process that is killed in the middle of a collective.
#
# Usage: bench/gpu-several.sh [--only PART,PART...] [--list]
# Needs: build/bin, build/shim, two GPUs with their driver, python3 with torch and torchvision. No Go.
# The raw log is several.jsonl in $SLUICE_LOGS/several (default build/gpu-logs/several); bench/several_report.py judges
# it and prints the table. SLUICE_BUDGET is how many seconds may have passed when a case begins (255), SLUICE_MEM what
# a lease asks for on each GPU (40G), SLUICE_PLACES the order of the runs of each case (native remote).
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

# shellcheck disable=SC2034 # read by choose_parts
PARTS=(collectives onecomm ddp dataparallel fsdp tensor mp copies killed)
BUDGET=${SLUICE_BUDGET:-255}
MEM=${MEM:-40G}
# shellcheck disable=SC2034 # read by start_worker
DEVICES=0,1
choose_parts "$@"
read -r -a PLACES <<<"${SLUICE_PLACES:-native remote}"
RAW=$LOGS/several
LOG=$RAW/several.jsonl
mkdir -p "$RAW"
# Multicast over NVLink stays off: it needs a service of the machine that not every one runs, and Sluice does not serve it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export SLUICE_LOG=${SLUICE_LOG:-warn}

# seconds PART: how long a run of it may take.
seconds() {
	case $1 in
	collectives | ddp | fsdp) echo 45 ;;
	*) echo 35 ;;
	esac
}

# run_case PART PLACE: a run's line goes into the raw log also if it failed, with what was measured until then.
run_case() {
	local part=$1 place=$2 limit status begun=$SECONDS run=$1-$2 line f
	in_time "$run" || return 1
	limit=$(seconds "$part")
	[ $((SECONDS + limit)) -le $((BUDGET + 20)) ] || limit=$((BUDGET + 20 - SECONDS))
	rm -f "$RAW/$run".*
	export NCCL_DEBUG=INFO NCCL_DEBUG_FILE=$RAW/$run.nccl.%p
	local -x SLUICE_STATS=$RAW/$run.stats
	if [ "$place" = native ]; then
		limited $((limit + 5)) "$PYTHON" "$BENCH/several.py" "$part" --seconds "$limit" >"$RAW/$run.out" 2>"$RAW/$run.err"
	else
		limited $((limit + 5)) remote "$ADDR" "$PYTHON" "$BENCH/several.py" "$part" --seconds "$limit" >"$RAW/$run.out" 2>"$RAW/$run.err"
	fi
	status=$?
	line=$(tail -n 1 "$RAW/$run.out")
	printf '{"run": "%s", "place": "%s", "status": %s, "seconds": %s, "result": %s, "stats": [%s]}\n' "$part" "$place" $status \
		$((SECONDS - begun)) "${line:-null}" "$(paste -sd, "$RAW/$run.stats" 2>/dev/null)" >>"$LOG"
	if [ $status = 0 ]; then
		printf '     %s: %s s\n' "$run" $((SECONDS - begun))
		return 0
	fi
	fail "$run" "$(why $status) after $((SECONDS - begun)) s"
	printf '%s\n' "$line" | grep -o '"failed".*' | cut -c1-300
	show "$RAW/$run.err" 60
	for f in "$RAW/$run".nccl.*; do
		[ -e "$f" ] && show "$f" 40
	done
	[ "$place" = native ] || show "$LOGS/worker-several.log" 15
	return 1
}

used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | paste -sd' '; }

# nothing_left: within some seconds both GPUs have as little in use as before.
nothing_left() {
	local now i k ok=0
	local -a before after
	read -r -a before <<<"$USED_BEFORE"
	for ((i = 0; i < 50 && ok == 0; i++)); do
		now=$(used)
		read -r -a after <<<"$now"
		ok=1
		for k in "${!after[@]}"; do
			[ "${after[k]}" -le $((${before[k]:-0} + 8)) ] || ok=0
		done
		sleep 0.1
	done
	if [ $ok = 1 ]; then pass nothing-left "MiB in use: $now; before: $USED_BEFORE"; else fail nothing-left "MiB in use: $now; before: $USED_BEFORE"; fi
}

log_header | tee "$LOG"
start_worker several tcp || exit 1
sleep 1
USED_BEFORE=$(used)
for part in "${CHOSEN[@]}"; do
	echo "== $part ($SECONDS s)"
	for place in "${PLACES[@]}"; do
		kill -0 "${STARTED[several]:-0}" 2>/dev/null || {
			fail "$part-worker" "the worker has died"
			show "$LOGS/worker-several.log" 30
			exit 1
		}
		run_case "$part" "$place"
	done
done
nothing_left
"$PYTHON" "$BENCH/several_report.py" "$LOG" || FAILED=$((FAILED + 1))
echo "gpu-several: $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw logs in ${RAW#"$ROOT"/}"
[ "$FAILED" = 0 ]
