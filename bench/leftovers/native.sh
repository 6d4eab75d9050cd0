#!/bin/bash
# What the driver itself leaves to the next process: without Sluice.
set -u; cd "$(dirname "$0")" || exit
# shellcheck source=bench/leftovers/common.sh disable=SC1091
. ./common.sh
t=/sluice-try-$$; mkdir -p "$t"; build "$t"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "== control: one process, memory freed and taken again"; timeout 10 "$t/leftovers" control
for end in exit cap wait busy; do
	echo "== written by uid 65534, end: $end"
	as 65534 timeout 20 "$t/leftovers" write $end >"$t/w" 2>&1 & p=$!
	written "$t/w" $p
	case $end in wait|busy) pkill -9 -u 65534 -x leftovers;; esac
	wait $p 2>/dev/null; sed 's/^/   writer: /' "$t/w"
	as 65533 timeout 15 "$t/leftovers" read
done
rm -rf "$t"
