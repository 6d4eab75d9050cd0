#!/bin/bash
# prometheus.sh: bring Debian 12's Prometheus and promtool into the cache, and print the folder of both. The package is unpacked,
# never installed. 20 MB are downloaded.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=debian-apt.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/debian-apt.sh"

tree=$(debian_cache)/prometheus-tree
debian_tree prometheus "$tree" : prometheus
echo "$tree/usr/bin"
