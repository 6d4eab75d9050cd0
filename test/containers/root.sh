#!/bin/bash
# root.sh [DIR]: a Debian root of its own (sid) with today's container engines and Slurm 26.05, and the path of it on
# stdout. As root, with debootstrap. It is kept, and used again without network.
#
# In it: docker, podman, containerd, runc, crun, apptainer, charliecloud. It is the root of test/slurm/root.sh with
# more in it. Nothing of the machine's own is touched, and no service is started.
#
#	DIR   default $SLUICE_CACHE/containers, or build/cache/containers
set -euo pipefail

recipe=1	# raise it when what is installed changes: a root of another recipe is built anew
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd -- "$here/../.." && pwd)
# shellcheck source=test/kept.sh
. "$repo/test/kept.sh"
kept root "${1:-${SLUICE_CACHE:-$repo/build/cache}/containers}" .containers "$recipe"

base=$("$here/../slurm/root.sh" 26.05)
cp -a --reflink=auto "$base/." "$work/"
chmod 755 "$work"

say "container engines into $dir, about a minute"
# A script, not a function: it runs in the root.
cat >"$work/install" <<-'INSTALL'
	set -eu
	export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
	apt-get -q -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 update
	apt-get -q -o Acquire::Retries=3 install -y --no-install-recommends \
		docker.io docker-cli containerd podman runc crun apptainer charliecloud \
		uidmap slirp4netns fuse3 fuse-overlayfs squashfuse squashfs-tools iproute2
	apt-get clean
	rm -rf /var/lib/apt/lists/*
INSTALL
# shellcheck disable=SC2016 # $1 is the inner shell's
unshare -m --propagation private bash -eu -c '
	mount -t proc proc "$1/proc"
	mount --rbind /dev "$1/dev"
	cp /etc/resolv.conf /etc/hosts "$1/etc/"
	chroot "$1" /bin/sh /install' root "$work" </dev/null >"$log" 2>&1 ||
	{ tail -n 20 "$log" >&2; die "installing the engines failed, all of it is in $log"; }
rm -f "$work/install" "$work"/var/cache/apt/*.bin

keep "$(dpkg-query --root="$work" -W -f '${Package} ${Version}, ' docker.io podman apptainer charliecloud runc crun | sed 's/, $//')"
