#!/bin/bash
# fuzz.sh TIME: run every fuzz target of the module for TIME, two at a time, each in a process of its
# own. Fails when one finds something, or when there are fewer than there should be. Inputs are not
# minimised for long: that is time in which nothing new is tried.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

time=${1:-60s}
least=8
logs=build/fuzz
mkdir -p "$logs"

targets=()
while read -r dir; do
	while read -r name; do
		targets+=("$dir $name")
	done < <(go test -list '^Fuzz' "./$dir" | grep '^Fuzz')
done < <(git ls-files --cached --others --exclude-standard -- '*_test.go' | xargs grep -l '^func Fuzz' | xargs -n1 dirname | sort -u)

if [ ${#targets[@]} -lt $least ]; then
	echo "fuzz: ${#targets[@]} targets found, there should be at least $least" >&2
	exit 1
fi

one() {
	local dir=$1 name=$2 log
	log=$logs/$(tr / - <<<"$dir")-$name.log
	if GOMAXPROCS=1 go test -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 1s -parallel 1 "./$dir" >"$log" 2>&1; then
		echo "fuzz: $dir $name: $(grep -E '^fuzz: elapsed' "$log" | tail -n 1 | sed 's/^fuzz: //')"
	else
		echo "fuzz: $dir $name: FAILED"
		tail -n 60 "$log"
		return 1
	fi
}
export -f one
export time logs

# Build each package's test binary once, before two fuzzers race for it.
printf '%s\n' "${targets[@]}" | cut -d' ' -f1 | sort -u | while read -r dir; do go test -run '^$' "./$dir" >/dev/null; done

# shellcheck disable=SC2016 # the inner shell expands them
printf '%s\n' "${targets[@]}" | xargs -P 2 -L 1 bash -c 'one "$1" "$2"' one
echo "fuzz: ${#targets[@]} targets, $time each, no finding"
