#!/bin/bash
# nvidia-smi.sh NVIDIA-SMI...: each nvidia-smi given, of whatever driver, against the NVML shim and a worker
# that grants 20480 MiB (test_nvml --serve). What it prints must be the grant and the lease's processes.
# Needs the shim and test_nvml in build/ (or SLUICE_BUILD).
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

build=${SLUICE_BUILD:-build}
dir=$(mktemp -d)
failed=0 passed=0
worker=

end() {
	[ -z "$worker" ] || kill "$worker" 2>/dev/null || true
	rm -rf "$dir"
}
trap end EXIT

# The worker lives until its standard input ends: a FIFO that this script holds open.
mkfifo "$dir/hold"
"$build/test/test_nvml" --serve "$dir/sock" 20480 <"$dir/hold" >"$dir/ready" 2>"$dir/worker.log" &
worker=$!
exec 9>"$dir/hold"
for _ in $(seq 100); do
	[ -s "$dir/ready" ] && break
	sleep 0.05
done
[ -s "$dir/ready" ] || { echo "nvidia-smi.sh: the worker does not start" >&2; exit 1; }

export SLUICE_WORKER=unix:$dir/sock LD_LIBRARY_PATH=$build/shim

# expect NAME PATTERN ARGUMENT...: runs $smi and looks for the extended regular expression in what it prints.
expect() {
	local name=$1 pattern=$2 rc=0
	shift 2
	timeout 60 "$smi" "$@" >"$dir/out" 2>&1 || rc=$?
	if [ $rc = 0 ] && grep -qE -- "$pattern" "$dir/out"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAIL $smi: $name: exit $rc, wanted /$pattern/ in:"
		sed 's/^/    /' "$dir/out"
	fi
}

for smi in "$@"; do
	expect page '5120MiB / +20480MiB'
	cat "$dir/out"
	expect 'page, driver' 'Driver Version: 580\.159\.04 +CUDA Version: 13\.0'
	expect 'page, processes' ' C +python3 +4096MiB'
	expect list '^GPU 1: NVIDIA H200 \(UUID: GPU-a1b2c3d4-0102-0304-0506-0708090a0b01\)' -L
	expect query '^0, NVIDIA H200, 20480 MiB, 5120 MiB, 15360 MiB, 37 %, 41, 9\.0, Disabled$' \
		--query-gpu=index,name,memory.total,memory.used,memory.free,utilization.gpu,temperature.gpu,compute_cap,mig.mode.current --format=csv
	expect 'query by UUID' '^20480$' -i GPU-a1b2c3d4-0102-0304-0506-0708090a0b01 --query-gpu=memory.total --format=csv,noheader,nounits
	expect apps '^4243, train\?\.py, 1024 MiB$' --query-compute-apps=pid,name,used_memory --format=csv
	expect details '^ +Total +: 20480 MiB' -q
	expect memory '^ +Free +: 15360 MiB' -q -d MEMORY
	expect xml '<total>20480 MiB</total>' -q -x
	expect dmon '^ +0 +312 +41 ' dmon -c 1
	expect pmon '^ +0 +4243 +C ' pmon -c 1

	# What would change the GPU is refused, and an absent worker is an error, not a hang.
	if timeout 60 "$smi" -i 0 -c 3 >"$dir/out" 2>&1 || ! grep -qi permission "$dir/out"; then
		failed=$((failed + 1))
		echo "FAIL $smi: setting the compute mode is not refused"
		cat "$dir/out"
	fi
	if SLUICE_WORKER=unix:$dir/nobody timeout 60 "$smi" >"$dir/out" 2>&1 || ! grep -qi driver "$dir/out"; then
		failed=$((failed + 1))
		echo "FAIL $smi: no worker, no error"
		cat "$dir/out"
	fi
done

cat "$dir/worker.log"
echo "nvidia-smi: $passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
