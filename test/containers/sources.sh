#!/bin/bash
# sources.sh [DIR]: the root of root.sh with the engines that Debian does not have, compiled in it from their sources: enroot,
# pyxis and SingularityCE. Prints the path of it on stdout. As root. It is kept, and used again without network.
#
# The sources are cloned from GitHub at the tags below, and the modules of SingularityCE come by Go's proxy. Nothing of them enters the
# repository.
#
#	DIR              default $SLUICE_CACHE/sources, or build/cache/sources
#	SLUICE_SOURCES   see source.sh: enroot.tar.gz, pyxis.tar.gz and singularity.tar.gz. For SingularityCE its release archive is good, too
set -euo pipefail

recipe=1	# raise it when what is installed changes: a root of another recipe is built anew
enroot=4.1.2 pyxis=0.24.0 singularity=4.5.0
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd -- "$here/../.." && pwd)
# shellcheck source=test/kept.sh
. "$repo/test/kept.sh"
stamp="$recipe enroot $enroot, pyxis $pyxis, SingularityCE $singularity"
kept sources "${1:-${SLUICE_CACHE:-$repo/build/cache}/sources}" .sources "$stamp"

base=$("$here/root.sh")
cp -a --reflink=auto "$base/." "$work/"
chmod 755 "$work"

# shellcheck source=test/containers/source.sh
. "$here/source.sh"
source_of enroot "v$enroot" https://github.com/NVIDIA/enroot
source_of pyxis "v$pyxis" https://github.com/NVIDIA/pyxis
source_of singularity "v$singularity" https://github.com/sylabs/singularity
echo "$singularity" >"$work/src/singularity/VERSION"
# A release archive brings its modules along. Others come to the machine's own cache of modules, by its own settings.
[ -d "$work/src/singularity/vendor" ] || (cd "$work/src/singularity" && GOWORK=off go mod download) || die "the modules of SingularityCE do not come"

say "enroot, pyxis and SingularityCE into $dir, some minutes"
# A script, not a function: it runs in the root.
cat >"$work/install" <<-'INSTALL'
	set -eux
	export DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root PATH=/goroot/bin:/usr/sbin:/usr/bin:/sbin:/bin
	export GOMODCACHE=/gomod GOCACHE=/src/gocache GOPROXY=off GOTOOLCHAIN=local
	apt-get -q -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 update
	apt-get -q -o Acquire::Retries=3 install -y --no-install-recommends \
		gcc libc6-dev make pkg-config ca-certificates \
		bash bsdextrautils curl gawk jq parallel zstd libcap2-bin \
		cryptsetup-bin libseccomp-dev libsubid-dev

	# Against glibc and the headers of Debian, without what makes self-extracting archives: its own C library, kernel headers and
	# makeself are repositories of others.
	touch /src/enroot/deps/makeself/.stamp /src/enroot/deps/linux-headers/.stamp
	make -C /src/enroot FORCE_GLIBC=1 DEPS= prefix=/usr sysconfdir=/etc install
	make -C /src/pyxis prefix=/usr libdir=/usr/lib install

	cd /src/singularity
	./mconfig -b build --prefix=/usr/local --without-squashfuse
	make -C build
	make -C build install
	cd /
	apt-get clean
	rm -rf /var/lib/apt/lists/* /src
INSTALL
goroot=$(go env GOROOT) gomod=$(go env GOMODCACHE)
mkdir -p "$gomod"
# shellcheck disable=SC2016 # $1 and its like are the inner shell's
unshare -m --propagation private bash -eu -c '
	mkdir -p "$1/goroot" "$1/gomod"
	mount -t proc proc "$1/proc"
	mount --rbind /dev "$1/dev"
	mount --bind "$2" "$1/goroot"
	mount --bind "$3" "$1/gomod"
	cp /etc/resolv.conf /etc/hosts "$1/etc/"
	chroot "$1" /bin/sh /install' root "$work" "$goroot" "$gomod" </dev/null >"$log" 2>&1 ||
	{ tail -n 20 "$log" >&2; die "building failed, all of it is in $log"; }
rmdir "$work/goroot" "$work/gomod"
rm -f "$work/install" "$work"/var/cache/apt/*.bin

keep "${stamp#* }"
