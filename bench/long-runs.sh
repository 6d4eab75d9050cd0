#!/usr/bin/env bash
# Ten hundred thousand random frames, a hundred thousand damaged images and as many damaged ledgers, and a thousand faulty disks, on
# all processors at once: an hour or two of one processor each.
#
# Usage: build/long/long-runs.sh LOGS    as root, where bench/prebuild.sh --long-runs has made build/long, or where that was copied to
# Needs: objcopy, python3. No Go and no GPU. The raw logs are grammar.txt, images.txt and ledgers.txt in LOGS.
# SLUICE_FRAMES, SLUICE_IMAGES and SLUICE_DAMAGE are how many (1,000,000, 100,000, 100,000), SLUICE_DISKS how many disks (1,000).
# Exit status 0 if all of them passed.
set -u
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
[ $# = 1 ] || {
	echo "usage: $0 LOGS" >&2
	exit 2
}
logs=$1
mkdir -p "$logs" || exit
logs=$(cd "$logs" && pwd)
pieces=$(mktemp -d)
trap 'rm -rf "$pieces"' EXIT
export here pieces SLUICE_BUILD=$here/build SLUICE_CUDA=11.8
frames=${SLUICE_FRAMES:-1000000} images=${SLUICE_IMAGES:-100000} damage=${SLUICE_DAMAGE:-100000} disks=${SLUICE_DISKS:-1000}

# piece NAME VARIABLES TEST: runs one test; its output is NAME.out, and after it a line if it failed.
piece() {
	local name=$1 test=$3 at=test/e2e
	case $name in ledgers*) at=daemon/internal/ledger ;; esac
	# shellcheck disable=SC2086 # one word a variable
	(cd "$here/$at" && env TMPDIR="$pieces" $2 "./${at##*/}.test" -test.timeout 60m -test.count 1 -test.v -test.run "$test") >"$pieces/$name.out" 2>&1 ||
		echo "FAILED: status $?" >>"$pieces/$name.out"
}
export -f piece

# each NAME NUMBER PIECES TEST SEED STEP: a line for each piece: its name, variables and test.
each() {
	local i count seed
	case $1 in grammar) count=SLUICE_GRAMMAR seed=SLUICE_GRAMMAR_SEED ;; images) count=SLUICE_IMAGES seed=SLUICE_GRAMMAR_SEED ;; *) count=SLUICE_DAMAGE seed=SLUICE_DAMAGE_SEED ;; esac
	for ((i = 0; i < $3; i++)); do
		printf '%s-%s-%02d\t%s=%d %s=%d\t^%s$\n' "$1" "$4" "$i" "$count" $(($2 / $3)) "$seed" $(($5 + $6 * i)) "$4"
	done
}

# What takes longest begins first.
{
	each ledgers "$disks" 10 TestDiskFaults 1 1
	each images "$images" 20 TestMutatedImages 1001 10000
	each ledgers "$damage" 10 TestDamagedPages 1 1
	each ledgers "$damage" 4 TestPowerLoss 1 1
	each grammar "$frames" 20 TestGrammar 7010000 10000
} >"$pieces/list"
# shellcheck disable=SC2016 # expanded by the inner shell
tr '\t' '\n' <"$pieces/list" | xargs -d '\n' -n 3 -P "$(nproc)" bash -c 'piece "$@"' piece

failed=0
for name in grammar images ledgers; do
	{
		python3 "$here/rawlog.py" gpu=simulated driver=none
		echo "bench/long-runs.sh; each piece in the order below, $(nproc) at a time"
		for out in "$pieces/$name"-*.out; do
			sed -n "s/^$(basename "$out" .out)\t\(.*\)\t/\1 /p" "$pieces/list"
			cat "$out"
		done
	} >"$logs/$name.txt"
	n=$(grep -c -e '^FAILED' -e '^--- FAIL' "$logs/$name.txt")
	echo "long-runs: $name: $(grep -c '^--- PASS' "$logs/$name.txt") passed, $n failed"
	failed=$((failed + n))
done
[ "$failed" = 0 ]
