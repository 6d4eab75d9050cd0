#!/usr/bin/env bash
# The daemons on a real GPU: two sluiced of one machine, an owner with the GPU and a
# host without, joined by TCP and TLS; leases, sessions and what they show.
#
# Usage: bench/gpu-daemon.sh   (as root)
# Needs: build/bin, build/shim, a GPU with its driver, python3 with torch and
# torchvision, curl. No Go. Prints one line per check; raw output is kept in
# $SLUICE_LOGS (default build/gpu-logs). Exit status 0 when every check passed.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

LOGS=$LOGS/daemon
mkdir -p "$LOGS"
: >"$LOGS/results.txt"
DIR=$SCRATCH
chmod 755 "$DIR"
export SLUICED_SOCKET=$DIR/host/run/sluiced.sock
TOTAL=$(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits)

# configure NAME OWNER CONTROL DATA METRICS: a sluiced's folder and sluice.yaml.
configure() {
	sluiced_folder "$1" <<-YAML
		auth: tls
		tls: {ca: $DIR/ca/ca.pem, cert: $DIR/ca/$1.pem, key: $DIR/ca/$1.key}
		log: {level: debug}
		listen: {control: "127.0.0.1:$3", data: "127.0.0.1:$4", metrics: "127.0.0.1:$5"}
		owner: {enabled: "$2", poll: 1s}
		pools: {default: {owners: ["owner=127.0.0.1:$CONTROL"]}}
	YAML
}

# fraction NAME SECONDS FLAGS... -- PROGRAM...: sluice run by the host's daemon.
fraction() {
	local name=$1 seconds=$2
	shift 2
	timeout -k 5 "$seconds" "$SLUICE" run --lib "$BUILD/shim" "$@" >"$LOGS/$name.out" 2>"$LOGS/$name.err"
}

metric() {
	{
		echo "$HEADER"
		curl -s "http://127.0.0.1:$METRICS/metrics"
	} >"$LOGS/metrics-$1.txt"
}

rate() { "$PYTHON" -c 'import json, sys; print("%.2f" % (1e3 / json.loads(open(sys.argv[1]).read().splitlines()[-1])["median_ms"]))' "$1" 2>/dev/null; }

HEADER=$(log_header)
echo "$HEADER"
CONTROL=$(free_port) METRICS=$(free_port)
configure owner yes "$CONTROL" "$(free_port)" "$METRICS"
configure host no "$(free_port)" "$(free_port)" "$(free_port)"
if ! "$SLUICE" ca init --dir "$DIR/ca" >"$LOGS/ca.out" 2>&1 || ! "$SLUICE" ca issue owner host --dir "$DIR/ca" >>"$LOGS/ca.out" 2>&1; then
	fail ca "$(tail -n 1 "$LOGS/ca.out")"
fi
need_sluiced owner
need_sluiced host

# The owner measures what a context takes of the GPU before it lends it.
healthy() { "$SLUICE" gpus | grep -q ' ok *$'; }
wait_for 60 "${STARTED[owner]}" healthy

# inventory
"$SLUICE" gpus >"$LOGS/gpus.out" 2>&1
if grep -q "$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader)" "$LOGS/gpus.out"; then
	pass inventory "$(sed -n 2p "$LOGS/gpus.out" | tr -s ' ')"
else
	fail inventory "sluice gpus does not name the GPU"
	show "$LOGS/gpus.out"
	show "$LOGS/sluiced-owner.log" 20
fi

# half a GPU: nvidia-smi in it
fraction smi 60 --fraction 50 -- nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits
SEEN=$(tail -n 1 "$LOGS/smi.out")
if [ "${SEEN:-0}" -gt $((TOTAL * 48 / 100)) ] && [ "$SEEN" -le $((TOTAL / 2)) ]; then
	pass smi-half "$SEEN MiB of $TOTAL in nvidia-smi"
else
	fail smi-half "nvidia-smi says ${SEEN:-nothing}, the GPU has $TOTAL MiB"
	show "$LOGS/smi.err"
	show "$LOGS/sluiced-owner.log" 20
	show "$LOGS/sluiced-host.log" 20
fi

# ResNet-50, natively and on half the GPU; top and metrics while it runs
"$PYTHON" "$BENCH/resnet50.py" >"$LOGS/resnet.native.out" 2>"$LOGS/resnet.native.err"
fraction resnet.half 200 --fraction 50 -- "$PYTHON" "$BENCH/resnet50.py" &
JOB=$!
for ((i = 0; i < 300; i++)); do
	"$SLUICE" list --sessions >"$LOGS/list.out" 2>&1
	"$SLUICE" top --once >"$LOGS/top-host.out" 2>&1
	SLUICED_SOCKET=$DIR/owner/run/sluiced.sock timeout 3 "$SLUICE" top --interval 500ms --json 2>/dev/null | head -n 2 >"$LOGS/top-owner.json"
	{
		echo "$HEADER"
		SLUICED_SOCKET=$DIR/owner/run/sluiced.sock "$SLUICE" top --once
	} >"$LOGS/top-owner.out" 2>&1
	metric resnet
	grep -q '^sluice_session_launches_total.* [1-9][0-9]\{5\}' "$LOGS/metrics-resnet.txt" && break
	kill -0 $JOB 2>/dev/null || break
	sleep 0.2
done
wait $JOB
STATUS=$?
NATIVE=$(rate "$LOGS/resnet.native.out") HALF=$(rate "$LOGS/resnet.half.out")
if [ $STATUS = 0 ] && [ -n "$HALF" ]; then
	pass resnet50-half "$HALF steps/s, native $NATIVE, $(awk -v a="$HALF" -v b="$NATIVE" 'BEGIN { printf "%.3f", a / b }')"
else
	fail resnet50-half "$(why $STATUS)"
	show "$LOGS/resnet.half.err"
	show "$LOGS/sluiced-owner.log" 20
fi
if grep -q python "$LOGS/top-owner.out" || grep -q python "$LOGS/top-host.out" || grep -q python "$LOGS/list.out"; then
	pass top "$(grep -h python "$LOGS"/top-*.out "$LOGS/list.out" | head -n 1 | tr -s ' ' | cut -c1-150)"
else
	fail top "no line for the program"
	show "$LOGS/top-owner.out"
	show "$LOGS/list.out"
fi
if grep -q '^sluice_session_launches_total.* [1-9]' "$LOGS/metrics-resnet.txt"; then
	pass metrics "$(grep -c '^sluice_' "$LOGS/metrics-resnet.txt") series; $(grep '^sluice_session_launches_total' "$LOGS/metrics-resnet.txt" | sort -k2 -n | tail -n 1 | cut -c1-140)"
else
	fail metrics "no launches of a session"
	grep '^sluice_' "$LOGS/metrics-resnet.txt" | cut -d'{' -f1 | sort -u | head -40
fi

# 30 and 70 side by side, the larger one driven out of memory: the other's digests are as alone
fraction train.alone 200 --fraction 30 -- "$PYTHON" "$BENCH/train_bits.py" --only resnet50
fraction train.beside 200 --fraction 30 -- "$PYTHON" "$BENCH/train_bits.py" --only resnet50 &
JOB=$!
cat >"$DIR/oom.py" <<-'PY'
	import torch
	held, refused = [], 0
	for n in range(200):
	    try:
	        held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(n))
	    except torch.cuda.OutOfMemoryError:
	        refused += 1
	        if refused > 50:
	            break
	        if refused % 10 == 0:
	            held.clear()
	            torch.cuda.empty_cache()
	torch.cuda.synchronize()
	print(f"{refused} times out of memory, {torch.cuda.max_memory_allocated() >> 20} MiB at most")
PY
fraction oom 120 --fraction 70 -- "$PYTHON" "$DIR/oom.py"
OOM=$?
wait $JOB
STATUS=$?
if [ $STATUS = 0 ] && [ $OOM = 0 ] && cmp -s "$LOGS/train.alone.out" "$LOGS/train.beside.out"; then
	pass side-by-side "70 %: $(tail -n 1 "$LOGS/oom.out"); 30 %: $(wc -l <"$LOGS/train.beside.out") lines the same as alone"
else
	fail side-by-side "70 %: $(why $OOM), 30 %: $(why $STATUS)"
	show "$LOGS/oom.err"
	show "$LOGS/train.beside.err"
	diff "$LOGS/train.alone.out" "$LOGS/train.beside.out" | head -5
fi

# 30 and 80 do not fit
"$SLUICE" run --lib "$BUILD/shim" --fraction 30 -- sleep 5 &
JOB=$!
sleep 1
fraction toomuch 30 --fraction 80 -- true
STATUS=$?
if [ $STATUS != 0 ] && [ -s "$LOGS/toomuch.err" ]; then
	pass too-much "$(head -n 1 "$LOGS/toomuch.err" | cut -c1-160)"
else
	fail too-much "80 % were granted beside 30 %"
fi
wait $JOB

# kill -9 of both daemons takes no session with it
fraction kill9 120 --fraction 50 -- "$PYTHON" "$BENCH/train_bits.py" --only resnet50 &
JOB=$!
sleep 6
for n in owner host; do
	kill -9 "${STARTED[$n]}"
	wait "${STARTED[$n]}" 2>/dev/null
	rm -f "$DIR/$n/run/sluiced.sock"
	need_sluiced $n
done
wait $JOB
STATUS=$?
if [ $STATUS = 0 ] && cmp -s "$LOGS/train.alone.out" "$LOGS/kill9.out"; then
	pass kill-9 "both daemons killed and started again in mid-training: $(wc -l <"$LOGS/kill9.out") lines the same"
else
	fail kill-9 "$(why $STATUS)"
	show "$LOGS/kill9.err"
fi

# another user, in the clear and then encrypted: the worker is that user's, and the bits are the same
"$PYTHON" "$BENCH/train_bits.py" --only mlp >"$LOGS/mlp.native.out" 2>"$LOGS/mlp.native.err"
as_user() { # as_user NAME
	timeout -k 5 120 setpriv --reuid 12345 --regid 12345 --clear-groups env HOME="$DIR/home" USER=user LOGNAME=user \
		"$SLUICE" run --lib "$BUILD/shim" --fraction 30 -- "$PYTHON" "$BENCH/train_bits.py" --only mlp >"$LOGS/$1.out" 2>"$LOGS/$1.err"
}
install -d -o 12345 -g 12345 "$DIR/home"
for way in plain encrypted; do
	if [ $way = encrypted ]; then
		export SLUICE_ENCRYPT=true
		for n in owner host; do
			stop $n
			rm -f "$DIR/$n/run/sluiced.sock"
			need_sluiced $n
		done
		wait_for 60 "${STARTED[owner]}" healthy
	fi
	as_user "user-$way" &
	JOB=$!
	seen=
	while kill -0 $JOB 2>/dev/null; do
		for p in $(pgrep -u 12345 -f "sluice-worker.* session"); do
			now=$(awk '/^Uid|^CapEff|^NoNewPrivs|^Seccomp:/ { printf "%s%s ", $1, $2 }' "/proc/$p/status" 2>/dev/null)
			seen=${now:-$seen} # it may have ended since pgrep looked
		done
		sleep 0.2
	done
	wait $JOB
	STATUS=$?
	if [ $STATUS = 0 ] && [ -n "$seen" ] && cmp -s <(grep 0x "$LOGS/mlp.native.out") <(grep 0x "$LOGS/user-$way.out"); then
		pass "user-$way" "$(grep -c 0x "$LOGS/user-$way.out") lines the same as natively; worker: $seen"
	else
		fail "user-$way" "$(why $STATUS); worker: ${seen:-not seen}"
		show "$LOGS/user-$way.err"
		show "$LOGS/sluiced-owner.log" 10
	fi
done

# a second session opens on a warm worker
sleep 2
for i in 1 2 3 4 5; do
	fraction "open$i" 30 --fraction 20 -- nvidia-smi -L
done
sleep 2
"$SLUICE" list >"$LOGS/list-end.out" 2>&1
LEFT=$("$SLUICE" list --json 2>/dev/null | grep -c '"id"')
USED=$(nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits)
if [ "$LEFT" = 0 ]; then
	pass nothing-left "no lease; $USED MiB of the GPU in use"
else
	fail nothing-left "$LEFT leases; $USED MiB of the GPU in use"
	show "$LOGS/list-end.out"
fi
cp "$DIR/owner/log/audit.log" "$LOGS/audit-owner.log" 2>/dev/null
cp "$DIR/host/log/audit.log" "$LOGS/audit-host.log" 2>/dev/null
for n in owner host; do
	awk -v n="$n" '/VmRSS/ { printf "sluiced %s: %.1f MiB resident\n", n, $2 / 1024 }' "/proc/${STARTED[$n]}/status"
done
echo "gpu-daemon: $PASSED passed, $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s"
[ "$FAILED" = 0 ]
