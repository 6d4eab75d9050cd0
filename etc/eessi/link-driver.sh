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
[ -e "$lib/libcuda.so.1" ] || die "$lib has no libcuda.so.1: give the directory of Sluice's libraries"

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
mkdir -p -- "$dir"
# Links to another libcuda are a driver's.
if [ -e "$dir/libcuda.so.1" ] && ! [ "$dir/libcuda.so.1" -ef "$lib/libcuda.so.1" ]; then
	die "$dir has another libcuda.so.1: on a node with a driver of its own nothing is to be linked"
fi
for f in libcuda.so libnvidia-ml.so; do
	ln -sfn -- "$lib/$f.1" "$dir/$f.1"
	ln -sfn -- "$f.1" "$dir/$f" # EESSI's modules look for this name
done
echo "$cuda" >"$dir/cuda_version.txt"

if [ "$version" = 2023.06 ]; then
	ln -sfn host "$injections/nvidia/x86_64/latest"
	loader=$injections/$version/compat/linux/x86_64
	mkdir -p -- "$loader"
	[ -L "$loader/lib" ] || [ ! -e "$loader/lib" ] || die "$loader/lib is no link"
	ln -sfn -- "$repo/host_injections/nvidia/x86_64/latest" "$loader/lib"
fi
echo "link-driver: EESSI $version finds $lib as the driver, by $dir"
