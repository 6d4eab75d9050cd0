#!/bin/bash
# pack.sh OUT: deb and rpm packages of what `make` has built, into OUT. `make packages` calls it.
#
#	BUILD              what `make` has filled; default build
#	NFPM               the program that writes packages
#	SOURCE_DATE_EPOCH  the time of all files in them, by default the commit's; the same build gives the same bytes
#	COMPRESSION        gzip (default), or none: quicker to make, and larger
#	PACKAGE_VERSION    by default of the commit's time, so that a newer commit is an upgrade
#
# A package for each role has its list in a file beside this: client, node, owner, slurm, spank, hook. Of the plug-in there is one
# for all releases of Slurm, and one for each release in BUILD/spank.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
out=$(cd -- "$1" && pwd)
build=$(cd -- "${BUILD:-$here/../../build}" && pwd)
cd "$here/../.."

export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
commit=$(cat "$build/version")
version=${PACKAGE_VERSION:-0.1.0~git$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d%H%M%S).${commit%-dirty}}
maintainer='The Sluice authors <sluice-hpc@users.noreply.github.com>'
compression=${COMPRESSION:-gzip} rpm_compression=gzip:9
[ "$compression" = gzip ] || rpm_compression=gzip:1 # the least that rpms can have
umask 022

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/completion"
for f in bin/sluice bin/sluiced bin/sluice-worker bin/sluice-hook shim/libcuda.so.1 shim/libnvidia-ml.so.1; do
	strip --strip-unneeded -o "$stage/${f##*/}" "$build/$f"
done
"$build/bin/sluice" man "$stage/pages"
"$here/man.sh" "$build/bin" "$stage/pages"
for f in "$stage"/pages/*; do
	mkdir -p "$stage/man/man${f##*.}"
	gzip -9nc "$f" >"$stage/man/man${f##*.}/${f##*/}.gz"
done
for s in bash zsh fish; do "$build/bin/sluice" completion "$s" >"$stage/completion/sluice.$s"; done
gzip -9nc CHANGELOG.md >"$stage/changelog.gz"

# plugins: the releases of Slurm for which BUILD has a plug-in of its own.
plugins() { (cd "$build/spank" && for f in */spank_sluice.so; do [ ! -e "$f" ] || echo "${f%/*}"; done); }
mapfile -t releases < <(plugins)

# Every package of the plug-in that there may be; a node has one of them. spank/version.h has the releases.
every=$(grep -o '{ [0-9]*, [0-9]*, [0-9]* }' spank/version.h | awk '{printf ", sluice-spank-%d.%02d", $3, $4}')
every=sluice-spank$every

# The next package: its name and, for a plug-in package, the file it holds and the releases of Slurm that the file serves.
name='' plugin='' which=''

# describe ROLE FORMAT: its list, filled in, with what all packages have.
describe() {
	local libc='libc6 (>= 2.34)' same="(= $version)" provides='' others=", $every,"
	[ "$2" = deb ] || libc='libc.so.6(GLIBC_2.34)(64bit)' same="= $version"
	[ "$name" = sluice-spank ] || provides=sluice-spank
	others=${others/, $name,/,}
	others=${others#, } others=${others%,}
	sed -e "s|@STAGE@|$stage|g" -e "s|@LIBC@|\"$libc\"|g" -e "s|@CLIENT@|\"sluice-client $same\"|" -e "s|@NODE@|\"sluice-node $same\"|" \
		-e "s|@NAME@|$name|g" -e "s|@PROVIDES@|$provides|" -e "s|@OTHERS@|$others|g" -e "s|@PLUGIN@|$plugin|" -e "s|@RELEASES@|$which|" "$here/$1.yaml"
	cat <<-YAML
		  - {dst: /usr/share/doc/$name, type: dir, file_info: {mode: 0755}}
		  - {src: LICENSE, dst: /usr/share/doc/$name/copyright, file_info: {mode: 0644}}
		  - {src: $stage/changelog.gz, dst: /usr/share/doc/$name/changelog.gz, file_info: {mode: 0644}}
		version: "$version"
		version_schema: none
		release: ""
		arch: amd64
		maintainer: "$maintainer"
		vendor: Sluice
		homepage: https://github.com/sluice-hpc/sluice
		license: Apache-2.0
		section: admin
		priority: optional
		umask: 0o022
		mtime: $(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
		deb: {compression: $compression}
		rpm: {buildhost: sluice, group: System Environment/Daemons, compression: "$rpm_compression"}
	YAML
}

# one ROLE: both packages of it.
one() {
	local format
	for format in deb rpm; do
		describe "$1" "$format" >"$stage/$name.$format.yaml"
		"${NFPM:?the program nfpm}" package --config "$stage/$name.$format.yaml" --packager "$format" --target "$out/" >/dev/null
	done
}

rm -f "$out"/sluice-*.deb "$out"/sluice-*.rpm
for role in client node owner slurm hook; do name=sluice-$role one "$role"; done
strip --strip-unneeded -o "$stage/spank.so" "$build/spank/spank_sluice.so"
name=sluice-spank plugin=$stage/spank.so which='Slurm 22.05 to 26.05' one spank
for r in "${releases[@]}"; do
	strip --strip-unneeded -o "$stage/spank-$r.so" "$build/spank/$r/spank_sluice.so"
	name=sluice-spank-$r plugin=$stage/spank-$r.so which="Slurm $r" one spank
done
(cd "$out" && sha256sum ./*.deb ./*.rpm >SHA256SUMS)
