# Checks of the jobs in this folder, which source it in the machine, and of packages.sh. A line of each check begins with @.
# shellcheck shell=bash
failures=0
say() { printf '%s\n' "$*"; }
ok() { # ok WHAT COMMAND...: it has to succeed
	local what=$1
	shift
	if "$@"; then say "@ ok: $what"; else
		say "@ FAILED: $what"
		failures=$((failures + 1))
	fi
}
# until_ok COMMAND: for at most 30 s, since everything here is emulated.
until_ok() {
	local end=$((SECONDS + 30))
	until eval "$1"; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.2
	done
}
