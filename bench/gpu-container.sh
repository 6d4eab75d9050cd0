#!/usr/bin/env bash
# A container on a real GPU: runc and crun of Debian's packages, a tree of debootstrap's that
# knows nothing of GPUs, and in it nvidia-smi and statically linked CUDA programs on 30 % of a
# GPU, through the hook, two sluiced and a worker; as root and rootless, and by exec.
#
# Usage: bench/gpu-container.sh --fetch [DIR]   where apt, debootstrap and a network are, as root: 20 MB
#        bench/gpu-container.sh [DIR]           as root, on the machine with the GPU
# DIR is build/container unless given; the word installed is for a machine that has runc, crun and debootstrap. Needs: build/bin with sluice-hook, build/shim, build/gpu or
# build/test with the CUDA programs of nvcc 11.8, a GPU with its driver, python3, dpkg-deb. No
# engine, no Go and no network. Prints one line per check and what the containers say; raw output
# is kept in $SLUICE_LOGS/container (default build/gpu-logs/container). A runtime that cannot
# start any container here is named and left out; with none of them the script fails.
set -u
# shellcheck source-path=SCRIPTDIR source=gpu-lib.sh
. "$(dirname "$0")/gpu-lib.sh"
# shellcheck source-path=SCRIPTDIR source=slurm-lib.sh
. "$(dirname "$0")/slurm-lib.sh" # how Debian's packages are fetched

DIR=$SCRATCH
chmod 755 "$DIR"
STARTS=${SLUICE_STARTS:-11} MOST_MS=${SLUICE_MOST_MS:-50} # containers, and what a lease may add to the start of one
NOBODY=12345 # whom the machine does not know
LIBS=$DIR/debs/usr/lib/x86_64-linux-gnu:$DIR/debs/lib/x86_64-linux-gnu

# fetch DIR: the runtimes' packages, and the tree that the other tests use as well.
fetch() {
	local tree
	# shellcheck disable=SC2034 # slurm_fetch reads it
	SLURM_PACKAGES=(runc crun libseccomp2 libyajl2 libcap2 libsystemd0 liblz4-1 liblzma5 libzstd1 libgcrypt20 libgpg-error0)
	slurm_fetch "$1" >"$DIR/fetch.log" && tree=$("$ROOT/test/containers/image.sh") && xz -cT0 "$tree" >"$1/tree.tar.xz" || return 1
	du -sh "$1"
}

if [ "${1:-}" = --fetch ]; then
	fetch "${2:-$BUILD/container}"
	exit
fi
DEBS=${1:-$BUILD/container}
LOGS=$LOGS/container
mkdir -p "$LOGS"
rm -rf "${LOGS:?}"/*
export SLUICED_SOCKET=$DIR/host/run/sluiced.sock
SMI=${SLUICE_SMI:-$(command -v nvidia-smi)} # the site's, which containers get
TOTAL=$(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits)
PROGRAMS=$BUILD/gpu/cuda-11.8
[ -d "$PROGRAMS" ] || PROGRAMS=$BUILD/test/cuda-11.8

for_users "$SLUICE" "$BUILD/bin/sluice-hook"
HOOK=$DIR/users/sluice-hook

# configure NAME OWNER CONTROL DATA: a sluiced's folder and sluice.yaml.
configure() {
	sluiced_folder "$1" <<-YAML
		auth: tls
		tls: {ca: $DIR/ca/ca.pem, cert: $DIR/ca/$1.pem, key: $DIR/ca/$1.key}
		log: {level: debug}
		listen: {control: "127.0.0.1:$3", data: "127.0.0.1:$4", metrics: "off"}
		owner: {enabled: "$2", poll: 1s}
		pools: {default: {owners: ["owner=127.0.0.1:$CONTROL"]}}
	YAML
}

healthy() { "$SLUICE" gpus | grep -q ' ok *$'; }

# hold UID: a lease of 30 % of that user's, until the script ends; its socket is left in SOCKET.
hold() {
	mkfifo "$DIR/hold$1"
	: >"$DIR/lease$1"
	# shellcheck disable=SC2016 # the job's shell expands it
	setpriv --reuid "$1" --regid "$1" --clear-groups env HOME=/ "$DIR/users/sluice" run --lib "$DIR/users/shim" --fraction 30 -- sh -c 'echo "$SLUICE_SOCKET"; exec cat' \
		<"$DIR/hold$1" >"$DIR/lease$1" 2>"$LOGS/lease$1.err" &
	STARTED["lease$1"]=$!
	exec {OPEN}>"$DIR/hold$1" # until the script ends
	: "$OPEN"
	wait_for 60 "${STARTED[lease$1]}" test -s "$DIR/lease$1" || return 1
	SOCKET=$(cat "$DIR/lease$1")
}

# box UID SOCKET PROGRAM...: writes the specification of that user's container; SOCKET is empty
# where it does not ask. It has a network of its own, without any interface.
box() {
	"$PYTHON" - "$DIR/box$1/config.json" "$DIR/programs" "$@" <<-'PY'
		import json, sys
		path, programs, uid, socket, *args = sys.argv[1:]
		uid = int(uid)
		spec = {
		    "ociVersion": "1.0.2", "hostname": "box", "root": {"path": "rootfs"},
		    "process": {"args": args, "cwd": "/", "noNewPrivileges": True, "user": {"uid": 0, "gid": 0}, "capabilities": {},
		                "env": ["PATH=/usr/bin:/bin:/programs"] + (["SLUICE_SOCKET=" + socket] if socket else [])},
		    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
		               {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
		               {"destination": "/programs", "type": "bind", "source": programs, "options": ["rbind", "ro"]}],
		    "linux": {"namespaces": [{"type": t} for t in ("pid", "mount", "uts", "ipc", "network")]},
		}
		if uid:
		    spec["linux"]["namespaces"].append({"type": "user"})
		    spec["linux"]["uidMappings"] = spec["linux"]["gidMappings"] = [{"containerID": 0, "hostID": uid, "size": 1}]
		json.dump(spec, open(path, "w"))
	PY
	chmod 644 "$DIR/box$1/config.json"
}

# call UID RUNTIME COMMAND...: the runtime behind our wrapper, or itself if PLAIN is set. crun
# wants one kind of cgroups and runc wants some, so the mounts of this call are its own.
PLAIN=
call() {
	local uid=$1 runtime=$2 command=("$HOOK" runtime --config "$DIR/$2.json" --)
	[ -z "$PLAIN" ] || command=("${PATHS[$2]}")
	# shellcheck disable=SC2016 # the inner shell expands them
	timeout -k 5 120 unshare -m --propagation private sh -c '
		umount /sys/fs/cgroup/unified 2>/dev/null
		mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
		uid=$1; shift; [ "$uid" = 0 ] || set -- setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@"
		exec "$@"' sh "$uid" env LD_LIBRARY_PATH="$LIBS" XDG_RUNTIME_DIR="$DIR/$uid" HOME=/ \
		"${command[@]}" --root "$DIR/$uid/$runtime" ${GLOBAL[$runtime]:+"${GLOBAL[$runtime]}"} "${@:3}"
}

# start NAME UID RUNTIME: the container that box wrote; its output is NAME's.
COUNT=0
start() {
	COUNT=$((COUNT + 1))
	call "$2" "$3" run ${RUN[$3]:+"${RUN[$3]}"} --bundle "$DIR/box$2" "box$COUNT" </dev/null >"$LOGS/$1.out" 2>"$LOGS/$1.err"
}

all() {
	printf '     --- %s\n' "${1#"$LOGS"/}"
	sed 's/^/     | /' "$1"
}

steps() { grep '^step' "$1"; }
mounts() { sort /proc/self/mountinfo; }

# median FILE: of numbers, one a line
median() { sort -n "$1" | awk '{ v[NR] = $1 } END { printf "%.1f", v[int((NR + 1) / 2)] }'; }

log_header
declare -A PATHS=() RUN=() GLOBAL=()
if [ "$DEBS" = installed ]; then
	LIBS=
	PATHS=([runc]=$(command -v runc) [crun]=$(command -v crun))
	TREE=$("$ROOT/test/containers/image.sh") || exit 1
else
	PATHS=([runc]=$DIR/debs/usr/sbin/runc [crun]=$DIR/debs/usr/bin/crun)
	for f in "$DEBS"/*.deb; do
		dpkg-deb -x "$f" "$DIR/debs" || exit 1
	done
	TREE=$DIR/tree.tar # without a program for xz
	"$PYTHON" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$DEBS/tree.tar.xz" "$TREE" || exit 1
fi
for uid in 0 $NOBODY; do
	install -d -m 0700 -o "$uid" -g "$uid" "$DIR/$uid"
	install -d -m 0755 "$DIR/box$uid" "$DIR/box$uid/rootfs"
	tar -C "$DIR/box$uid/rootfs" -xf "$TREE" || exit 1
	[ "$uid" = 0 ] || chown -hR "$uid:$uid" "$DIR/box$uid"
done
install -d -m 0755 "$DIR/programs"
install -m 0755 "$PROGRAMS"/{vecadd,memcheck,train} "$DIR/programs/"

# which runtimes start a container here, and how
for runtime in runc crun; do
	: >"$LOGS/tried-$runtime.txt"
	for uid in 0 $NOBODY; do
		for way in '|' '|--no-pivot' '--cgroup-manager=disabled|' '--cgroup-manager=disabled|--no-pivot'; do
			[[ $runtime = runc && $way = *disabled* ]] && continue
			GLOBAL[$runtime]=${way%|*} RUN[$runtime]=${way#*|}
			box "$uid" '' /bin/true
			if PLAIN=1 start "true-$runtime-$uid" "$uid" $runtime; then
				KINDS+=("$runtime:$uid:$way")
				continue 2
			fi
			echo "uid $uid, $way: $(tail -n 1 "$LOGS/true-$runtime-$uid.err")" >>"$LOGS/tried-$runtime.txt"
		done
		echo "     $runtime starts no container of uid $uid here: $(grep -m 1 "^uid $uid" "$LOGS/tried-$runtime.txt" | cut -c1-200)"
	done
done
[ -n "${KINDS[*]:-}" ] || {
	fail runtimes "none of them starts a container of root's or of a user's here"
	exit 1
}
pass runtimes "${KINDS[*]}"

# what containers get, and the daemons
for f in /sbin/ldconfig.real /sbin/ldconfig; do # Ubuntu's /sbin/ldconfig is a script
	[ -e "$f" ] && LDCONFIG=$f && break
done
for runtime in runc crun; do
	cat >"$DIR/$runtime.json" <<-JSON
		{"lib": "$DIR/content", "leases": "$DIR/host/run/leases", "ldconfig": "${LDCONFIG:-/sbin/ldconfig}", "runtimes": ["${PATHS[$runtime]}"]}
	JSON
done
"$HOOK" prepare --config "$DIR/runc.json" --from "$BUILD/shim" --nvidia-smi "$SMI" || exit 1
CONTROL=$(free_port)
configure owner yes "$CONTROL" "$(free_port)"
configure host no "$(free_port)" "$(free_port)"
if ! "$SLUICE" ca init --dir "$DIR/ca" >"$LOGS/ca.out" 2>&1 || ! "$SLUICE" ca issue owner host --dir "$DIR/ca" >>"$LOGS/ca.out" 2>&1; then
	fail ca "$(tail -n 1 "$LOGS/ca.out")"
	exit 1
fi
need_sluiced owner
need_sluiced host
wait_for 60 "${STARTED[owner]}" healthy
# The simulated GPU serves no program without the worker: there the comparison is with one outside of containers.
WHERE=natively
if ! "$DIR/programs/train" 400 >"$LOGS/train.native.out" 2>"$LOGS/train.native.err"; then
	WHERE='outside of the container'
	"$SLUICE" run --lib "$BUILD/shim" --fraction 30 -- "$DIR/programs/train" 400 >"$LOGS/train.native.out" 2>>"$LOGS/train.native.err"
fi
BEFORE=$(mounts)

declare -A SOCKETS=()
for kind in "${KINDS[@]}"; do
	IFS=: read -r runtime uid way <<<"$kind"
	GLOBAL[$runtime]=${way%|*} RUN[$runtime]=${way#*|}
	name=$runtime-$([ "$uid" = 0 ] && echo root || echo rootless)
	if [ -z "${SOCKETS[$uid]:-}" ]; then
		hold "$uid" || {
			fail "lease-$uid" "no lease of 30 %"
			show "$LOGS/lease$uid.err"
			show "$LOGS/sluiced-host.log" 20
			continue
		}
		SOCKETS[$uid]=$SOCKET
	fi
	SOCKET=${SOCKETS[$uid]}

	# a container that does not ask has nothing of ours, and finds no GPU
	box "$uid" '' /bin/sh -c '! [ -e /usr/lib/sluice/libcuda.so.1 ] && ! [ -s /usr/bin/nvidia-smi ] && ! vecadd'
	if start "$name.none" "$uid" "$runtime"; then
		pass "$name-none" "a container that does not ask: $(head -n 1 "$LOGS/$name.none.err" | cut -c1-120)"
	else
		fail "$name-none" "$(head -n 1 "$LOGS/$name.none.out")"
	fi

	# one that asks: nvidia-smi, memory to the last granule, computing
	# shellcheck disable=SC2016 # the container's shell expands it
	box "$uid" "$SOCKET" /bin/sh -c 'nvidia-smi && nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits && memcheck $(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits) && vecadd && train 400'
	start "$name" "$uid" "$runtime"
	STATUS=$?
	[ "$kind" = "${KINDS[0]}" ] && all "$LOGS/$name.out"
	SEEN=$(grep -x '[0-9][0-9]*' "$LOGS/$name.out" | head -n 1)
	if [ "${SEEN:-0}" -gt $((TOTAL * 28 / 100)) ] && [ "$SEEN" -le $((TOTAL * 30 / 100)) ]; then
		pass "$name-smi" "nvidia-smi in the container: $SEEN MiB of $TOTAL"
	else
		fail "$name-smi" "nvidia-smi in the container says ${SEEN:-nothing}, the GPU has $TOTAL MiB"
		show "$LOGS/$name.err"
	fi
	if [ $STATUS = 0 ] && [ "$(grep -c '^PASS' "$LOGS/$name.out")" = 3 ] && cmp -s <(steps "$LOGS/$name.out") <(steps "$LOGS/train.native.out"); then
		pass "$name-compute" "vecadd, memcheck to one granule of ${SEEN:-?} MiB, $(steps "$LOGS/$name.out" | wc -l) lines of training as $WHERE"
	else
		fail "$name-compute" "$(why $STATUS), $(grep -c '^PASS' "$LOGS/$name.out") of 3 passed"
		show "$LOGS/$name.err" 20
		diff <(steps "$LOGS/$name.out") <(steps "$LOGS/train.native.out") | head -n 5
		show "$LOGS/sluiced-host.log" 10
		show "$LOGS/sluiced-owner.log" 10
	fi

	# exec, which has nothing of the container's environment
	box "$uid" "$SOCKET" /bin/sleep 60
	if call "$uid" "$runtime" run ${RUN[$runtime]:+"${RUN[$runtime]}"} --detach --bundle "$DIR/box$uid" "exec-$name" </dev/null >"$LOGS/$name.detach" 2>&1; then
		# crun comes back before the container's program runs, and there is nothing to enter yet.
		PID=$(call "$uid" "$runtime" state "exec-$name" 2>/dev/null | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p')
		wait_for 20 "${PID:-0}" grep -qx sleep "/proc/${PID:-0}/comm"
		call "$uid" "$runtime" exec "exec-$name" /bin/sh -c 'unset SLUICE_SOCKET; nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits && /programs/vecadd' \
			</dev/null >"$LOGS/$name.exec" 2>&1
		call "$uid" "$runtime" delete --force "exec-$name" >"$LOGS/$name.delete" 2>&1
	fi
	if grep -q '^PASS' "$LOGS/$name.exec" && grep -qx "${SEEN:-none}" "$LOGS/$name.exec"; then
		pass "$name-exec" "$SEEN MiB, and vecadd, in a program of exec without our environment"
	else
		fail "$name-exec" "see below"
		show "$LOGS/$name.detach"
		show "$LOGS/$name.exec"
	fi

	# what it costs
	for asks in '' "$SOCKET"; do
		: >"$DIR/times"
		for ((i = 0; i < STARTS; i++)); do
			box "$uid" "$asks" /bin/true
			T0=$(clock)
			start "$name.time" "$uid" "$runtime" || fail "$name-time" "$(tail -n 1 "$LOGS/$name.time.err")"
			awk -v a="$(clock)" -v b="$T0" 'BEGIN { printf "%.1f\n", (a - b) * 1e3 }' >>"$DIR/times"
		done
		if [ -z "$asks" ]; then WITHOUT=$(median "$DIR/times"); else WITH=$(median "$DIR/times"); fi
	done
	MORE=$(minus "$WITH" "$WITHOUT")
	if awk -v m="$MORE" -v most="$MOST_MS" 'BEGIN { exit !(m < most) }'; then
		pass "$name-time" "a container's start takes $WITHOUT ms through the wrapper, $WITH ms with a lease: $MORE ms more (medians of $STARTS)"
	else
		fail "$name-time" "$MORE ms more with a lease than the $WITHOUT ms without (medians of $STARTS)"
	fi
done

# the lease's end is the container's refusal
for uid in "${!SOCKETS[@]}"; do
	stop "lease$uid"
done
wait_for 30 "${STARTED[host]}" test ! -e "$(dirname "${SOCKETS[${KINDS[0]#*:}]:-${SOCKET:-/}}")"
IFS=: read -r runtime uid way <<<"${KINDS[0]}"
box "$uid" "${SOCKETS[$uid]:-}" /bin/true
if [ -n "${SOCKETS[$uid]:-}" ] && ! start refused "$uid" "$runtime" && grep -q 'not on this node, or it has ended' "$LOGS/refused.err"; then
	pass refused "$(grep -o 'the GPU fraction cannot.*ended' "$LOGS/refused.err" | head -n 1 | cut -c1-150)"
else
	fail refused "a container of an ended lease: $(tail -n 1 "$LOGS/refused.err" | cut -c1-200)"
fi
if [ "$BEFORE" = "$(mounts)" ] && ! "$SLUICE" list | sed 1d | grep -q .; then
	pass nothing-left "no lease, mounts as before; $(nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits) MiB of the GPU in use"
else
	fail nothing-left "$("$SLUICE" list | sed 1d | grep -c .) leases; mounts: $(diff <(echo "$BEFORE") <(mounts) | head -n 3)"
fi
echo "gpu-container: $PASSED passed, $FAILED failed${FAILURES[*]:+: ${FAILURES[*]}}; $SECONDS s"
[ "$FAILED" = 0 ]
