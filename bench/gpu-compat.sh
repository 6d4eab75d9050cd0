#!/usr/bin/env bash
# Other people's tests and programs, natively and through Sluice side by side: what passes natively has to pass remotely.
#
# Usage: bench/gpu-compat.sh --sources DIR [run.py's other flags, as --only samples,programs/torch,jax,numba,cupy
#        --cases jax=100 --budget 600]: groups of suites with a slash between them run side by side
# Needs: build/bin, build/shim, a GPU with its driver, nvcc, cmake, ninja, python3 with torch, pytest, pytest-xdist and
# pytest-timeout, and the suites' sources in DIR: docs/compatibility.md says which. No Go.
# Writes native.jsonl, remote.jsonl and the logs to $SLUICE_LOGS (default build/gpu-logs), and prints the cases that differ.
# With SLUICE_APPEND=1 they are kept from a run of the same commit on the same machine, which had other suites.
# Exit status 0 when every case that passes natively passes remotely.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

header=$(log_header)
undated() { sed 's/"date": "[^"]*"//'; }
if [ -z "${SLUICE_APPEND:-}" ] || [ "$(head -qn 1 "$LOGS"/{native,remote}.jsonl 2>/dev/null | undated)" != "$(printf '%s\n%s\n' "$header" "$header" | undated)" ]; then
	tee "$LOGS/native.jsonl" "$LOGS/remote.jsonl" <<<"$header"
fi
start_worker compat tcp || exit 1
SLUICE_LOG=${SLUICE_LOG:-warn} "$PYTHON" "$BENCH/compat/run.py" --out "$LOGS" \
	--remote "$SLUICE run --worker $ADDR --mem ${SLUICE_MEM:-8G} --" "$@"
"$PYTHON" "$BENCH/compat/report.py" --differences "$LOGS"
