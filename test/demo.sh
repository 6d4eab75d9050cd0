#!/bin/bash
# demo.sh [up|down]: what Sluice does, on a machine without a GPU and without Slurm's services: a Slurm cluster
# in a folder, of a controller with accounting, a node with two simulated GPUs of 8 GiB and two nodes without
# any. A user submits jobs for fractions of GPUs, one of which has to wait; they run a program built by nvcc on
# nodes without GPUs. The cluster is left running; `demo.sh down` leaves nothing. Its folder is
# /tmp/sluice-demo, or that of SLUICE_DEMO. As root.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[ "$(id -u)" = 0 ] || { echo "demo: nodes are made of namespaces, which needs root; say sudo make demo" >&2; exit 1; }

build=${SLUICE_BUILD:-$PWD/build}
lab=$build/bin/slurmlab
dir=${SLUICE_DEMO:-/tmp/sluice-demo} # short: sockets lie below it

down() {
	rmdir "$dir" 2>/dev/null || true # a start that was cut short
	[ ! -e "$dir" ] || "$lab" down "$dir"
}
if [ "${1:-up}" = down ]; then
	down
	echo "demo: nothing is left of it"
	exit
fi

say() { printf '\n%s\n' "$*" | fold -s -w 100; }
# at NODE USER COMMAND...: on that node; show: with a prompt, as that user sees it.
at() { "$lab" run "$dir" -n "$1" -u "$2" "${@:3}"; }
show() {
	printf '\n\033[1m%s@%s$ %s\033[0m\n' "$2" "$1" "${*:3}"
	at "$@"
}
state() { at democtl root squeue -h -t all -j "$1" -o %T; }
# until_is LIMIT TEXT COMMAND...: until the command prints the text and nothing else.
until_is() {
	local i now=
	for ((i = 0; i < $1 * 10; i++)); do
		now=$("${@:3}" 2>/dev/null) || true
		[ "$now" != "$2" ] || return 0
		[ "$now" != FAILED ] || break
		sleep 0.1
	done
	echo "demo: ${*:3}: $now, and not $2 within $1 s. The logs are below $dir/n, and jobs' outputs in $dir/home/alice:" >&2
	tail -n 5 "$dir"/home/alice/*.out "$dir"/n/*/log/sluiced.log >&2 || true
	exit 1
}

rmdir "$dir" 2>/dev/null || true # a start that was cut short
[ ! -e "$dir" ] || { echo "demo: $dir is there already, perhaps with a cluster that somebody looks around in; make demo-down ends it, or name another folder: make demo SLUICE_DEMO=/tmp/NAME" >&2; exit 1; }
# What docs/admin.md has a site do: the plug-in, the four scripts, job_submit.lua, and the pool's licences.
options=$(mktemp) follower=
trap 'rm -f "$options"; [ -z "$follower" ] || kill $follower 2>/dev/null || true' EXIT
BUILD=$build CUDA=${CUDA:-11.8} python3 - >"$options" <<'PY'
import json, os
build, here = os.environ["BUILD"], os.getcwd()
scripts = {"Prolog": "prolog.sh", "Epilog": "epilog.sh", "PrologSlurmctld": "prolog-ctld.sh", "EpilogSlurmctld": "epilog-ctld.sh"}
slurm = "/usr/lib/sluice/slurm/"
print(json.dumps({
    "Name": "demo", "Build": build, "Accounting": True,
    "Nodes": [{"Name": "gpu01", "GPUs": 2, "Sluice": {"owner.poll": "1s"}}, {"Name": "node01"}, {"Name": "node02"}],
    "SlurmLines": [
        "PartitionName=compute Nodes=node01,node02 Default=YES State=UP LLN=YES",
        "PartitionName=gpu Nodes=gpu01 State=UP",
    ],
    "Slurm": {key: slurm + name for key, name in scripts.items()},
    "Hooks": {},
    "Etc": {
        "job_submit.lua": open("prolog/job_submit.lua").read(),
        "plugstack.conf": "optional " + slurm + "spank_sluice.so\n",
    },
    "Install": {
        slurm + "spank_sluice.so": build + "/spank/spank_sluice.so",
        slurm + "sluice.lua": here + "/prolog/sluice.lua",
        **{slurm + name: here + "/prolog/" + name for name in scripts.values()},
        "/opt/demo/train": build + "/test/cuda-" + os.environ["CUDA"] + "/train",
    },
    "Sluice": {"slurm.controllers": "[democtl]", "lease.silence": "45s", "users.run": "false"},
}))
PY
"$lab" up "$dir" "$options"
at democtl root sluice slurm lua --out /etc/slurm/sluice_pools.lua

cat >"$dir/home/alice/train.sh" <<'SH'
#!/bin/bash
#SBATCH --job-name=train --output=%x.out
#SBATCH --gres=rgpu:50      # half of a GPU
#SBATCH --rgpu-report       # and at the end a line about it
/opt/demo/train 2000
SH
cat >"$dir/home/alice/more.sh" <<'SH'
#!/bin/bash
#SBATCH --output=%x.out
/opt/demo/train 1500
SH

say "A cluster of Slurm $(at democtl root scontrol version | cut -d' ' -f2). gpu01 lends two GPUs, simulated ones, to the jobs on node01 and node02, which have none:"
show democtl alice sinfo -o '%N %t %c %G %P'
show democtl alice sluice gpus
say 'Slurm is as Debian ships it. What an administrator has added to its configuration:'
show democtl root sluice slurm check
say 'One line in a batch script asks for a fraction:'
show democtl alice cat train.sh
show democtl alice sbatch train.sh
train=1
until_is 30 RUNNING state $train
say 'Two more jobs: all of a GPU and a fifth of another; and four fifths, for which there is no room left. It is Slurm that makes it wait:'
show democtl alice sbatch --job-name=large --gres=rgpu:120 more.sh
until_is 30 RUNNING state 2
show democtl alice sbatch --job-name=later --gres=rgpu:80 --rgpu-mem=2G more.sh
until_is 30 Licenses at democtl root squeue -h -j 3 -o %r
show democtl alice squeue -o '%.6i %.8j %.6u %.2t %.6M %.9N %.12r %W'
show democtl alice scontrol show licenses
say 'On gpu01, while they compute:'
sleep 1 # rates are of the last second
show gpu01 root sluice top --once
say 'More than there is at all, and what is no size, are refused when they are submitted:'
for bad in --gres=rgpu:300 '--gres=rgpu:50 --rgpu-mem=much'; do
	printf '\n\033[1malice@democtl$ sbatch %s more.sh\033[0m\n' "$bad"
	# shellcheck disable=SC2086 # two arguments
	if at democtl alice sbatch $bad more.sh 2>&1; then
		echo 'demo: it was accepted' >&2
		exit 1
	fi
done
say 'The program is plain CUDA and knows nothing of Sluice. A small network learns a picture, on its half of a GPU of another node:'
printf '\n\033[1malice@democtl$ tail -n +1 -f train.out\033[0m\n'
tail -n +1 -f "$dir/home/alice/train.out" &
follower=$!
until_is 120 COMPLETED state $train
until_is 20 1 grep -c '^sluice: asked' "$dir/home/alice/train.out" # what --rgpu-report is for
sleep 1.2                                                        # tail looks once a second where it is not told
kill $follower
wait $follower 2>/dev/null || true
for job in 2 3; do until_is 120 COMPLETED state $job; done
say 'The third began when the first had returned its licences:'
until_is 20 3 bash -c "'$lab' run '$dir' -u root sacct -X -n -j 1,2,3 -o AdminComment%20 | grep -c sluice:"
show democtl alice sacct -X --units=M -o JobID%5,JobName%7,State%10,Start%19,End%19,NodeList%8,AllocTRES%52
show democtl alice sacct -X -n -o JobID%5,AdminComment%120
show democtl alice sluice report $train
say 'And everything is back:'
until_is 20 '' "$lab" status "$dir"
show democtl alice scontrol show licenses
show democtl alice sluice gpus
grep -q '^PASS$' "$dir/home/alice/train.out"
say "demo: all of it ran, in $SECONDS s. The cluster goes on, until make demo-down:"
echo "    ${lab#"$PWD/"} run $dir sbatch train.sh"
