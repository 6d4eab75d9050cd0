#!/bin/bash
# tools.sh: bring Debian 12's Environment Modules, Lmod and Ruby into the cache, and print the folder of their tree. The packages are
# unpacked, never installed: the first two exclude each other. 10 MB are downloaded, once for each form of this script and each place of
# the cache.
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
# Lmod has its path in its files.
tree=$cache/recipes-$({ echo "$cache"; cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-12)

# Two builds may share a cache: one fetches, the other waits for it.
exec 9>"$cache/.recipes.lock"
flock 9
if [ ! -d "$tree" ]; then
	work=$(mktemp -d "$cache/.recipes.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	mkdir -p "$work/debs" "$work/tree"
	debian_apt "$work/apt" bookworm main || exit 1
	(cd "$work/debs" && APT_CONFIG=$work/apt/apt.conf apt-get -q download environment-modules tcl8.6 libtcl8.6 \
		lmod lua5.3 lua-filesystem lua-json lua-lpeg lua-posix lua-term libreadline8 libtinfo6 \
		ruby3.1 libruby3.1 libyaml-0-2 libgmp10 libcrypt1 zlib1g) >"$work/apt/log" 2>&1 || {
		cat "$work/apt/log" >&2
		echo 'recipes: the download failed' >&2
		exit 1
	}
	for deb in "$work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$work/tree"
	done
	# All but the C library's own comes from the tree, or the next machine lacks it.
	lib=$work/tree/usr/lib/x86_64-linux-gnu
	for program in "$work"/tree/usr/bin/{tclsh8.6,lua5.3,ruby3.1} "$lib"/lua/5.3/*.so "$lib"/ruby/3.1.0/{psych,stringio,strscan,date_core,json/ext/parser}.so; do
		strange=$(LD_LIBRARY_PATH=$lib:$work/tree/lib/x86_64-linux-gnu ldd "$program" |
			awk -v tree="$work/tree/" '/=>/ && index($3, tree) != 1 && $1 !~ /^lib(c|m)\.so\.6$/ { print $1 }')
		[ -z "$strange" ] || {
			echo "recipes: ${program#"$work"/tree} needs $strange, which no package of tools.sh has" >&2
			exit 1
		}
	done
	# Lmod knows by their full paths where it and its Lua modules are.
	lmod=$work/tree/usr/share/lmod/lmod/libexec
	sed -i -E "/^local sys_lua_c?path/s#([\";])/usr/(share|lib)/#\1$tree/usr/\2/#g" "$lmod/lmod"
	sed -i -E "/^set g_(lua|lmod)_cmd/s#\"/usr/#\"$tree/usr/#" "$lmod/tcl2lua.tcl"
	mv "$work/tree" "$tree"
fi
echo "$tree"
