#!/bin/sh
# check_elf.sh LIBRARY SONAME PREFIX: the library must load wherever programs of the last ten years do.
#
# Checked: the name it goes by; that it needs nothing but the C library's own parts, and of them no symbol
# newer than glibc 2.17; that its exports carry no version and nothing else leaks; no packed relocations
# (older loaders crash on them), no thread-local storage that must fit the static block, no executable
# stack, read-only after relocation, never unloaded.
set -eu
lib=$1 soname=$2 prefix=$3
fail() {
	echo "check_elf: $lib: $*" >&2
	exit 1
}

dynamic=$(readelf -dW "$lib")
echo "$dynamic" | grep -q "SONAME.*\[$soname\]" || fail "its name is not $soname"
for need in $(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
	case $need in
	libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1) ;;
	*) fail "it needs $need" ;;
	esac
done
echo "$dynamic" | grep -Eq '\((RELR|RELRSZ|RELRENT)\)' && fail "it has packed relocations"
echo "$dynamic" | grep -q 'STATIC_TLS' && fail "its thread-local storage must fit the static block"
echo "$dynamic" | grep -q 'FLAGS_1.*NOW' || fail "it is bound lazily"
[ "$soname" != libcuda.so.1 ] || echo "$dynamic" | grep -q 'NODELETE' || fail "it can be unloaded under its threads"
echo "$dynamic" | grep -q '(RUNPATH)\|(RPATH)' && fail "it has a search path"
readelf -lW "$lib" | grep 'GNU_STACK' | grep -q 'E ' && fail "its stack is executable"
readelf -lW "$lib" | grep -q 'GNU_RELRO' || fail "its relocations stay writable"

symbols=$(readelf --dyn-syms -W "$lib" | awk 'NR > 3 && $5 != "LOCAL"')
newest=$(echo "$symbols" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
[ "$(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1)" = GLIBC_2.17 ] || fail "it needs $newest"
echo "$symbols" | awk '$7 == "UND" && $5 != "WEAK" && $8 !~ /@GLIBC_/ { print $8 }' | grep -q . && fail "it needs symbols of nobody's"
exports=$(echo "$symbols" | awk '$7 != "UND" { print $8 }')
echo "$exports" | grep -v "^$prefix" | grep -q . && fail "it exports $(echo "$exports" | grep -v "^$prefix" | head -3 | tr '\n' ' ')"
echo "$exports" | grep -q '@' && fail "its exports have versions"
readelf -nW "$lib" 2>/dev/null | grep -q 'x86-64-v[234]' && fail "it asks for a newer processor"
echo "check_elf: $lib: $(echo "$exports" | wc -l) exports, nothing newer than $newest"
