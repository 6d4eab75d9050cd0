#!/bin/sh
# check_elf.sh LIBRARY MAP: the plug-in must load into any Slurm's processes and change nothing in them.
#
# Checked: that it exports what the version script MAP names and no more; that it needs the C library only, and
# of it nothing newer than glibc 2.17; that what else it needs are functions that spank.h and slurm_errno.h have;
# read-only after relocation, bound when it is loaded, no executable stack, no search path, no thread-local storage.
set -eu
lib=$1 map=$2
fail() {
	echo "check_elf: $lib: $*" >&2
	exit 1
}

dynamic=$(readelf -dW "$lib")
needed=$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[ "$needed" = libc.so.6 ] || fail "it needs $needed"
echo "$dynamic" | grep -q 'FLAGS_1.*NOW' || fail "it is bound lazily"
echo "$dynamic" | grep -q '(RUNPATH)\|(RPATH)' && fail "it has a search path"
echo "$dynamic" | grep -Eq '\((RELR|RELRSZ|RELRENT)\)' && fail "it has packed relocations"
readelf -lW "$lib" | grep 'GNU_STACK' | grep -q 'E ' && fail "its stack is executable"
readelf -lW "$lib" | grep -q 'GNU_RELRO' || fail "its relocations stay writable"
readelf -lW "$lib" | grep -q 'TLS' && fail "it has thread-local storage"

symbols=$(readelf --dyn-syms -W "$lib" | awk 'NR > 3 && $5 != "LOCAL"')
newest=$(echo "$symbols" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
[ "$(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1)" = GLIBC_2.17 ] || fail "it needs $newest"
foreign=$(echo "$symbols" | awk '$7 == "UND" && $5 != "WEAK" && $8 !~ /@/ { print $8 }' | grep -Ev '^(spank_[a-z_]+|slurm_error|slurm_verbose|slurm_spank_log)$' || true)
[ -z "$foreign" ] || fail "it needs $foreign"
want=$(sed -n 's/^[[:space:]]*\([a-z_]*\);$/\1/p' "$map" | sort)
have=$(echo "$symbols" | awk '$7 != "UND" { print $8 }' | sort)
[ "$have" = "$want" ] || fail "it exports $have"
readelf -nW "$lib" 2>/dev/null | grep -q 'x86-64-v[234]' && fail "it asks for a newer processor"
echo "check_elf: $lib: $(echo "$have" | wc -l) exports, nothing newer than $newest, $(stat -c %s "$lib") bytes"
