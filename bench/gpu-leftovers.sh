#!/usr/bin/env bash
# What a program leaves in a GPU's memory to the next one of another user: marks of the first are looked for by the second,
# in each kind of memory, for each way in which the first may end.
#
# Usage: bench/gpu-leftovers.sh    as root
# Natively, and remotely by a lease each, of two users with a worker each. A writer ends by itself (exit), ends after an
# allocation that was refused (cap), is killed (kill), or has its session process killed while a kernel runs (session), as the end of
# an overrun does. First a control: one process looks for what it has itself written and freed.
# Needs: build/bin, build/shim, a GPU with its driver, nvcc or the program prebuilt as build/leftovers/leftovers, setpriv. No Go.
# The raw log is leftovers.jsonl in $SLUICE_LOGS (default build/gpu-logs); leftovers/report.py judges it. What would begin
# after SLUICE_BUDGET seconds (50) is left out, and said to be. SLUICE_MEM is the memory of a lease (40G),
# SLUICE_READER the user id of the reader (65533; the writer's is 65534), SLUICE_ONLY remote or native.
# Exit status 0 if no mark of another user was found.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

BUDGET=${SLUICE_BUDGET:-50}
LOG=$LOGS/leftovers.jsonl
declare -A UID_OF=([writer]=65534 [reader]=${SLUICE_READER:-65533})
PROGRAM=$BUILD/leftovers/leftovers
DRIVER=(${SLUICE_OWNER_LIBCUDA:+--libcuda "$SLUICE_OWNER_LIBCUDA" --libnvml "${SLUICE_OWNER_LIBNVML:-}"})
log_header | tee "$LOG"
if [ ! -x "$PROGRAM" ]; then
	PROGRAM=$SCRATCH/leftovers
	build_cu "$BENCH/leftovers/leftovers.cu" "$PROGRAM" >"$LOGS/leftovers.nvcc" 2>&1 || {
		echo 'gpu-leftovers: bench/leftovers/leftovers.cu does not compile'
		show "$LOGS/leftovers.nvcc"
		exit 1
	}
fi
chmod 755 "$SCRATCH"
for_users "$PROGRAM" "$SLUICE" "$WORKER"
USERS=$SCRATCH/users

as() {
	local uid=${UID_OF[$1]}
	shift
	setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@"
}

# worker_of WHO: a worker of that user's.
worker_of() {
	local at=$SCRATCH/$1
	install -d -m 755 -o "${UID_OF[$1]}" -g "${UID_OF[$1]}" "$at"
	install -d -m 700 -o "${UID_OF[$1]}" -g "${UID_OF[$1]}" "$at/store"
	# No function of ours, whose process would be another than the worker's.
	HOME=$at setpriv --reuid "${UID_OF[$1]}" --regid "${UID_OF[$1]}" --clear-groups "$USERS/sluice-worker" --listen "unix:$at/w" --device 0 --store "$at/store" --log warn "${DRIVER[@]}" >"$LOGS/worker-$1.log" 2>&1 &
	STARTED[$1]=$!
	wait_for 30 "${STARTED[$1]}" test -S "$at/w" || {
		fail "worker-$1" "did not start"
		show "$LOGS/worker-$1.log"
		exit 1
	}
}

# program WHERE WHO ARGS...: leftovers natively or remotely, as a user.
program() {
	local where=$1 who=$2
	shift 2
	if [ "$where" = native ]; then
		as "$who" timeout -k 1 20 "$USERS/leftovers" "$@"
	else
		as "$who" timeout -k 1 20 "$USERS/sluice" run --worker "unix:$SCRATCH/$who/w" --lib "$USERS/shim" --mem "${MEM:-40G}" -- "$USERS/leftovers" "$@"
	fi
}

# record RUN SECONDS STATUS: lines of JSON, of what a reader found, as lines of the raw log.
record() {
	sed -n "s/^{/{\"run\": \"$1\", /p" "$SCRATCH/found" >>"$LOG"
	printf '{"run": "%s", "seconds": %s, "status": %d}\n' "$1" "$2" "$3" >>"$LOG"
	[ "$3" = 0 ] || {
		fail "$1" "$(why "$3")"
		show "$LOGS/$1.err" 8
	}
}

# too_late RUN: whether the time is over; then the log says that it was not run.
too_late() {
	in_time "$1" && return 1
	printf '{"run": "%s", "error": "not run, %s s were over"}\n' "$1" "$BUDGET" >>"$LOG"
}

control() {
	local run=$1.control begun status
	too_late "$run" && return
	begun=$(clock)
	program "$1" writer control >"$SCRATCH/found" 2>"$LOGS/$run.err"
	status=$?
	record "$run" "$(minus "$(clock)" "$begun")" $status
}

# written PID: whether the writer has, or has ended.
written() { grep -q '^written ' "$SCRATCH/written" || ! kill -0 "$1"; }

# another WHERE END: a writer that ends so, and then the reader.
another() {
	local run=$1.$2 how=$2 pid program c begun status killed
	too_late "$run" && return
	begun=$(clock)
	case $2 in kill) how="wait" ;; session) how="busy" ;; esac
	: >"$SCRATCH/written"
	program "$1" writer write "$how" >"$SCRATCH/written" 2>"$LOGS/$run.err" &
	pid=$!
	wait_for 20 $pid written $pid
	if [ "$2" = session ]; then
		killed=0
		for c in $(pgrep -P "${STARTED[writer]}"); do
			tr '\0' ' ' <"/proc/$c/cmdline" | grep -q ' session' && kill -KILL "$c" && killed=$((killed + 1))
		done
		[ $killed -gt 0 ] || fail "$run" 'the writer has no session'
	fi
	program=$(sed -n 's/^written //p' "$SCRATCH/written")
	[ -n "$program" ] || fail "$run" 'the writer did not come to its end'
	[ "$how" = "$2" ] || [ -z "$program" ] || kill -KILL "$program"
	wait $pid
	program "$1" reader read >"$SCRATCH/found" 2>>"$LOGS/$run.err"
	status=$?
	record "$run" "$(minus "$(clock)" "$begun")" $status
}

worker_of writer
worker_of reader
for where in ${SLUICE_ONLY:-remote native}; do
	control "$where"
	for end in exit cap kill; do
		another "$where" $end
	done
	[ "$where" = native ] || another "$where" session
done
python3 "$BENCH/leftovers/report.py" "$LOG" || fail marks 'see above'
echo "gpu-leftovers: $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw log ${LOG#"$ROOT"/}"
[ "$FAILED" = 0 ]
