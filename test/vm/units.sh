#!/bin/bash
# The shipped units under a real systemd with cgroup v2: the job of `test/vm.sh units`, which runs in the machine.
# shellcheck disable=SC2016,SC2317 # until_ok evaluates what it is given; functions are called by ok
set -u
exec 2>&1
# shellcheck source=test/vm/lib.sh
. ./lib.sh
main_pid() { systemctl show -P MainPID sluiced; }
active() { [ "$(systemctl is-active sluiced)" = active ]; }

echo "@ $(systemctl --version | head -n1), Linux $(uname -r), $(stat -fc %T /sys/fs/cgroup)"
install -D -m 755 -t /usr/sbin bin/sluiced bin/sluice-worker
install -D -m 755 -t /usr/bin bin/sluice
install -D -m 755 -t /opt/sim simgpu/* test/twins.so steady
install -D -m 755 -t /usr/lib/sluice shim/*
install -D -m 644 -t /etc/systemd/system ./*.service
mkdir -p /etc/sluice /etc/systemd/system/sluiced.service.d
useradd -m alice
cat >/etc/sluice/sluice.yaml <<-'YAML'
	node: vm
	advertise: 127.0.0.1
	users: {run: true}
	owner: {libcuda: /opt/sim/libcuda.so.1, libnvml: /opt/sim/libnvidia-ml.so.1, keep_mem: 0}
	worker: {cgroup: required, pids_max: 100, cpus: 1}
YAML
cat >/etc/systemd/system/sluiced.service.d/sim.conf <<-'CONF'
	[Service]
	Environment=SLUICE_SIM_STATE=/run/sluice/sim SLUICE_SIM_MEM=2G SLUICE_SIM_DEVICES=1 SLUICE_SIM_KERNELS=/opt/sim/twins.so SLUICE_SIM_CTX_MEM=16M
CONF
systemctl daemon-reload
systemd-analyze verify sluiced.service sluice-sessions.service 2>&1 | grep -i sluice
ok 'the unit starts' systemctl enable --now sluiced

# program NAME PERCENT: a program of alice's that computes until it is ended; its output in /tmp/NAME.
program() { su alice -c "exec sluice run --fraction $2 -- /opt/sim/steady 100" >"/tmp/$1" 2>&1 & }
group() { echo "/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$1/cgroup")"; }

program one 30
ok 'a program computes' until_ok 'grep -q "steady: 1 devices" /tmp/one'
cat /tmp/one
sluice list --sessions
worker=$(pgrep -n -f 'sluice-worker' -u alice)
g=$(group "$worker")
echo "session $worker in $g"
ok 'its session is in a group of its own below sluice-sessions.service' test "${g%/*}" = /sys/fs/cgroup/system.slice/sluice-sessions.service/sluice
ok 'with a limit of threads' grep -qx 100 "$g/pids.max"
ok 'with a limit of memory' grep -qx '[0-9]*' "$g/memory.max"
ok 'with a limit of processors' grep -qx '100000 100000' "$g/cpu.max"
grep . "$g"/{pids.max,memory.max,memory.swap.max,cpu.max,cgroup.procs}
systemd-cgls --no-pager /system.slice/sluiced.service
systemd-cgls --no-pager /system.slice/sluice-sessions.service

before=$(main_pid)
kill -9 "$before"
ok 'the daemon is killed, and comes back beside its session' until_ok 'active && [ "$(main_pid)" != "$before" ]'
ok 'the session lives' kill -0 "$worker"
ok 'the unit reloads' systemctl reload sluiced
echo 'x: 1' >>/etc/sluice/sluice.yaml
ok 'a wrong file fails the reload, and the daemon goes on' eval '! systemctl reload sluiced && active'
sed -i '$d' /etc/sluice/sluice.yaml
ok 'the unit restarts' systemctl restart sluiced
systemctl stop sluiced
ok 'the session lives while the unit is stopped' kill -0 "$worker"
ok 'the unit starts beside it' systemctl start sluiced
ok 'the session has kept its limits' grep -qx 100 "$g/pids.max"
program two 30
ok 'a second program computes' until_ok 'grep -q "steady: 1 devices" /tmp/two'
two=$(pgrep -n -f 'sluice-worker' -u alice)
h=$(group "$two")
ok 'in another group' test "$h" != "$g" -a "${h%/*}" = "${g%/*}"

# In the second session's place: as many processes as can be, then as much memory as can be.
python3 - "$h" <<-'BOMB'
	import os, sys, time
	open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))
	n = 0
	try:
	    while n < 1000:
	        if os.fork() == 0:
	            time.sleep(5)
	            os._exit(0)
	        n += 1
	except OSError as e:
	    print('fork', n, 'refused:', e)
	sys.exit(0 if n < 100 else 1)
BOMB
ok 'a fork bomb is held' test $? = 0
cat "$h/pids.events"
echo 100M >"$h/memory.max"
python3 - "$h" <<-'HOG'
	import sys, os
	open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))
	b = [bytearray(b'x' * (1 << 20)) for _ in range(400)]
HOG
ok 'a memory hog is killed' test $? = 137
ok 'and the session that it stood for' until_ok '! kill -0 $two 2>/dev/null'
ok 'the daemon says why' until_ok 'journalctl -q -u sluiced | grep -q "its host memory passed worker.memory_max"'
ok 'the other session lives' kill -0 "$worker"
ok 'the daemon is active' active
ok 'so is sluice-sessions' test "$(systemctl is-active sluice-sessions)" = active
pkill -TERM -f /opt/sim/steady
ok 'the first program ends well' until_ok 'grep -q PASS /tmp/one'
ok 'the group of its session goes' until_ok '[ ! -d $g ]'
sluice health
systemctl stop sluiced sluice-sessions
ok 'nothing is left of both units' until_ok '[ ! -d /sys/fs/cgroup/system.slice/sluice-sessions.service ] && [ ! -d /sys/fs/cgroup/system.slice/sluiced.service ]'
journalctl -q -u sluiced -u sluice-sessions --no-pager -o cat | tail -n 40
systemd-analyze security sluiced.service --no-pager | tail -n 1
echo "@ $failures failures, $(cut -d' ' -f1 /proc/uptime) s after the boot"
exit "$((failures > 0))"
