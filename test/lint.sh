#!/bin/bash
# lint.sh STATICCHECK-MODULE: formatting, vet, staticcheck, shellcheck and the sizes of files and functions, over
# all that is tracked or about to be. Every finding is an error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

staticcheck=$1
bad=0

# A rule of the tree has one home: product code elsewhere may not have it a second time.
# shellcheck source=test/rules.sh
. test/rules.sh

mapfile -t go_files < <(files '*.go')
unformatted=$(gofmt -l "${go_files[@]}")
if [ -n "$unformatted" ]; then
	echo "gofmt: not formatted:" "$unformatted" >&2
	bad=1
fi

go vet ./... || bad=1
go vet -tags gateswitch ./remoting/worker ./remoting/worker/gate || bad=1 # of bench/prebuild.sh
go vet -tags browser ./daemon/internal/page || bad=1 # of make test-page
go vet -tags sources ./test/containers || bad=1 # of make test-sources
go vet -tags cri ./test/containers || bad=1 # of make test-cri
go vet -tags recipes ./test/recipes || bad=1 # of make test-recipes
go run "$staticcheck" ./... || bad=1

mapfile -t sh_files < <({ files '*.sh'; files .ci/run; } | sort -u)
shellcheck "${sh_files[@]}" || bad=1

# Words that say a thing is not done do not land: it is finished, refused by name, or in docs/limits.md.
if files '*.go' '*.c' '*.h' '*.sh' Makefile | grep -v '^test/lint.sh$' | xargs grep -nE '\b(TODO|FIXME|XXX)\b' -- ; then
	echo "lint: unfinished work, see above" >&2
	bad=1
fi

# The guide for newcomers names files by path.
# shellcheck disable=SC2016
while read -r f; do
	[ -e "$f" ] || { echo "lint: CONTRIBUTING.md names $f, which is not there" >&2; bad=1; }
done < <(sed -n '/^## Where is it decided/,/^## /s/.*| `\(.*\)` |$/\1/p' CONTRIBUTING.md)

test/sizes.py || bad=1

[ "$bad" = 0 ] || exit 1
echo "lint: ${#go_files[@]} Go files and ${#sh_files[@]} scripts, no findings"
