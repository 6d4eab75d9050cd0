#!/bin/bash
# link-driver.sh VERSION CUDA [LIB]: shows EESSI of that version Sluice's libraries as the CUDA driver, on a node without a driver of
# its own. EESSI's own link_nvidia_host_libraries.sh does this for NVIDIA's driver: it asks nvidia-smi and ldconfig for it.
#
#	VERSION             2023.06, 2025.06
#	CUDA                the CUDA version of the owners' driver, as nvidia-smi shows it: 12.8. EESSI compares it with what modules need
#	LIB                 the directory of Sluice's libraries, default /usr/lib/sluice
#	EESSI_CVMFS_REPO    default /cvmfs/software.eessi.io
set -euo pipefail
die() { echo "link-driver: $*" >&2; exit 1; }

[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
version=$1 cuda=$2 lib=${3:-/usr/lib/sluice}
repo=${EESSI_CVMFS_REPO:-/cvmfs/software.eessi.io}
[[ $version =~ ^[0-9]{4}\.[0-9]{2}$ ]] || die "$version: want a version of EESSI, as 2023.06"
[[ $cuda =~ ^[0-9]+\.[0-9]+$ ]] || die "$cuda: want a version of CUDA, as 12.8"
[[ $lib = /* ]] || die "$lib: want a full path"

# Where EESSI's loader looks: below host_injections in 2023.06, and since 2025.06 in a directory that the site's CernVM-FS names.
# host_injections is a link whose target need not exist yet.
injections=$(readlink -m -- "$repo/host_injections")
if [ "$version" = 2023.06 ]; then
	dir=$injections/nvidia/x86_64/host
else
	trusted=$repo/versions/$version/compat/linux/x86_64/lib/nvidia
	dir=$(readlink -m -- "$trusted")
	[[ $dir != /dev/null && $dir != "$trusted" ]] ||
		die "$trusted leads nowhere: set EESSI_NVIDIA_OVERRIDE_DEFAULT in CernVM-FS's configuration to a directory of this node"
fi
latest=$injections/nvidia/x86_64/latest
loader=$injections/$version/compat/linux/x86_64/lib

# ours NAME TARGET: is the entry NAME of the directory not there, or a link of this script's that should lead to TARGET? Sluice's libraries
# are in a directory sluice, whatever the prefix, and a link to those of another prefix is ours even if nothing is there any more.
ours() {
	local to
	[ -e "$dir/$1" ] || [ -L "$dir/$1" ] || return 0
	to=$(readlink -- "$dir/$1") || return 1
	[[ $to = "$2" || $to = */sluice/"${2##*/}" ]] || [ "$dir/$1" -ef "$lib/${2##*/}" ]
}
# leads LINK DIR: is LINK not there, or a link to DIR?
leads() {
	[ -e "$1" ] || [ -L "$1" ] || return 0
	[ -L "$1" ] && [ "$(readlink -m -- "$1")" = "$(readlink -m -- "$2")" ]
}
another() {
	die "$dir has another $1: on a node with a driver of its own nothing is to be linked; if it has none any more, remove $dir/$1"
}
# All is looked at before anything is changed.
for f in libcuda.so libnvidia-ml.so; do
	[ -e "$lib/$f.1" ] || die "$lib has no $f.1: give the directory of Sluice's libraries"
	ours "$f.1" "$lib/$f.1" || another "$f.1"
	ours "$f" "$f.1" || another "$f"
done
if [ "$version" = 2023.06 ]; then
	leads "$latest" "$dir" || die "$latest leads to another driver than $dir"
	leads "$loader" "$latest" || die "$loader is no link to $latest"
fi

mkdir -p -- "$dir"
for f in libcuda.so libnvidia-ml.so; do
	ln -sfn -- "$lib/$f.1" "$dir/$f.1"
	ln -sfn -- "$f.1" "$dir/$f" # EESSI's modules look for this name
done
echo "$cuda" >"$dir/cuda_version.txt"
if [ "$version" = 2023.06 ]; then
	ln -sfn host "$latest"
	mkdir -p -- "${loader%/*}"
	ln -sfn -- "$repo/host_injections/nvidia/x86_64/latest" "$loader"
fi
echo "link-driver: EESSI $version finds $lib as the driver, by $dir"
