#!/usr/bin/env bash
# Which way of sharing one GPU holds a share to a point? Tenants of several kinds of
# load on one real GPU: as the driver slices time by itself, by turns, by MPS with a
# percentage of active threads, by turns within MPS, and by green contexts.
#
# Usage: bench/shares/run.sh [SECONDS]      (default 140; cells that would end later are left out)
# Needs nvcc and a GPU; changes no setting of the GPU. Raw lines (shares.jsonl), what was
# said (shares.log) and the table that table.py makes (table.txt) go to
# $SLUICE_LOGS/shares (default build/gpu-logs/shares), in place of what is there.
# What came of it: docs/shares.md.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
raw=${SLUICE_LOGS:-$root/build/gpu-logs}/shares
budget=${1:-140}
until=$(($(date +%s) + budget))
export SHARES_UNTIL=$until
mkdir -p "$raw"
rm -f "$raw"/*
log=$raw/shares.log
work=$(mktemp -d "${TMPDIR:-/tmp}/shares.XXXXXX")
mps_pid=

finish() {
	[ -z "$mps_pid" ] || mps_stop
	rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

left() { echo $((until - $(date +%s))); }
say() { printf '%4d s left: %s\n' "$(left)" "$*"; }

find_nvcc() {
	local n
	for n in "${NVCC:-}" nvcc /usr/local/cuda/bin/nvcc /usr/local/cuda-13*/bin/nvcc; do
		[ -n "$n" ] && command -v "$n" 2>/dev/null && return 0
	done
	echo 'no nvcc here; put it on PATH or name it in NVCC' >&2
	return 1
}

# pool NAME SIZE [PERCENTS]: the cells on standard input, in one pool of tenants.
pool() {
	local name=$1 status
	shift
	if [ "$(left)" -lt 4 ]; then
		say "$name: not run"
		return
	fi
	say "$name"
	echo "== pool $name" >>"$log"
	timeout -k 2 $(($(left) + 5)) "$work/tenant" "$@" >>"$raw/shares.jsonl" 2>"$work/err"
	status=$?
	cat "$work/err" >>"$log"
	[ $status = 0 ] || { printf '%s: exit status %s\n' "$name" $status; tail -n 5 "$work/err"; }
	grep 'not run' "$work/err" | sed "s/^/$name: /"
	return 0
}

mps_start() {
	local control
	for control in nvidia-cuda-mps-control /usr/local/nvidia/bin/nvidia-cuda-mps-control /usr/local/cuda/bin/nvidia-cuda-mps-control; do
		command -v "$control" >/dev/null 2>&1 && break
		control=
	done
	[ -n "$control" ] || { echo 'nvidia-cuda-mps-control is not on this machine: no MPS'; return 1; }
	mkdir -p "$work/mps" "$work/mps-log"
	export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
	mps_control=$control
	"$control" -f >"$work/mps-log/foreground" 2>&1 &
	mps_pid=$!
	for _ in $(seq 50); do
		[ -e "$work/mps/control" ] && return 0
		kill -0 "$mps_pid" 2>/dev/null || break
		sleep 0.1
	done
	echo "the MPS daemon does not start:"
	tail -n 5 "$work"/mps-log/*
	mps_stop
	return 1
}

mps_stop() {
	echo quit | timeout 10 "$mps_control" >/dev/null 2>&1
	kill "$mps_pid" 2>/dev/null
	wait "$mps_pid" 2>/dev/null
	mps_pid=
	tail -n 100 "$work"/mps-log/* >>"$log"
	unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# for every kind alone: freely, or as the only one who takes turns
each_alone() {
	local k
	for k in gemm copy small sync mixed graph long; do
		echo "$1.$k secs=0.8 warm=0.2 $2 $k:100"
	done
}

nvcc=$(find_nvcc) || exit 1
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
{
	nvidia-smi --query-gpu=name,driver_version,compute_mode,mig.mode.current,clocks.sm,power.draw --format=csv,noheader
	nproc
	"$nvcc" --version | tail -n 2
} >"$raw/machine.txt" 2>&1
cat "$raw/machine.txt"
built=()
for p in tenant green; do
	"$nvcc" -O2 -std=c++17 -cudart static -gencode "arch=compute_${arch:-90},code=sm_${arch:-90}" \
		-o "$work/$p" "$here/$p.cu" -lpthread -ldl >"$work/build-$p.txt" 2>&1 &
	built+=($!)
done
for p in "${built[@]}"; do
	wait "$p" || { cat "$work"/build-*.txt; exit 1; }
done
say 'built'

pool main 4 <<-CELLS
	heat mode=free bound=2000 secs=0.8 warm=0.4 gemm:100
	$(each_alone alone 'mode=free bound=2000')
	$(each_alone lone 'mode=turns')
	driver.50-50 mode=free bound=2000 secs=0.9 gemm:50 gemm:50
	driver.50-50 mode=free bound=2000 secs=0.9 gemm:50 small:50
	driver.50-50 mode=free bound=2000 secs=0.9 gemm:50 sync:50
	driver.50-50 mode=free bound=2000 secs=0.9 gemm:50 copy:50
	driver.50-50 mode=free bound=2000 secs=0.9 copy:50 copy:50
	driver.50-30-20 mode=free bound=2000 secs=0.9 gemm:50 gemm:30 gemm:20
	turns.50-50 mode=turns secs=1.8 gemm:50 gemm:50
	turns.30-70 mode=turns secs=1.8 gemm:30 gemm:70
	turns.10-90 mode=turns secs=1.8 gemm:10 gemm:90
	turns.25-75 mode=turns secs=1.8 copy:25 copy:75
	turns.50-30-20 mode=turns secs=1.8 gemm:50 gemm:30 gemm:20
	turns.50-50 mode=turns secs=1.8 gemm:50 small:50
	turns.50-50 mode=turns secs=1.8 gemm:50 sync:50
	turns.50-50 mode=turns secs=1.8 gemm:50 copy:50
	turns.30-70 mode=turns secs=1.8 copy:30 gemm:70
	turns.30-70 mode=turns secs=1.8 graph:30 mixed:70
	turns.50-50 mode=turns secs=1.8 graph:50 gemm:50
	turns.4x25 mode=turns secs=1.8 gemm:25 copy:25 small:25 graph:25
	lend mode=turns secs=0.9 lend=1 gemm:30 idle:70
	nolend mode=turns secs=0.9 lend=0 gemm:30 idle:70
	nolend mode=turns secs=0.9 lend=0 gemm:30 copy:70
	lend.burst mode=turns secs=0.9 burst:50 gemm:50
	overrun mode=turns secs=0.9 long:50 gemm:50
	overrun.driver mode=free bound=2000 secs=0.9 long:50 gemm:50
CELLS

if mps_start; then
	pool mps50 2 50,50 <<-CELLS
		mps.50-50 mode=free bound=2000 secs=0.9 gemm:50 gemm:50
		mps.50-50 mode=free bound=2000 secs=0.9 gemm:50 copy:50
		mps.50-50 mode=free bound=2000 secs=0.9 gemm:50 sync:50
		mps.50-50 mode=free bound=2000 secs=0.9 copy:50 copy:50
	CELLS
	pool mps30 2 30,70 <<-CELLS
		mps.30-70 mode=free bound=2000 secs=0.9 gemm:30 gemm:70
		mps.30-70 mode=free bound=2000 secs=0.9 copy:30 gemm:70
	CELLS
	pool mps10 2 10,90 <<-CELLS
		mps.10-90 mode=free bound=2000 secs=0.9 gemm:10 gemm:90
	CELLS
	pool mps503020 3 50,30,20 <<-CELLS
		mps.50-30-20 mode=free bound=2000 secs=0.9 gemm:50 gemm:30 gemm:20
	CELLS
	pool mpsturns 3 <<-CELLS
		mps.alone mode=free bound=2000 secs=0.6 warm=0.2 gemm:100
		mps.alone mode=free bound=2000 secs=0.6 warm=0.2 sync:100
		mps.plain mode=free bound=2000 secs=0.9 gemm:50 gemm:50
		mps.plain mode=free bound=2000 secs=0.9 gemm:50 sync:50
		mps.turns.50-50 mode=turns secs=0.9 gemm:50 gemm:50
		mps.turns.30-70 mode=turns secs=0.9 gemm:30 gemm:70
		mps.turns.10-90 mode=turns secs=0.9 gemm:10 gemm:90
		mps.turns.50-50 mode=turns secs=0.9 gemm:50 sync:50
		mps.turns.50-50 mode=turns secs=0.9 gemm:50 copy:50
		mps.turns.50-30-20 mode=turns secs=0.9 gemm:50 gemm:30 gemm:20
		mps.turns.q1 mode=turns q=1000 secs=0.7 gemm:50 copy:50
		mps.turns.q2 mode=turns q=2000 secs=0.7 gemm:50 copy:50
		mps.turns.early mode=turns q=2000 early=60 secs=0.7 copy:50 copy:50
	CELLS
	pool mpskill 2 <<<'mps.kill mode=turns secs=1 warm=0.2 end=kill gemm:50 gemm:50'
	mps_stop
fi

# What a quantum, the bound of work in flight, an early hand-over and the way of waiting cost.
pool sweep 4 <<-CELLS
	$(for q in 500 1000 2000 10000 20000; do
		echo "turns.q$q mode=turns q=$q secs=0.7 warm=0.2 gemm:50 copy:50"
		echo "turns.q$q mode=turns q=$q secs=0.7 warm=0.2 copy:30 copy:70"
	done)
	turns.period10 mode=turns period=10000 secs=0.7 warm=0.2 copy:10 copy:90
	turns.period20 mode=turns period=20000 secs=0.7 warm=0.2 gemm:10 gemm:90
	turns.bound100 mode=turns bound=100 secs=0.7 warm=0.2 small:50 copy:50
	turns.bound300 mode=turns bound=300 secs=0.7 warm=0.2 small:50 copy:50
	turns.bound1000 mode=turns bound=1000 secs=0.7 warm=0.2 small:50 copy:50
	turns.bound5000 mode=turns bound=5000 secs=0.7 warm=0.2 small:50 copy:50
	turns.early50 mode=turns early=50 secs=0.7 warm=0.2 copy:50 copy:50
	turns.early150 mode=turns early=150 secs=0.7 warm=0.2 copy:50 copy:50
	turns.early600 mode=turns early=600 secs=0.7 warm=0.2 gemm:50 copy:50
	turns.spin mode=turns wait=spin secs=0.7 warm=0.2 copy:50 copy:50
	turns.alert mode=turns wait=alert secs=0.7 warm=0.2 copy:50 copy:50
	turns.futex mode=turns wait=futex secs=0.7 warm=0.2 copy:50 copy:50
	turns.charge-gpu mode=turns charge=gpu secs=0.7 warm=0.2 gemm:10 copy:90
	turns.charge-gpu mode=turns charge=gpu secs=0.7 warm=0.2 gemm:50 sync:50
	alone.gemm mode=free bound=2000 secs=0.6 warm=0.2 gemm:100
	alone.copy mode=free bound=2000 secs=0.6 warm=0.2 copy:100
CELLS

# A tenant that is killed, or stopped, in its turn.
pool kill 2 <<<'kill mode=turns secs=1 warm=0.2 end=kill gemm:50 gemm:50'
pool stop 2 <<<'stop mode=turns secs=1 warm=0.2 end=stop gemm:50 gemm:50'

if [ "$(left)" -gt 8 ]; then
	say 'green contexts'
	timeout 20 "$work/green" 0.5 >>"$raw/shares.jsonl" 2>"$work/err" || echo 'green contexts failed'
	tee -a "$log" <"$work/err"
fi

many=$(
	for _ in 1 2 3 4 5 6; do printf ' small:2 sync:2'; done
	for _ in 1 2 3 4; do printf ' gemm:5 copy:5'; done
	for _ in 1 2; do printf ' graph:9 mixed:9'; done
)
pool many 24 <<-CELLS
	many.q2 mode=turns q=2000 secs=1.8 warm=0.5$many
	many.q1 mode=turns q=1000 secs=1.8 warm=0.5$many
	many.driver mode=free bound=2000 secs=1.2 warm=0.5$many
CELLS

if command -v python3 >/dev/null; then
	python3 "$here/table.py" "$raw/shares.jsonl" | tee "$raw/table.txt"
fi
say 'done'
