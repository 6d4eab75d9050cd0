#!/bin/bash
# gcc-offload.sh: bring what GCC 12 needs to compile OpenMP and OpenACC for NVIDIA's GPUs, and libgomp's plug-in, from
# Debian 12 into the cache, and print its folder. The packages are unpacked, never installed. 10 MB are downloaded.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=debian-apt.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/debian-apt.sh"

tree=$(debian_cache)/gcc-offload
debian_tree gcc-offload "$tree" : gcc-12-offload-nvptx nvptx-tools libgomp-plugin-nvptx1
echo "$tree"
