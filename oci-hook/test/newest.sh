#!/bin/bash
# newest.sh ROOT: a directory with the runc and crun of another Debian root (test/containers/root.sh), and the path of
# it on stdout. They run on this machine with that root's loader and libraries, so that the same tests run with them:
# SLUICE_OCI_RUNTIMES=$(oci-hook/test/newest.sh ROOT) go test ./oci-hook/test
set -euo pipefail

root=$1
dir=$root/runtimes
mkdir -p "$dir"
for name in runc crun; do
	from=$root/usr/bin/$name
	[ -e "$from" ] || from=$root/usr/sbin/$name
	cp "$from" "$dir/.$name"
	# A loader in front of them would be what they start again as themselves.
	patchelf --set-interpreter "$root/lib64/ld-linux-x86-64.so.2" --set-rpath "$root/usr/lib/x86_64-linux-gnu" "$dir/.$name"
	mv "$dir/.$name" "$dir/$name"
	"$dir/$name" --version | head -n 1 >&2
done
echo "$dir"
