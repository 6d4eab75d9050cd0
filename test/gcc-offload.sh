#!/bin/bash
# gcc-offload.sh: bring what GCC 12 needs to compile OpenMP and OpenACC for NVIDIA's GPUs, and libgomp's plug-in, from
# Debian 12 into the cache, and print its folder. The packages are unpacked, never installed. 10 MB are downloaded.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SLUICE_CACHE:-$repo/build/cache}

# shellcheck source-path=SCRIPTDIR source=debian-apt.sh
. "$repo/test/debian-apt.sh"

mkdir -p "$cache"
cache=$(cd -- "$cache" && pwd)
tree=$cache/gcc-offload

# Two builds may share a cache: one fetches, the other waits for it.
exec 9>"$cache/.gcc-offload.lock"
flock 9
if [ ! -d "$tree" ]; then
	work=$(mktemp -d "$cache/.gcc-offload.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	mkdir -p "$work/debs" "$work/tree"
	debian_apt "$work/apt" bookworm main || exit 1
	(cd "$work/debs" && APT_CONFIG=$work/apt/apt.conf apt-get -q download gcc-12-offload-nvptx nvptx-tools libgomp-plugin-nvptx1) >"$work/apt/log" 2>&1 || {
		cat "$work/apt/log" >&2
		echo 'gcc-offload: the download failed' >&2
		exit 1
	}
	for deb in "$work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$work/tree"
	done
	mv "$work/tree" "$tree"
fi
echo "$tree"
