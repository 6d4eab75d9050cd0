#!/bin/bash
# client.sh PREFIX: what the package sluice-client has below /usr, into PREFIX, for a folder that nodes share, for Spack and for
# EasyBuild. `make install-client` calls it. The list of files is client.yaml's.
#
#	BUILD   what `make client` has filled; default build
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
[ $# = 1 ] || { echo 'usage: client.sh PREFIX' >&2; exit 2; }
umask 022
mkdir -p "$1"
prefix=$(cd -- "$1" && pwd)
build=$(cd -- "${BUILD:-$here/../../build}" && pwd)
cd "$here/../.."

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp "$build/bin/sluice" "$build/shim/libcuda.so.1" "$build/shim/libnvidia-ml.so.1" "$stage/"
"$build/bin/sluice" man "$stage/man/man1"
gzip -9n "$stage"/man/man1/*
mkdir "$stage/completion"
for s in bash zsh fish; do "$build/bin/sluice" completion "$s" >"$stage/completion/sluice.$s"; done

# A line of client.yaml is {src: FILE, dst: /usr/PATH, file_info: {mode: 0644}}, or has a type or a packager.
field() { sed -n "s/.*[{ ]$1: \([^,}]*\).*/\1/p" <<<"$line"; }
while read -r line; do
	src=$(field src) dst=$(field dst) mode=$(field mode)
	src=${src/@STAGE@/$stage} dst=$prefix/${dst#/usr/}
	if [ "$(field packager)" = rpm ]; then
		continue
	elif [ "$(field type)" = dir ]; then
		mkdir -p "$dst"
	elif [ "$(field type)" = tree ]; then
		mkdir -p "$dst"
		install -m 644 "$src"* "$dst"
	else
		install -D -m "$mode" "$src" "$dst"
	fi
done < <(sed -n '/^contents:/,$p' "$here/client.yaml" | grep '^  - {')
install -D -m 644 LICENSE "$prefix/share/doc/sluice-client/copyright"
