#!/bin/bash
# rules.sh: rules of which each has one home. lint.sh reads it; alone it checks nothing but these, which takes a few seconds.
#
# A rule is tried first, on lines of each language that break it, so that one that finds nothing any more fails. Then no line
# of product code outside of its home may break it, comments apart: Go, C, Lua, shell, and whatever lies in etc.
# shellcheck disable=SC2016 # lines of shell are tried, not run
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bad=${bad:-0}

files() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

# C cannot call Go: what it has to do itself is here, RULE FILE REASON, and nowhere else. An entry that is not needed any more fails.
in_c=(
	'renamed remoting/client/compilecache.c the shim has libc alone. A file of the compile cache that a crash has cut has another sum, and is compiled again'
	'peer spank/ask.c the plug-in runs inside slurmd and srun. It asks whether the other end is root or slurmd'"'"'s user, and keeps no pid'
	'started remoting/simgpu/idle.c the simulated driver has libc alone. It asks whether a process is stopped, and which of its threads run'
	'started remoting/simgpu/state.c the simulated driver has libc alone. It tells a process that ended from one that has its pid now'
	'tcp remoting/client/throughput.c the shim has libc alone, and measures its own connection'
	'listens remoting/simverbs/link.c the simulated library of RDMA stands for a device; its sockets are the wire between processes of one test'
)

mapfile -t product < <(files '*.go' '*.c' '*.h' '*.lua' '*.sh' 'etc/*' | grep -vE '_test\.(go|lua)$|\.pb\.go$|(^|/)(test|bench|[a-z]+test)/|/test(_[a-z_]+)?\.(c|sh)$|/cmd/[a-z]+gen/')
tries=$(mktemp -d)
trap 'rm -rf "$tries"' EXIT

# breaking PATTERN FILE...: the lines of these files that match PATTERN (extended), but for comments.
breaking() {
	grep -nE -- "$1" /dev/null "${@:2}" | grep -vE '^[^:]+\.(go|c|h):[0-9]+:\s*(//|/?\*)|^[^:]+\.lua:[0-9]+:\s*--|^([^:]+\.(sh|py|lua|yaml|conf|service)|etc/[^:]*):[0-9]+:\s*#' || true
}

# only RULE HOME TRIES PATTERN REASON: no line outside of HOME (a regular expression on the path) and of what in_c has for RULE may
# match PATTERN. TRIES has lines "EXT LINE": a LINE that the rule must find in a file of that extension.
only() {
	local rule=$1 home=$2 pattern=$4 reason=$5 ext line entry file rest elsewhere=()
	while read -r ext line; do
		printf '%s\n' "$line" >"$tries/try.$ext"
		if [ -z "$(breaking "$pattern" "$tries/try.$ext")" ]; then
			echo "rules: '$reason' does not find this any more: $line" >&2
			bad=1
		fi
	done <<<"$3"
	mapfile -t elsewhere < <(printf '%s\n' "${product[@]}" | grep -vE -- "$home")
	for entry in "${in_c[@]}"; do
		read -r name file rest <<<"$entry"
		[ "$name" = "$rule" ] || continue
		mapfile -t elsewhere < <(printf '%s\n' "${elsewhere[@]}" | grep -vxF -- "$file")
		if [ ! -f "$file" ] || [ -z "$(breaking "$pattern" "$file")" ] || [ -z "$rest" ]; then
			echo "rules: $file needs no exemption from '$reason': take it out of in_c" >&2
			bad=1
		fi
	done
	rest=$(breaking "$pattern" "${elsewhere[@]}")
	if [ -n "$rest" ]; then
		printf '%s\n' "$rest" "rules: see above: $reason" >&2
		bad=1
	fi
}

only renamed '^internal/safefile/' 'go err = os.Rename(tmp, path)
go err = unix.Renameat(d, temp, d, name)
go err = root.Rename(tmp, name)
go _, _, errno := unix.Syscall6(unix.SYS_RENAMEAT2, a, b, c, d, 0, 0)
c if (rename(from, to))
c return renameat2(dir, from, dir, to, 0);
c return (int)syscall(SYS_renameat, dir, from, dir, to);
lua os.rename(tmp, path)
sh mv "$new" "$path"
sh [ ! -e "$new" ] || mv -f "$new" "$path"' \
	'\b(os|unix|syscall)\.[Rr]ename|\.Rename(at2?)?\(|\bSYS_(RENAME|rename)|\brename(at2?)?\(|(^|[;&|({]|\b(then|do|else))[[:space:]]*(command )?mv[[:space:]]' \
	'files are renamed by internal/safefile alone: three of seven copies had forgotten to sync'
# Files of the kernel are written in place.
only written '^internal/safefile/|^daemon/internal/workers/cgroup\.go$|^remoting/worker/bind\.go$' 'go b := os.WriteFile(path, b, 0o600)' \
	'\bos\.(Create|CreateTemp|WriteFile|Link|Symlink)\(' \
	'files are written by internal/safefile: half a file after a crash is worse than none'
# What is not written whole: locks, marks without content, logs that are appended to, files that processes map, and mount points.
only created '^internal/safefile/|^daemon/internal/(audit/audit|jobsock/notes|node/rundir)\.go$|^remoting/(wire/transport|worker/(bind|store/upload|turns/schedule))\.go$|^oci-hook/internal/(rootfs/rootfs|wrapper/wrapper)\.go$' \
	'go f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
go fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT, 0o600)' '\b(os|unix|syscall)\.O_CREAT' \
	'files are created by internal/safefile: half a file after a crash is worse than none'
only viper '^daemon/internal/config/load\.go$' 'go v := viper.New()
go import "github.com/spf13/viper"' '\bviper\.|spf13/viper"' 'daemon/internal/config reads the configuration, once: it says in which file and line a mistake is'
only peer '^internal/unixsock/' 'go unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
c if (!getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len))' 'GetsockoptUcred|\bSO_PEER(CRED|PIDFD)\b|\bgetpeereid\(' \
	'internal/unixsock says who is at the other end of a connection: a pid alone may be that of another process by now'
only listens '^internal/unixsock/' 'go l, err := net.ListenUnix("unix", a)
go l, err := lc.Listen(ctx, "unix", path)
c if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 8))' 'net\.ListenUnix\(|\.Listen\([^)]*"unix"|\blisten\([a-z_>.-]+, ?[0-9A-Z]' \
	'internal/unixsock makes sockets: between bind and chmod a socket has the mode of the umask'
only started '^internal/process/' 'go os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
c snprintf(path, sizeof(path), "/proc/%d/stat", pid);
sh read -r line <"/proc/$pid/stat"' '/proc/(%[diu]|self|\$[^ "/]+)/stat\b' \
	'internal/process reads start times: the name in that file may hold anything, parentheses too'
only lease '^internal/form/' 'go var id = regexp.MustCompile("^[0-9a-f]{32}$")
go var id = regexp.MustCompile(`^[a-f\d]{32}$`)
go var id = regexp.MustCompile(`^[[:xdigit:]]{32}$`)
go if len(id) == 32 {
go if len(l.ID) != 32 {
go if len(r.Lease) < 32 {
go if 32 == len(name) {
go b, err := hex.DecodeString(l.ID)
c return strlen(lease_id) == 32;
lua if #id ~= 32 then
sh [[ $id =~ ^[0-9a-f]{32}$ ]]
sh [ ${#id} -eq 32 ]' \
	'(\]|\\[dhwx])\{32\}|\blen\(([A-Za-z]+\.)*([A-Za-z]*(id|ID|Id)|[A-Za-z]*[lL]ease)\) ?[!=<>]=? ?32\b|\b32 ?[!=]= ?len\(|strlen\([^)]*(id|lease)[^)]*\) [!=]= 32\b|#([a-z]*_)?(id|lease)\}? *([~=]=|-(eq|ne)) *32\b|hex\.DecodeString\(.*(\.ID|\.Lease|\bid)\)' \
	'internal/form says what a lease id is: of six copies three took upper case, and such a lease was lost when its owner started again'
only run '^internal/form/' 'go if strings.HasPrefix(job, "run-") {
c if (!strncmp(job, "run-", 4))
sh case $job in run-*) exit ;; esac' '"run-"|\brun-[*$]' 'internal/form says which job is one of sluice run'
only job '^internal/process/' 'go r := regexp.MustCompile("/job_([0-9]+)(?:/|$)")
c snprintf(path, sizeof path, "%s/job_%u", group, job);
sh grep -q "/job_$SLURM_JOB_ID" /proc/self/cgroup' '/job_[($*[%]' \
	'internal/process says which job of Slurm a process is in: who may use a lease depends on it'
only licence '^internal/form/|^spank/options' 'go ok := strings.HasPrefix(licence, "rgpu")
c if (!strncmp(licence, "rgpu", 4))
sh case $licence in rgpu*) exit ;; esac' '(Prefix|Suffix|Contains|Cut|strn?cmp|strstr)\([^)]*"[,;]?rgpu|\brgpu[_:]?\*' \
	'internal/form says what a licence of ours is, spank/options how Slurm spells our names'
only option '^spank/options' 'go v := os.Getenv("SPANK_RGPU_MEM")
c getenv("SPANK_RGPU_MEM")
sh mem=${SPANK_RGPU_MEM-}' '"(SPANK_)?RGPU_|\$\{?(SPANK_)?RGPU_' 'spank/options has the plug-in'"'"'s options: a list of them elsewhere lacks the next one'
only comment '^daemon/internal/slurm/command\.go$' 'go b.WriteString("sluice:")
lua if comment:find("sluice:") then' '"sluice:"' 'slurm.OwnPrefix begins an AdminComment of ours: of three copies two wrote and one searched'
only size '^internal/form/' 'go shift := 10 * (1 + strings.IndexByte("KMGT", c))
go func parseSize(s string) (int64, error) {
go {"T", 1<<40},
go units := "kMGTPE"' '"KMGT?"|func parseSize\(|\{"T", ?(40|1 ?<< ?40)|"[Kk]MGTPE"' 'internal/form reads and writes sizes: five copies took five grammars, and two wrote 1000M differently'
only mib '^internal/form/' 'go mem := (peak+1<<20-1)>>20' '1 ?<< ?20 ?- ?1\)? ?(>>|/)' 'internal/form.MiB rounds up to MiB: there were six copies'
only owners '^daemon/internal/host/peers\.go$' 'go all, err = p.owner.List(ctx, h.cfg.Node)' '\b(p|pe|pt\.peer|a\.peer)\.(owner\.[A-Z]|note\()' \
	'host calls owners by call and poll: calls with deadlines of their own had forgotten to note silence'
only tcp '^remoting/wire/link\.go$' 'go info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
c getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len)' 'GetsockoptTCPInfo|\bTCP_INFO\b' \
	'remoting/wire says what the kernel knows of a connection'
only wire '^remoting/(api|wire)/' 'c #define CTL_BEAT 3
c #define SL_MAX_DEVICES 16
go const OpBeat = 3
go 	FrameReply uint16 = 1
go const OpBeat2 uint16 = 0xF00F
c send(s, 0xf00f, NULL, 0);
go if m != 0x4c43574c {' '#define[[:space:]]+(CTL|SL_(FRAME|STATUS|SESSION|FEATURE|MAX|OP))_|^[[:space:]]*(const[[:space:]]+)?(Op|Frame|Kind|Status|Feature)[A-Z][A-Za-z]*[[:space:]]+([a-z0-9]+[[:space:]]+)?=[[:space:]]*[0-9]|0x4c43574c|"SLUICE(\\r|-L)|\b0x[fF]0[0-2][0-9a-fA-F]\b' \
	'remoting/api/wire.tbl has the numbers and limits of the wire: of five copies by hand two had other limits'
only snapshot '^remoting/(api|wire)/|^remoting/client/connect\.c$' 'c struct wire_snapshot_head h;
c struct wire_device_head h;
go var h wire.SnapshotHead' 'wire_(snapshot|device)_head|wire\.(Snapshot|Device)Head' \
	'a snapshot has one decoder for both shims, in remoting/client/connect.c, and one in remoting/wire'
only pattern '^internal/pattern/|^remoting/api/' 'go var nameRE = regexp.MustCompile("^[a-z]+$")
go 	clock = regexp.MustCompile(`^\d+$`)' 'regexp\.MustCompile\(' 'internal/pattern compiles a regular expression when it is used: compiling all of them took a command a quarter of its time'
only lies '^$' 'go import "github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"' 'turns/turnstest"' 'lies about a schedule are told by tests and bench alone'

# Alone: lint.sh goes on.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
	[ "$bad" = 0 ] || exit 1
	echo "rules: ${#product[@]} files, no findings"
fi
