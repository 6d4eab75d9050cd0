#!/bin/bash
# tools.sh: bring Debian 12's Environment Modules, Lmod and Ruby into the cache, and print the folder of their tree. The packages are
# unpacked, never installed: the first two exclude each other. 10 MB are downloaded.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${SLUICE_CACHE:-$repo/build/cache}

# shellcheck source-path=SCRIPTDIR source=../debian-apt.sh
. "$repo/test/debian-apt.sh"

mkdir -p "$cache"
cache=$(cd -- "$cache" && pwd)
tree=$cache/recipes-tree

# Two builds may share a cache: one fetches, the other waits for it.
exec 9>"$cache/.recipes.lock"
flock 9
if [ ! -d "$tree" ]; then
	work=$(mktemp -d "$cache/.recipes.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	mkdir -p "$work/debs" "$work/tree"
	debian_apt "$work/apt" bookworm main || exit 1
	(cd "$work/debs" && APT_CONFIG=$work/apt/apt.conf apt-get -q download environment-modules tcl8.6 libtcl8.6 \
		lmod lua5.3 lua-filesystem lua-json lua-lpeg lua-posix lua-term ruby3.1 libruby3.1 libyaml-0-2 libgmp10) >"$work/apt/log" 2>&1 || {
		cat "$work/apt/log" >&2
		echo 'recipes: the download failed' >&2
		exit 1
	}
	for deb in "$work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$work/tree"
	done
	# Lmod knows by their full paths where it and its Lua modules are.
	lmod=$work/tree/usr/share/lmod/lmod/libexec
	sed -i -E "/^local sys_lua_c?path/s#([\";])/usr/(share|lib)/#\1$tree/usr/\2/#g" "$lmod/lmod"
	sed -i -E "/^set g_(lua|lmod)_cmd/s#\"/usr/#\"$tree/usr/#" "$lmod/tcl2lua.tcl"
	mv "$work/tree" "$tree"
fi
echo "$tree"
