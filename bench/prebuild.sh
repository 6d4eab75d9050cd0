#!/usr/bin/env bash
# prebuild.sh [--long-runs | VERSION...]: builds what a GPU machine without Go, git and old compilers needs: build/bin, build/shim,
# build/spank, build/version (the commit of all of it), the CUDA test programs as nvcc 11.8 and 12.4 make them, in
# build/gpu, the worker of gpu-shares.sh --part switch, in build/switch, and what its part theft needs, in build/shares.
# With --long-runs it builds build/long instead: bench/long-runs.sh and the tests and programs that it runs, for a machine with many processors.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --long-runs ]; then
	make --no-print-directory all cuda-programs
	rm -rf build/long
	# The tests look for files beside them, as in this tree.
	mkdir -p build/long/test/e2e/testdata build/long/remoting/api build/long/daemon/internal/ledger build/long/build/test/cuda-11.8
	go test -c -ldflags '-s -w' -o build/long/test/e2e/ ./test/e2e
	go test -c -ldflags '-s -w' -o build/long/daemon/internal/ledger/ ./daemon/internal/ledger
	cp -a test/e2e/testdata/grammar build/long/test/e2e/testdata/
	cp -a remoting/api/cuabi.h build/long/remoting/api/
	cp -aL build/bin build/shim build/simgpu build/version build/long/build/
	cp -a build/test/nvml build/test/twins.so build/long/build/test/
	for f in build/test/cuda-11.8/*; do
		strip --strip-unneeded -o "build/long/$f" "$f"
	done
	cp -a bench/long-runs.sh bench/rawlog.py build/long/
	du -sh build/long
	exit
fi
versions=("$@")
[ $# -gt 0 ] || versions=(11.8 12.4)
mkdir -p build/gpu
make --no-print-directory all prebuilt
for v in "${versions[@]}"; do
	make --no-print-directory CUDA="$v" cuda-programs
	rm -rf "build/gpu/cuda-$v"
	mkdir "build/gpu/cuda-$v"
	for f in "build/test/cuda-$v"/*; do
		strip --strip-unneeded -o "build/gpu/cuda-$v/${f##*/}" "$f"
	done
done
du -sh build/bin build/gpu build/switch build/shares
