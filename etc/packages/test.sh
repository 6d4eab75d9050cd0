#!/bin/bash
# test.sh: the packages of BUILD (default build), made twice and alike, then installed, upgraded and removed with dpkg and with
# rpm in a Debian 12 of its own, without systemd: nothing is left but what conffiles mean. As root; NFPM is the program that writes packages.
# shellcheck disable=SC2016 # formats of dpkg-query
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
export COMPRESSION=none
failures=0
ok() { # ok WHAT COMMAND...: it has to succeed
	local what=$1
	shift
	if "$@" >"$work/said" 2>&1; then echo "ok: $what"; else
		echo "FAILED: $what"
		cat "$work/said"
		failures=$((failures + 1))
	fi
}
refused() { # refused WORDS COMMAND...: it has to fail, and say so
	local words=$1
	shift
	if "$@" >"$work/refusal" 2>&1 || ! grep -q -- "$words" "$work/refusal"; then
		cat "$work/refusal"
		return 1
	fi
}

(umask 077 && TZ=Asia/Tokyo PACKAGE_VERSION=1.0 "$here/pack.sh" "$work/again") &
again=$!
PACKAGE_VERSION=1.0 "$here/pack.sh" "$work/first"
wait "$again"
ok 'two runs give the same bytes' diff "$work/first/SHA256SUMS" "$work/again/SHA256SUMS"
PACKAGE_VERSION=1.1 "$here/pack.sh" "$work/second"

# A root without anything of ours. Its dpkg must not leave documentation out, as some images' does.
root=$work/root
mkdir "$root"
tar -C "$root" -xpf "$("$here/../../test/containers/image.sh")"
rm -rf "$root/etc/dpkg/dpkg.cfg.d"
mknod -m 666 "$root/dev/null" c 1 3
mkdir -p "$root/debs"
cp "$work"/first/*.deb "$root/debs/"
for f in "$work"/second/*.deb; do cp "$f" "$root/debs/"; done
in_root() { unshare -m --propagation private chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
# tree: all that is there, with modes and owners, but for what dpkg and rpm keep of themselves.
tree() { (cd "$root" && find . -mindepth 1 \( -path ./debs -o -path ./var/lib/dpkg -o -path ./var/log/dpkg.log -o -path ./var/lib/rpm -o -path ./proc \) -prune -o -printf '%p %y %m %U:%G\n' | sort); }
tree >"$work/before"
debs() { for r in client node owner slurm spank hook; do echo "/debs/sluice-${r}_$1_amd64.deb"; done; }
names=(sluice-client sluice-node sluice-owner sluice-slurm sluice-spank sluice-hook)

ok 'a node without the client is not configured' refused 'depends on sluice-client (= 1.0)' in_root dpkg -i /debs/sluice-node_1.0_amd64.deb
# shellcheck disable=SC2046 # a list of names
ok 'dpkg installs all of them' in_root dpkg -i $(debs 1.0)
tree >"$work/installed"
while read -r line; do ok "installed: $line" grep -qxF -- ".$line" "$work/installed"; done <<'LIST'
/usr/bin/sluice f 755 0:0
/usr/sbin/sluiced f 755 0:0
/usr/sbin/sluice-worker f 755 0:0
/usr/bin/sluice-hook f 755 0:0
/usr/bin/sluice-runtime l 777 0:0
/usr/lib/sluice/libcuda.so.1 f 755 0:0
/usr/lib/sluice/libnvidia-ml.so.1 f 755 0:0
/usr/lib/sluice/container/libcuda.so.1 f 644 0:0
/usr/lib/sluice/slurm/spank_sluice.so f 755 0:0
/usr/lib/sluice/slurm/prolog.sh f 755 0:0
/usr/lib/sluice/slurm/sluice.lua f 644 0:0
/etc/sluice/sluice.yaml f 644 0:0
/etc/sluice/oci-hook.json f 644 0:0
/etc/slurm/plugstack.conf.d/sluice.conf f 644 0:0
/usr/lib/systemd/system/sluiced.service f 644 0:0
/usr/lib/systemd/system/sluice-sessions.service f 644 0:0
/usr/lib/tmpfiles.d/sluice.conf f 644 0:0
/usr/share/man/man1/sluice-run.1.gz f 644 0:0
/usr/share/man/man5/sluice.yaml.5.gz f 644 0:0
/usr/share/man/man8/sluiced.8.gz f 644 0:0
/usr/share/man/man8/sluice-worker.8.gz f 644 0:0
/usr/share/man/man8/sluice-hook.8.gz f 644 0:0
/usr/share/bash-completion/completions/sluice f 644 0:0
/usr/share/modulefiles/sluice/system f 644 0:0
/usr/share/doc/sluice-client/examples/eessi/link-driver.sh f 755 0:0
/usr/share/doc/sluice-client/examples/jupyter/jupyterhub_config.py f 644 0:0
/usr/share/doc/sluice-client/examples/ondemand/sluice_jupyter/template/script.sh.erb f 755 0:0
/usr/share/doc/sluice-node/selinux/sluice.te f 644 0:0
/usr/share/doc/sluice-hook/examples/containerd.toml f 644 0:0
/usr/share/doc/sluice-client/copyright f 644 0:0
/var/lib/sluice d 700 0:0
/var/log/sluice d 750 0:0
LIST
ok 'nothing of ours can be written by others' test -z "$(comm -13 "$work/before" "$work/installed" | awk '$2 != "l" && $3 ~ /[2367].$|[2367]$/')"
ok 'sluiced --check is content with what was installed' in_root sluiced --check
ok 'sluice runs' in_root sluice version
for p in sluiced.8 sluice-worker.8 sluice-hook.8 sluice.yaml.5; do
	ok "the page $p names itself" grep -q '^.SH NAME' <(zcat "$root/usr/share/man/man${p##*.}/$p.gz")
done
ok 'conffiles are the three files in /etc' diff <(printf '%s\n' /etc/sluice/oci-hook.json /etc/sluice/sluice.yaml /etc/slurm/plugstack.conf.d/sluice.conf) \
	<(in_root dpkg-query -W -f '${Conffiles}\n' "${names[@]}" | awk 'NF {print $1}' | sort)

sed -i 's/^#cluster: .*/cluster: prod/' "$root/etc/sluice/sluice.yaml"
: >"$root/etc/slurm/job_submit.lua"
touch -d @1 "$root/etc/slurm/job_submit.lua"
# shellcheck disable=SC2046
ok 'dpkg upgrades all of them' in_root dpkg -i $(debs 1.1)
ok 'what the site changed in sluice.yaml stays' grep -qx 'cluster: prod' "$root/etc/sluice/sluice.yaml"
ok 'slurmctld will read sluice.lua again' test "$(stat -c %Y "$root/etc/slurm/job_submit.lua")" -gt 1
rm "$root/etc/slurm/job_submit.lua"
ok 'an upgrade leaves the same files' diff "$work/installed" <(tree)
for f in "$root"/debs/sluice-spank-[0-9]*_1.1_amd64.deb; do
	[ -e "$f" ] || continue
	r=${f##*/}
	r=${r%%_*}
	ok "$r takes the place of sluice-spank" in_root dpkg -i --auto-deconfigure -B "/debs/${f##*/}"
	ok 'which has gone' test "$(in_root dpkg-query -W -f '${db:Status-Status}' sluice-spank 2>/dev/null)" != installed
	ok 'and back' in_root dpkg -i --auto-deconfigure -B /debs/sluice-spank_1.1_amd64.deb
	names+=("$r")
	break
done

echo 'Prolog=/usr/lib/sluice/slurm/prolog.sh' >"$root/etc/slurm/slurm.conf"
ok 'sluice-slurm does not go while slurm.conf names its scripts' refused 'slurm.conf still names' in_root dpkg -r sluice-slurm
ok 'nor with all others' refused 'slurm.conf still names' in_root dpkg -r "${names[@]}"
# shellcheck disable=SC2016 # dpkg-query's
ok 'what it needs stays too' test "$(in_root dpkg-query -W -f '${db:Status-Status} ' sluice-client sluice-node sluice-slurm)" = 'installed installed installed '
ok 'and is whole' test -x "$root/usr/lib/sluice/slurm/prolog.sh"
sed -i 's/^/#/' "$root/etc/slurm/slurm.conf"
ok 'dpkg removes all of them' in_root dpkg -r "${names[@]}"
rm "$root/etc/slurm/slurm.conf"
ok 'conffiles alone are left' diff <(printf '%s\n' ./etc/sluice ./etc/sluice/oci-hook.json ./etc/sluice/sluice.yaml ./etc/slurm ./etc/slurm/plugstack.conf.d ./etc/slurm/plugstack.conf.d/sluice.conf) \
	<(comm -13 "$work/before" <(tree) | cut -d' ' -f1)
ok 'dpkg purges all of them' in_root dpkg -P "${names[@]}"
ok 'nothing is left' diff "$work/before" <(tree)

# By rpm, which runs its scripts in the same root. It knows nothing of what dpkg has installed there, so dependencies are only listed.
rpms() { for r in client node owner slurm spank hook; do echo "$work/$1/sluice-$r-$2-1.x86_64.rpm"; done; }
rpm_() { unshare -m --propagation private rpm --root "$root" --dbpath /var/lib/rpm --nodeps "$@"; }
ok 'an rpm asks for its C library and for the client of its build' diff <(printf '%s\n' 'libc.so.6(GLIBC_2.34)(64bit)' 'sluice-client = 1.0') \
	<(rpm -qp --requires "$work/first/sluice-node-1.0-1.x86_64.rpm" | grep -v '^rpmlib\|^/bin/sh\|^config(' | sort)
# shellcheck disable=SC2046
ok 'rpm installs all of them' rpm_ -i $(rpms first 1.0)
ok 'to the same places' diff <(sed 's|zsh/vendor-completions|zsh/site-functions|' "$work/installed" | sort) <(tree)
sed -i 's/^#cluster: .*/cluster: prod/' "$root/etc/sluice/sluice.yaml"
# shellcheck disable=SC2046
ok 'rpm upgrades all of them' rpm_ -U $(rpms second 1.1)
ok 'what the site changed in sluice.yaml stays' grep -qx 'cluster: prod' "$root/etc/sluice/sluice.yaml"
ok 'rpm finds all as it was installed, but for that file' diff <(echo '/etc/sluice/sluice.yaml') <(rpm_ -Va --nodeps 2>/dev/null | awk '{print $NF}')
ok 'rpm removes all of them' rpm_ -e sluice-client sluice-node sluice-owner sluice-slurm sluice-spank sluice-hook
# Directories that other packages bring on a node of rpm's, and that therefore are not ours to remove.
ok 'the changed file alone is left' diff <(printf '%s\n' ./etc/sluice ./etc/sluice/sluice.yaml.rpmsave) \
	<(comm -13 "$work/before" <(tree) | cut -d' ' -f1 | grep -vE '^\./(etc/slurm(/plugstack\.conf\.d)?|usr/share/(containers(/oci(/hooks\.d)?)?|doc|fish(/vendor_completions\.d)?|man(/man[158])?|modulefiles|zsh(/site-functions)?))$')

echo "packages: $failures failures"
[ "$failures" = 0 ]
