#!/usr/bin/env bash
# prebuild.sh [VERSION...]: what a GPU machine without Go and old compilers needs,
# to be carried there with build/bin and build/shim: the CUDA test programs as
# nvcc 11.8 and 12.4 make them, in build/gpu, the relay, in build/bin, and the worker of
# gpu-shares.sh --part switch, in build/switch.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

versions=("$@")
[ $# -gt 0 ] || versions=(11.8 12.4)
mkdir -p build/bin build/gpu build/switch
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o build/bin/relay ./bench/relay
go build -trimpath -ldflags '-s -w' -tags gateswitch -o build/switch/ ./remoting/worker/cmd/sluice-worker
for v in "${versions[@]}"; do
	make --no-print-directory CUDA="$v" cuda-programs
	rm -rf "build/gpu/cuda-$v"
	mkdir "build/gpu/cuda-$v"
	for f in "build/test/cuda-$v"/*; do
		strip --strip-unneeded -o "build/gpu/cuda-$v/${f##*/}" "$f"
	done
done
du -sh build/bin build/gpu build/switch
