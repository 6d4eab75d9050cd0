#!/bin/bash
# fuzz.sh SECONDS: run every fuzz target of the module, two at a time, each in a process of its own: those
# that read what a stranger sends for so long, the others, which read the site's own files and tools, for
# a quarter of it. Fails when one finds something, or when there are fewer than there should be.
# Inputs are not minimised for long: that is time in which nothing new is tried.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

time=${1:-60s}
time=${time%s}
least=8
# What reads from sockets, from programs' images and from shared memory, and the plug-in in users' commands.
strangers='^(remoting/(wire|worker)|daemon/internal/(data|host|identity|jobsock|probe)|spank)(/|$)'
logs=build/fuzz
mkdir -p "$logs"

# Names are read from the files: to list them, go test would build every package once more, and not as it does for fuzzing. They
# are in the order of names, so that the two that run are seldom of one package, which both would build.
targets=()
while IFS=: read -r file name; do
	targets+=("$(dirname -- "$file") $name")
done < <(git ls-files --cached --others --exclude-standard -- '*_test.go' | xargs grep -oE '^func Fuzz[A-Za-z0-9_]*\(' /dev/null | sed 's/func //; s/($//' | sort -t: -k2)

if [ ${#targets[@]} -lt $least ]; then
	echo "fuzz: ${#targets[@]} targets found, there should be at least $least" >&2
	exit 1
fi

# timed_out LOG: whether a run that failed has found nothing, but come to the end of its time: now and then
# go test takes that for an error (go.dev/issue/75804). It says nothing else then, and has written no input.
timed_out() {
	[ "$(sed -n '/^--- FAIL/,$p' "$1" | sed 1d)" = "    context deadline exceeded
FAIL
exit status 1
$(grep '^FAIL[[:space:]]' "$1")" ] && ! grep -qi 'failing input' "$1"
}

one() {
	local dir=$1 name=$2 log seconds=$time
	grep -qE "$strangers" <<<"$dir" || seconds=$(((time + 3) / 4))
	log=$logs/$(tr / - <<<"$dir")-$name.log
	if GOMAXPROCS=1 go test -run '^$' -fuzz "^$name\$" -fuzztime "${seconds}s" -fuzzminimizetime 1s -parallel 1 "./$dir" >"$log" 2>&1 || timed_out "$log" && grep -q '^fuzz: elapsed' "$log"; then
		echo "fuzz: $dir $name: $(grep -E '^fuzz: elapsed' "$log" | tail -n 1 | sed 's/^fuzz: //')"
	else
		echo "fuzz: $dir $name: FAILED"
		tail -n 60 "$log"
		return 1
	fi
}
export -f one timed_out
export time logs strangers

# What all targets share is built once, before two of them build it at the same time.
go test -c -fuzz . -o /dev/null "./${targets[0]%% *}"

# shellcheck disable=SC2016 # the inner shell expands them
printf '%s\n' "${targets[@]}" | xargs -P 2 -L 1 bash -c 'one "$1" "$2"' one
echo "fuzz: ${#targets[@]} targets, no finding"
