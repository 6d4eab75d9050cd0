# A Slurm of one node on a machine that has none: Debian 12's packages, unpacked into
# a folder and run from there. Nothing is installed, no service is touched and no
# account is made. Sourced by bash after gpu-lib.sh, never run.
# shellcheck shell=bash

# shellcheck source-path=SCRIPTDIR source=../test/debian-apt.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../test/debian-apt.sh"

declare -A STARTED # gpu-lib.sh's

# What the daemons, the commands and the plug-ins used here are linked with, but for
# the C library, of which the machine needs 2.36 or newer.
SLURM_PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2
	liblua5.1-0 libhwloc15 libudev1 libnuma1 liblz4-1 libpam0g libaudit1 libcap-ng0 libgcrypt20
	libgpg-error0 libreadline8 libtinfo6 libbz2-1.0 zlib1g)
SLURM_TOOLS=(sbin/slurmctld-wlm sbin/slurmd-wlm sbin/slurmstepd-wlm sbin/munged bin/munge bin/unmunge
	bin/sbatch bin/srun bin/salloc bin/squeue bin/sinfo bin/scontrol bin/scancel)

# slurm_fetch DIR: the packages. On Debian or Ubuntu, with a network.
slurm_fetch() {
	local apt=$SCRATCH/apt
	mkdir -p "$1"
	debian_apt "$apt" bookworm main || return 1
	export APT_CONFIG=$apt/apt.conf
	# A package's epoch is a %3a in its file's name, which not every way to carry it takes.
	if ! (cd "$1" && rm -f -- *.deb && apt-get -q download "${SLURM_PACKAGES[@]}" &&
		for f in *%3a*; do mv -- "$f" "${f/\%3a/.}"; done) >>"$apt/log" 2>&1; then
		tail -n 5 "$apt/log" >&2
		echo "the packages of Slurm could not be downloaded" >&2
		return 1
	fi
	du -sh "$1"
}

# slurm_unpack PACKAGES INTO: leaves the folder of the commands in SLURM_BIN. Each command is
# started by the loader, which is told where its libraries are: an LD_LIBRARY_PATH would go
# on from sbatch and srun into the jobs. PACKAGES may be "installed": then it is the machine's.
slurm_unpack() {
	local deb tool name lib=x86_64-linux-gnu
	SLURM_ROOT=$2/root SLURM_BIN=$2/bin
	mkdir -p "$SLURM_ROOT" "$SLURM_BIN"
	if [ "$1" = installed ]; then
		for tool in "${SLURM_TOOLS[@]}"; do
			name=${tool##*/}
			ln -s "/usr/${tool%-wlm}" "$SLURM_BIN/${name%-wlm}"
		done
		SLURM_PLUGINS=$(ldd /usr/bin/scontrol | sed -n 's|.* \(/.*\)/libslurmfull.so .*|\1|p')
		[ -n "$SLURM_PLUGINS" ]
		return
	fi
	for deb in "$1"/*.deb; do
		dpkg-deb -x "$deb" "$SLURM_ROOT" || return 1
	done
	SLURM_PLUGINS=$SLURM_ROOT/usr/lib/$lib/slurm-wlm
	for tool in "${SLURM_TOOLS[@]}"; do
		name=${tool##*/}
		name=${name%-wlm}
		[ -x "$SLURM_ROOT/usr/$tool" ] || {
			echo "$1 has no $tool; run bench/gpu-slurm.sh --fetch $1 where there is apt" >&2
			return 1
		}
		cat >"$SLURM_BIN/$name" <<-SH
			#!/bin/sh
			exec /lib64/ld-linux-x86-64.so.2 --argv0 $name --library-path $SLURM_PLUGINS:$SLURM_ROOT/usr/lib/$lib:$SLURM_ROOT/lib/$lib $SLURM_ROOT/usr/$tool "\$@"
		SH
		chmod 755 "$SLURM_BIN/$name"
	done
}

# slurm_resolvable: Slurm looks its host's name up, and a bare container's may be unknown.
slurm_resolvable() { getent hosts "$(hostname -s)" >/dev/null 2>&1; }

# slurm_configure DIR NODE GRES LINES: a key for munge, slurm.conf and an empty plugstack.conf in
# DIR. LINES is what else slurm.conf is to say, GRES what the line of the node is.
slurm_configure() {
	local dir=$1 node=$2 gres=$3 lines=$4 host
	host=$(hostname -s)
	SLURM_DIR=$dir SLURM_NODE=$node
	export SLURM_CONF=$dir/slurm.conf
	install -d -m 0755 "$dir" "$dir/run" "$dir/spool" "$dir/log"
	install -d -m 0700 "$dir/state" "$dir/munge"
	(umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
	: >"$dir/plugstack.conf"
	# 127.0.0.1 alone, and no cgroups: the machine may let nobody make any.
	echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"
	cat >"$SLURM_CONF" <<-CONF
		ClusterName=bench
		SlurmctldHost=$host(127.0.0.1)
		CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
		SlurmctldPort=$(free_port)
		SlurmUser=root
		AuthInfo=socket=$dir/run/munge.sock
		PluginDir=$SLURM_PLUGINS
		PlugStackConfig=$dir/plugstack.conf
		StateSaveLocation=$dir/state
		SlurmdSpoolDir=$dir/spool
		SlurmctldPidFile=$dir/run/slurmctld.pid
		SlurmdPidFile=$dir/run/slurmd.pid
		SlurmctldLogFile=$dir/log/slurmctld.log
		SlurmdLogFile=$dir/log/slurmd.log
		ProctrackType=proctrack/linuxproc
		TaskPlugin=task/none
		MpiDefault=none
		JobAcctGatherType=jobacct_gather/linux
		SelectType=select/cons_tres
		SelectTypeParameters=CR_Core
		SchedulerParameters=bf_interval=2,sched_interval=2
		SlurmdParameters=config_overrides
		ReturnToService=2
		NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=16 RealMemory=4000 $gres
		PartitionName=main Nodes=$node Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
		$lines
	CONF
}

# slurm_munge: munged, which sluiced needs as well.
slurm_munge() {
	"$SLURM_BIN/munged" --foreground --force --socket="$SLURM_DIR/run/munge.sock" --key-file="$SLURM_DIR/munge/key" \
		--pid-file="$SLURM_DIR/run/munged.pid" --log-file="$SLURM_DIR/log/munged.log" \
		--seed-file="$SLURM_DIR/munge/seed" >"$SLURM_DIR/log/munged.out" 2>&1 &
	STARTED[munged]=$!
	wait_for 20 "${STARTED[munged]}" test -S "$SLURM_DIR/run/munge.sock"
}

# slurm_start: slurmctld and slurmd, until the node is idle.
slurm_start() {
	"$SLURM_BIN/slurmctld" -D >"$SLURM_DIR/log/slurmctld.out" 2>&1 &
	STARTED[slurmctld]=$!
	wait_for 20 "${STARTED[slurmctld]}" slurm_answers || return 1
	"$SLURM_BIN/slurmd" -D -N "$SLURM_NODE" -d "$SLURM_BIN/slurmstepd" >"$SLURM_DIR/log/slurmd.out" 2>&1 &
	STARTED[slurmd]=$!
	wait_for 30 "${STARTED[slurmd]}" slurm_idle
}

slurm_answers() { "$SLURM_BIN/scontrol" ping | grep -q 'is UP'; }
slurm_idle() { [ "$("$SLURM_BIN/sinfo" -h -o %t)" = idle ]; }

# state JOB, reason JOB, field JOB NAME: of the controller's record.
state() { "$SLURM_BIN/squeue" -h -t all -j "$1" -o %T 2>/dev/null; }
reason() { "$SLURM_BIN/squeue" -h -t all -j "$1" -o %r 2>/dev/null; }
field() { "$SLURM_BIN/scontrol" -o show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1; }

# until_state SECONDS JOB STATE...: until the job is in one of them.
until_state() {
	local i job=$2 now seconds=$1
	shift 2
	for ((i = 0; i < seconds * 10; i++)); do
		now=$(state "$job")
		[[ " $* " = *" $now "* ]] && return 0
		sleep 0.1
	done
	return 1
}
