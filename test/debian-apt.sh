# Debian's packages without installing any: an apt of its own that sees nothing of this machine's configuration but
# its proxy. Sourced by bash, never run.
# shellcheck shell=bash
#
# SLUICE_CACHE          where trees are kept (default: build/cache of this repository)
# SLUICE_DEBIAN_MIRROR  default http://deb.debian.org/debian

# debian_apt FOLDER SUITE COMPONENT...: reads the package lists of that suite, which are checked against Debian's
# signature. `APT_CONFIG=FOLDER/apt.conf apt-get download PACKAGE...` is good for it then. On an error the reason is
# on stderr.
debian_apt() {
	local apt=$1 suite=$2 mirror=${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
	local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
	shift 2
	[ -r "$keyring" ] || {
		echo "$keyring is missing; install debian-archive-keyring" >&2
		return 1
	}
	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
	: >"$apt/status"
	echo "deb [arch=amd64 signed-by=$keyring] $mirror $suite $*" >"$apt/sources.list"
	cat >"$apt/apt.conf" <<-CONF
		Dir::Etc::SourceList "$apt/sources.list";
		Dir::Etc::SourceParts "/dev/null";
		Dir::Etc::Preferences "/dev/null";
		Dir::Etc::PreferencesParts "/dev/null";
		Dir::State "$apt";
		Dir::State::Lists "$apt/lists";
		Dir::State::Status "$apt/status";
		Dir::Cache "$apt/cache";
		APT::Architecture "amd64";
		APT::Architectures "amd64";
		APT::Sandbox::User "root";
		Acquire::Languages "none";
		Acquire::Retries "3";
	CONF
	APT_CONFIG=$apt/apt.conf apt-get -q -o APT::Update::Error-Mode=any update >"$apt/log" 2>&1 || {
		tail -n 5 "$apt/log" >&2
		echo "the package lists of $suite did not come from $mirror" >&2
		return 1
	}
}

# debian_cache: makes the folder where trees are kept, and prints its full path.
debian_cache() {
	local cache=${SLUICE_CACHE:-$(dirname -- "${BASH_SOURCE[0]}")/../build/cache}
	mkdir -p "$cache" && cd -- "$cache" && pwd
}

# debian_tree NAME TREE FINISH PACKAGE...: unpacks packages of Debian 12 into the folder TREE, once, and installs none. The command FINISH is
# called with the folder before it is in its place; `:` is one that does nothing. NAME begins the messages. The script ends if it fails.
debian_tree() {
	local name=$1 tree=$2 finish=$3 deb
	shift 3
	# Two builds may share a cache: one fetches, the other waits for it.
	exec 9>"$(dirname -- "$tree")/.$name.lock"
	flock 9
	[ ! -d "$tree" ] || return 0
	debian_work=$(mktemp -d "$(dirname -- "$tree")/.$name.XXXXXX")
	trap 'rm -rf "$debian_work"' EXIT
	mkdir -p "$debian_work/debs" "$debian_work/tree"
	debian_apt "$debian_work/apt" bookworm main || exit 1
	(cd "$debian_work/debs" && APT_CONFIG=$debian_work/apt/apt.conf apt-get -q download "$@") >"$debian_work/apt/log" 2>&1 || {
		cat "$debian_work/apt/log" >&2
		echo "$name: the download failed" >&2
		exit 1
	}
	for deb in "$debian_work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$debian_work/tree" || exit 1
	done
	"$finish" "$debian_work/tree" || exit 1
	mv "$debian_work/tree" "$tree"
}
