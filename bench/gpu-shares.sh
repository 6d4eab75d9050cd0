#!/usr/bin/env bash
# Shares of compute time on real GPUs: an owner daemon for each of them and a host's, tenants by
# `sluice run --fraction P --policy fixed`, and what each was delivered against the same work alone
# through the same path.
#
# Usage: bench/gpu-shares.sh [--gpus 0,1,2,3] [--part PART,PART...] [--quick] [--seconds N] [--windows N] [--quantum T] [--only PATTERN]
#   as root. --part is of: fixed (10/90 to 50/30/20, each of five loads beside its like, 30 cells of a minute), unlike
#   (the same percent, each load beside others, 16), together (what launch-bound tenants do in all), lone, floors (best effort, equal,
#   lending, a live change), kill, theft (work that outlasts its turns; theft.kind: programs in sessions of kind observe, theft.liar.1 to 3:
#   lies in the schedule, by bench/liar; each beside a tenant of 85 or 90 %), vgg, many (24 PyTorch programs); all unless given. And, by
#   itself, switch: a lone tenant on the worker build/switch/sluice-worker (bench/prebuild.sh), which keeps turns in every other tenth of a
#   second. Cells are spread over the GPUs; one that would end after --seconds (default 560) is left out, and said to be. --windows is how
#   many of 10 s (default 5).
#   --quantum is the length of a turn (sluice.yaml's default). --only leaves cells whose name, as fixed.25-75.gemm, has a match.
#   --quick is a little of each, in a minute on four GPUs and two on one; --part try needs no GPU.
# Needs: build/bin, build/shim, GPUs with their driver, python3; for vgg and many torch and torchvision;
# nvcc, or the programs prebuilt in build/shares (--build makes them, where nvcc is);
# for theft liar and kind2.so in build/shares (bench/prebuild.sh). No Go.
# Raw lines go to $SLUICE_LOGS/shares (default build/gpu-logs/shares); shares/summary.py judges them.
# Exit status 0 when every bar was held.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"

HERE=$BENCH/shares
PARTS=(lone unlike together floors kill theft fixed many vgg)
GPUS='' CHOSEN=() SECS=560 WINDOWS=5 WINDOW=10 WARM=2 QUANTUM='' ONLY=''
usage() {
	sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
	exit 2
}
while [ $# -gt 0 ]; do
	case $1 in
	--gpus) GPUS=${2:-} && shift ;;
	--part) IFS=, read -r -a CHOSEN <<<"${2:-}" && shift ;;
	--seconds) SECS=${2:-} && shift ;;
	--windows) WINDOWS=${2:-} && shift ;;
	--quantum) QUANTUM=${2:-} && shift ;;
	--only) ONLY=${2:-} && shift ;;
	--quick) CHOSEN=(quick) WINDOWS=1 WINDOW=3 WARM=1 ;;
	--build)
		mkdir -p "$BUILD/shares"
		build_cu "$HERE/share.cu" "$BUILD/shares/share" && build_cu "$HERE/thief.cu" "$BUILD/shares/thief"
		exit
		;;
	*) usage ;;
	esac
	shift
done
[ "${CHOSEN[*]}" != try ] || WINDOWS=1 WINDOW=1 WARM=0.5
[ ${#CHOSEN[@]} -gt 0 ] || CHOSEN=("${PARTS[@]}")
for p in "${CHOSEN[@]}"; do
	[[ " ${PARTS[*]} quick try switch " = *" $p "* ]] || usage
done
EXE=''
if [[ " ${CHOSEN[*]} " = *" switch "* ]]; then
	[ ${#CHOSEN[@]} = 1 ] || usage
	EXE=$BUILD/switch/sluice-worker
	[ -x "$EXE" ] || {
		echo "gpu-shares.sh: no $EXE; run bench/prebuild.sh where Go is, and bring build/switch along" >&2
		exit 2
	}
fi
[ -n "$GPUS" ] || GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)
IFS=, read -r -a GPU <<<"$GPUS"

LOGS=$LOGS/shares
mkdir -p "$LOGS"
NAME=$(IFS=-; echo "${CHOSEN[*]}")
RAW=$LOGS/$NAME.jsonl
DIR=$SCRATCH
chmod 755 "$DIR"
export SLUICED_SOCKET=$DIR/host/run/sluiced.sock

# configure NAME CONTROL DATA METRICS OWNER: a sluiced's folder and sluice.yaml.
configure() {
	sluiced_folder "$1" <<-YAML
		auth: tls
		tls: {ca: $DIR/ca/ca.pem, cert: $DIR/ca/$1.pem, key: $DIR/ca/$1.key}
		listen: {control: "127.0.0.1:$2", data: "127.0.0.1:$3", metrics: "127.0.0.1:$4"}
		owner: {$5, poll: 1s, warm: 4}
		shares: {${QUANTUM:+quantum: $QUANTUM}}
		worker: {${EXE:+exe: $EXE}}
		pools: {$POOLS}
	YAML
}

daemon() {
	"$BUILD/bin/sluiced" --config "$DIR/$1/sluice.yaml" >"$LOGS/sluiced-$1.log" 2>&1 &
	STARTED[$1]=$!
}

# give_up WHAT: what a start that failed has left to say.
give_up() {
	fail start "$1"
	for f in "$LOGS"/sluiced-*.log; do
		show "$f" 20
	done
	exit 1
}

# The owners measure what a context takes of their GPU before they lend it.
healthy() { [ "$("$SLUICE" gpus | grep -c ' ok *$')" = ${#GPU[@]} ]; }

log_header | tee "$RAW"
echo "== gpu-shares: ${CHOSEN[*]} on GPU ${GPUS}"
nvidia-smi --query-gpu=index,uuid,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
# program NAME: the path of one that is prebuilt, or built now.
program() {
	local at=$BUILD/shares/$1
	if [ ! -x "$at" ]; then
		at=$DIR/$1
		build_cu "$HERE/$1.cu" "$at" >"$LOGS/build-$1.txt" 2>&1 || return 1
	fi
	echo "$at"
}
SHARE=$(program share) || give_up "share.cu was not built: $(tail -n 1 "$LOGS/build-share.txt")"
THIEF=''
if [[ " ${CHOSEN[*]} " = *" theft "* ]]; then
	THIEF=$(program thief) || give_up "thief.cu was not built: $(tail -n 1 "$LOGS/build-thief.txt")"
	for f in liar kind2.so; do
		[ -e "$BUILD/shares/$f" ] || give_up "no $BUILD/shares/$f; run make prebuilt where Go is, and bring build/shares along"
	done
fi
POOLS='' OWNERS=()
declare -A CONTROL=()
for g in "${GPU[@]}"; do
	CONTROL[$g]=$(free_port)
	OWNERS+=("owner$g")
	POOLS+="${POOLS:+, }gpu$g: {owners: [\"owner$g=127.0.0.1:${CONTROL[$g]}\"]}"
done
if ! "$SLUICE" ca init --dir "$DIR/ca" >"$LOGS/ca.out" 2>&1 || ! "$SLUICE" ca issue host "${OWNERS[@]}" --dir "$DIR/ca" >>"$LOGS/ca.out" 2>&1; then
	give_up "no certificates: $(tail -n 1 "$LOGS/ca.out")"
fi
for g in "${GPU[@]}"; do
	configure "owner$g" "${CONTROL[$g]}" "$(free_port)" "$(free_port)" "enabled: \"yes\", gpus: [$g]"
	daemon "owner$g"
done
configure host "$(free_port)" "$(free_port)" "$(free_port)" 'enabled: "no"'
daemon host
for n in "${!STARTED[@]}"; do
	wait_for 60 "${STARTED[$n]}" test -S "$DIR/$n/run/sluiced.sock" || give_up "sluiced of $n did not start"
done
wait_for 60 "${STARTED[host]}" healthy || give_up "not all GPUs can be lent: $("$SLUICE" gpus 2>&1 | tail -n 3)"
"$SLUICE" gpus
DRIVER=${SLUICE_OWNER_LIBCUDA:+'"--libcuda", "'$SLUICE_OWNER_LIBCUDA'", "--libnvml", "'${SLUICE_OWNER_LIBNVML:-}'"'}
cat >"$DIR/site.json" <<-JSON
	{"sluice": "$SLUICE", "worker": "$WORKER", "lib": "$BUILD/shim", "share": "$SHARE", "thief": "$THIEF", "liar": "$BUILD/shares/liar", "kind2": "$BUILD/shares/kind2.so", "python": "$PYTHON",
	 "logs": "$LOGS", "dir": "$DIR", "native_lib": "${SLUICE_NATIVE_LIB:-}", "worker_flags": [$DRIVER],
	 "gpus": [${GPUS}], "seconds": $((SECS - SECONDS)), "warm": $WARM, "windows": $WINDOWS, "window": $WINDOW, "only": "${ONLY//\\/\\\\}"}
JSON
nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv,noheader -l 2 >"$LOGS/clocks-$NAME.csv" 2>&1 &
STARTED[clocks]=$!
python3 "$HERE/cells.py" "$DIR/site.json" "$RAW" "${CHOSEN[@]}" 2>"$LOGS/cells-$NAME.err" &
STARTED[cells]=$!
wait "${STARTED[cells]}"
STATUS=$?
unset "STARTED[cells]"
[ $STATUS = 0 ] || { fail cells "$(why $STATUS)"; }
show "$LOGS/cells-$NAME.err" 30
if "$SLUICE" list --json | grep -q '"id"'; then
	fail nothing-left "leases are left"
	"$SLUICE" list --sessions
fi
for g in "${GPU[@]}"; do
	cp "$DIR/owner$g/log/audit.log" "$LOGS/audit-owner$g-$NAME.log" 2>/dev/null
done
find "$LOGS" -name 'tenant-*.err' -empty -delete
python3 "$HERE/summary.py" "$RAW" | tee "$LOGS/summary-$NAME.txt"
STATUS=${PIPESTATUS[0]}
echo "gpu-shares: $SECONDS s"
[ "$STATUS" = 0 ] && [ $FAILED = 0 ]
