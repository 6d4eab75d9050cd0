#!/usr/bin/env bash
# prebuild.sh [VERSION...]: builds what a GPU machine without Go, git and old compilers needs: build/bin, build/shim,
# build/spank, build/version (the commit of all of it), the CUDA test programs as nvcc 11.8 and 12.4 make them, in
# build/gpu, the worker of gpu-shares.sh --part switch, in build/switch, and what its part theft needs, in build/shares.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

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
