#!/bin/bash
# libc.sh SUITE: a small tree with the C library of a Debian release, for containers of another age than this
# machine's, and the path of it on stdout. As root, where apt is. It is kept, and used again without network.
set -euo pipefail

suite=$1
cache=${SLUICE_CACHE:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)/build/cache}
mirror=${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
dir=$cache/libc-$suite

mkdir -p "$cache"
exec 9>"$dir.lock" # two may want it at once
flock 9
if [ ! -e "$dir/usr/bin/ldd" ]; then
	new=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	chmod 755 "$new"
	# An apt that sees nothing of this machine's configuration but its proxy.
	apt=$new/apt
	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$new/tree/usr/lib64" "$new/tree/usr/sbin" "$new/tree"/{dev,proc,tmp}
	: >"$apt/status"
	echo "deb [arch=amd64 signed-by=$keyring] $mirror $suite main" >"$apt/sources.list"
	cat >"$apt/apt.conf" <<-CONF
		Dir::Etc::SourceList "$apt/sources.list";
		Dir::Etc::SourceParts "/dev/null";
		Dir::Etc::Preferences "/dev/null";
		Dir::Etc::PreferencesParts "/dev/null";
		Dir::State "$apt";
		Dir::State::Lists "$apt/lists";
		Dir::State::Status "$apt/status";
		Dir::Cache "$apt/cache";
		APT::Architecture "amd64";
		APT::Architectures "amd64";
		APT::Sandbox::User "root";
		Acquire::Languages "none";
		Acquire::Retries "3";
	CONF
	export APT_CONFIG=$apt/apt.conf
	if ! apt-get -q update >"$apt/log" 2>&1 || ! (cd "$apt" && apt-get -q download libc6 libc-bin libgcc-s1 libstdc++6) >>"$apt/log" 2>&1; then
		tail -n 5 "$apt/log" >&2
		echo "libc.sh: the packages of $suite did not come from $mirror" >&2
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
