#!/bin/bash
# cuda-toolkit.sh [11.8|12.4|13.0|smi]: bring NVIDIA's compiler of that version and its static runtime
# into the cache, and print the folder in which bin/nvcc now is. With smi: the nvidia-smi programs of
# drivers 535 and 550, as bin/nvidia-smi-535 and bin/nvidia-smi-550.
#
# 11.8 comes from Debian 12's non-free section, 12.4 from Debian 13's, 13.0 from NVIDIA's own wheels.
# No driver package is installed and the machine's apt is left as it is: the sources and the package
# lists are private files, the packages are unpacked, never installed. Only what a build needs is
# kept (300 MB of 3 GB). A second call finds the finished folder and prints it at once.
#
# SLUICE_CACHE          where to keep it (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian
set -euo pipefail

version=${1:-11.8}
recipe=1	# raise it when what is kept changes: a folder of another recipe is built anew
repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SLUICE_CACHE:-$repo/build/cache}

# shellcheck source-path=SCRIPTDIR source=debian-apt.sh
. "$repo/test/debian-apt.sh"

die() { echo "cuda-toolkit: $*" >&2; exit 1; }
say() { echo "cuda-toolkit: $*" >&2; }

case $version in
11.8 | 12.4 | 13.0 | smi) ;;
*) die "version $version is not known; ask for 11.8, 12.4, 13.0 or smi" ;;
esac

mkdir -p "$cache"
cache=$(cd -- "$cache" && pwd)
tree=$cache/cuda-$version
stamp=$tree/.recipe

finished() { [ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ]; }

if finished; then
	echo "$tree"
	exit 0
fi

# Two builds may share a cache: one fetches, the other waits for it.
exec 9>"$cache/.cuda-$version.lock"
flock 9
if finished; then
	echo "$tree"
	exit 0
fi

work=$(mktemp -d "$cache/.cuda-$version.XXXXXX")
trap 'rm -rf "$work"' EXIT
new=$work/tree
mkdir -p "$new/bin"

# fetch SUITE PACKAGE...: download packages of that suite into $work/debs.
fetch() {
	local suite=$1
	shift
	mkdir -p "$work/debs"
	say "$version: reading the package lists of $suite"
	debian_apt "$work/apt" "$suite" main non-free || die "no packages of $suite"
	say "$version: downloading $* (870 MB with 11.8)"
	(cd "$work/debs" && APT_CONFIG=$work/apt/apt.conf apt-get -q download "$@") >"$work/apt/log" 2>&1 || { cat "$work/apt/log" >&2; die "download from $suite failed"; }
}

# unpack PACKAGE PATTERN...: take the named members out of a downloaded package.
unpack() {
	local name=$1
	shift
	say "$version: unpacking $name"
	dpkg-deb --fsys-tarfile "$work/debs/${name}"_*.deb | tar -x -C "$new" --wildcards --no-same-owner "$@"
	rm -f "$work/debs/${name}"_*.deb
}

# debian_toolkit: what both Debian releases package alike. Their nvcc.profile names absolute paths;
# ours is relative to the place of nvcc, so the tree works wherever it lies.
debian_toolkit() {
	unpack nvidia-cuda-toolkit \
		'./usr/bin/*' './usr/lib/nvidia-cuda-toolkit/bin/*' './usr/lib/nvidia-cuda-toolkit/libdevice/*'
	unpack nvidia-cuda-dev './usr/include/*' \
		'./usr/lib/x86_64-linux-gnu/libcudart_static.a' './usr/lib/x86_64-linux-gnu/libcudadevrt.a'
	local bin=$new/usr/lib/nvidia-cuda-toolkit/bin
	rm -f "$bin/nvcc.profile" "$bin/gcc" "$bin/g++" "$new/usr/bin/compute-sanitizer" "$new"/usr/bin/{nvprof,nsys*,ncu*,nsight*,TreeLauncher*}
	cat >"$bin/nvcc.profile" <<-'PROFILE'
		NVVMIR_LIBRARY_DIR = $(_HERE_)/../libdevice
		PATH      += $(_HERE_):$(_HERE_)/../../../bin:
		INCLUDES  += "-I$(_HERE_)/../../../include"
		LIBRARIES =+ $(_SPACE_) "-L$(_HERE_)/../../x86_64-linux-gnu"
	PROFILE
}

# wrapper NVCC CCBIN: bin/nvcc, which runs NVCC (relative to the tree) with the right host compiler.
wrapper() {
	cat >"$new/bin/nvcc" <<-WRAPPER
		#!/bin/sh
		here=\$(dirname -- "\$(dirname -- "\$(readlink -f -- "\$0")")")
		exec "\$here/$1" -ccbin "$2" "\$@"
	WRAPPER
	chmod 755 "$new/bin/nvcc"
}

case $version in
11.8)
	# nvcc 11.8 takes no compiler newer than gcc 11, which Debian 12 still carries beside its gcc 12.
	fetch bookworm nvidia-cuda-toolkit nvidia-cuda-dev g++-11 gcc-11 cpp-11 libgcc-11-dev libstdc++-11-dev
	debian_toolkit
	for p in g++-11 gcc-11 cpp-11; do
		unpack "$p" './usr/bin/*' './usr/lib/gcc/*'
	done
	unpack libgcc-11-dev './usr/lib/gcc/*'
	unpack libstdc++-11-dev './usr/lib/gcc/*' './usr/include/*'
	gcclib=$new/usr/lib/gcc/x86_64-linux-gnu/11
	rm -rf "$gcclib"/{lto1,lto-wrapper,plugin,g++-mapper-server} "$gcclib"/lib{asan,tsan,lsan,ubsan,itm,gomp,cc1}*
	ln -sfn /usr/lib/x86_64-linux-gnu/libstdc++.so.6 "$gcclib/libstdc++.so"
	wrapper usr/lib/nvidia-cuda-toolkit/bin/nvcc "\$here/usr/bin/x86_64-linux-gnu-g++-11"
	;;
12.4)
	fetch trixie nvidia-cuda-toolkit nvidia-cuda-dev
	debian_toolkit
	wrapper usr/lib/nvidia-cuda-toolkit/bin/nvcc g++
	;;
13.0)
	mkdir -p "$work/wheels"
	say "13.0: downloading NVIDIA's wheels (about 110 MB)"
	python3 -m pip download -q --no-deps --only-binary=:all: -d "$work/wheels" \
		nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
		nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 >&2
	for w in "$work"/wheels/*.whl; do
		python3 -m zipfile -e "$w" "$work/unzipped"
	done
	mv "$work/unzipped/nvidia/cu13" "$new/cu13"
	ln -s lib "$new/cu13/lib64" # where the nvcc.profile looks
	chmod -R a+rX "$new/cu13"
	chmod a+x "$new"/cu13/bin/* "$new"/cu13/nvvm/bin/*
	wrapper cu13/bin/nvcc g++
	;;
smi)
	for release in bookworm:535 trixie:550; do
		fetch "${release%:*}" nvidia-smi
		unpack nvidia-smi '*/nvidia-smi'
		found=$(find "$new" -name nvidia-smi -type f -perm -u+x | head -n 1)
		[ -n "$found" ] || die "no program in the package nvidia-smi of ${release%:*}"
		mv "$found" "$new/bin/nvidia-smi-${release#*:}"
		rm -rf "${new:?}/usr" "$work/apt"
	done
	;;
esac

# A compiler's tree is only worth its stamp when it can build a program.
if [ "$version" != smi ]; then
cat >"$work/probe.cu" <<'CU'
__global__ void probe(int *p) { *p = 1; }
int main() { int *d = 0; probe<<<1, 1>>>(d); return cudaGetLastError() == cudaSuccess; }
CU
arch=sm_75
"$new/bin/nvcc" -cudart static -arch=$arch -o "$work/probe" "$work/probe.cu" >&2 || die "$version: the unpacked nvcc cannot build a program"
fi

echo $recipe >"$new/.recipe"
rm -rf "$tree"
mv "$new" "$tree"
say "$version: ready in $tree"
echo "$tree"
