#!/usr/bin/env bash
# What must hold on a real GPU: CUDA programs and PyTorch give remotely, through
# sluice run, what they give natively, and no more memory than was granted.
#
# Usage: bench/gpu-test.sh [--only PART,PART...] [--list]
# Needs: build/bin, build/shim, a GPU with its driver, nvcc 13, python3 with torch
# and torchvision; build/gpu from bench/prebuild.sh for the older compilers. No Go.
# Prints one line per check; the raw output of every run is kept in $SLUICE_LOGS
# (default build/gpu-logs). Exit status 0 when every check passed. SLUICE_MEM is
# what a lease asks for (20G), SLUICE_OVERHEAD_MIB what NVML may show beyond it.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

PARTS=(smi cuda13 cuda11.8 cuda12.4 libs pinned hostmem train mem end)
MEM=${MEM:-20G}
BUDGET=${SLUICE_BUDGET:-530} # seconds; no check begins after that
OVERHEAD_MIB=${SLUICE_OVERHEAD_MIB:-64}
choose_parts "$@"
: >"$LOGS/results.txt"

# both NAME SECONDS PROGRAM...: natively, then remotely; the output and the exit
# status must be the same, and the status 0. The native run is what is compared with: one
# that dies of a signal (a driver does not always survive a thread that calls it at
# exit) is made again, and the line says so. The remote one has one try.
both() {
	local name=$1 seconds=$2 native remote begun middle end deaths=0
	shift 2
	in_time "$name" || return
	while
		begun=$(clock)
		limited "$seconds" "$@" >"$LOGS/$name.native.out" 2>"$LOGS/$name.native.err"
		native=$?
		[ $native -gt 128 ] && [ $native != 137 ] && [ $deaths -lt 3 ]
	do
		deaths=$((deaths + 1))
	done
	middle=$(clock)
	run_remote "$name" "$seconds" "$@"
	remote=$?
	end=$(clock)
	if [ $native != 0 ]; then
		fail "$name" "natively: $(why $native)"
		show "$LOGS/$name.native.err" 6
	elif [ $remote != 0 ]; then
		fail "$name" "$(why $remote)"
		show_remote "$name"
	elif ! cmp -s "$LOGS/$name.native.out" "$LOGS/$name.remote.out"; then
		fail "$name" "the outputs differ"
		diff "$LOGS/$name.native.out" "$LOGS/$name.remote.out" | head -n 8 | cut -c1-200 | sed 's/^/     | /'
	else
		pass "$name" "$(wc -l <"$LOGS/$name.remote.out") lines the same; native $(minus "$middle" "$begun") s, remote $(minus "$end" "$middle") s$([ $deaths = 0 ] || echo "; natively it died of a signal $deaths times first")"
		return 0
	fi
	return 1
}

# alone NAME SECONDS PROGRAM...: remotely only; the exit status must be 0.
alone() {
	local name=$1 seconds=$2 status
	shift 2
	in_time "$name" || return
	run_remote "$name" "$seconds" "$@"
	status=$?
	if [ $status = 0 ]; then
		pass "$name" "$(tail -n 2 "$LOGS/$name.remote.out" | head -n 1 | cut -c1-160)"
	else
		fail "$name" "$(why $status)"
		show_remote "$name"
	fi
	return $status
}

run_remote() {
	local name=$1 seconds=$2
	shift 2
	if ! kill -0 "${STARTED[test]:-0}" 2>/dev/null || [ -z "${STARTED[test]:-}" ]; then
		fail "$name-worker" "the worker has died; starting another"
		show "$LOGS/worker-test.log"
		mv "$LOGS/worker-test.log" "$LOGS/worker-test-before-$name.log"
		unset "STARTED[test]"
		start_worker test tcp || return 125
	fi
	limited "$seconds" remote "$ADDR" "$@" >"$LOGS/$name.remote.out" 2>"$LOGS/$name.remote.err"
}

show_remote() {
	show "$LOGS/$1.remote.out" 6
	show "$LOGS/$1.remote.err" 12
	show "$LOGS/worker-test.log" 6
}

# programs FOLDER: every test program in it, as one compiler made it.
programs() {
	local from=$1 label=$2 p arg
	for p in vecadd reduce streams_events pipeline printf assertion threads pinned zerocopy crowded hostpool registered flags managed managedvar graph graphnode graphhost graph_times arrive engine packed pointers fork multi_process ipc twolibs separate separate-ptx separate-part link legacy nocode; do
		[ -x "$from/$p" ] && both "$label-$p" 60 "$from/$p"
	done
	# Before CUDA 12 the device's runtime knew no GPU as new as the H100.
	[ -x "$from/nested" ] && [ "$label" != cuda11.8 ] && both "$label-nested" 60 "$from/nested"
	[ -x "$from/link" ] && for p in linked module library; do
		for arg in print assert trap; do
			both "$label-link-$p-$arg" 60 "$from/link" $p $arg
		done
	done
	[ -x "$from/graph_times" ] && both "$label-graph_times-pinned" 60 "$from/graph_times" pinned
	if [ -x "$from/pipeline" ]; then
		both "$label-pipeline-shared" 60 "$from/pipeline" shared
		alone "$label-pipeline-gone" 60 "$from/pipeline" gone # no driver has to survive it
	fi
	[ -x "$from/errors" ] && for arg in plain illegal; do
		both "$label-errors-$arg" 60 "$from/errors" $arg
	done
	[ -x "$from/blocking" ] && for arg in plain blocking; do
		both "$label-blocking-$arg" 60 "$from/blocking" $arg
	done
	[ -x "$from/exit_live" ] && for arg in return exit quick thread; do
		both "$label-exit-$arg" 60 "$from/exit_live" $arg
	done
	[ -x "$from/memcheck" ] && alone "$label-memcheck" 60 "$from/memcheck" $((CAP >> 20))
	return 0
}

part_smi() {
	local name=smi field bad=0
	limited 60 "$BENCH/smi.sh" >"$LOGS/$name.native.out" 2>&1
	run_remote "$name" 60 "$BENCH/smi.sh"
	local status=$?
	for field in name uuid driver_version pci.bus_id compute_cap; do
		[ "$(grep "^$field:" "$LOGS/$name.native.out")" = "$(grep "^$field:" "$LOGS/$name.remote.out")" ] || {
			bad=1
			diff <(grep "^$field:" "$LOGS/$name.native.out") <(grep "^$field:" "$LOGS/$name.remote.out") | sed 's/^/     | /'
		}
	done
	grep -qx "memory.total: $((CAP >> 20))" "$LOGS/$name.remote.out" || bad=1
	if [ $status = 0 ] && [ $bad = 0 ]; then
		pass "$name" "$(grep '^name:' "$LOGS/$name.remote.out"), $(grep '^memory.total' "$LOGS/$name.remote.out") MiB of $(sed -n 's/^memory.total: //p' "$LOGS/$name.native.out")"
	else
		fail "$name" "$(why $status); expected total $((CAP >> 20)) MiB"
		show "$LOGS/$name.remote.out" 40
	fi
}

part_cuda13() {
	local out=$SCRATCH/cuda13 f
	mkdir -p "$out"
	for f in "$ROOT"/test/cuda/*.cu; do
		case $(basename "$f") in twolibs.cu | separate.cu | nested.cu | nocode.cu) ;; *) printf '%s\n' "$f" ;; esac
	done >"$SCRATCH/sources"
	export -f build_cu find_nvcc
	# shellcheck disable=SC2016 # expanded by the inner shell
	xargs -P 8 -I{} bash -c 'n=$(basename {} .cu); build_cu {} "$0/$n" >"$1/$n.nvcc" 2>&1' "$out" "$LOGS" <"$SCRATCH/sources"
	build_twolibs "$out" >"$LOGS/twolibs.nvcc" 2>&1
	build_separate "$out" >"$LOGS/separate.nvcc" 2>&1
	gcc -O1 -o "$out/nvml" "$ROOT/test/cuda/nvml.c" -ldl >"$LOGS/nvml.gcc" 2>&1
	for f in $(sed 's|.*/||; s/\.cu$//' "$SCRATCH/sources") twolibs separate separate-ptx separate-part nested; do
		[ -x "$out/$f" ] || {
			fail "cuda13-$f" "does not compile"
			show "$LOGS/$f.nvcc" 6
		}
	done
	programs "$out" cuda13
	[ -x "$out/nvml" ] && NVML_TOTAL_MIB=$((CAP >> 20)) alone nvml 60 "$out/nvml"
	[ -x "$out/bigcopy" ] && both cuda13-bigcopy 120 "$out/bigcopy" 5120
}

# As the Makefile builds it: two shared objects and a program, a runtime in each.
build_twolibs() {
	local src=$ROOT/test/cuda/twolibs.cu nvcc n
	nvcc=$(find_nvcc) || return 1
	for n in 1 2; do
		"$nvcc" -O2 -std=c++17 -cudart static -arch=native -DLIB=$n -shared -Xcompiler -fPIC,-fvisibility=hidden \
			-Xlinker --exclude-libs,ALL -o "$1/libtwo$n.so" "$src" || return 1
	done
	# shellcheck disable=SC2016 # $ORIGIN is the loader's
	"$nvcc" -O2 -std=c++17 -cudart static -arch=native -Xlinker --exclude-libs,ALL -Xlinker -rpath,'$ORIGIN' \
		-o "$1/twolibs" "$src" -L"$1" -ltwo1 -ltwo2
}

# As the Makefile builds them: linked for this GPU, by its driver, and for another GPU beside the objects' PTX; and with
# the device's runtime.
build_separate() {
	local src=$ROOT/test/cuda/separate.cu nvcc out code part
	nvcc=$(find_nvcc) || return 1
	for out in "separate -arch=native" "separate-ptx -gencode arch=compute_80,code=compute_80" \
		"separate-part -gencode arch=compute_75,code=[sm_75,compute_75]"; do
		read -r out code <<<"$out"
		for part in 0 1 2; do
			# shellcheck disable=SC2086 # several words
			"$nvcc" -O2 -std=c++17 -cudart static -rdc=true $code -DPART=$part -c -o "$1/$out.$part.o" "$src" || return 1
		done
		# shellcheck disable=SC2086
		"$nvcc" -cudart static -rdc=true $code -o "$1/$out" "$1/$out".[012].o || return 1
	done
	"$nvcc" -O2 -std=c++17 -cudart static -rdc=true -arch=native -o "$1/nested" "$ROOT/test/cuda/nested.cu" -lcudadevrt
}

prebuilt() {
	if [ -x "$BUILD/gpu/cuda-$1/vecadd" ]; then
		programs "$BUILD/gpu/cuda-$1" "cuda$1"
	else
		fail "cuda$1" "no programs in build/gpu/cuda-$1; run bench/prebuild.sh where the compiler is, and bring build/gpu along"
	fi
}

part_cuda11.8() { prebuilt 11.8; }
part_cuda12.4() { prebuilt 12.4; }

part_libs() {
	both cublas 120 "$PYTHON" "$BENCH/cublas.py"
	both cudnn 120 "$PYTHON" "$BENCH/cudnn.py"
	both cufft 120 "$PYTHON" "$BENCH/fft.py"
}

part_pinned() {
	both pinned-torch 120 "$PYTHON" "$BENCH/pinned.py" &&
		printf '     %s\n' "native: $(paste -sd, "$LOGS/pinned-torch.native.err")" "remote: $(paste -sd, "$LOGS/pinned-torch.remote.err")"
}

# JAX's copies to its pinned host memory and back, which it waits for by host functions alone.
part_hostmem() {
	"$PYTHON" -c 'import jax' 2>/dev/null || {
		echo "     no JAX here"
		return
	}
	both pinned-host-jax 120 "$PYTHON" "$BENCH/pinned_host.py" 1000
}

part_train() {
	local model
	for model in mlp resnet50; do
		both "train-$model" 150 "$PYTHON" "$BENCH/train_bits.py" --only $model && {
			printf '     %s\n' "first loss $(sed -n 1p "$LOGS/train-$model.remote.out"), last $(grep ' 99 ' "$LOGS/train-$model.remote.out")"
			continue
		}
		# Is it native itself that differs from run to run?
		in_time "train-$model-again" || continue
		limited 100 "$PYTHON" "$BENCH/train_bits.py" --only $model >"$LOGS/train-$model.native2.out" 2>&1
		cmp -s <(grep "^$model .*0x" "$LOGS/train-$model.native.out") <(grep "^$model .*0x" "$LOGS/train-$model.native2.out") &&
			echo "     two native runs agree" || echo "     two native runs differ too"
	done
}

part_mem() {
	local most seen unknown way
	"$PYTHON" "$BENCH/nvml_sample.py" --pid "${STARTED[test]}" >"$LOGS/nvml_sample.out" 2>&1 &
	STARTED[sampler]=$!
	wait_for 10 "${STARTED[sampler]}" grep -q sampling "$LOGS/nvml_sample.out"
	alone mem 120 "$PYTHON" "$BENCH/mem.py" --cap "$CAP"
	sed 's/^/     /' "$LOGS/mem.remote.out"
	if build_cu "$BENCH/greedy.cu" "$SCRATCH/greedy" >"$LOGS/greedy.nvcc" 2>&1; then
		for way in local module library streams graphs pools stack; do
			alone "greedy-$way" 60 "$SCRATCH/greedy" $way
			tail -n 1 "$LOGS/greedy-$way.remote.out" | sed 's/^/     /'
		done
	else
		fail greedy "does not compile"
		show "$LOGS/greedy.nvcc" 6
	fi
	stop sampler
	read -r most seen unknown <<<"$("$PYTHON" -c '
import json, sys
d = json.loads(open(sys.argv[1]).read().splitlines()[-1])
print(d["most"], d["seen"], d["unknown"])' "$LOGS/nvml_sample.out" 2>/dev/null)"
	if [ -n "${most:-}" ] && [ "$seen" -gt 0 ] && [ "$unknown" = 0 ] && [ "$most" -le $((CAP + (OVERHEAD_MIB << 20))) ]; then
		pass mem-nvml "the worker's most by NVML is $most bytes in $seen samples; cap $CAP, $((most - CAP)) over, $OVERHEAD_MIB MiB allowed"
	else
		fail mem-nvml "most ${most:-unknown}, cap $CAP, overhead allowed $OVERHEAD_MIB MiB"
		show "$LOGS/nvml_sample.out"
	fi
}

# children PID: how many processes it has.
children() {
	cat /proc/[0-9]*/stat 2>/dev/null | awk -v pid="$1" '{ sub(/^.*\) /, "") } $2 == pid { n++ } END { print n + 0 }'
}

# usage: session processes and MiB of device memory in use. The worker always
# keeps a process ready for the next session.
usage() {
	children "${STARTED[test]}"
	nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits
}

# holders: how many processes have memory on the device, by the driver.
holders() { nvidia-smi -i 0 --query-compute-apps=pid --format=csv,noheader | grep -c .; }

# holders_seen: whether the driver tells of a session's process that has memory.
holders_seen() {
	local program i seen=1
	run_remote holder 60 "$PYTHON" -c 'import time, torch; torch.ones(1 << 20, device="cuda"); print("held"); time.sleep(3)' &
	program=$!
	for ((i = 0; i < 300 && seen; i++)); do
		grep -qs held "$LOGS/holder.remote.out" && [ "$(holders)" -gt 0 ] && seen=0
		kill -0 $program 2>/dev/null || break
		sleep 0.1
	done
	wait $program
	return $seen
}

# Nothing of the sessions is left: no process of theirs, no memory on the device. After many programs the driver may keep some
# memory that no process has; what makes it do so is not known.
part_end() {
	local left used i ok=0 figures
	for ((i = 0; i < 20; i++)); do
		{ read -r left && read -r used; } <<<"$(usage)"
		if [ "$left" -le "$CHILDREN_BEFORE" ] && [ "$used" -le $((USED_BEFORE + 8)) ]; then
			ok=1
			break
		fi
		sleep 0.1
	done
	figures="$left processes kept ready, $CHILDREN_BEFORE before; device memory used $used MiB, $USED_BEFORE before"
	if [ $ok = 0 ] && [ "$left" -le "$CHILDREN_BEFORE" ] && [ "$(holders)" = 0 ] && holders_seen; then
		figures+='; no process has any of it'
		ok=1
	fi
	if [ $ok = 1 ]; then
		pass nothing-left "$figures"
	else
		fail nothing-left "$figures"
		nvidia-smi -i 0 --query-compute-apps=pid,name,used_memory --format=csv,noheader | sed 's/^/     | /'
	fi
}

log_header
CAP=$(bytes "$MEM")
start_worker test tcp || exit 1
sleep 1
{ read -r CHILDREN_BEFORE && read -r USED_BEFORE; } <<<"$(usage)"
echo "worker at $ADDR, leases of $MEM"
for part in "${CHOSEN[@]}"; do
	echo "== $part ($SECONDS s; $(usage | tail -n 1) MiB of the device in use)"
	"part_$part"
done
echo "gpu-test: $PASSED passed, $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s"
[ "$FAILED" = 0 ]
