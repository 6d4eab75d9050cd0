#!/bin/bash
# root.sh VERSION [DIR]: a Debian root of its own with that release of Slurm, and the path of it on
# stdout. As root, with debootstrap. It is kept, and used again without network.
#
#	24.11   of Debian 13 (trixie)
#	26.05   of Debian's sid
#
# The machine's own Slurm is not touched: packages are installed inside the root, services are not started,
# and what has to be mounted meanwhile is mounted in a namespace that ends with this script.
#
#	DIR                    default $SLUICE_CACHE/slurm-VERSION, or build/cache/slurm-VERSION
#	SLUICE_DEBIAN_MIRROR   default http://deb.debian.org/debian
set -euo pipefail

version=${1:-}
recipe=1	# raise it when what is installed changes: a root of another recipe is built anew
repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
mirror=${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# shellcheck source=test/kept.sh
. "$repo/test/kept.sh"

case $version in
24.11) suite=trixie ;;
26.05) suite=sid ;;
*) die "release '$version' is not known; ask for 24.11 or 26.05" ;;
esac

kept root "${2:-${SLUICE_CACHE:-$repo/build/cache}/slurm-$version}" .recipe "$suite $recipe"
command -v debootstrap >/dev/null || die 'debootstrap is missing; apt-get install debootstrap'
[ -r "$keyring" ] || die "$keyring is missing; install debian-archive-keyring"

say "$version: Debian's $suite into $dir, about a minute"
# debootstrap mounts /proc: in this namespace only, so that nothing is left of it if it is killed.
unshare -m --propagation private \
	debootstrap --variant=minbase --keyring="$keyring" "$suite" "$work" "$mirror" >"$log" 2>&1 ||
	{ tail -n 20 "$log" >&2; die "debootstrap of $suite from $mirror failed, all of it is in $log"; }

# No service starts in it, nothing is synced for a power cut, and what nobody reads is left out.
printf '#!/bin/sh\nexit 101\n' >"$work/usr/sbin/policy-rc.d"
chmod 755 "$work/usr/sbin/policy-rc.d"
cat >"$work/etc/dpkg/dpkg.cfg.d/sluice" <<-'CONF'
	force-unsafe-io
	path-exclude=/usr/share/doc/*
	path-exclude=/usr/share/man/*
	path-exclude=/usr/share/locale/*
CONF
# The proxy of this machine's apt, if it has one.
apt-config dump | grep '^Acquire::http' >"$work/etc/apt/apt.conf.d/90proxy" || true

# A script, not a function: it runs in the root.
cat >"$work/install" <<-'INSTALL'
	set -eu
	export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
	apt-get -q -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 update
	apt-get -q -o Acquire::Retries=3 install -y --no-install-recommends \
		slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin \
		libslurm-dev munge jq procps util-linux
	apt-get clean
	rm -rf /var/lib/apt/lists/*
INSTALL
# shellcheck disable=SC2016 # $1 is the inner shell's
unshare -m --propagation private bash -eu -c '
	mount -t proc proc "$1/proc"
	mount --rbind /dev "$1/dev"
	cp /etc/resolv.conf /etc/hosts "$1/etc/"
	chroot "$1" /bin/sh /install' root "$work" </dev/null >>"$log" 2>&1 ||
	{ tail -n 20 "$log" >&2; die "installing Slurm into $suite failed, all of it is in $log"; }

rm -f "$work/install" "$work"/var/cache/apt/*.bin
found=$(chroot "$work" slurmctld -V)
found=${found##* }	# "slurm-wlm 24.11.5"
# A rolling suite moves on. What it has is worth testing all the same, under its own name.
[[ $found = "$version".* ]] || say "$version was asked for, $suite has $found by now"

echo "$found" >"$work/.slurm-version"
keep "$version: Slurm $found"
