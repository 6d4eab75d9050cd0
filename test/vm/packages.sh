#!/bin/bash
# packages.sh SUITE LOG: from three machines of Debian 12 or 13, bookworm or trixie, to a job on a simulated GPU, with the packages and docs/admin.md alone; then an
# upgrade beside a job that computes, and removal. `test/vm.sh packages` runs it; packages-node.sh makes of each machine what a site
# has before Sluice: head runs slurmctld, node01 runs jobs and has no GPU, gpu01 has the simulated GPU and no Slurm. All that was
# typed and said is in LOG. A line of each check begins with @.
#
#	BUILD  what `make all cuda-programs` has filled; default build
#	NFPM   the program that writes packages
set -euo pipefail
repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(cd -- "${BUILD:-$repo/build}" && pwd)
suite=$1-slurm log=$2
most_commands=15 most_seconds=600
nodes=(head node01 gpu01)
work=$(mktemp -d)
pids=()
trap '[ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT

# shellcheck source=test/vm/lib.sh
. "$repo/test/vm/lib.sh"
say() { printf '%s\n' "$*" | tee -a "$log"; }
# within SECONDS COMMAND...: it has to succeed within that time.
within() {
	local end=$((SECONDS + $1))
	until "${@:2}" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 1
	done
}

# at NODE COMMAND: in that machine, as root. Its output and its status are this function's; 124 after five minutes. The clocks of
# emulated machines on a busy host go apart, and there is no NTP: each command brings the time along.
at() {
	local dir=$work/$1 n end=$((SECONDS + 300))
	n=$(($(cat "$dir/count" 2>/dev/null || echo 0) + 1))
	echo "$n" >"$dir/count"
	printf 'date -s @%s >/dev/null\n%s\n' "$EPOCHREALTIME" "$2" >"$dir/new"
	mv "$dir/new" "$dir/$n.sh"
	until [ -e "$dir/$n.rc" ]; do
		[ "$SECONDS" -lt "$end" ] || return 124
		sleep 0.1
	done
	cat "$dir/$n.out"
	return "$(cat "$dir/$n.rc")"
}
quiet() { at "$@" >/dev/null; }
# typed NODE USER COMMAND: what an administrator or a user types, into the log with its output, its time and its status.
typed() {
	local rc=0 began=${EPOCHREALTIME/./} what=$3
	printf '\n%s@%s%s %s\n' "$2" "$1" "$([ "$2" = root ] && echo '#' || echo '$')" "$what" | tee -a "$log"
	[ "$2" = root ] || what="su - $2 -c $(printf %q "$3")"
	at "$1" "$what" >"$work/said" || rc=$?
	# apt's progress, which it writes over itself on a terminal, is left out.
	tr -d '\r' <"$work/said" | sed '/^(Reading database /d' | tee -a "$log"
	local tenths=$(((${EPOCHREALTIME/./} - began + 50000) / 100000))
	say "[$((tenths / 10)).$((tenths % 10)) s, status $rc]"
	return "$rc"
}
# guide NODE USER COMMAND [STATUS]: typed, and counted. It has to end with that status, 0.
commands=0
guide() {
	local rc=0
	commands=$((commands + 1))
	typed "$1" "$2" "$3" || rc=$?
	[ "$rc" = "${4:-0}" ] || ok "it ends with status ${4:-0}" false
}
# files NODE: every file there with mode and owner, and those in /etc with a checksum; not what Debian's own programs keep of their doings.
files() {
	at "$1" 'find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /job -o -path /home/alice \
		-o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache/apt -o -path /var/log/apt -o -path /var/log/dpkg.log \
		-o -path /var/log/journal -o -path /var/log/slurm -o -path /var/log/munge -o -path "/var/spool/slurm*" -o -path /var/lib/systemd \
		-o -path /var/tmp -o -path /var/lib/munge \) -prune -o -printf "%p %y %m %U:%G %l\n"
		find /etc -type f -exec sha256sum {} + | sed "s/\(.*\)  \(.*\)/\2 \1/"' | sort
}

# --- packages: of the build, and of the same tree as a later version ---

SLUICE_BUILD=$build "$repo/bench/rawlog.py" gpu=simulated driver=none >"$log"
cp -a --no-preserve=timestamps "$build/bin" "$build/shim" "$build/spank" "$build/version" -t "$(mkdir "$work/later" && echo "$work/later")"
make -s -C "$repo" B="$work/later" VERSION=later go-bins
export NFPM
PACKAGE_VERSION=1.0 BUILD=$build "$repo/etc/packages/pack.sh" "$work/1.0"
# A later release whose sluice.yaml is another one: dpkg would ask which to take, and fails where nobody answers.
mkdir "$work/tree"
cp -a "$repo/etc" "$repo/prolog" "$repo/spank" "$repo/LICENSE" "$repo/CHANGELOG.md" "$work/tree/"
echo '# Said by a later release.' >>"$work/tree/etc/sluice.yaml"
SOURCE_DATE_EPOCH=$(git -C "$repo" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
PACKAGE_VERSION=1.1 BUILD=$work/later "$work/tree/etc/packages/pack.sh" "$work/1.1"

# --- three machines, with a network that is a hub in the first one's qemu ---

i=0
for n in "${nodes[@]}"; do
	i=$((i + 1))
	mkdir -p "$work/$n/simgpu" "$work/$n/1.0" "$work/$n/1.1"
	echo "$n 10.9.0.$i" >"$work/$n/name"
	cp "$repo/test/vm/packages-node.sh" "$work/$n/job.sh"
	cp -L "$build/simgpu/libcuda.so.1" "$build/simgpu/libnvidia-ml.so.1" "$build/test/twins.so" "$work/$n/simgpu/"
	cp "$build/test/cuda-${CUDA:-11.8}/steady" "$build/test/cuda-${CUDA:-11.8}/vecadd" "$work/$n/"
	for v in 1.0 1.1; do cp "$work/$v"/*.deb "$work/$n/$v/"; done
done
"$repo/test/vm.sh" root "$suite" >/dev/null
began=$SECONDS
machine() { # machine NODE MAC ARGUMENTS...
	"$repo/test/vm.sh" boot "$suite" "$work/$1" -smp 1 -m 1536 "${@:3}" -device "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:0$2" >"$work/$1/qemu" 2>&1 &
	pids+=($!)
}
machine head 1 -netdev hubport,id=n0,hubid=0 \
	-netdev "stream,id=s2,server=on,addr.type=unix,addr.path=$work/s2" -netdev hubport,id=h2,hubid=0,netdev=s2 \
	-netdev "stream,id=s3,server=on,addr.type=unix,addr.path=$work/s3" -netdev hubport,id=h3,hubid=0,netdev=s3
within 60 test -S "$work/s2" -a -S "$work/s3"
machine node01 2 -netdev "stream,id=n0,server=off,addr.type=unix,addr.path=$work/s2"
machine gpu01 3 -netdev "stream,id=n0,server=off,addr.type=unix,addr.path=$work/s3"
say "Three machines of Debian, emulated: one processor and 1.5 GiB each."
for n in "${nodes[@]}"; do
	within 300 test -e "$work/$n/ready" || { say "$n does not come up"; tail -n 20 "$work/$n/console" "$work/$n/log"; exit 1; }
done
# shellcheck disable=SC2016 # it is expanded there
say "Up after $((SECONDS - began)) s: $(at head '. /etc/os-release; echo "$PRETTY_NAME, Linux $(uname -r), $(systemctl --version | head -n1), $(scontrol --version)"')"
ok 'Slurm runs jobs before Sluice is there' within 60 quiet head 'su - alice -c "srun true"'
ok 'nothing of Sluice is there' test -z "$(for n in "${nodes[@]}"; do at "$n" 'dpkg -l | grep sluice; ls -d /etc/sluice /usr/lib/sluice 2>/dev/null'; done)"
for n in "${nodes[@]}"; do files "$n" >"$work/before.$n"; done

# packages NODE: those that the guide has for it; debs VERSION NODE: their files.
packages() { if [ "$1" = gpu01 ]; then echo sluice-client sluice-node sluice-owner; else echo sluice-client sluice-node sluice-slurm sluice-spank; fi; }
debs() { local p out=''; for p in $(packages "$2"); do out+=" $1/${p}_*.deb"; done; echo "${out# }"; }

# --- docs/admin.md, "From nothing to the first job" ---

say '' && say '--- From nothing to the first job ---'
say 'The packages have been made by make packages and copied to each machine, to the folder 1.0 of its administrator; later ones are in 1.1. Times are in emulation, without the typing.'
began=$SECONDS
clock=$(at head 'cut -d. -f1 /proc/uptime')
setup='sluice setup --cluster prod --controllers head --owners gpu01'
guide gpu01 root "dpkg -i $(debs 1.0 gpu01)"
guide gpu01 root "$setup"
guide head root "dpkg -i $(debs 1.0 head)"
guide head root "$setup"
guide head root 'sluice slurm setup'
guide node01 root "dpkg -i $(debs 1.0 node01)"
guide node01 root "$setup"
guide node01 root 'sluice slurm setup'
guide head root 'systemctl restart slurmctld'
guide node01 root 'systemctl restart slurmd'
guide head root 'sluice slurm check' 1 # there is no slurmdbd, which is a warning
guide node01 root 'sluice slurm check' 1
guide head alice 'srun --gres=rgpu:50 ./vecadd'
took=$((SECONDS - began))
say ''
ok 'the job has computed on the GPU' grep -qx PASS "$work/said"
say "@ $commands commands, $took s from the first to the end of the first job; by the clock of head $(($(at head 'cut -d. -f1 /proc/uptime') - clock)) s"
ok "at most $most_commands commands" test "$commands" -le "$most_commands"
ok "at most $most_seconds s" test "$took" -le "$most_seconds"

# --- an upgrade, beside a job that computes ---

say '' && say '--- Upgrade while a job computes ---'
at head 'cat >/home/alice/long.sh <<-"SH"
	#!/bin/bash
	#SBATCH --gres=rgpu:50 --output=long.out
	./steady 100 & # a sum on the GPU, checked, ten times a second
	until [ -e stop ]; do sleep 1; done
	kill -TERM $!
	wait $!
	SH
	chown alice: /home/alice/long.sh'
typed head alice 'sbatch long.sh' || true
job=$(sed -n 's/^Submitted batch job //p' "$work/said")
ok 'its program computes' within 90 quiet node01 'grep -q "steady: 1 devices" /home/alice/long.out'
typed gpu01 root 'sluice list --sessions' || true
session=$(at gpu01 'pgrep -u alice -f sluice-worker' | tr '\n' ' ')
version=$(at gpu01 'sluice version | head -n1')
for n in gpu01 head node01; do
	typed "$n" root "dpkg -i --force-confold $(debs 1.1 "$n")" || ok 'the upgrade succeeds' false
done
for n in "${nodes[@]}"; do
	# shellcheck disable=SC2016
	ok "$n: the daemon is content, and is the new one" within 60 quiet "$n" 'sluice health; [ $? -le 1 ] && [ "$(readlink /proc/$(systemctl show -P MainPID sluiced)/exe)" = /usr/sbin/sluiced ]'
done
say "before: $version; now: $(at gpu01 'sluice version | head -n1')"
typed gpu01 root 'sluice list --sessions' || true
ok 'the session goes on with the old worker' quiet gpu01 "readlink /proc/${session% }/exe | grep deleted"
ok 'it is the one that was there' test -n "$session" -a "$session" = "$(at gpu01 'pgrep -u alice -f sluice-worker' | tr '\n' ' ')"
quiet node01 'touch /home/alice/stop'
ok 'the job ends, with success' within 90 quiet head "scontrol show job $job | grep -q 'JobState=COMPLETED' && scontrol show job $job | grep -q 'ExitCode=0:0'"
typed node01 root 'cat /home/alice/long.out' || true
ok 'its program has noticed nothing, and every sum was right' grep -qx PASS "$work/said"
typed head alice 'srun --gres=rgpu:50 ./vecadd' || true
ok 'the next job computes too' grep -qx PASS "$work/said"

# --- removal ---

say '' && say '--- Removal ---'
# gone PACKAGE NODE: it, and the plug-in where it is, which depends on no other.
gone() { if [ "$2" = gpu01 ]; then echo "$1"; else echo "$1 sluice-spank"; fi; }
typed head root 'apt-get -y remove sluice-slurm' && ok 'sluice-slurm stays while slurm.conf names its scripts' false
for n in head node01; do typed "$n" root 'sluice slurm setup --remove' || ok 'it is taken away' false; done
typed head root 'systemctl restart slurmctld' || true
typed node01 root 'systemctl restart slurmd' || true
for n in "${nodes[@]}"; do
	typed "$n" root "apt-get -y remove $(gone sluice-client "$n")" || ok 'apt removes all' false
	files "$n" >"$work/removed.$n"
	say '' && say "What is on $n besides what was before the installation:"
	comm -13 "$work/before.$n" "$work/removed.$n" | grep -v '^/etc/.* [0-9a-f]\{64\}$' | tee -a "$log" || true
	ok "$n: nothing is missing or changed" test -z "$(comm -23 "$work/before.$n" "$work/removed.$n" | tee -a "$log")"
	ok "$n: only conffiles, ledgers and logs are left" test -z "$(comm -13 "$work/before.$n" "$work/removed.$n" | cut -d' ' -f1 |
		grep -vE '^/etc/sluice(/sluice\.yaml(\.dpkg-dist)?)?$|^/etc/slurm/plugstack\.conf\.d/sluice\.conf$|^/var/(lib|log)/sluice(/|$)' | tee -a "$log")"
done
for n in "${nodes[@]}"; do
	typed "$n" root "apt-get -y purge $(gone sluice-node "$n")" || ok 'apt purges all' false
	files "$n" >"$work/purged.$n"
	ok "$n: after the purge all files are as before the installation" diff "$work/before.$n" "$work/purged.$n"
	ok "$n: no unit, process, socket or cgroup of Sluice is left" test -z "$(at "$n" 'systemctl list-units --all --no-legend "sluice*"; pgrep -a sluice
		find /run -path /run/systemd -prune -o -name "*sluice*" -print; ls -d /run/cdi 2>/dev/null; find /sys/fs/cgroup -name "*sluice*"' | tee -a "$log")"
done
ok 'Slurm runs jobs as before' within 60 quiet head 'su - alice -c "srun true"'
say "@ $failures failures, $SECONDS s in all"
exit "$((failures > 0))"
