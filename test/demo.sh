#!/bin/bash
# demo.sh: what Sluice does, on a machine without a GPU: the daemon of a GPU node with two simulated GPUs of
# 8 GiB, the daemon of a node without any, and CUDA programs, built by nvcc, that use fractions of
# the former's GPUs on the latter through `sluice run`. As root, which daemons and their workers need.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[ "$(id -u)" = 0 ] || { echo "demo: the daemons need root; say sudo make demo" >&2; exit 1; }

build=$PWD/build
cuda=$build/test/cuda-${CUDA:-11.8}
dir=$(mktemp -d)
chmod 755 "$dir"
daemons=()
finish() {
	for pid in "${daemons[@]}"; do
		kill "$pid" 2>/dev/null || true
		wait "$pid" 2>/dev/null || true
	done
	rm -rf "$dir"
}
trap finish EXIT

show() {
	printf '\n\033[1m$ %s\033[0m\n' "${*//$build/build}"
	"$@"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
control=$(free_port)

# node NAME OWNER CONTROL: a sluiced with a folder of its own. Real nodes have munge, and no advertise.
node() {
	local at=$dir/$1
	install -d -m 0755 "$at" "$at/run" "$at/log"
	install -d -m 0700 "$at/state"
	cat >"$at/sluice.yaml" <<-YAML
		node: $1
		cluster: demo
		state_dir: $at/state
		run_dir: $at/run
		advertise: 127.0.0.1
		auth: tls
		tls: {ca: $dir/ca/ca.pem, cert: $dir/ca/$1.pem, key: $dir/ca/$1.key}
		audit: {file: $at/log/audit.log}
		listen: {control: "127.0.0.1:$3", data: "127.0.0.1:$(free_port)", metrics: "127.0.0.1:$(free_port)"}
		owner:
		  enabled: "$2"
		  libcuda: $build/simgpu/libcuda.so.1
		  libnvml: $build/simgpu/libnvidia-ml.so.1
		pools:
		  default:
		    owners: ["gpu01=127.0.0.1:$control"]
	YAML
	SLUICE_SIM_STATE=$dir/sim SLUICE_SIM_MEM=8G SLUICE_SIM_DEVICES=2 SLUICE_SIM_KERNELS=$build/test/twins.so \
		"$build/bin/sluiced" --config "$at/sluice.yaml" 2>"$at/log/sluiced.log" &
	daemons+=($!)
	for _ in $(seq 200); do
		[ ! -S "$at/run/sluiced.sock" ] || return 0
		kill -0 $! 2>/dev/null || break
		sleep 0.05
	done
	cat "$at/log/sluiced.log" >&2
	exit 1
}

PATH=$build/bin:$PATH
sluice ca init --dir "$dir/ca" >/dev/null
sluice ca issue gpu01 node01 --dir "$dir/ca" >/dev/null
node gpu01 yes "$control"
node node01 no "$(free_port)"
export SLUICED_SOCKET=$dir/node01/run/sluiced.sock
for _ in $(seq 200); do
	[ "$(sluice gpus | grep -c ' ok *$')" != 2 ] || break
	sleep 0.05
done

printf 'Two nodes: gpu01 lends two GPUs (simulated ones, of 8 GiB), node01 has none. On node01:\n'
show sluice gpus
printf '\nThe programs are plain CUDA with a static runtime; they know nothing of Sluice:\n'
show ldd "$cuda/vecadd"
show env SLUICE_TRACE=1 sluice run --fraction 50 -- "$cuda/vecadd"
show sluice run --fraction 50 -- "$cuda/streams_events"
show sluice run --fraction 50 -- "$cuda/printf"
printf '\nExactly the memory that was granted: with 2 GiB of the 8 the program may have 2 GiB, and not one granule more:\n'
show sluice run --mem 2G -- "$cuda/memcheck" 2048
show env NVML_TOTAL_MIB=2048 sluice run --mem 2G -- "$build/test/nvml"
printf '\nFour processes of one job share one account:\n'
show sluice run --fraction 30 -- "$cuda/multi_process"
printf '\nTwo fractions are two GPUs; a lease while it is used:\n'
printf '\n\033[1m$ %s\033[0m\n' 'sluice run --fraction 100,40 -- sleep 2 &'
sluice run --fraction 100,40 -- sleep 2 &
sleep 0.5
show sluice list
show sluice gpus
printf '\nWhat does not fit is refused, with the figures:\n'
printf '\n\033[1m$ %s\033[0m\n' "sluice run --fraction 70 -- build/test/${cuda##*/}/vecadd"
if sluice run --fraction 70 -- "$cuda/vecadd"; then exit 1; fi
wait $!
[ "$(sluice list | wc -l)" = 1 ] || { echo 'demo: a lease is left' >&2; exit 1; }
printf '\ndemo: all of it ran\n'
