#!/bin/bash
# prometheus.sh: bring Debian 12's Prometheus and promtool into the cache, and print the folder of both. The package is unpacked,
# never installed. 20 MB are downloaded.
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
tree=$cache/prometheus-tree

# Two builds may share a cache: one fetches, the other waits for it.
exec 9>"$cache/.prometheus.lock"
flock 9
if [ ! -d "$tree" ]; then
	work=$(mktemp -d "$cache/.prometheus.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	mkdir -p "$work/debs" "$work/tree"
	debian_apt "$work/apt" bookworm main || exit 1
	(cd "$work/debs" && APT_CONFIG=$work/apt/apt.conf apt-get -q download prometheus) >"$work/apt/log" 2>&1 || {
		cat "$work/apt/log" >&2
		echo 'prometheus: the download failed' >&2
		exit 1
	}
	for deb in "$work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$work/tree"
	done
	mv "$work/tree" "$tree"
fi
echo "$tree/usr/bin"
