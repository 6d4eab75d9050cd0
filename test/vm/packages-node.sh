#!/bin/bash
# What runs in each machine of packages.sh: it makes of the root a site's machine as it is before Sluice, with Slurm, munge and, on
# gpu01, the driver of simulated GPUs; then it runs the scripts that appear in /job, 1.sh, 2.sh and so on, each with its output in
# N.out and its status in N.rc. /job is a folder of the host's.
set -u
export HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
cd /root || exit
read -r node address </job/name
hostname "$node"
echo "$node" >/etc/hostname
printf '127.0.0.1 localhost\n10.9.0.1 head\n10.9.0.2 node01\n10.9.0.3 gpu01\n' >/etc/hosts
modprobe -q virtio_net
for nic in /sys/class/net/e*; do nic=${nic##*/}; done
ip link set "$nic" up
ip addr add "$address/24" dev "$nic"

# Slurm as an administrator of Debian's has it: one file on all machines of the cluster.
install -d -o slurm -g slurm /var/spool/slurmctld /var/log/slurm
install -d /var/spool/slurmd
cat >/etc/slurm/slurm.conf <<'CONF'
ClusterName=prod
SlurmctldHost=head
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=node01 CPUs=1 RealMemory=400 State=UNKNOWN
PartitionName=main Nodes=node01 Default=YES MaxTime=INFINITE State=UP
CONF
printf 'CgroupPlugin=cgroup/v2\nConstrainCores=yes\n' >/etc/slurm/cgroup.conf
case $node in
head) systemctl -q enable --now slurmctld ;;
node01)
	systemctl -q enable --now slurmd
	install -m 755 /job/steady /job/vecadd /home/alice/
	;;
gpu01) # no Slurm; the driver in the place of NVIDIA's, which has to be told what GPUs there are
	rm /etc/slurm/slurm.conf /etc/slurm/cgroup.conf
	install -m 644 -t /usr/lib/x86_64-linux-gnu /job/simgpu/libcuda.so.1 /job/simgpu/libnvidia-ml.so.1
	install -D -m 644 /job/simgpu/twins.so /opt/sim/twins.so
	ldconfig
	mkdir -p /etc/systemd/system/sluiced.service.d
	cat >/etc/systemd/system/sluiced.service.d/simulated.conf <<-'CONF'
		[Service]
		Environment=SLUICE_SIM_STATE=/run/sluice/sim SLUICE_SIM_MEM=2G SLUICE_SIM_DEVICES=1 SLUICE_SIM_KERNELS=/opt/sim/twins.so SLUICE_SIM_CTX_MEM=16M
	CONF
	;;
esac
ln -s /job/1.0 /job/1.1 "$HOME"
touch /job/ready

n=1
exec 5<> <(:)
while :; do
	until [ -e "/job/$n.sh" ]; do read -r -t 0.3 -u 5; done
	bash "/job/$n.sh" >"/job/$n.out" 2>&1 </dev/null
	echo $? >"/job/$n.rc.new"
	mv "/job/$n.rc.new" "/job/$n.rc"
	n=$((n + 1))
done
