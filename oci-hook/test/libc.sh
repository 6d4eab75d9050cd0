#!/bin/bash
# libc.sh SUITE: a small tree with the C library of a Debian release, for containers of another age than this
# machine's, and the path of it on stdout. As root, where apt is. It is kept, and used again without network.
set -euo pipefail

suite=$1
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${SLUICE_CACHE:-$root/build/cache}
dir=$cache/libc-$suite

mkdir -p "$cache"
exec 9>"$dir.lock" # two may want it at once
flock 9
if [ ! -e "$dir/usr/bin/ldd" ]; then
	new=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	chmod 755 "$new"
	# shellcheck source-path=SCRIPTDIR source=../../test/debian-apt.sh
	. "$root/test/debian-apt.sh"
	apt=$new/apt
	mkdir -p "$new/tree/usr/lib64" "$new/tree/usr/sbin" "$new/tree"/{dev,proc,tmp}
	debian_apt "$apt" "$suite" main || exit
	if ! (cd "$apt" && APT_CONFIG=$apt/apt.conf apt-get -q download libc6 libc-bin libgcc-s1 libstdc++6) >>"$apt/log" 2>&1; then
		tail -n 5 "$apt/log" >&2
		echo "libc.sh: the packages of $suite did not come" >&2
		exit 1
	fi
	for d in bin sbin lib lib64; do # some releases have their files in /lib, some in /usr/lib
		mkdir -p "$new/tree/usr/$d"
		ln -s "usr/$d" "$new/tree/$d"
	done
	for p in "$apt"/*.deb; do
		dpkg-deb --fsys-tarfile "$p" | tar -x -C "$new/tree" --keep-directory-symlink --exclude='./usr/share/*'
	done
	mv -T "$new/tree" "$dir"
fi
echo "$dir"
