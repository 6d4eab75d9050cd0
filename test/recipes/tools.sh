#!/bin/bash
# tools.sh: bring Debian 12's Environment Modules, Lmod and Ruby into the cache, and print the folder of their tree. The packages are
# unpacked, never installed: the first two exclude each other. 10 MB are downloaded, once for each form of this script and each place of
# the cache.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../debian-apt.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../debian-apt.sh"

cache=$(debian_cache)
# Lmod has its path in its files.
tree=$cache/recipes-$({ echo "$cache"; cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-12)

# finish FOLDER: all but the C library's own comes from the tree, or the next machine lacks it; and Lmod knows by their full paths where it
# and its Lua modules are.
finish() {
	local lib=$1/usr/lib/x86_64-linux-gnu program strange lmod=$1/usr/share/lmod/lmod/libexec
	for program in "$1"/usr/bin/{tclsh8.6,lua5.3,ruby3.1} "$lib"/lua/5.3/*.so "$lib"/ruby/3.1.0/{psych,stringio,strscan,date_core,json/ext/parser}.so; do
		strange=$(LD_LIBRARY_PATH=$lib:$1/lib/x86_64-linux-gnu ldd "$program" |
			awk -v tree="$1/" '/=>/ && index($3, tree) != 1 && $1 !~ /^lib(c|m)\.so\.6$/ { print $1 }')
		[ -z "$strange" ] || {
			echo "recipes: ${program#"$1"} needs $strange, which no package of tools.sh has" >&2
			return 1
		}
	done
	sed -i -E "/^local sys_lua_c?path/s#([\";])/usr/(share|lib)/#\1$tree/usr/\2/#g" "$lmod/lmod" &&
		sed -i -E "/^set g_(lua|lmod)_cmd/s#\"/usr/#\"$tree/usr/#" "$lmod/tcl2lua.tcl"
}

debian_tree recipes "$tree" finish environment-modules tcl8.6 libtcl8.6 \
	lmod lua5.3 lua-filesystem lua-json lua-lpeg lua-posix lua-term libreadline8 libtinfo6 \
	ruby3.1 libruby3.1 libyaml-0-2 libgmp10 libcrypt1 zlib1g
echo "$tree"
