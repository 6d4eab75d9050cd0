#!/bin/bash
# What becomes of sessions whose machine is suspended, or whose clock is set: the job of `test/vm.sh clocks`, which runs in the machine.
# shellcheck disable=SC2016,SC2317 # until_ok evaluates what it is given; functions are called by ok
set -u
exec 2>&1
if [ -z "${IN_MEMORY:-}" ]; then # the emulated disk does not come back after a suspension, so nothing may need it
	mkdir -p /mem
	mount -t tmpfs -o mode=755 mem /mem
	mkdir /mem/{proc,sys,dev,run,tmp,job}
	cp -a /bin /sbin /lib* /usr /etc /mem
	cp -a ./* /mem/job
	for f in proc sys dev; do mount --rbind /$f /mem/$f; done
	IN_MEMORY=1 chroot /mem /bin/bash -c 'cd /job && ./job.sh; echo "@@ status $?"; sleep 1; echo o >/proc/sysrq-trigger; sleep 60'
fi
# shellcheck source=test/vm/lib.sh
. ./lib.sh
clock() { python3 -c "import time; print(round(time.clock_gettime(time.CLOCK_$1), 3))"; }
# sleeps S: the machine is suspended for so many seconds, by the kernel's test of it, which needs nobody to wake it.
sleeps() {
	local up awake
	up=$(clock BOOTTIME) awake=$(clock MONOTONIC)
	echo core >/sys/power/pm_test
	echo "$1" >/sys/module/suspend/parameters/pm_test_delay
	echo mem >/sys/power/state || return
	echo "$(clock BOOTTIME) $up $(clock MONOTONIC) $awake" |
		awk -v s="$1" '{ printf "@ %.1f s have passed, in %.1f of them the machine was awake\n", $1 - $2, $3 - $4; exit !($1 - $2 - $3 + $4 > s - 2) }'
}
# moves S: the machine's clock is set, S seconds later than it is.
moves() { python3 -c "import time; time.clock_settime(time.CLOCK_REALTIME, time.time() + $1)"; }

export SLUICE_SIM_STATE=/run/sim SLUICE_SIM_MEM=1G SLUICE_SIM_DEVICES=1 SLUICE_SIM_KERNELS=$PWD/test/twins.so
bin/sluice-worker --listen tcp:127.0.0.1:7000 --device 0 --mem 512M --libcuda "$PWD/simgpu/libcuda.so.1" --libnvml "$PWD/simgpu/libnvidia-ml.so.1" \
	--grace 20s --keepalive 5s --store /tmp/store --store-keep-free 0 --log info >/tmp/worker 2>&1 &
until_ok '(exec 4<>/dev/tcp/127.0.0.1/7000) 2>/dev/null' || { cat /tmp/worker; exit 1; }
mkfifo /tmp/net
bin/relay --listen 127.0.0.1:7001 --to 127.0.0.1:7000 --cuts </tmp/net >/tmp/relay 2>&1 &
exec 3>/tmp/net
until_ok 'grep -q ^listening /tmp/relay'
# net STATE: the network's state from now on.
net() {
	local before
	before=$(grep -c '^network' /tmp/relay)
	echo "$1" >&3
	until_ok "[ \$(grep -c '^network' /tmp/relay) -gt $before ]"
}
export SLUICE_WORKER=tcp:127.0.0.1:7001 LD_LIBRARY_PATH=$PWD/shim
program() {
	./steady 50 >/tmp/out 2>/tmp/err &
	pid=$!
	until_ok 'grep -q "steady: 1 devices" /tmp/out' || ok 'a program computes' false
}
# ends: the program is asked to end, and has ended well in less than five seconds.
ends() {
	local rc=0 began ended
	began=$(clock MONOTONIC)
	kill -TERM "$pid"
	wait "$pid" || rc=$?
	ended=$(clock MONOTONIC)
	cat /tmp/out /tmp/err
	[ "$rc" = 0 ] && grep -q PASS /tmp/out && awk "BEGIN { exit !($ended - $began < 5) }"
}

echo "@ Linux $(uname -r), $(cat /sys/power/state)"
program
ok 'the machine is suspended for longer than the grace while a program computes' sleeps 30
ok 'the program goes on and ends well' ends

program
net reset
ok 'the machine is suspended during a cut, for longer than the grace' sleeps 30
net mend
ok 'the program goes on' until_ok 'grep -q "is back after" /tmp/err'
ok 'and says how long the cut was, the time asleep with it' grep -q 'is back after 3[0-9]' /tmp/err
ok 'so does the worker' until_ok 'grep -q "the client is back.* after=3[0-9]" /tmp/worker'
ok 'it ends well' ends

program
for by in 7200 -14400; do
	net silence
	moves $by
	sleep 7
	net mend
	ok "a cut of seven seconds in which the clock is set by $by s is over" until_ok "[ \$(grep -c 'is back after' /tmp/err) = $((by > 0 ? 1 : 2)) ]"
done
ok 'each is told with its own length' test "$(grep -c 'is back after [0-9.]*s' /tmp/err)" = 2
moves 7200
ok 'the program ends well and at once' ends

program
while sleep 0.02; do moves -3600; moves 3600; done &
jumps=$!
sleep 5
ok 'the clock jumps by an hour all the time, and a program ends well and at once' ends
kill $jumps

program
net reset
began=$(clock MONOTONIC)
moves -86400
ok 'a cut that is longer than the grace ends the session, whatever the clock says' until_ok '! kill -0 $pid 2>/dev/null'
awk "BEGIN { t = $(clock MONOTONIC) - $began; printf \"@ after %.1f s\\n\", t; exit !(t > 19 && t < 24) }"
ok 'about when the grace is over' test $? = 0
ok 'and says so' grep -q 'could not be made again within 20.0s' /tmp/err
net mend
ok 'its session ends as well' until_ok 'grep -q "the client did not come back within 20s" /tmp/worker'
cat /tmp/err
sed -n '/WARN\|ERROR/p' /tmp/worker | tail -n 20
echo "@ $failures failures, $(cut -d' ' -f1 /proc/uptime) s after the boot"
exit "$((failures > 0))"
