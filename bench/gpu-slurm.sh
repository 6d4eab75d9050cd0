#!/usr/bin/env bash
# The job, on a real GPU: a slurmctld and a slurmd of Debian's packages, sluiced on the
# node with the GPU and on the node of the jobs, and batch scripts with --gres=rgpu:N.
#
# Usage: bench/gpu-slurm.sh --fetch [DIR]   where apt and a network are: the packages (5 MB)
#        bench/gpu-slurm.sh [DIR]           as root, on the machine with the GPU
# DIR is build/slurm-debs unless given; the word installed is for a machine that has a Slurm.
# Needs: build/bin, build/shim, build/spank, a GPU with its driver, python3 with torch and
# torchvision, dpkg-deb. No Slurm and no Go. Prints one line per check and every job's
# output; raw output is kept in $SLUICE_LOGS/slurm (default build/gpu-logs/slurm). Exit
# status 0 when every check passed.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"
# shellcheck source-path=SCRIPTDIR source=slurm-lib.sh
. "$(dirname "$0")/slurm-lib.sh"

if [ "${1:-}" = --fetch ]; then
	slurm_fetch "${2:-$BUILD/slurm-debs}"
	exit
fi
DEBS=${1:-$BUILD/slurm-debs}
# Where the machine's name is not known, it is localhost for this script and what it starts.
if ! slurm_resolvable && [ "$(hostname)" != localhost ]; then
	rm -rf "$SCRATCH"
	exec unshare --uts bash -c 'hostname localhost && exec "$@"' bash "$0" "$@"
fi

LOGS=$LOGS/slurm
mkdir -p "$LOGS"
rm -f "$LOGS"/*
DIR=$SCRATCH
chmod 755 "$DIR"
for_users "$BUILD/spank/spank_sluice.so" "$BENCH/resnet50.py" "$BENCH/measure.py" "$BENCH/busy.py"
TOTAL=$(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits)
JOB_USER=${SLUICE_JOB_USER:-nobody} # Slurm wants one that the machine knows
STEPS=${SLUICE_STEPS:-40} # of ResNet-50, in each of a job's repeats

# configure NAME OWNER CONTROL DATA METRICS: a sluiced's folder and sluice.yaml.
configure() {
	sluiced_folder "$1" <<-YAML
		munge: {socket: $SLURM_DIR/run/munge.sock}
		log: {level: debug}
		listen: {control: "127.0.0.1:$3", data: "127.0.0.1:$4", metrics: "127.0.0.1:$5"}
		owner: {enabled: "$2", poll: 1s}
		lease: {silence: 1m}
		pools: {default: {owners: ["gpu01=127.0.0.1:$CONTROL"]}}
		slurm: {controllers: [cpu01], bin: $SLURM_BIN, conf: $SLURM_CONF, user: root, lib: $DIR/users/shim, spool: $SLURM_DIR/spool}
	YAML
}

daemon() { PATH=$SLURM_BIN:$PATH start_sluiced "$1"; }

healthy() { "$SLUICE" gpus | grep -q ' ok *$'; }

# give_up NAME: what a start that failed has left to say.
give_up() {
	local f
	fail "$1" "did not start"
	for f in "$LOGS"/sluiced-*.log "$SLURM_DIR"/log/*; do
		show "$f" 15
	done
	exit 1
}

# hooks: what etc/ has a site put into slurm.conf, with the paths of here.
hooks() {
	local hook script
	for hook in Prolog:prolog.sh Epilog:epilog.sh PrologSlurmctld:prolog-ctld.sh EpilogSlurmctld:epilog-ctld.sh; do
		script=$DIR/${hook#*:}
		sed "s|/usr/bin/sluice|SLUICED_SOCKET=$SLUICED_SOCKET $SLUICE|" "$ROOT/prolog/${hook#*:}" >"$script"
		chmod 755 "$script"
		echo "${hook%:*}=$script"
	done
	echo "PrologFlags=Contain"
	echo "GresTypes=rgpu"
	echo "Licenses=rgpu:100"
	echo "JobSubmitPlugins=lua"
}

# lua: job_submit.lua as it is installed, with the paths of here.
lua() {
	sed "s|^local sluice = dofile.*|local sluice = dofile(\"$ROOT/prolog/sluice.lua\")\nsluice.table(\"$SLURM_DIR/sluice_pools.lua\")|" \
		"$ROOT/prolog/job_submit.lua" >"$SLURM_DIR/job_submit.lua"
}

# batch NAME PERCENT PROGRAM...: a job of the user's, with the options in OPTIONS; its id is left in JOB.
batch() {
	local name=$1 percent=$2
	shift 2
	printf '#!/bin/bash\n#SBATCH --job-name=%s --cpus-per-task=4 --gres=rgpu:%s %s\n%s\n' "$name" "$percent" "${OPTIONS:-}" "$*" >"$DIR/jobs/$name.sh"
	JOB=$(cd "$DIR/jobs" && as_user "$SLURM_BIN/sbatch" --parsable --output="$DIR/jobs/$name.out" "$DIR/jobs/$name.sh" 2>"$LOGS/$name.submit")
	case $JOB in
	'' | *[!0-9]*)
		fail "$name" "not submitted: $(head -n 1 "$LOGS/$name.submit")"
		return 1
		;;
	esac
}

as_user() {
	setpriv --reuid "$JOB_USER" --regid "$(id -g "$JOB_USER")" --clear-groups env HOME="$DIR/jobs" USER="$JOB_USER" LOGNAME="$JOB_USER" "$@"
}

# ended SECONDS NAME JOB: until it is over, however; then its output is the log's.
ended() {
	until_state "$1" "$3" COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY
	cp "$DIR/jobs/$2.out" "$LOGS/$2.out" 2>/dev/null
	"$SLURM_BIN/scontrol" show job "$3" >"$LOGS/$2.job" 2>&1
	[ "$(state "$3")" = COMPLETED ]
}

# all FILE: a job's output, whole.
all() {
	printf '     --- %s\n' "${1#"$LOGS"/}"
	sed 's/^/     | /' "$1"
}

rate() { sed -n 's/.*"median_ms": *\([0-9.]*\).*/\1/p' "$1" 2>/dev/null | tail -n 1 | awk '{ printf "%.2f", 1e3 / $1 }'; }
# delivered ALONE THIRTY SEVENTY: what busy.py printed alone and in the two jobs; fails unless they had 30 and 70 percent, to within 2 points.
delivered() {
	"$PYTHON" - "$@" <<-'P'
		import json, statistics, sys
		alone, *jobs = [json.loads(open(f).read().splitlines()[-1]) for f in sys.argv[1:]]
		begin, end = max(j["from"] for j in jobs), min(j["from"] + len(j["products"]) for j in jobs)
		if end - begin < 5:
		    sys.exit(f"both ran in {end - begin} whole seconds")
		rate = statistics.median(alone["products"])
		had = [100 * statistics.mean(j["products"][begin - j["from"] : end - j["from"]]) / rate for j in jobs]
		print(f"30 % had {had[0]:.1f} and 70 % had {had[1]:.1f} percent of the {rate:g} products a second that the program makes alone, in {end - begin} s")
		sys.exit(any(abs(h - w) > 2 for h, w in zip(had, (30, 70))))
	P
}
licences() { "$SLURM_BIN/scontrol" -o show lic | tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1; }
leases() { "$SLUICE" list 2>/dev/null | sed 1d | grep -c .; }
snapshot() {
	"$SLURM_BIN/squeue" -o '%.6i %.10j %.10u %.10T %.8M %.16R %W' >"$LOGS/squeue-$1.txt" 2>&1
	"$SLURM_BIN/scontrol" show lic >>"$LOGS/squeue-$1.txt" 2>&1
	SLUICED_SOCKET=$DIR/gpu01/run/sluiced.sock "$SLUICE" top --once >"$LOGS/top-$1.txt" 2>&1
}

# Jobs end before the daemons do.
leave() {
	[ -z "${SLURM_DIR:-}" ] || [ -z "${STARTED[slurmctld]:-}" ] || {
		"$SLURM_BIN/scancel" --user="$JOB_USER" 2>/dev/null
		for ((i = 0; i < 50; i++)); do
			[ -n "$("$SLURM_BIN/squeue" -h 2>/dev/null)" ] || break
			sleep 0.1
		done
	}
	finish
}
trap leave EXIT

log_header
slurm_unpack "$DEBS" "$DIR/slurm" || exit 1
"$SLURM_BIN/slurmctld" -V
CONTROL=$(free_port)
export SLUICED_SOCKET=$DIR/cpu01/run/sluiced.sock
slurm_configure "$DIR/etc" cpu01 Gres=rgpu:no_consume:6400 "$(hooks)"
echo "optional $DIR/users/spank_sluice.so socket=$DIR/cpu01/run/job.sock" >"$SLURM_DIR/plugstack.conf"
install -d -m 0755 -o "$JOB_USER" "$DIR/jobs"
configure gpu01 yes "$CONTROL" "$(free_port)" "$(free_port)"
configure cpu01 no "$(free_port)" "$(free_port)" "$(free_port)"
slurm_munge || give_up munge
daemon gpu01 || give_up sluiced-gpu01
daemon cpu01 || give_up sluiced-cpu01
# The owner measures what a context takes of the GPU before it lends it.
wait_for 60 "${STARTED[gpu01]}" healthy
"$SLUICE" slurm lua --config "$DIR/cpu01/sluice.yaml" --out "$SLURM_DIR/sluice_pools.lua" 2>"$LOGS/lua.err" || give_up lua
lua
if slurm_start; then
	pass slurm "$("$SLURM_BIN/sinfo" -h -o '%N %t, %c processors'), licences $(licences Total)"
else
	give_up slurm
fi
if "$SLURM_BIN/srun" --help | grep -q rgpu-mem; then
	pass options "$("$SLURM_BIN/srun" --help | grep -c -e --rgpu-) of ours in srun --help"
else
	fail options "srun --help shows none of ours"
fi
"$SLUICE" slurm check --config "$DIR/cpu01/sluice.yaml" >"$LOGS/check.txt" 2>&1
if grep -q '^ok' "$LOGS/check.txt" && ! grep -q '^fail' "$LOGS/check.txt"; then # there is no slurmdbd here, which it warns of
	pass check "sluice slurm check: $(grep -c '^ok' "$LOGS/check.txt") well, $(grep -c '^warn' "$LOGS/check.txt") warned of"
else
	fail check "$(grep -m 1 '^fail' "$LOGS/check.txt")"
	show "$LOGS/check.txt" 30
fi

# half of the GPU: nvidia-smi and ResNet-50 in one batch script
"$PYTHON" "$BENCH/resnet50.py" --steps "$STEPS" >"$LOGS/native.out" 2>"$LOGS/native.err"
batch half 50 "nvidia-smi
nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits
$PYTHON $DIR/users/resnet50.py --steps $STEPS" && {
	until_state 60 "$JOB" RUNNING COMPLETED FAILED
	for ((i = 0; i < 300; i++)); do
		snapshot half
		grep -q 'python\|train' "$LOGS/top-half.txt" && break
		[ "$(state "$JOB")" = RUNNING ] || break
		sleep 0.2
	done
	ended 300 half "$JOB"
	STATUS=$?
	all "$LOGS/half.out"
	all "$LOGS/squeue-half.txt"
	all "$LOGS/top-half.txt"
	SEEN=$(grep -x '[0-9][0-9]*' "$LOGS/half.out" | head -n 1)
	HALF=$(rate "$LOGS/half.out") NATIVE=$(rate "$LOGS/native.out")
	if [ $STATUS = 0 ] && [ -n "$HALF" ] && [ "${SEEN:-0}" -gt $((TOTAL * 48 / 100)) ] && [ "$SEEN" -le $((TOTAL / 2)) ]; then
		pass half "$SEEN MiB of $TOTAL; $HALF steps/s, native $NATIVE, $(awk -v a="$HALF" -v b="$NATIVE" 'BEGIN { printf "%.3f", a / b }')"
	else
		fail half "job $JOB is $(state "$JOB"); nvidia-smi says ${SEEN:-nothing} of $TOTAL MiB"
		show "$LOGS/half.job" 40
		show "$LOGS/sluiced-cpu01.log" 30
		show "$LOGS/sluiced-gpu01.log" 20
		show "$SLURM_DIR/log/slurmctld.log" 20
		show "$SLURM_DIR/log/slurmd.log" 20
	fi
	# Without slurmdbd, Slurm takes no comment on a job that has ended.
	"$SLUICE" report "$JOB" >"$LOGS/report.txt" 2>&1
	all "$LOGS/report.txt"
	REPORT=$(grep '^sluice: asked 50% granted 50%' "$LOGS/report.txt")
	if [ -n "$REPORT" ]; then pass report "$REPORT"; else fail report "no report of job $JOB"; fi
}

# 30 and 70 side by side, and one more that waits for them
NAMES=(thirty seventy waits) PERCENTS=(30 70 40) IDS=()
for n in 0 1 2; do
	batch "${NAMES[n]}" "${PERCENTS[n]}" "nvidia-smi --query-gpu=memory.total --format=csv,noheader
$PYTHON $DIR/users/resnet50.py --steps $((n < 2 ? STEPS * 2 : STEPS))" && IDS[n]=$JOB
	[ $n -ne 1 ] || { until_state 30 "${IDS[0]:-0}" RUNNING && until_state 30 "${IDS[1]:-0}" RUNNING; }
done
if [ ${#IDS[@]} = 3 ]; then
	BESIDE=
	for ((i = 0; i < 200; i++)); do
		if [ "$(state "${IDS[0]}") $(state "${IDS[1]}") $(state "${IDS[2]}") $(reason "${IDS[2]}")" = "RUNNING RUNNING PENDING Licenses" ]; then
			snapshot beside
			BESIDE=$(leases)
			[ "$(grep -c 'python\|train' "$LOGS/top-beside.txt")" -ge 2 ] && break
		fi
		[ "$(state "${IDS[0]}")" = RUNNING ] || break
		sleep 0.1
	done
	STATUS=0
	for n in 0 1 2; do
		ended 300 "${NAMES[n]}" "${IDS[n]}" || STATUS=1
		all "$LOGS/${NAMES[n]}.out"
	done
	all "$LOGS/squeue-beside.txt"
	all "$LOGS/top-beside.txt"
	if [ $STATUS = 0 ] && [ "$BESIDE" = 2 ]; then
		pass side-by-side "30 % $(rate "$LOGS/thirty.out") and 70 % $(rate "$LOGS/seventy.out") steps/s, both at once; the third waited for Licenses"
	else
		fail side-by-side "two leases and a third job waiting were $([ "$BESIDE" = 2 ] || echo "not ")seen; ${IDS[*]} are $(state "${IDS[0]}") $(state "${IDS[1]}") $(state "${IDS[2]}")"
		show "$LOGS/sluiced-cpu01.log" 30
		show "$SLURM_DIR/log/slurmctld.log" 30
	fi
	START=$(field "${IDS[2]}" StartTime) END=$(printf '%s\n' "$(field "${IDS[0]}" EndTime)" "$(field "${IDS[1]}" EndTime)" | sort | head -n 1)
	if [[ -n "$START" && ! "$START" < "$END" ]]; then
		pass waited "the third began at ${START#*T}, the first to end did so at ${END#*T}"
	else
		fail waited "the third began at $START, before ${END:-nothing}"
	fi
fi

# 30 and 70 of policy fixed, both with work all the time: the percent of the products that the program makes alone, in the
# whole seconds in which both ran
"$PYTHON" "$BENCH/busy.py" --seconds 4 >"$LOGS/busy.out" 2>"$LOGS/busy.err"
IDS=()
for n in 0 1; do
	OPTIONS=--rgpu-policy=fixed batch "fixed${PERCENTS[n]}" "${PERCENTS[n]}" "$PYTHON $DIR/users/busy.py --seconds ${SLUICE_FIXED_SECONDS:-14}" && IDS[n]=$JOB
done
if [ ${#IDS[@]} = 2 ]; then
	STATUS=0
	for n in 0 1; do
		ended 120 "fixed${PERCENTS[n]}" "${IDS[n]}" || STATUS=1
		all "$LOGS/fixed${PERCENTS[n]}.out"
	done
	if [ $STATUS = 0 ] && DELIVERED=$(delivered "$LOGS/busy.out" "$LOGS/fixed30.out" "$LOGS/fixed70.out" 2>"$LOGS/delivered.err"); then
		pass fixed "$DELIVERED"
	else
		fail fixed "${DELIVERED:-$(why $STATUS)}; wanted 30 and 70 to within 2 points"
		show "$LOGS/delivered.err"
		show "$LOGS/fixed30.job" 30
		show "$LOGS/sluiced-gpu01.log" 20
	fi
fi

# who does not ask gets nothing; who asks for too much hears of it
printf '#!/bin/bash\nenv\n' >"$DIR/jobs/none.sh"
JOB=$(cd "$DIR/jobs" && as_user "$SLURM_BIN/sbatch" --parsable --output="$DIR/jobs/none.out" "$DIR/jobs/none.sh")
if ended 60 none "$JOB" && ! grep -q '^SLUICE_SOCKET=\|^SLUICE_LEASE\|^LD_LIBRARY_PATH=.*shim' "$LOGS/none.out"; then
	pass none "a job that asks for nothing has nothing of ours in its environment"
else
	fail none "job $JOB is $(state "$JOB"); $(grep '^SLUICE_\|^LD_LIB' "$LOGS/none.out" | head -n 1)"
fi
if as_user "$SLURM_BIN/sbatch" --gres=rgpu:150 --wrap true >"$LOGS/toomuch.out" 2>"$LOGS/toomuch.err"; then
	fail too-much "150 % of a pool of 100 % were accepted"
else
	pass too-much "$(head -n 1 "$LOGS/toomuch.err" | cut -c1-160)"
fi

for ((i = 0; i < 100; i++)); do
	LEFT=$(leases) USED=$(licences Used) NODE=$("$SLURM_BIN/sinfo" -h -o %t)
	[ "$LEFT $USED $NODE" != '0 0 idle' ] || break
	sleep 0.1
done
if [ "$LEFT $USED $NODE" = '0 0 idle' ]; then
	pass nothing-left "no lease, no licence in use, node $NODE; $(nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits) MiB of the GPU in use"
else
	fail nothing-left "$LEFT leases, $USED licences in use, node $NODE"
	"$SLUICE" list
fi
cp "$SLURM_CONF" "$SLURM_DIR"/log/*.log "$LOGS/" 2>/dev/null
cp "$DIR/gpu01/log/audit.log" "$LOGS/audit-gpu01.log" 2>/dev/null
echo "gpu-slurm: $PASSED passed, $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s"
[ "$FAILED" = 0 ]
