#!/bin/bash
# Upgrades a cluster of real Slurm node by node, from the release of a commit to this tree's, in the midst of jobs.
#
#   test/upgrade.sh COMMIT [NODES]
#
# This tree has to be built (make all cuda-programs). COMMIT is built in a folder of its own, with the same programs. NODES is 4 if it is
# not given, and at most 22; one of four owns a simulated GPU. It needs root, as all tests with Slurm do.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.."
commit=$(git rev-parse --verify "$1^{commit}")
if [ ! -x build/bin/sluiced ] || [ ! -d build/test/cuda-11.8 ]; then
	echo "upgrade: run make all cuda-programs first" >&2
	exit 1
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
chmod 755 "$dir" # jobs run programs there
git archive "$commit" | tar -x -C "$dir"
echo "upgrade: building ${commit:0:12}"
make -s -C "$dir" VERSION="${commit:0:12}" all >"$dir/log" 2>&1 || { tail -20 "$dir/log"; exit 1; }
cp -a build/test "$dir/build/test"
SLUICE_OLD=$dir SLUICE_NODES=${2:-4} SLUICE_BUILD=$PWD/build SLUICE_CUDA=11.8 go test -count=1 -v -timeout 20m ./test/slurm/upgrade
