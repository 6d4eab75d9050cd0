# A root of Debian that is made once, kept, and used again without network. To be sourced.
# shellcheck shell=bash

die() { echo "${kept_name:-root}: $*" >&2; exit 1; }
say() { echo "${kept_name:-root}: $*" >&2; }

# kept NAME DIR FILE STAMP: if DIR is a finished root, whose FILE says STAMP, prints its path and exits. Else it returns, as the only one
# that makes it, with the variables dir, its path, work, a new folder beside it that goes with this process, and log, a file for what is
# printed meanwhile. NAME begins the messages.
kept() {
	kept_name=$1 kept_file=$3 kept_stamp=$4
	mkdir -p "$(dirname -- "$2")"
	dir=$(cd -- "$(dirname -- "$2")" && pwd)/$(basename -- "$2")
	if_finished
	[ "$(id -u)" = 0 ] || die 'a root of Debian can only be made by root'
	# Two may want it at once: one makes it, the other waits.
	exec 9>"$dir.lock"
	flock 9
	if_finished
	work=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf --one-file-system "$work"' EXIT
	chmod 755 "$work"
	log=$work.log
}

if_finished() {
	[ "$(cat "$dir/$kept_file" 2>/dev/null)" = "$kept_stamp" ] || return 0
	echo "$dir"
	exit 0
}

# keep WHAT: work is finished and takes dir's place. WHAT is what is in it, for a message. Prints the path.
keep() {
	echo "$kept_stamp" >"$work/$kept_file"
	rm -rf --one-file-system "$dir"
	mv "$work" "$dir"
	rm -f "$log"
	trap - EXIT
	say "$1, $(du -sm "$dir" | cut -f1) MiB"
	echo "$dir"
}
