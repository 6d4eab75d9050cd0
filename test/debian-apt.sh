# Debian's packages without installing any: an apt of its own that sees nothing of this machine's configuration but
# its proxy. Sourced by bash, never run.
# shellcheck shell=bash
#
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
	APT_CONFIG=$apt/apt.conf apt-get -q update >"$apt/log" 2>&1 || {
		tail -n 5 "$apt/log" >&2
		echo "the package lists of $suite did not come from $mirror" >&2
		return 1
	}
}
