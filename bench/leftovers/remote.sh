#!/bin/bash
# Leases one after another, of two users, each with a worker of its own. "session": the session process is killed while a
# kernel runs, as the end of an overrun does.
set -u; cd "$(dirname "$0")" || exit
# shellcheck source=bench/leftovers/common.sh disable=SC1091
. ./common.sh
B=${SLUICE_BUILD:-}
for d in $(echo "${LD_LIBRARY_PATH:-}" | tr : " "); do [ -n "$B" ] || { [ -x "$d/../bin/sluice-worker" ] && B=$(cd "$d/.." && pwd); }; done
[ -n "$B" ] || B=$(cd "$(dirname "$(command -v sluice)")/.." && pwd)
clean=
for d in $(echo "${LD_LIBRARY_PATH:-}" | tr : " "); do [ "$(readlink -f "$d")" = "$(readlink -f "$B/shim")" ] || clean=$clean${clean:+:}$d; done
if [ -n "$clean" ]; then export LD_LIBRARY_PATH=$clean; else unset LD_LIBRARY_PATH; fi
unset SLUICE_SOCKET SLUICE_WORKER SLUICE_LEASE SLUICE_LEASE_ID LD_PRELOAD
t=/sluice-try-$$; mkdir -p "$t"; build "$t"
cp "$B/bin/sluice-worker" "$B/bin/sluice" "$t/"; cp -r "$B/shim" "$t/shim"; chmod -R a+rX "$t"
declare -A worker
up() { # UID
	install -d -m 755 "$t/$1"; install -d -m 700 "$t/$1/store"; chown -R "$1:$1" "$t/$1"
	HOME=$t/$1 as "$1" "$t/sluice-worker" --listen "unix:$t/$1/w" --device 0 --store "$t/$1/store" --log info >"$t/$1/log" 2>&1 & worker[$1]=$!
	for _ in $(seq 150); do [ -S "$t/$1/w" ] && break; sleep 0.1; done
}
up 65534; up 65533
run() { local uid=$1; shift; as "$uid" timeout 25 "$t/sluice" run --worker "unix:$t/$uid/w" --lib "$t/shim" --mem 40G -- "$t/leftovers" "$@"; }
echo "== control: one process, memory freed and taken again"; run 65534 control
for end in exit cap kill session; do
	echo "== written by uid 65534, end: $end"
	how=$end
	case $end in kill) how="wait";; session) how="busy";; esac
	run 65534 write $how >"$t/w" 2>&1 & p=$!
	written "$t/w" $p
	case $end in
	kill) pkill -9 -u 65534 -x leftovers;;
	session) for c in $(pgrep -P "${worker[65534]}"); do tr '\0' ' ' <"/proc/$c/cmdline" | grep -q ' session' && kill -9 "$c"; done; pkill -9 -u 65534 -x leftovers;;
	esac
	wait $p 2>/dev/null; sed 's/^/   writer: /' "$t/w" | head -8
	run 65533 read
done
kill "${worker[@]}" 2>/dev/null; wait 2>/dev/null
grep -h 'level=\(WARN\|ERROR\)' "$t"/6553?/log | cut -c1-200 | head -10
rm -rf "$t"
