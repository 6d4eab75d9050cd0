#!/bin/bash
# lint.sh STATICCHECK-MODULE: formatting, vet, staticcheck, shellcheck and the sizes of files and functions, over
# all that is tracked or about to be. Every finding is an error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

staticcheck=$1
bad=0

files() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

mapfile -t go_files < <(files '*.go')
unformatted=$(gofmt -l "${go_files[@]}")
if [ -n "$unformatted" ]; then
	echo "gofmt: not formatted:" "$unformatted" >&2
	bad=1
fi

go vet ./... || bad=1
go vet -tags gateswitch ./remoting/worker ./remoting/worker/gate || bad=1 # of bench/prebuild.sh
go vet -tags browser ./daemon/internal/page || bad=1 # of make test-page
go vet -tags sources ./test/containers || bad=1 # of make test-sources
go vet -tags cri ./test/containers || bad=1 # of make test-cri
go vet -tags recipes ./test/recipes || bad=1 # of make test-recipes
go run "$staticcheck" ./... || bad=1

mapfile -t sh_files < <({ files '*.sh'; files .ci/run; } | sort -u)
shellcheck "${sh_files[@]}" || bad=1

# Words that say a thing is not done do not land: it is finished, refused by name, or in docs/limits.md.
if files '*.go' '*.c' '*.h' '*.sh' Makefile | grep -v '^test/lint.sh$' | xargs grep -nE '\b(TODO|FIXME|XXX)\b' -- ; then
	echo "lint: unfinished work, see above" >&2
	bad=1
fi

# A rule of the tree has one home: product code elsewhere may not have it a second time.
# only HOME EXAMPLE PATTERN REASON: no line of product code outside of the files HOME (a regular expression on the path)
# but for comments matches PATTERN (extended). EXAMPLE is a line that the pattern must find, so that a rule that finds nothing any more fails.
mapfile -t product < <(files '*.go' '*.c' '*.h' '*.lua' | grep -vE '_test\.(go|lua)$|\.pb\.go$|(^|/)(test|bench|[a-z]+test)/|/test_[a-z_]+\.c$|/cmd/[a-z]+gen/')
only() {
	if ! grep -qE -- "$3" <<<"$2"; then
		echo "lint: the rule '$4' does not find its own example: $2" >&2
		bad=1
	fi
	if printf '%s\n' "${product[@]}" | grep -vE -- "$1" | xargs grep -nE -- "$3" | grep -vE '^[^:]+:[0-9]+:\s*(//|/?\*|--)'; then
		echo "lint: see above: $4" >&2
		bad=1
	fi
}

only '^internal/safefile/' 'err = os.Rename(tmp, path)' '\b(os|unix|syscall)\.Rename' \
	'files are renamed by internal/safefile alone: three of seven copies had forgotten to sync'
# Files of the kernel are written in place.
only '^internal/safefile/|^daemon/internal/workers/cgroup\.go$|^remoting/worker/bind\.go$' 'b := os.WriteFile(path, b, 0o600)' \
	'\bos\.(Create|CreateTemp|WriteFile|Link|Symlink)\(' \
	'files are written by internal/safefile: half a file after a crash is worse than none'
only '^internal/unixsock/|^spank/ask\.c$' 'unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)' 'GetsockoptUcred|\bSO_PEER(CRED|PIDFD)\b' \
	'internal/unixsock says who is at the other end of a connection: a pid alone may be that of another process by now'
only '^internal/unixsock/' 'l, err := net.ListenUnix("unix", a)' 'net\.ListenUnix\(|\.Listen\([^)]*"unix"' \
	'internal/unixsock makes sockets: between bind and chmod a socket has the mode of the umask'
only '^internal/process/|^remoting/simgpu/' 'os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))' '"/proc/(%d|self)/stat"' \
	'internal/process reads start times: the name in that file may hold anything, parentheses too'

only '^internal/form/' 'var id = regexp.MustCompile("^[0-9a-f]{32}$")' '\[(0-9a-f|a-f0-9|0-9a-fA-F)\]\{32\}|\blen\((id|l\.ID|[a-z]+\.Lease)\) != 32|hex\.DecodeString\(.*(\.ID|\.Lease|\bid)\)' \
	'internal/form says what a lease id is: of six copies three took upper case, and such a lease was lost when its owner started again'
only '^internal/form/' 'if strings.HasPrefix(job, "run-") {' '"run-"' 'internal/form says which job is one of sluice run'
only '^internal/process/' 'r := regexp.MustCompile("/job_([0-9]+)(?:/|$)")' '/job_\(' \
	'internal/process says which job of Slurm a process is in: who may use a lease depends on it'
only '^internal/form/|^spank/options' 'ok := strings.HasPrefix(licence, "rgpu")' '(Prefix|Suffix|Contains|Cut|strn?cmp|strstr)\([^)]*"[,;]?rgpu' 'internal/form says what a licence of ours is, spank/options how Slurm spells our names'
only '^spank/options' 'v := os.Getenv("SPANK_RGPU_MEM")' '"(SPANK_)?RGPU_' 'spank/options has the plug-in'"'"'s options: a list of them elsewhere lacks the next one'
only '^daemon/internal/slurm/command\.go$' 'b.WriteString("sluice:")' '"sluice:"' 'slurm.OwnPrefix begins an AdminComment of ours: of three copies two wrote and one searched'
only '^internal/form/' 'shift := 10 * (1 + strings.IndexByte("KMGT", c))' '"KMGT?"|func parseSize\(|\{"T", ?(40|1 ?<< ?40)|"[Kk]MGTPE"' 'internal/form reads and writes sizes: five copies took five grammars, and two wrote 1000M differently'
only '^internal/form/' 'mem := (peak+1<<20-1)>>20' '1 ?<< ?20 ?- ?1\)? ?(>>|/)' 'internal/form.MiB rounds up to MiB: there were six copies'
only '^remoting/wire/link\.go$' 'info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)' 'GetsockoptTCPInfo' \
	'remoting/wire says what the kernel knows of a connection'
only '^remoting/(api|wire)/' '#define CTL_BEAT 3' '#define[[:space:]]+(CTL|SL_(FRAME|STATUS|SESSION|FEATURE|MAX|OP))_|^[[:space:]]*(const[[:space:]]+)?(Op|Frame|Kind|Status|Feature)[A-Z][A-Za-z]*[[:space:]]+([a-z0-9]+[[:space:]]+)?=[[:space:]]*[0-9]|0x4c43574c|"SLUICE(\\r|-L)' \
	'remoting/api/wire.tbl has the numbers and limits of the wire: of five copies by hand two had other limits'
only '^remoting/(api|wire)/|^remoting/client/connect\.c$' 'struct wire_snapshot_head h;' 'wire_snapshot_head|wire\.SnapshotHead' \
	'a snapshot has one decoder for both shims, in remoting/client/connect.c, and one in remoting/wire'

only '^daemon/internal/host/peers\.go$' 'all, err = p.owner.List(ctx, h.cfg.Node)' '\b(p|pe|pt\.peer|a\.peer)\.(owner\.[A-Z]|note\()' \
	'host calls owners by call and poll: calls with deadlines of their own had forgotten to note silence'

# The guide for newcomers names files by path.
# shellcheck disable=SC2016
while read -r f; do
	[ -e "$f" ] || { echo "lint: CONTRIBUTING.md names $f, which is not there" >&2; bad=1; }
done < <(sed -n '/^## Where is it decided/,/^## /s/.*| `\(.*\)` |$/\1/p' CONTRIBUTING.md)

test/sizes.py || bad=1

[ $bad = 0 ] || exit 1
echo "lint: ${#go_files[@]} Go files and ${#sh_files[@]} scripts, no findings"
