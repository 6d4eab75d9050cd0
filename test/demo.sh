#!/bin/bash
# demo.sh: what Sluice does, on a machine without a GPU: a worker with a simulated GPU of 8 GiB, and
# CUDA programs, built by nvcc, that use a fraction of it through `sluice run`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

build=$PWD/build
cuda=$build/test/cuda-${CUDA:-11.8}
dir=$(mktemp -d)
worker=
finish() {
	[ -z "$worker" ] || { kill "$worker" 2>/dev/null || true; wait "$worker" 2>/dev/null || true; }
	rm -rf "$dir"
}
trap finish EXIT

show() {
	printf '\n\033[1m$ %s\033[0m\n' "${*//$PWD\//}"
	"$@"
}

export SLUICE_SIM_STATE=$dir/sim SLUICE_SIM_MEM=8G SLUICE_SIM_KERNELS=$build/test/twins.so
address=unix:$dir/worker.sock
PATH=$build/bin:$PATH

echo "A worker on the GPU's machine; here the GPU is a simulated one of 8 GiB:"
printf '\n\033[1m$ sluice-worker --listen %s --device 0 --mem 6G ... &\033[0m\n' "$address"
sluice-worker --listen "$address" --device 0 --mem 6G --store "$dir/store" \
	--libcuda "$build/simgpu/libcuda.so.1" --libnvml "$build/simgpu/libnvidia-ml.so.1" 2>"$dir/log" &
worker=$!
for _ in $(seq 100); do
	[ ! -S "$dir/worker.sock" ] || break
	kill -0 "$worker" 2>/dev/null || { cat "$dir/log" >&2; exit 1; }
	sleep 0.05
done

printf '\nThe programs are plain CUDA with a static runtime; they know nothing of Sluice:\n'
show ldd "$cuda/vecadd"
run=(sluice run --worker "$address")
show env SLUICE_TRACE=1 "${run[@]}" --mem 2G -- "$cuda/vecadd"
show "${run[@]}" --mem 2G -- "$cuda/streams_events"
show "${run[@]}" --mem 2G -- "$cuda/printf"
printf '\nExactly the memory that was granted: with 2 GiB of the 8 the program may have 2 GiB, and not one granule more:\n'
show "${run[@]}" --mem 2G -- "$cuda/memcheck" 2048
show env NVML_TOTAL_MIB=2048 "${run[@]}" --mem 2G -- "$build/test/nvml"
printf '\nFour processes of one job share one account:\n'
show "${run[@]}" --mem 2G -- "$cuda/multi_process"
printf '\nA lease that does not fit is refused, by name:\n'
printf '\n\033[1m$ %s\033[0m\n' "${run[*]} --mem 7G -- ${cuda#"$PWD"/}/vecadd"
if "${run[@]}" --mem 7G -- "$cuda/vecadd"; then exit 1; fi
printf '\ndemo: all of it ran\n'
