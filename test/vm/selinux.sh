#!/bin/bash
# Sluice under an SELinux policy in force: the job of `test/vm.sh selinux`, which runs in the machine. First with Debian's policy as it is, then
# with the module of etc/selinux, which the machine's root has linked beside it in /etc/selinux/with.
# shellcheck disable=SC2016,SC2317 # until_ok evaluates what it is given; functions are called by ok
set -u
exec 2>&1
export HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# shellcheck source=test/vm/lib.sh
. ./lib.sh
part() { printf '\n--- %s, %s s after the boot ---\n' "$1" "$(cut -d' ' -f1 /proc/uptime)"; }
# denials: what the policy in force has refused since the last call, without times and numbers.
denials() {
	ausearch --input-logs -m avc --raw --start today 2>/dev/null | grep 'denied.*permissive=0' >/tmp/denied.now
	touch /tmp/denied
	tail -n +$(($(wc -l </tmp/denied) + 1)) /tmp/denied.now | sed -E 's/^.*avc: +//; s/ (pid|ino|audit)=[^ ]*//g' | sort | uniq -c
	mv /tmp/denied.now /tmp/denied
}
# as DOMAIN COMMAND: a program of alice's in that domain. What runs here may not enter it, as a login does; so the program waits in it,
# stopped, until the policy is in force again.
as() {
	local rc=0
	rm -f /tmp/said
	setenforce 0
	runcon "$1" setpriv --reuid alice --regid alice --init-groups sh -c 'exec >/tmp/said 2>&1 </dev/null; kill -STOP $$; id -Z; exec sluice run --fraction 30 -- "$@"' sh "${@:2}" &
	until_ok '[ "$(ps -o state= -p $!)" = T ]'
	setenforce 1
	kill -CONT $!
	wait $! || rc=$?
	cat /tmp/said
	return "$rc"
}
programs() {
	echo "sluiced: $(ps -o label= -C sluiced | sort -u)"
	ls -dZ /usr/sbin/sluiced /run/sluice /run/sluice/leases /run/sluice/sluiced.sock
	ok 'a program of a user who is not confined computes' as unconfined_u:unconfined_r:unconfined_t:s0 vecadd
}

echo "@ $(getenforce), $(dpkg-query -W -f '${Package} ${Version}' selinux-policy-default), Linux $(uname -r), $(systemctl --version | head -n1)"
ok 'the policy is in force' test "$(getenforce)" = Enforcing
part 'The packages'
dpkg -i debs/*.deb | grep -v '^(Reading'
install -m 644 -t /usr/lib/x86_64-linux-gnu simgpu/libcuda.so.1 simgpu/libnvidia-ml.so.1
install -D -m 644 test/twins.so /opt/sim/twins.so
install -m 755 -t /usr/local/bin vecadd
ldconfig
mkdir -p /etc/systemd/system/sluiced.service.d
cat >/etc/systemd/system/sluiced.service.d/simulated.conf <<-'CONF'
	[Service]
	Environment=SLUICE_SIM_STATE=/run/sluice/sim SLUICE_SIM_MEM=2G SLUICE_SIM_DEVICES=1 SLUICE_SIM_KERNELS=/opt/sim/twins.so SLUICE_SIM_CTX_MEM=16M
CONF
systemctl daemon-reload
sluice setup --cluster prod --controllers vm --owners vm
echo 'users: {run: true}' >>/etc/sluice/sluice.yaml
ok 'the daemon restarts' systemctl restart sluiced
ok 'it lends its GPU' until_ok 'sluice health | grep -q "owner .*1 GPUs to lend"'
sluice version | head -n1
part 'The policy as it is'
echo 'denied until here:'
denials
programs
ok 'a confined user is refused' eval '! as user_u:user_r:user_t:s0 vecadd'
echo denied:
denials

part 'With the module of etc/selinux'
cp /etc/selinux/with/policy/* /etc/selinux/default/policy/
cp /etc/selinux/with/contexts/files/file_contexts* /etc/selinux/default/contexts/files/
ok 'the policy is loaded' load_policy
restorecon -Rv /usr/sbin/sluiced /run/sluice | head -n 3
ok 'the daemon restarts' systemctl restart sluiced
programs
ok 'the daemon has its own domain' test "$(ps -o label= -C sluiced | sort -u)" = system_u:system_r:sluiced_t:s0
ok 'a program of a confined user computes' as user_u:user_r:user_t:s0 vecadd
echo denied:
denials | tee /tmp/last
ok 'nothing of Sluice is denied' eval '! grep -E "sluice|vecadd" /tmp/last'
echo "@ $failures failures, $(cut -d' ' -f1 /proc/uptime) s after the boot"
exit "$((failures > 0))"
