#!/bin/bash
# image.sh [FILE]: an archive of a Debian 12 tree that knows nothing of GPUs, for engines to import, and the path of it
# on stdout. As root, with debootstrap. It is kept, and used again without network.
#
#	FILE                   default $SLUICE_CACHE/image.tar, or build/cache/image.tar
#	SLUICE_DEBIAN_MIRROR   default http://deb.debian.org/debian
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
file=${1:-${SLUICE_CACHE:-$repo/build/cache}/image.tar}
mirror=${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

die() { echo "image: $*" >&2; exit 1; }

mkdir -p "$(dirname -- "$file")"
file=$(cd -- "$(dirname -- "$file")" && pwd)/$(basename -- "$file")
exec 9>"$file.lock"
flock 9
if [ -e "$file" ]; then
	echo "$file"
	exit 0
fi
[ "$(id -u)" = 0 ] || die 'a tree of Debian can only be made by root'

work=$(mktemp -d "$file.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
echo "image: Debian's bookworm into $file, half a minute" >&2
# debootstrap mounts /proc: in this namespace only, so that nothing is left of it if it is killed.
unshare -m --propagation private \
	debootstrap --variant=minbase --keyring="$keyring" bookworm "$work/tree" "$mirror" >"$work/log" 2>&1 ||
	{ tail -n 20 "$work/log" >&2; die "debootstrap of bookworm from $mirror failed"; }
# What no test reads. The engines copy the rest several times.
cd "$work/tree"
rm -rf usr/share/{doc,man,locale,info,i18n,zoneinfo,perl5} usr/lib/x86_64-linux-gnu/{perl-base,gconv} var/cache/apt var/lib/apt/lists dev/*
tar --numeric-owner -cf "$work/tar" .
mv "$work/tar" "$file"
echo "$file"
