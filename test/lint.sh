#!/bin/bash
# lint.sh STATICCHECK-MODULE: formatting, vet, staticcheck and shellcheck over all that is tracked or
# about to be. Every finding is an error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

staticcheck=$1
bad=0

files() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

mapfile -t go_files < <(files '*.go')
unformatted=$(gofmt -l "${go_files[@]}")
if [ -n "$unformatted" ]; then
	echo "gofmt: not formatted:" "$unformatted" >&2
	bad=1
fi

go vet ./... || bad=1
go vet -tags gateswitch ./remoting/worker || bad=1 # of bench/prebuild.sh
go run "$staticcheck" ./... || bad=1

mapfile -t sh_files < <({ files '*.sh'; files .ci/run; } | sort -u)
shellcheck "${sh_files[@]}" || bad=1

# Words that say a thing is not done do not land: it is finished, refused by name, or in docs/limits.md.
if files '*.go' '*.c' '*.h' '*.sh' Makefile | grep -v '^test/lint.sh$' | xargs grep -nE '\b(TODO|FIXME|XXX)\b' -- ; then
	echo "lint: unfinished work, see above" >&2
	bad=1
fi

[ $bad = 0 ] || exit 1
echo "lint: ${#go_files[@]} Go files and ${#sh_files[@]} scripts, no findings"
