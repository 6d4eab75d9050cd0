#!/bin/bash
# Sluice over RDMA on the kernel's software device, rdma_rxe: the job of `test/vm.sh rdma`, which runs in the machine, and of `test/vm.sh
# rdma2`, which runs in two: the first, owner, has the worker, and does what the second one, client, asks for in a folder that both have.
# What the folder of the job says: role is one, owner or client; settings has RDMA (on, or off for plain TCP), PARTS (which of tests,
# programs and faults), SANDBOX (of the worker) and SLUICE_FAULTS.
# shellcheck disable=SC2016,SC2153,SC2317 # RDMA is in settings; until_ok and there evaluate what they are given; functions are called by ok
set -u
exec 2>&1
# shellcheck source=test/vm/lib.sh
. ./lib.sh
# shellcheck source=/dev/null
. ./settings
role=$(cat role)
keepalive=3
most=400 # seconds of a program
worker=
owner=192.0.2.1 address=192.0.2.1 nic=d0
[ "$role" != client ] || address=192.0.2.2
# shellcheck disable=SC2086 # four numbers
gid=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' ${address//./ })

# tenths: the time, in tenths of a second; seconds T: so many tenths, as seconds.
tenths() { echo $((${EPOCHREALTIME//[.,]/} / 100000)); }
seconds() { echo "$(($1 / 10)).$(($1 % 10))"; }
wanted() { [[ " $PARTS " == *" $1 "* ]]; }
part() { printf '\n--- %s, %s s after the boot ---\n' "$1" "$(cut -d' ' -f1 /proc/uptime)"; }

# --- the network ---

# device: the RDMA device that has the machine's address, and the address' place in its table, in $device and $index.
device() {
	local f
	f=$(grep -lsx "$gid" /sys/class/infiniband/*/ports/1/gids/* | head -n1)
	device=$(cut -d/ -f5 <<<"$f") index=${f##*/}
	[ -n "$device" ] && grep -q ACTIVE "/sys/class/infiniband/$device/ports/1/state"
}
# network: the address and its device are there, whatever was done to them before.
network() {
	local n=0
	[ -e "/sys/class/net/$nic" ] || ip link add "$nic" type dummy || return
	ip link set "$nic" mtu 4200 up && ip addr replace "$address/24" dev "$nic" || return
	device && return
	while [ -e "/sys/class/infiniband/rxe$n" ]; do n=$((n + 1)); done
	rdma link add "rxe$n" type rxe netdev "$nic" 2>/tmp/rdma-link
	device
}
# counters: what the device has counted of retries and losses, where it is not 0.
counters() { grep -sv '^0$' /sys/class/infiniband/*/ports/1/hw_counters/* | sed 's|.*/||' | tr '\n' ' '; echo; }
# pingpong [ADDRESS]: between two machines, or two processes of one.
pingpong() { device && timeout 60 ibv_rc_pingpong -d "$device" -g "$index" -n 300 "$@"; }

# --- the worker's machine ---

# there COMMAND: done where the worker is. What it says and its status are this function's.
asked=0
there() {
	local at end=$((SECONDS + 120))
	[ "$role" = client ] || { eval "$1"; return; }
	# A subshell may ask as well, so that a counter would not do.
	at=/mnt/$(printf %08d "$(cat /tmp/asked 2>/dev/null || echo 0)")
	echo $((10#${at#/mnt/} + 1)) >/tmp/asked
	echo "$1" >"$at.new"
	mv "$at.new" "$at.do"
	until [ -e "$at.rc" ]; do
		[ "$SECONDS" -lt "$end" ] || return 124
		sleep 0.1
	done
	cat "$at.said"
	return "$(cat "$at.rc")"
}
# serve: runs the commands that the other machine sends by `there`, until the file stop is made.
serve() {
	local at
	until [ -e /mnt/stop ]; do
		at=/mnt/$(printf %08d "$asked")
		[ -e "$at.do" ] || { sleep 0.1; continue; }
		eval "$(cat "$at.do")" >"$at.said" 2>&1
		echo $? >"$at.rc.new"
		mv "$at.rc.new" "$at.rc"
		asked=$((asked + 1))
	done
}

# start_worker GRACE: a worker with that grace, in seconds, unless it is there.
start_worker() {
	[ "${worker_grace-}" != "$1" ] || ! kill -0 "$worker" 2>/dev/null || return 0
	[ -z "$worker" ] || { kill "$worker"; wait "$worker"; } 2>/dev/null
	worker_grace=$1
	local more=()
	[ "$RDMA" = off ] || more=(--rdma on)
	SLUICE_SIM_MEM=1G SLUICE_SIM_DEVICES=1 SLUICE_SIM_KERNELS=$PWD/test/twins.so bin/sluice-worker --listen "tcp:$owner:7000" --device 0 --mem 512M \
		--libcuda "$PWD/simgpu/libcuda.so.1" --libnvml "$PWD/simgpu/libnvidia-ml.so.1" --sandbox "$SANDBOX" --keepalive "${keepalive}s" --grace "$1s" \
		--store /tmp/store --store-keep-free 0 --log info "${more[@]}" >>/tmp/worker 2>&1 &
	worker=$!
	until_ok '(exec 4<>/dev/tcp/$owner/7000) 2>/dev/null' || { tail -n 20 /tmp/worker; return 1; }
}
export SLUICE_SIM_STATE=/run/sim
# sessions: the processes of the worker's sessions. The one that it starts ahead has a single socket.
sessions() {
	local p
	for p in $(pgrep -P "$worker"); do
		[ "$(find "/proc/$p/fd" -lname 'socket:*' 2>/dev/null | wc -l)" -lt 2 ] || echo "$p"
	done
}
# idle: no session is left, and no memory of the GPU in use.
idle() { [ -z "$(sessions)" ] && [ "$(LD_LIBRARY_PATH=$PWD/simgpu test/nvml used | cut -d' ' -f1)" = 0 ]; }

# --- programs ---

remote=(env "SLUICE_WORKER=tcp:$owner:7000" "LD_LIBRARY_PATH=/opt/rdma/shim" SLUICE_LOG=info)
[ "$RDMA" = off ] || remote+=(SLUICE_RDMA=1)
# over: the program has said that it uses RDMA, or has not if it must not.
over() { if [ "$RDMA" = off ]; then ! grep -q 'over RDMA' "$1"; else grep -q 'over RDMA' "$1"; fi; }
# tried WANT COMMAND...: it ends well, over RDMA, and has printed WANT unless that is empty. Else $why says what is wrong. $took is its time.
tried() {
	local rc=0 began
	why='' began=$(tenths)
	timeout -k 5 "$most" "${remote[@]}" "${@:2}" >/tmp/out 2>/tmp/err </dev/null || rc=$?
	took=$(seconds $(($(tenths) - began)))
	if [ "$rc" != 0 ]; then
		why="status $rc"
	elif [ -n "$1" ] && ! printf %b "$1" | cmp -s - /tmp/out; then
		why='it has printed something else'
	elif ! over /tmp/err; then
		why="RDMA is $RDMA, which it does not say"
	fi
	[ -z "$why" ]
}
# program WANT COMMAND...: tried, as a check.
program() {
	tried "$@"
	ok "${*:2}: $took s${why:+; $why}" test -z "$why"
	[ -z "$why" ] || { tail -n 15 /tmp/out /tmp/err; there 'tail -n 5 /tmp/worker'; }
}

# --- faults ---

own_link_down() { ip link set "$nic" down; }
own_address_gone() { ip addr del "$address/24" dev "$nic"; }
own_link_deleted() { ip link delete "$nic"; }
peer_link_down() { there own_link_down; }
peer_address_gone() { there own_address_gone; }
worker_killed() { there 'kill -9 "$worker"; wait "$worker" 2>/dev/null'; true; }
session_killed() { there 'kill -9 $(sessions)'; }
client_killed() { kill -9 "$copies"; }

# where PID: what its threads are doing.
where() {
	local t
	for t in "/proc/$1/task"/*; do echo "    $(cat "$t/comm"): $(tr '\n' ' ' <"$t/stack" | cut -c1-300)"; done
}

# ended PID: it is, now.
ended() { { kill -9 "$1"; wait "$1"; } 2>/dev/null; }

# fault NAME GRACE: it happens in the middle of a program that copies, to a session with that grace. The program has to end with an error or to go
# on, within keep-alive and grace and five seconds, and the session to end when it does. With a grace the network is back after two
# seconds. $became says what came of it, $after when, in tenths.
fault() {
	local limit=$(((keepalive + $2 + 5) * 10)) began lines rc=0 i said=
	became='' after=0 back=''
	until_ok network || { became='there is no network'; return 1; }
	there "until_ok network && start_worker $2" || { became='there is no worker'; return 1; }
	: >/tmp/out
	"${remote[@]}" test/copies --repeats 2 --sizes "$sizes" >/tmp/out 2>/tmp/err </dev/null &
	copies=$!
	i=$((1 + RANDOM % 45))
	until_ok "[ \$(wc -l </tmp/out) -ge $i ] || ! kill -0 $copies 2>/dev/null" || { became="only $(wc -l </tmp/out) of $i lines after 30 s"; ended "$copies"; return 1; }
	sleep "0.$((RANDOM % 3))"
	over /tmp/err || { became="RDMA is $RDMA, which it does not say"; ended "$copies"; return 1; }
	kill -0 "$copies" 2>/dev/null || {
		wait "$copies" || rc=$?
		became="it ended before the fault, status $rc"
		there 'grep " level=ERROR " /tmp/worker | tail -n 1; counters'
		counters
		return 1
	}
	began=$(tenths)
	"$1" >/dev/null || { became='the fault itself failed'; ended "$copies"; return 1; }
	lines=$(wc -l </tmp/out)
	[ "$2" = 0 ] || {
		sleep 2
		until_ok network
		there 'until_ok network'
		back=", the network back after $(seconds $(($(tenths) - began))) s"
	}
	while kill -0 "$copies" 2>/dev/null; do
		after=$(($(tenths) - began))
		# What was under way may have given one line more.
		[ "$(wc -l </tmp/out)" -lt $((lines + 2)) ] || { became='went on'; break; }
		[ "$said" ] || ! grep -q 'error [0-9]' /tmp/err || said=$after
		[ "$after" -le "$limit" ] || break
		sleep 0.1
	done
	if [ -z "$became" ] && kill -0 "$copies" 2>/dev/null; then
		# The software device destroys no queue pair of which packets wait for a machine that does not answer: the program has its error, and the
		# kernel keeps the process.
		where "$copies"
		until_ok network
		there 'until_ok network'
		if [ -z "$said" ] || ! until_ok '! kill -0 $copies 2>/dev/null'; then
			became=hung
			kill -9 "$copies"
			return 1
		fi
		wait "$copies" 2>/dev/null || rc=$?
		after=$said
		became="ended, status $rc"
		echo "  $1: the program had its error after $(seconds "$said") s, and was gone when the network was back"
		[ "$rc" = 1 ]
		return
	fi
	if [ "$became" ]; then
		until_ok network
		there 'until_ok network'
		for _ in {1..4}; do until_ok '! kill -0 $copies 2>/dev/null' && break; done
		! kill -0 "$copies" 2>/dev/null || { became='went on, and hung later'; where "$copies"; ended "$copies"; return 1; }
	fi
	wait "$copies" 2>/dev/null || rc=$?
	if [ "$rc" = 0 ]; then
		became='went on'
	elif [ -z "$became" ] || [ $(($(tenths) - began)) -le "$limit" ]; then
		became=ended after=$(($(tenths) - began))
	fi
	became+=", status $rc"
	case $1,$became in
	client_killed,"ended, status 137" | *,"went on, status 0" | *_[a-z]*,"ended, status 1") ;;
	*) return 1 ;;
	esac
	# The session's end, or the memory's that the worker left.
	while ! there idle; do
		[ $(($(tenths) - began)) -le $((limit + 20)) ] || { became+=', but the session lives on'; there 'for p in $(sessions); do where $p; done'; return 1; }
		sleep 0.2
	done
	[ "$1" != client_killed ] || after=$(($(tenths) - began))
}

# faults NAME: so many times, in turn without a grace and with one. After each of them the next program goes over RDMA as before.
faults() {
	local n bad=0 ended=0 on=0 longest=0 grace
	for n in $(seq "$SLUICE_FAULTS"); do
		grace=$((n % 2 ? 0 : 5))
		if fault "$1" "$grace"; then
			case $became in went*) on=$((on + 1)) ;; *) ended=$((ended + 1)) ;; esac
			[ "$after" -le "$longest" ] || longest=$after
		else
			bad=$((bad + 1))
		fi
		echo "  $1, grace $grace s: $became$back, after $(seconds "$after") s$([ ! -s /tmp/err ] || echo ": $(tail -n 1 /tmp/err)")"
		until_ok network
		there 'until_ok network'
		there "start_worker $grace"
		tried '' cuda/vecadd || {
			bad=$((bad + 1))
			echo "  the next program: $why"
			tail -n 5 /tmp/err
			there 'tail -n 5 /tmp/worker'
		}
	done
	ok "$1, $SLUICE_FAULTS times: $ended programs ended, $on went on, after at most $(seconds "$longest") s; $bad were wrong" test "$bad" = 0
}

# --- the job ---

mkdir /opt/rdma
cp -a bin simgpu shim test cuda tests programs /opt/rdma
cd /opt/rdma || exit
ip link set lo up
if [ "$role" != one ]; then
	mount -t 9p -o trans=virtio,version=9p2000.L both /mnt
	for nic in /sys/class/net/e*; do nic=${nic##*/}; done
fi
ok "$role: the address is on an RDMA device" until_ok network
[ "$failures" = 0 ] || { ip addr; rdma link; cat /tmp/rdma-link; exit 1; }
if [ "$role" = owner ]; then
	serve
	tail -n 100 /tmp/worker
	exit 0
fi
echo "@ Linux $(uname -r), $(nproc) processors, RDMA $RDMA, ${SLUICE_FAULTS} faults of each kind, keep-alive $keepalive s, ulimit -l $(ulimit -l)"
[ "$role" = one ] || ok 'the other machine answers' until_ok 'there true'
rdma link
ibv_devinfo | grep -E 'hca_id|state|mtu'

part 'The device itself'
there 'pingpong >/tmp/pingpong 2>&1 &'
ok 'ibv_rc_pingpong' until_ok "pingpong $owner"

if [ "$role" = one ] && wanted tests; then
	part 'Tests of our own'
	ok 'there are tests' test "$(ls tests)"
	for t in tests/*; do
		began=$(tenths) rc=0
		SCALE=10 timeout -k 5 "$most" "$t" "$address" >/tmp/out 2>&1 </dev/null || rc=$?
		ok "$t: status $rc after $(seconds $(($(tenths) - began))) s" test "$rc" = 0
		tail -n 30 /tmp/out
	done
	for cut in "ip link set $nic down" "ip addr del $address/24 dev $nic" "ip link delete $nic"; do
		began=$(tenths) rc=0
		timeout -k 5 30 tests/test_stream "$address" cut "$cut" >/tmp/out 2>&1 </dev/null || rc=$?
		ok "$cut ends a stream: status $rc after $(seconds $(($(tenths) - began))) s" test "$rc" = 0
		tail -n 3 /tmp/out
		ok 'the device is there again' until_ok network
	done
fi

part 'Programs'
ok 'a worker' there 'start_worker 0'
pid=$(there 'echo $worker')
if ! wanted programs; then
	program '' cuda/vecadd
elif [ "$role" = one ]; then
	while IFS='|' read -r name arguments want <&3; do
		# shellcheck disable=SC2086 # they are words
		program "${want}PASS\n" "cuda/$name" $arguments
	done 3<programs
else
	for name in vecadd pinned managed multi_process; do program '' "cuda/$name"; done
fi
if wanted programs; then
	program '' cuda/paused 1 30
	program '' cuda/bigcopy 64
	program 'PASS\n' test/bulk 1 4
	program '' test/copies --repeats 2 --sizes 2100000,8388608,16777216
	tail -n 20 /tmp/out
fi
ok 'no session is left, and no memory of the GPU in use' there 'until_ok idle'
ok 'it is the same worker' test "$pid" = "$(there 'kill -0 $worker && echo $worker')"

part 'Faults'
kinds='session_killed worker_killed client_killed'
sizes=$(printf '2100000,%.0s' {1..16})
sizes=${sizes%,}
if ! wanted faults; then
	kinds=
elif [ "$role" = one ]; then
	kinds="own_link_down own_address_gone own_link_deleted $kinds"
else
	kinds="peer_link_down own_link_down peer_address_gone $kinds"
fi
for kind in $kinds; do faults "$kind"; done

part 'The end'
counters
there 'grep -E "WARN|ERROR|level=(WARN|ERROR)" /tmp/worker | tail -n 30'
dmesg | grep -v 'speed is unknown' | tail -n 15
[ "$role" = one ] || touch /mnt/stop
echo "@ $failures failures, $(cut -d' ' -f1 /proc/uptime) s after the boot"
exit "$((failures > 0))"
