# Sources of engines that Debian does not have. To be sourced, in a root that kept.sh makes.
# shellcheck shell=bash
#
#	SLUICE_SOURCES   a folder with NAME.tar.gz for each, for a machine that cannot reach GitHub: what git archive makes of the tag,
#	                 or GitHub's own archive of it

# source_of NAME TAG ADDRESS: its source into /src/NAME of the root.
# shellcheck disable=SC2154 # work is kept.sh's
source_of() {
	local name=$1 tag=$2 address=$3 to=$work/src/$1
	mkdir -p "$to"
	if [ -n "${SLUICE_SOURCES-}" ]; then
		[ -r "$SLUICE_SOURCES/$name.tar.gz" ] || die "$SLUICE_SOURCES/$name.tar.gz is missing; it is to be $address at $tag"
		tar -C "$to" --no-same-owner -xzf "$SLUICE_SOURCES/$name.tar.gz"
		# An archive of GitHub's has a folder around all.
		local inner=("$to"/*)
		[ ${#inner[@]} != 1 ] || mv "${inner[0]}" "$to.inner"
		[ ! -e "$to.inner" ] || { rmdir "$to" && mv "$to.inner" "$to"; }
	else
		git -c advice.detachedHead=false clone -q --depth 1 --branch "$tag" "$address" "$to" ||
			die "$address does not come; SLUICE_SOURCES can name a folder with $name.tar.gz"
		rm -rf "$to/.git"
	fi
}
