#!/usr/bin/env bash
# Other people's tests and programs, natively and through Sluice side by side: what passes natively has to pass remotely.
#
# Usage: bench/gpu-compat.sh --sources DIR [run.py's other flags, as --only samples,cupy --cases jax=100 --budget 600]
# Needs: build/bin, build/shim, a GPU with its driver, nvcc, cmake, ninja, python3 with torch, pytest, pytest-xdist and
# pytest-timeout, and the suites' sources in DIR: docs/compatibility.md says which. No Go.
# Writes native.jsonl, remote.jsonl and the logs to $SLUICE_LOGS (default build/gpu-logs), and prints the cases that differ.
# Exit status 0 when every case that passes natively passes remotely.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

rm -f "$LOGS/native.jsonl" "$LOGS/remote.jsonl"
log_header | tee "$LOGS/native.jsonl" "$LOGS/remote.jsonl"
start_worker compat tcp || exit 1
SLUICE_LOG=${SLUICE_LOG:-warn} "$PYTHON" "$BENCH/compat/run.py" --out "$LOGS" \
	--remote "$SLUICE run --worker $ADDR --mem ${SLUICE_MEM:-8G} --" "$@"
"$PYTHON" "$BENCH/compat/report.py" --differences "$LOGS"
