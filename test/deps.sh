#!/bin/bash
# deps.sh: see that everything the build and the tests call is there; on Debian, as root, install
# what is not. Says nothing and takes no time when nothing is missing.
set -euo pipefail

missing=()
need() { # need COMMAND PACKAGE
	command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}

need gcc gcc
need g++ g++
need ld binutils
need make make
need git git
need shellcheck shellcheck
need curl curl
need dpkg-deb dpkg
need xz xz-utils
need flock util-linux
need ps procps
need ip iproute2
need python3 python3
need munged munge
need slurmctld slurmctld
need slurmd slurmd
need slurmdbd slurmdbd
need sbatch slurm-client
need mariadbd mariadb-server
need lua5.3 lua5.3
need lua5.1 lua5.1
need jq jq
need rpm rpm
need debootstrap debootstrap
need runc runc
need crun crun
need podman podman
need newuidmap uidmap
need ch-run charliecloud-runtime # the whole one would bring docker, as a service
need patchelf patchelf
[ -e /lib/ld-musl-x86_64.so.1 ] || missing+=(musl)
[ -e /usr/include/slurm/spank.h ] || missing+=(libslurm-dev)
slurm_plugins=/usr/lib/$(gcc -print-multiarch 2>/dev/null || true)/slurm-wlm
[ -e "$slurm_plugins/job_submit_lua.so" ] || missing+=(slurm-wlm-basic-plugins)
[ -e "$slurm_plugins/accounting_storage_mysql.so" ] || missing+=(slurm-wlm-mysql-plugin)
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
[ -e "/lib/$(gcc -print-multiarch 2>/dev/null || true)/libdevmapper.so.1.02.1" ] || missing+=(libdevmapper1.02.1) # dockerd's
# gcc 12 brings both sanitizers' runtimes; a bare compiler without libgcc's has neither.
[ -e "$(gcc -print-file-name=libasan.so 2>/dev/null || echo /nowhere)" ] || missing+=(libgcc-12-dev)

# Go: any release from 1.21 on fetches the toolchain that go.mod names.
go_ok() {
	local minor
	minor=$(cd / && GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
	[ "${minor:-0}" -ge 21 ]
}
go_ok || missing+=(golang-backports)

[ ${#missing[@]} -gt 0 ] || exit 0

echo "deps: missing: ${missing[*]}" >&2
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
	echo "deps: cannot install them: this needs Debian or Ubuntu, and root" >&2
	exit 1
fi

packages=()
backports=
for p in "${missing[@]}"; do
	if [ "$p" = golang-backports ]; then backports=1; else packages+=("$p"); fi
done
export DEBIAN_FRONTEND=noninteractive
# Slurm, munge and the database are run by the tests, in folders of their own: installing them starts nothing here.
# Docker is run by them as well, from where oci-hook/test/docker.sh unpacks it: other dockers stay as they are.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
	trap 'rm -f "$policy"' EXIT
fi
apt-get -q update
[ ${#packages[@]} -eq 0 ] || apt-get -q install -y --no-install-recommends "${packages[@]}"
if [ -n "$backports" ]; then
	# Debian 12's own Go is 1.19. Its backports are not enabled by default, and what they have changes.
	newest() { apt-cache search --names-only '^golang-1\.[0-9]*-go$' | sed -n 's/^golang-1\.\([0-9]*\)-go .*/\1/p' | sort -n | tail -n 1; }
	minor=$(newest)
	if [ "${minor:-0}" -lt 21 ]; then
		echo 'deb http://deb.debian.org/debian bookworm-backports main' >/etc/apt/sources.list.d/bookworm-backports.list
		apt-get -q update
		minor=$(newest)
	fi
	apt-get -q install -y --no-install-recommends "golang-1.$minor-go"
	ln -sfn "/usr/lib/go-1.$minor/bin/go" /usr/local/bin/go
	ln -sfn "/usr/lib/go-1.$minor/bin/gofmt" /usr/local/bin/gofmt
fi
