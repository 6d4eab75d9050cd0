#!/usr/bin/env bash
# Language models on a real GPU, natively and remotely: greedy decoding in PyTorch from a cold start, cuDNN's attention
# with new shapes, and llama.cpp.
#
# Usage: bench/gpu-llm.sh [--only tokens,attention,llama] [--list]
# Needs: what gpu-bench.sh needs, numpy, and for llama cmake, ninja, nvcc with cuBLAS (its own or the one in Python's
# packages) and the sources of llama.cpp in SLUICE_LLAMA. SLUICE_LINKS names the links (loopback unix fast lan wan).
# SLUICE_LLAMA_BUILD is where llama.cpp is built, for a second run to find it there.
# The raw log is llm.jsonl in $SLUICE_LOGS/llm (default build/gpu-logs/llm); bench/llm_report.py makes the lines of it.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

# shellcheck disable=SC2034 # read by choose_parts
PARTS=(tokens attention llama)
BUDGET=${SLUICE_BUDGET:-530} # seconds; no run begins after that
BUILD_SECONDS=${SLUICE_BUILD_SECONDS:-240}
MEM=${MEM:-20G}
NEW=${SLUICE_NEW:-48} # tokens of GPT-2's size
choose_parts "$@"
read -r -a LINKS <<<"${SLUICE_LINKS:-loopback unix fast lan wan}"
RAW=$LOGS/llm
LOG=$RAW/llm.jsonl
mkdir -p "$RAW"

# cold PART SECONDS PROGRAM...: natively and over each link, with an empty compile cache and then with what that run left
# in it, as a second job of the same user has it.
cold() {
	local part=$1 seconds=$2 v
	shift 2
	for v in native "${LINKS[@]}" native; do
		[ "$v" = native ] || [ -n "${AT[$v]:-}" ] || continue
		CUDA_CACHE_PATH=$(mktemp -d "$SCRATCH/cache.XXXXXX")
		export CUDA_CACHE_PATH
		one "$part.$v.empty" "$seconds" "$@" && one "$part.$v.filled" "$seconds" "$@"
		unset CUDA_CACHE_PATH
	done
}

part_tokens() { cold tokens 60 "$PYTHON" "$BENCH/decode.py" tokens --new "$NEW"; }
part_attention() { cold attention 60 "$PYTHON" "$BENCH/decode.py" attention --new 8; }

# wheel_folder NAME: the folder of NVIDIA's Python packages that has a file of that name, for a toolkit without cuBLAS.
wheel_folder() {
	"$PYTHON" - "$1" <<-'PY'
		import pathlib, sys, sysconfig
		roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
		found = [f for r in roots if r for f in sorted(pathlib.Path(r).glob("nvidia/*/*/" + sys.argv[1]))]
		print(found[0].parent if found else "")
	PY
}

# build_llama: the program of bench/llama, $LLAMA_BIN. Its libraries are found by LD_LIBRARY_PATH alone, where
# Sluice's come first.
build_llama() {
	local nvcc flags=() home lib inc
	nvcc=$(find_nvcc) || return 1
	home=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
	LLAMA_LIBS=$LLAMA_BUILD/bin:$home/lib64
	if ! compgen -G "$home/lib64/libcublas.so" >/dev/null && ! compgen -G "$home/targets/*/lib/libcublas.so" >/dev/null; then
		lib=$(wheel_folder 'libcublas.so.*') inc=$(wheel_folder cublas_v2.h)
		if [ -z "$lib" ] || [ -z "$inc" ]; then
			echo 'no cuBLAS to build with, neither in the toolkit nor in Python packages'
			return 1
		fi
		mkdir -p "$SCRATCH/cublas"
		ln -sf "$inc"/cublas*.h "$SCRATCH/cublas/"
		flags+=("-DCUDA_cublas_LIBRARY=$(compgen -G "$lib/libcublas.so.*" | head -n 1)"
			"-DCUDA_cublasLt_LIBRARY=$(compgen -G "$lib/libcublasLt.so.*" | head -n 1)"
			"-DCMAKE_CUDA_FLAGS=-isystem $SCRATCH/cublas")
		LLAMA_LIBS=$LLAMA_LIBS:$lib
	fi
	if ! compgen -G "$home/lib64/libcudart.so" >/dev/null && lib=$(compgen -G "$home/lib*/libcudart.so.*" | head -n 1) && [ -n "$lib" ]; then
		flags+=("-DCUDA_CUDART=$lib" "-DCUDA_cudart_LIBRARY=$lib")
	fi
	if ! compgen -G "$home/lib64/stubs/libcuda.so" >/dev/null; then
		flags+=("-DCUDA_cuda_driver_LIBRARY=$(ldconfig -p | sed -n 's/.*libcuda\.so\.1.* => //p' | head -n 1)")
	fi
	cmake -G Ninja -S "$BENCH/llama" -B "$LLAMA_BUILD" -DLLAMA="$SLUICE_LLAMA" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SKIP_RPATH=ON \
		-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined \
		-DCMAKE_CUDA_COMPILER="$nvcc" -DCUDAToolkit_ROOT="$home" -DCMAKE_CUDA_ARCHITECTURES="${SLUICE_ARCH:-90-real}" -DGGML_CUDA=ON -DGGML_CUDA_GRAPHS=ON \
		-DGGML_CUDA_FA="${SLUICE_LLAMA_FA:-OFF}" -DGGML_CUDA_NCCL=OFF -DGGML_CUDA_COMPRESSION_MODE=none -DGGML_OPENMP=OFF \
		-DGGML_NATIVE=OFF "${flags[@]}" && timeout -k 5 "$BUILD_SECONDS" ninja -C "$LLAMA_BUILD" decode
}

part_llama() {
	local v begun=$SECONDS model=$SCRATCH/model.gguf
	if [ ! -e "${SLUICE_LLAMA:-}/CMakeLists.txt" ]; then
		fail llama 'SLUICE_LLAMA names no folder with the sources of llama.cpp'
		return
	fi
	if ! build_llama >"$RAW/build.log" 2>&1; then
		fail llama 'does not build'
		show "$RAW/build.log" 30
		return
	fi
	printf '     built in %s s\n' $((SECONDS - begun))
	limited 60 "$PYTHON" "$BENCH/gguf.py" "$model" || {
		fail llama 'the model cannot be written'
		return
	}
	local -x LD_LIBRARY_PATH=$LLAMA_LIBS${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
	limited 60 "$LLAMA_BIN" "$model" --repeats 1 >"$RAW/llama.first" 2>&1 || true # unmeasured: the file is in memory afterwards
	one llama.native.1 60 "$LLAMA_BIN" "$model"
	for v in "${LINKS[@]}"; do
		[ -n "${AT[$v]:-}" ] || continue
		one "llama.$v.cold" 60 "$LLAMA_BIN" "$model" && one "llama.$v.1" 60 "$LLAMA_BIN" "$model"
	done
	one llama.native.1 60 "$LLAMA_BIN" "$model"
}

LLAMA_BUILD=${SLUICE_LLAMA_BUILD:-$SCRATCH/llama}
LLAMA_BIN=$LLAMA_BUILD/decode
log_header | tee "$LOG"
start_links || exit 1
for p in "${CHOSEN[@]}"; do
	echo "== $p ($SECONDS s)"
	"part_$p"
done
"$PYTHON" "$BENCH/llm_report.py" "$LOG"
echo "gpu-llm: $FAILED runs failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s; raw logs in ${RAW#"$ROOT"/}"
[ "$FAILED" = 0 ]
