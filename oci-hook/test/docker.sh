#!/bin/bash
# docker.sh prints a directory with Debian's dockerd, containerd and docker in it, and fetches them first if
# they are not there. They are unpacked and not installed: an installed dockerd would be started as a service.
set -euo pipefail

cache=${SLUICE_CACHE:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)/build/cache}
dir=$cache/docker
mkdir -p "$cache"
exec 9>"$dir.lock" # two may want it at once
flock 9
if [ ! -x "$dir/usr/sbin/dockerd" ]; then
	new=$(mktemp -d "$cache/docker.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	chmod 755 "$new"
	download() { (cd "$new" && apt-get -q -o APT::Sandbox::User=root download docker.io containerd tini >&2); }
	download || { apt-get -q update >&2 && download; }
	for p in "$new"/*.deb; do
		dpkg -x "$p" "$new"
		rm "$p"
	done
	mv -T "$new" "$dir"
	trap - EXIT
fi
echo "$dir"
