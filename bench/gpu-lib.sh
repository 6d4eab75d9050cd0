# Shared by the GPU scripts in this folder: where things are, workers and relays
# started and stopped, one line per check. Sourced by bash, never run.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC2034 # for the scripts that source this
BENCH=$ROOT/bench
BUILD=${SLUICE_BUILD:-$ROOT/build}
LOGS=${SLUICE_LOGS:-$BUILD/gpu-logs}
PYTHON=${PYTHON:-python3}
SLUICE=$BUILD/bin/sluice
WORKER=$BUILD/bin/sluice-worker
RELAY=$BUILD/bin/relay
STORE=${SLUICE_STORE:-$BUILD/gpu-store}
MEM=${SLUICE_MEM:-}
WORKER_LOG=${SLUICE_WORKER_LOG:-warn}

mkdir -p "$LOGS"
install -d -m 0700 "$STORE" # the worker refuses a store that others can write to
LOGS=$(cd "$LOGS" && pwd)
STORE=$(cd "$STORE" && pwd)
export PYTHONUNBUFFERED=1

# What we started and have to end: process ids by name.
declare -A STARTED=()
SCRATCH=$(mktemp -d "${TMPDIR:-/tmp}/sluice-gpu.XXXXXX")

finish() {
	local name
	for name in "${!STARTED[@]}"; do
		stop "$name"
	done
	rm -rf "$SCRATCH"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# stop NAME ends what start_worker or start_relay began: politely, then surely.
stop() {
	local pid=${STARTED[$1]:-} i
	[ -n "$pid" ] || return 0
	unset "STARTED[$1]"
	kill -TERM "$pid" 2>/dev/null
	for ((i = 0; i < 50; i++)); do
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	kill -KILL "$pid" 2>/dev/null
	wait "$pid" 2>/dev/null
	return 0
}

# for_users FILE...: what other users run, and the shim, as copies in $SCRATCH/users: where all this lies may be root's alone.
for_users() {
	install -d -m 755 "$SCRATCH/users/shim"
	cp -RL "$@" "$SCRATCH/users/"
	cp -L "$BUILD"/shim/*.so* "$SCRATCH/users/shim/"
	chmod -R a+rX "$SCRATCH/users"
}

free_port() {
	"$PYTHON" - <<-'P'
		import random, socket
		while True:
		    port = random.randrange(32000, 32768)  # above those of test/slurm/lab, below those that the kernel gives to whoever asks for any
		    with socket.socket() as s:
		        try:
		            s.bind(("", port))
		        except OSError:
		            continue
		    print(port)
		    break
	P
}

# wait_for SECONDS PID COMMAND...: until COMMAND succeeds; fails if PID ends first.
wait_for() {
	local seconds=$1 pid=$2 i
	shift 2
	for ((i = 0; i < seconds * 20; i++)); do
		"$@" 2>/dev/null && return 0
		kill -0 "$pid" 2>/dev/null || return 1
		sleep 0.05
	done
	return 1
}

accepts() { (exec 3<>"/dev/tcp/127.0.0.1/$1"); }

# start_worker NAME tcp|unix [FLAGS...]: a worker on device 0, or on DEVICES, that offers all their
# memory, for leases to take from; its address is left in ADDR, its log is
# worker-NAME.log.
start_worker() {
	local name=$1 kind=$2 port log=$LOGS/worker-$1.log
	shift 2
	if [ "$kind" = unix ]; then
		ADDR=unix:$SCRATCH/$name.sock
	else
		port=$(free_port)
		ADDR=tcp:127.0.0.1:$port
	fi
	"$WORKER" --listen "$ADDR" --device "${DEVICES:-0}" --store "$STORE" --log "$WORKER_LOG" "$@" >"$log" 2>&1 &
	STARTED[$name]=$!
	if [ "$kind" = unix ]; then
		wait_for 30 "${STARTED[$name]}" test -S "${ADDR#unix:}"
	else
		wait_for 30 "${STARTED[$name]}" accepts "$port"
	fi || {
		printf 'worker %s did not start; its log %s ends:\n' "$name" "$log"
		tail -n 30 "$log"
		return 1
	}
}

# start_relay NAME HOST:PORT RTT RATE: leaves the relay's address in ADDR.
start_relay() {
	local log=$LOGS/relay-$1.log
	"$RELAY" --listen 127.0.0.1:0 --to "$2" --rtt "$3" --rate "$4" >"$log" 2>&1 &
	STARTED[$1]=$!
	wait_for 10 "${STARTED[$1]}" grep -q '^listening ' "$log" || {
		printf 'relay %s did not start: ' "$1"
		tail -n 5 "$log"
		return 1
	}
	ADDR=tcp:$(sed -n 's/^listening //p' "$log" | head -n 1)
}

# sluiced_folder NAME: a daemon's folder in DIR, with what all of them have in their sluice.yaml; the rest of that
# comes from standard input.
sluiced_folder() {
	local at=$DIR/$1
	install -d -m 0700 "$at" "$at/state"
	install -d -m 0755 "$at/run" "$at/log"
	chmod 755 "$at"
	{
		cat
		cat <<-YAML
			node: $1
			cluster: bench
			state_dir: $at/state
			run_dir: $at/run
			advertise: 127.0.0.1
			audit: {file: $at/log/audit.log}
		YAML
	} >"$at/sluice.yaml"
}

# start_sluiced NAME: the daemon of such a folder; its log is sluiced-NAME.log.
start_sluiced() {
	"$BUILD/bin/sluiced" --config "$DIR/$1/sluice.yaml" >>"$LOGS/sluiced-$1.log" 2>&1 &
	STARTED[$1]=$!
	wait_for 60 "${STARTED[$1]}" test -S "$DIR/$1/run/sluiced.sock"
}

# need_sluiced NAME: start_sluiced, or the end of the script.
need_sluiced() {
	start_sluiced "$1" || {
		fail "sluiced-$1" "did not start"
		show "$LOGS/sluiced-$1.log" 30
		exit 1
	}
}

# remote ADDR PROGRAM...: on the worker, with the memory set in MEM if any.
remote() {
	local addr=$1
	shift
	"$SLUICE" run --worker "$addr" ${MEM:+--mem "$MEM"} -- "$@"
}

# limited SECONDS COMMAND...: as timeout does it, also for the functions here.
limited() {
	local seconds=$1
	shift
	case $1 in
	remote)
		shift
		local addr=$1
		shift
		timeout -k 5 "$seconds" "$SLUICE" run --worker "$addr" ${MEM:+--mem "$MEM"} -- "$@"
		;;
	*) timeout -k 5 "$seconds" "$@" ;;
	esac
}

PASSED=0
FAILED=0
FAILURES=()

# pass NAME FIGURES..., fail NAME FIGURES...: one line each, also into results.txt.
pass() {
	PASSED=$((PASSED + 1))
	printf 'PASS %-28s %s\n' "$1" "${*:2}" | tee -a "$LOGS/results.txt"
}

fail() {
	FAILED=$((FAILED + 1))
	FAILURES+=("$1")
	printf 'FAIL %-28s %s\n' "$1" "${*:2}" | tee -a "$LOGS/results.txt"
}

# show FILE [LINES]: the end of a log, indented, so that it reads as a quotation.
show() {
	[ -s "$1" ] || return 0
	printf '     --- end of %s\n' "${1#"$LOGS"/}"
	tail -n "${2:-15}" "$1" | cut -c1-300 | sed 's/^/     | /'
}

# why STATUS: a word for an exit status.
why() {
	case $1 in
	124) echo 'ran past its time' ;;
	137) echo 'killed' ;;
	*) if [ "$1" -gt 128 ]; then echo "died of signal $(($1 - 128))"; else echo "exit status $1"; fi ;;
	esac
}

find_nvcc() {
	local n
	for n in "${NVCC:-}" nvcc /usr/local/cuda/bin/nvcc /usr/local/cuda-13*/bin/nvcc; do
		[ -n "$n" ] && command -v "$n" >/dev/null 2>&1 && {
			command -v "$n"
			return 0
		}
	done
	return 1
}

# build_cu SOURCE OUTPUT: by the nvcc of this machine, for this machine's GPU,
# with the runtime linked statically.
build_cu() {
	local nvcc arch
	nvcc=$(find_nvcc) || {
		echo 'no nvcc here; put it on PATH or name it in NVCC'
		return 1
	}
	arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
	"$nvcc" -O2 -std=c++17 -cudart static -gencode "arch=compute_${arch:-90},code=[sm_${arch:-90},compute_${arch:-90}]" \
		-o "$2" "$1" -lpthread
}

# log_header: the line that every raw log begins with: commit, date, machine, GPU and driver.
log_header() { SLUICE_BUILD=$BUILD PYTHON=$PYTHON python3 "$BENCH/rawlog.py"; }

# Where a program can run, by name: the address of the worker or relay.
declare -A AT=()

# start_links: a worker over loopback TCP, one over a Unix socket, and the relays of slower links; their addresses are in AT.
start_links() {
	start_worker links tcp || return 1
	AT[loopback]=$ADDR
	start_worker links-unix unix && AT[unix]=$ADDR
	start_relay fast "${AT[loopback]#tcp:}" 0.1ms 10G && AT[fast]=$ADDR
	start_relay lan "${AT[loopback]#tcp:}" 0.2ms 1G && AT[lan]=$ADDR
	start_relay wan "${AT[loopback]#tcp:}" 20ms 1G && AT[wan]=$ADDR
	return 0
}

# one RUN SECONDS PROGRAM...: what it printed and the shim's counters become a line of the raw log $LOG.
# RUN is PART.VARIANT.NUMBER.
# shellcheck disable=SC2153 # the script that sources this sets RAW and LOG
one() {
	local run=$1 seconds=$2 variant status begun=$SECONDS
	shift 2
	variant=${run#*.}
	variant=${variant%.*}
	in_time "$run" || return 1
	rm -f "$RAW/$run.json" "$RAW/$run.stats"
	if [ "$variant" = native ]; then
		limited "$seconds" "$@" >"$RAW/$run.json" 2>"$RAW/$run.err"
	else
		SLUICE_STATS=$RAW/$run.stats limited "$seconds" remote "${AT[$variant]}" "$@" >"$RAW/$run.json" 2>"$RAW/$run.err"
	fi
	status=$?
	if [ $status = 0 ]; then
		printf '{"run": "%s", "result": %s, "stats": [%s]}\n' "$run" "$(tail -n 1 "$RAW/$run.json")" "$(paste -sd, "$RAW/$run.stats" 2>/dev/null)" >>"$LOG"
		printf '     %s: %s s\n' "$run" $((SECONDS - begun))
		return 0
	fi
	fail "$run" "$(why $status)"
	show "$RAW/$run.err" 12
	show "$LOGS/worker-links.log" 5
	return 1
}

# choose_parts ARGS...: fills CHOSEN from --only, or with all PARTS.
choose_parts() {
	local p
	CHOSEN=("${PARTS[@]}")
	while [ $# -gt 0 ]; do
		case $1 in
		--only)
			IFS=, read -r -a CHOSEN <<<"${2:-}"
			shift
			;;
		--only=*) IFS=, read -r -a CHOSEN <<<"${1#--only=}" ;;
		--list)
			printf '%s\n' "${PARTS[@]}"
			exit 0
			;;
		*)
			echo "$(basename "$0"): $1 is not known; say --only PART,PART... or --list" >&2
			exit 2
			;;
		esac
		shift
	done
	for p in "${CHOSEN[@]}"; do
		[[ " ${PARTS[*]} " = *" $p "* ]] || {
			echo "$(basename "$0"): no part $p; there are: ${PARTS[*]}" >&2
			exit 2
		}
	done
}

# in_time NAME: false, and a failed check, once the budget is spent.
in_time() {
	[ "$SECONDS" -lt "$BUDGET" ] && return 0
	fail "$1" "not run, $BUDGET s are over"
	return 1
}

clock() { printf '%s\n' "$EPOCHREALTIME"; }
minus() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f", a - b }'; }

# bytes SIZE: 20G, 512M or a number, as sluice run takes it.
bytes() {
	case $1 in
	*[Tt]) echo $((${1%?} << 40)) ;;
	*[Gg]) echo $((${1%?} << 30)) ;;
	*[Mm]) echo $((${1%?} << 20)) ;;
	*[Kk]) echo $((${1%?} << 10)) ;;
	*) echo "$1" ;;
	esac
}
