#!/bin/bash
# cri.sh [DIR]: the root of root.sh with CRI-O, crictl and nerdctl, compiled from their sources, since Debian has none of them. Prints the
# path of it on stdout. As root. It is kept, and used again without network. containerd and its ctr are Debian's.
#
# CRI-O and nerdctl are cloned from GitHub at the tags below; crictl and the modules of nerdctl come by Go's proxy. Nothing of them enters
# the repository.
#
#	DIR              default $SLUICE_CACHE/cri, or build/cache/cri
#	SLUICE_SOURCES   see source.sh: crio.tar.gz and nerdctl.tar.gz
set -euo pipefail

recipe=1	# raise it when what is installed changes: a root of another recipe is built anew
crio=1.36.3 crictl=1.36.0 nerdctl=2.3.5
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd -- "$here/../.." && pwd)
# shellcheck source=test/kept.sh
. "$repo/test/kept.sh"
stamp="$recipe CRI-O $crio, crictl $crictl, nerdctl $nerdctl"
kept cri "${1:-${SLUICE_CACHE:-$repo/build/cache}/cri}" .sources "$stamp"

base=$("$here/root.sh")
cp -a --reflink=auto "$base/." "$work/"
chmod 755 "$work"
# shellcheck source=test/containers/source.sh
. "$here/source.sh"
source_of crio "v$crio" https://github.com/cri-o/cri-o
source_of nerdctl "v$nerdctl" https://github.com/containerd/nerdctl

say "CRI-O, crictl and nerdctl into $dir, some minutes"
# By this machine's Go and C compiler, whose C library is older than the root's: all that they make runs there.
build() {
	set -eux
	cd "$work/src/crio"
	# CRI-O itself needs cgo. What would need further libraries is left out: image signatures by GPG are checked in Go.
	go build -mod=vendor -tags 'containers_image_openpgp containers_image_ostree_stub exclude_graphdriver_btrfs btrfs_noversion' -o "$work/usr/local/bin/crio" ./cmd/crio
	make -C pinns
	install -m 755 bin/pinns "$work/usr/local/bin/"
	cd "$work/src/nerdctl"
	CGO_ENABLED=0 go build -ldflags "-X github.com/containerd/nerdctl/v2/pkg/version.Version=v$nerdctl" -o "$work/usr/local/bin/nerdctl" ./cmd/nerdctl
	cd /
	CGO_ENABLED=0 GOBIN=$work/usr/local/bin go install "sigs.k8s.io/cri-tools/cmd/crictl@v$crictl"
}
# Its own process, so that set -e holds in it.
export -f build
export work nerdctl crictl GOWORK=off GOTOOLCHAIN=local
bash -c build </dev/null >"$log" 2>&1 || { tail -n 20 "$log" >&2; die "building failed, all of it is in $log"; }
rm -rf "$work/src"

keep "${stamp#* }"
