#!/bin/bash
# vm.sh: Debian under its own kernel, with systemd as process 1 and cgroup v2, in an emulated machine. For what
# neither a container nor the machine of the tests can show. It needs no network but for its first call.
#
#	vm.sh root SUITE             make the root of bookworm (systemd 252) or trixie (systemd 257), and print its path;
#	                             bookworm-slurm and trixie-slurm have Debian's Slurm and a user, alice, besides;
#	                             bookworm-selinux enforces Debian's SELinux policy, and has alice; bookworm-rdma has
#	                             libibverbs and the kernel's software device for RDMA, rdma_rxe
#	vm.sh run SUITE FOLDER [S]   boot it with FOLDER at /job, run FOLDER/job.sh there as root, and print its output;
#	                             the exit status is the script's, or 124 after S seconds (180)
#	vm.sh boot SUITE FOLDER ARGUMENTS   the same, with further ARGUMENTS of qemu and without a limit: for several machines
#	                             beside each other. What it says is in FOLDER/log and FOLDER/console
#	vm.sh units LOG              test/vm/units.sh: the shipped units on $SUITES (both); what they said into LOG.SUITE
#	vm.sh clocks LOG             test/vm/clocks.sh: sessions whose machine is suspended, or whose clock is set; likewise
#	vm.sh selinux LOG            test/vm/selinux.sh: packages and programs under SELinux in force, Debian 12 alone; likewise
#	vm.sh packages LOG           test/vm/packages.sh: three machines, from the packages to the first job, upgrade and removal; likewise
#	vm.sh rdma LOG               test/vm/rdma.sh: tests of the verbs, programs and faults over RDMA in one machine, Debian 12 alone. With
#	                             SLUICE_FAULTS faults of each kind (5); RDMA=off goes over TCP, to see what comes from the machine itself.
#	                             PARTS='tests programs faults' may be some of these, SANDBOX is the worker's (off). The tests are the executables build/test/verbs/test_*
#	vm.sh rdma2 LOG              the same with the worker in one machine and the programs in another
#
# As root, on Debian 12, with the packages qemu-system-x86, mmdebstrap, kmod, cpio, zstd and busybox-static.
# Roots are kept in $SLUICE_CACHE/vm, or build/cache/vm. What the guest writes to its disk is lost.
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SLUICE_CACHE:-$repo/build/cache}/vm
mirror=${SLUICE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
recipe=2 # raise it when what is built below changes

die() { echo "vm: $*" >&2; exit 2; }

for c in qemu-system-x86_64 mmdebstrap depmod cpio zstd busybox mkfs.ext4; do
	command -v "$c" >/dev/null || die "$c is missing; apt-get install qemu-system-x86 mmdebstrap kmod cpio zstd busybox-static e2fsprogs"
done
[ "$(id -u)" = 0 ] || die 'a root of Debian can only be made by root'

# kernel FOLDER MODULE...: vmlinuz, the modules and an initrd that mounts /dev/vda, in FOLDER. Both suites boot bookworm's. The initrd loads
# the modules that every machine needs, and those that are named; a root has none of its own.
kernel() {
	local dir=$1 package version m
	# shellcheck source=test/debian-apt.sh
	. "$repo/test/debian-apt.sh"
	debian_apt "$dir/apt" bookworm main
	package=$(APT_CONFIG=$dir/apt/apt.conf apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*-amd64\)$/\1/p' | head -n1)
	(cd "$dir" && APT_CONFIG=$dir/apt/apt.conf apt-get -q download "$package" >&2)
	dpkg-deb -x "$dir/$package"_*.deb "$dir/x"
	version=${package#linux-image-}
	mv "$dir/x/boot/vmlinuz-$version" "$dir/vmlinuz"
	depmod -b "$dir/x" "$version"
	mkdir -p "$dir/init/bin" "$dir/init/dev" "$dir/init/proc" "$dir/init/sys" "$dir/init/sysroot" "$dir/modules/lib/modules/$version"
	for m in virtio_pci virtio_blk virtio_console virtio_net ext4 crc32c_generic 9p 9pnet_virtio autofs4 ip_tables x_tables "${@:2}"; do
		modprobe -d "$dir/x" -S "$version" --show-depends "$m" | sed -n 's/^insmod //p'
	done | awk '!seen[$1]++ {print $1}' | while read -r m; do
		cp "$m" "$dir/init/"
		basename "$m" >>"$dir/init/modules"
	done
	cp "$(command -v busybox)" "$dir/init/bin/busybox"
	ln -s busybox "$dir/init/bin/sh"
	cat >"$dir/init/init" <<-'INIT'
		#!/bin/sh
		b=/bin/busybox
		$b mount -t devtmpfs dev /dev
		$b mount -t proc proc /proc
		$b mount -t sysfs sys /sys
		for m in $($b cat /modules); do $b insmod "/$m"; done
		until [ -b /dev/vda ]; do $b sleep 0.1; done
		$b mount -t ext4 -o rw /dev/vda /sysroot
		for d in dev proc sys; do $b mount --move /$d /sysroot/$d; done
		exec $b switch_root /sysroot /sbin/init
	INIT
	chmod 755 "$dir/init/init"
	(cd "$dir/init" && find . | cpio -o -H newc --quiet | zstd -q -1) >"$dir/initrd"
	rm -rf "$dir/x" "$dir/init" "$dir/apt" "$dir"/*.deb
}

# configure ROOT: no login, no timer, and a unit that runs the job and switches off.
configure() {
	local etc=$1/etc u
	echo vm >"$etc/hostname"
	printf '127.0.0.1 localhost\n127.0.1.1 vm\n' >"$etc/hosts"
	: >"$etc/fstab"
	mkdir -p "$1/job" "$etc/systemd/system/multi-user.target.wants"
	for u in serial-getty@ttyS0.service getty@tty1.service getty.target apt-daily.timer apt-daily-upgrade.timer \
		dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer dev-hugepages.mount \
		proc-sys-fs-binfmt_misc.automount systemd-binfmt.service systemd-networkd-wait-online.service; do
		ln -sf /dev/null "$etc/systemd/system/$u"
	done
	cat >"$etc/systemd/system/vmjob.service" <<-'UNIT'
		[Unit]
		After=multi-user.target munge.service
		[Service]
		Type=simple
		StandardOutput=file:/dev/hvc0
		StandardError=file:/dev/hvc0
		ExecStart=/bin/bash -c 'mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 job /job && cd /job && bash ./job.sh; echo "@@ status $?"; sync; systemctl poweroff -ff'
	UNIT
	mkdir -p "$etc/systemd/system/graphical.target.wants"
	ln -sf ../vmjob.service "$etc/systemd/system/graphical.target.wants/vmjob.service"
}

# users ROOT: alice, and no service of Slurm's: which machine has which is said when it has been booted.
users() {
	chroot "$1" useradd -m -s /bin/bash alice
	rm -f "$1"/etc/systemd/system/multi-user.target.wants/slurm*.service
}

# selinux ROOT FOLDER: the policy in force from the start, and the labels of all files, which mkfs takes along. FOLDER gets the kernel's
# arguments. /etc/selinux/with is the policy with the module of etc/selinux, which semodule would need a quarter of an hour for in emulation.
# Debian 12's spamassassin module keeps its policy from being linked a second time.
selinux() {
	mkdir "$1/sluice-module"
	cp "$repo"/etc/selinux/sluice.* "$1/sluice-module/"
	cat >"$1/sluice-module/install" <<-'INSTALL'
		set -e
		mount -t proc proc /proc # setfiles opens files by their descriptors there
		sed -i 's/^SELINUX=.*/SELINUX=enforcing/' /etc/selinux/config
		cd /sluice-module
		make -f /usr/share/selinux/devel/Makefile sluice.pp
		cp -a /etc/selinux/default /etc/selinux/plain
		semodule -n -X 100 -r spamassassin -X 400 -i sluice.pp
		mv /etc/selinux/default /etc/selinux/with
		mv /etc/selinux/plain /etc/selinux/default
		setfiles -F -e /proc /etc/selinux/default/contexts/files/file_contexts /
	INSTALL
	unshare -m --propagation private chroot "$1" sh /sluice-module/install >&2
	rm -r "$1/sluice-module"
	echo 'security=selinux selinux=1 enforcing=1' >"$2/cmdline"
	# What the job is in has no labels, and nobody may mount it. The policy that is tested is in force when the job begins.
	sed -i "s|mount -t 9p -o |setenforce 0; &context=system_u:object_r:usr_t:s0,|; s|job /job &&|job /job; setenforce 1;|" "$1/etc/systemd/system/vmjob.service"
}

# kernel_of SUITE: the folder of its kernel. Others need none of what RDMA needs, and keep theirs.
kernel_of() { echo "$cache/kernel-$recipe$([ "${1%-rdma}" = "$1" ] || echo -rdma)"; }

root() {
	local suite=$1 dir=$cache/$1-$recipe work debian=$1 kernel modules=()
	kernel=$(kernel_of "$1")
	[ "$suite" = "${suite%-selinux}" ] || dir+=-$(cat "$repo"/etc/selinux/* | sha256sum | cut -c1-8)
	local packages=systemd,systemd-sysv,kmod,iproute2,munge,dbus,procps,python3-minimal
	case $suite in
	bookworm | trixie) ;;
	bookworm-slurm | trixie-slurm) debian=${1%-*} packages+=,slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins ;;
	bookworm-selinux) debian=${1%-*} packages+=,selinux-policy-default,selinux-policy-dev,policycoreutils-python-utils,auditd ;;
	bookworm-rdma) debian=${1%-*} packages+=,ibverbs-providers,ibverbs-utils modules=(rdma_rxe ib_uverbs dummy crc32_generic) ;;
	*) die "suite '$suite' is not known; ask for bookworm or trixie, either with -slurm, or bookworm-selinux or bookworm-rdma" ;;
	esac
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock 9
	work=$(mktemp -d "$cache/new.XXXXXX")
	# shellcheck disable=SC2064 # the variable is gone when the script ends by an error
	trap "rm -rf --one-file-system '$work'" EXIT
	if [ ! -e "$kernel/initrd" ]; then
		mkdir "$work/kernel"
		kernel "$work/kernel" "${modules[@]}"
		rm -rf "$kernel"
		mv "$work/kernel" "$kernel"
	fi
	if [ ! -e "$dir/root.img" ]; then
		mkdir "$work/$suite"
		mmdebstrap --quiet --variant=minbase --include="$packages" "$debian" "$work/root.tar" "$mirror" >&2
		mkdir "$work/root"
		tar -C "$work/root" -xf "$work/root.tar"
		configure "$work/root"
		[ "$suite" = "$debian" ] || users "$work/root"
		[ "$suite" = "${suite%-selinux}" ] || selinux "$work/root" "$work/$suite"
		truncate -s 4G "$work/$suite/root.img"
		mkfs.ext4 -q -F -O ^has_journal -E lazy_itable_init=1 -d "$work/root" "$work/$suite/root.img"
		rm -rf "$dir"
		mv "$work/$suite" "$dir"
	fi
	exec 9>&-
	rm -rf --one-file-system "$work"
	trap - EXIT
	echo "$dir"
}

# machine SUITE ROOT FOLDER OUT: the command line of a machine, in the array of that name.
# KVM is not tried: a host may offer a /dev/kvm on which no guest of Debian's boots.
machine() {
	local more='' kernel
	kernel=$(kernel_of "$1")
	shift
	[ ! -e "$1/cmdline" ] || more=" $(cat "$1/cmdline")"
	machine=(qemu-system-x86_64 -M q35 -accel 'tcg,thread=multi' -cpu max
		-nodefaults -no-user-config -display none -no-reboot
		-kernel "$kernel/vmlinuz" -initrd "$kernel/initrd"
		-append 'quiet no_timer_check root=/dev/vda rw mitigations=off console=ttyS0'"$more"
		-drive "if=none,id=d0,file=$1/root.img,format=raw,snapshot=on" -device 'virtio-blk-pci,drive=d0'
		-device virtio-serial-pci -chardev "file,id=c0,path=$3/log" -device 'virtconsole,chardev=c0'
		-chardev "file,id=s0,path=$3/console" -serial chardev:s0
		-fsdev "local,id=f0,path=$2,security_model=none" -device 'virtio-9p-pci,fsdev=f0,mount_tag=job'
		-device virtio-rng-pci)
}

boot() {
	local dir job
	job=$(cd -- "$2" && pwd)
	dir=$(root "$1")
	machine "$1" "$dir" "$job" "$job"
	exec "${machine[@]}" "${@:3}"
}

run() {
	local suite=$1 job limit=${3:-180} dir out status
	job=$(cd -- "$2" && pwd)
	dir=$(root "$suite")
	out=$(mktemp -d)
	machine "$suite" "$dir" "$job" "$out"
	timeout -k 5 "$limit" "${machine[@]}" -smp 2 -m 768 >&2 || { tail -n 20 "$out/console" >&2; cat "$out/log"; rm -rf "$out"; exit 124; }
	status=$(tr -d '\r' <"$out/log" | sed -n 's/^@@ status //p')
	tr -d '\r' <"$out/log" | grep -v '^@@ status ' || true
	[ -n "$status" ] || tail -n 20 "$out/console" >&2
	rm -rf "$out"
	exit "${status:-124}"
}

# told LOG NAME COMMAND...: the command, with what it says in LOG.NAME below the line of raw logs, and its lines that begin with @.
told() {
	local began=$SECONDS rc=0
	"$repo/bench/rawlog.py" gpu=simulated driver=none >"$1.$2"
	("${@:3}") >>"$1.$2" 2>&1 || rc=$?
	grep '^@' "$1.$2" || true
	echo "vm: $2: status $rc after $((SECONDS - began)) s, all of it in $1.$2"
	return "$rc"
}

# job NAME LOG SECONDS [KIND]: test/vm/NAME.sh and what of the build it needs, on both suites one after the other, or on the roots of that kind.
job() {
	local job build=$repo/build f suite failed=0
	job=$(mktemp -d)
	for f in bin/sluiced bin/sluice bin/sluice-worker bin/relay simgpu/libcuda.so.1 simgpu/libnvidia-ml.so.1 test/twins.so \
		shim/libcuda.so.1 shim/libnvidia-ml.so.1 "test/cuda-${CUDA:-11.8}/steady" "test/cuda-${CUDA:-11.8}/vecadd"; do
		[ -e "$build/$f" ] || die "$build/$f is missing; make all cuda-programs"
		mkdir -p "$job/$(dirname "$f")"
		cp -L "$build/$f" "$job/$f"
	done
	mv "$job/test/cuda-${CUDA:-11.8}"/* "$job/"
	cp "$repo"/etc/*.service "$job/"
	cp "$repo/test/vm/lib.sh" "$job/"
	cp "$repo/test/vm/$1.sh" "$job/job.sh"
	if [ "$1" = selinux ]; then
		COMPRESSION=none BUILD=$build "$repo/etc/packages/pack.sh" "$job/debs" >&2
		rm -f "$job"/debs/*.rpm "$job"/debs/sluice-s*
	fi
	for suite in ${SUITES:-bookworm trixie}; do
		told "$2" "$suite" run "$suite${4-}" "$job" "$3" || failed=1
	done
	rm -rf "$job"
	exit "$failed"
}

# rdma_folder FOLDER ROLE: what test/vm/rdma.sh needs there: worker, simulated driver, shim, and the programs that test/e2e runs, with
# what each has to print.
rdma_folder() {
	local build=$repo/build cuda list=$repo/test/e2e/programs_test.go f separate
	cuda=$build/test/cuda-${CUDA:-11.8}
	mkdir -p "$1"/{bin,simgpu,shim,test,cuda,tests}
	separate=$(sed -n 's/^const separate = "\(.*\)"$/\1/p' "$list")
	sed -n '/^var programs/,/^}$/ {
		s/want: separate}/want: "'"${separate//\\/\\\\}"'"}/
		s/^\t{name: "\([^"]*\)",\( args: \[\]string{\([^}]*\)},\)\? want: "\(.*\)"},$/\1|\3|\4/
		T
		s/", "/ /g
		s/"//g
		p
	}' "$list" >"$1/programs"
	[ "$(wc -l <"$1/programs")" = "$(grep -c '^	{name: ' "$list")" ] || die "$list has programs that are not understood here"
	for f in "$build"/bin/sluice-worker "$build"/simgpu/lib{cuda,nvidia-ml}.so.1 "$build"/shim/lib{cuda,nvidia-ml}.so.1 "$build"/test/{twins.so,nvml,bulk,copies} \
		"$cuda"/libtwo{1,2}.so $(cut -d'|' -f1 "$1/programs" | sort -u | sed "s|^|$cuda/|") "$cuda"/{paused,bigcopy}; do
		[ -e "$f" ] || die "$f is missing; make all cuda-programs"
		case $f in
		"$cuda"/*) cp -L "$f" "$1/cuda/" ;;
		*) cp -L "$f" "$1/$(basename "$(dirname "$f")")/" ;;
		esac
	done
	for f in "$build"/test/verbs/test_*; do
		[ ! -x "$f" ] || cp "$f" "$1/tests/"
	done
	echo "$2" >"$1/role"
	echo "RDMA=${RDMA:-on} PARTS='${PARTS:-tests programs faults}' SANDBOX=${SANDBOX:-off} SLUICE_FAULTS=${SLUICE_FAULTS:-5}" >"$1/settings"
	cp "$repo/test/vm/lib.sh" "$1/"
	cp "$repo/test/vm/rdma.sh" "$1/job.sh"
}

# rdma2 FOLDER SECONDS: two machines, with a folder that both have and a network between them; what the second one says, then the first one.
rdma2() {
	local end=$((SECONDS + $2)) n=0 role pids=() status
	root bookworm-rdma >/dev/null
	mkdir "$1/both"
	for role in owner client; do
		rdma_folder "$1/$role" "$role"
		n=$((n + 1))
		(boot bookworm-rdma "$1/$role" -smp 2 -m 768 -fsdev "local,id=f1,path=$1/both,security_model=none" -device virtio-9p-pci,fsdev=f1,mount_tag=both \
			-netdev "stream,id=n0,server=$([ "$role" = owner ] && echo on || echo off),addr.type=unix,addr.path=$1/s" \
			-device "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:0$n,host_mtu=4200") &
		pids+=($!)
		until [ -S "$1/s" ]; do sleep 0.2; done
	done
	while kill -0 "${pids[1]}" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do sleep 0.5; done
	touch "$1/both/stop"
	for n in {1..40}; do
		kill -0 "${pids[0]}" 2>/dev/null || break
		sleep 0.5
	done
	kill "${pids[@]}" 2>/dev/null || true
	wait || true
	status=$(tr -d '\r' <"$1/client/log" | sed -n 's/^@@ status //p')
	for role in client owner; do
		printf '\n--- %s\n' "$role"
		tr -d '\r' <"$1/$role/log" | grep -v '^@@ status ' || true
		grep -q '^@@ status ' "$1/$role/log" || tail -n 20 "$1/$role/console"
	done
	return "${status:-124}"
}

# rdma KIND LOG: in one machine, or in two.
rdma() {
	local job rc=0
	job=$(mktemp -d)
	if [ "$1" = rdma2 ]; then
		told "$2" bookworm rdma2 "$job" 3000 || rc=1
	else
		rdma_folder "$job" one
		told "$2" bookworm run bookworm-rdma "$job" 5400 || rc=1
	fi
	rm -rf "$job"
	exit "$rc"
}

case ${1:-} in
root) [ $# = 2 ] || die 'usage: vm.sh root SUITE'; root "$2" ;;
run) [ $# = 3 ] || [ $# = 4 ] || die 'usage: vm.sh run SUITE FOLDER [SECONDS]'; run "$2" "$3" "${4:-}" ;;
boot) [ $# -ge 3 ] || die 'usage: vm.sh boot SUITE FOLDER ARGUMENTS'; boot "${@:2}" ;;
units) [ $# = 2 ] || die 'usage: vm.sh units LOG'; job units "$2" 900 ;;
clocks) [ $# = 2 ] || die 'usage: vm.sh clocks LOG'; job clocks "$2" 400 ;;
selinux) [ $# = 2 ] || die 'usage: vm.sh selinux LOG'; SUITES=bookworm job selinux "$2" 1500 -selinux ;;
rdma | rdma2) [ $# = 2 ] || die "usage: vm.sh $1 LOG"; rdma "$1" "$2" ;;
packages)
	[ $# = 2 ] || die 'usage: vm.sh packages LOG'
	failed=0
	for suite in ${SUITES:-bookworm trixie}; do "$repo/test/vm/packages.sh" "$suite" "$2.$suite" || failed=1; done
	exit "$failed"
	;;
*) die 'usage: vm.sh root SUITE | run SUITE FOLDER [SECONDS] | boot SUITE FOLDER ARGUMENTS | units LOG | clocks LOG | selinux LOG | packages LOG | rdma LOG | rdma2 LOG' ;;
esac
