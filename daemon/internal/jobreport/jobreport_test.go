package jobreport

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// TestMain is the child of Append too.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == AppendCommand {
		if err := Become(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if filepath.Base(os.Args[3]) == "hangs" {
			select {}
		}
		if filepath.Base(os.Args[3]) == "who" { // what the child has of its parent's
			fds, _ := os.ReadDir("/proc/self/fd")
			gs, _ := os.Getgroups()
			dumpable, _ := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
			text := fmt.Sprintf("%d %d %v %d %d", os.Getuid(), os.Getgid(), gs, len(os.Environ()), dumpable)
			for _, fd := range fds {
				to, _ := os.Readlink("/proc/self/fd/" + fd.Name())
				text += " " + to
			}
			os.Exit(AppendTo(os.Args[3], strings.NewReader(text)))
		}
		os.Exit(AppendTo(os.Args[3], os.Stdin))
	}
	// What the test's own parent left open is no business of the child's.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		fmt.Fprintln(os.Stderr, "close_range:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

var t0 = time.Unix(1_700_000_000, 0)

// report is one of node with a lease of its own.
func report(node string, run uint64, made time.Duration) lease.Report {
	return lease.Report{
		Lease: fmt.Sprintf("%s-%d", node, run), Key: lease.Key{Cluster: "c", Job: "7", Node: node, Incarnation: run}, Owner: "gpu01", UID: 65534,
		Asked: []lease.Fraction{{Percent: 50}}, Grants: []lease.Grant{{Owner: "gpu01", GPU: "GPU-1", Percent: 50, Mem: 71320 << 20}},
		Use:      []lease.Use{{Granted: 71320 << 20, Peak: 20480 << 20}},
		Counts:   lease.Counts{Calls: 1_200_000, Waits: 12, BytesIn: 3481 << 20, BytesOut: 1229 << 20},
		Sessions: 2, GPUTime: 12*time.Minute + 3*time.Second, Made: t0.Add(made), Ended: t0.Add(made + time.Minute),
	}
}

func TestLine(t *testing.T) {
	const one = "sluice: asked 50% granted 50% 71320MiB peak 20480MiB gpu 12m03s throttled 0s calls 1200000 waits 12 in 3.4GiB out 1.2GiB"
	a, b := report("n1", 10, 0), report("n2", 11, time.Second)
	odd := report("n1", 10, 0)
	odd.Asked = []lease.Fraction{{Percent: 100, Mem: 1 << 30}, {Percent: 50, Mem: 1 << 30}}
	odd.Owner, odd.Sessions, odd.Counts, odd.GPUTime = "gpu02", 0, lease.Counts{Errors: 3, Throttle: 3170 * time.Millisecond}, 0
	odd.Use = []lease.Use{{Peak: 1}}
	cut := a
	cut.Counts.Cuts, cut.Counts.CutTime, cut.Counts.Saved = 2, 41500*time.Millisecond, 3<<30
	two := odd // of the same lease, at another owner
	two.Owner = "gpu03"
	for _, c := range []struct {
		in   []lease.Report
		want string
	}{
		{nil, ""},
		{[]lease.Report{a}, one},
		{[]lease.Report{cut}, one + " saved 3GiB cuts 2 cut-time 41.5s"},
		{[]lease.Report{a, b}, "sluice: nodes 2 asked 100% granted 100% 142640MiB peak 40960MiB gpu 24m06s throttled 0s calls 2400000 waits 24 in 6.8GiB out 2.4GiB"},
		// A run before, on the same node and on one that is not of the last run.
		{[]lease.Report{report("n1", 3, -time.Hour), report("n9", 3, -time.Hour), a}, one + " earlier-runs 1 earlier-gpu 24m06s"},
		{[]lease.Report{odd, two}, "sluice: asked 150% 2048MiB granted 100% 142640MiB peak 1MiB gpu 0s throttled 6.3s calls 0 waits 0 in 0B out 0B errors 6 unused"},
	} {
		if got := Line(c.in); got != c.want {
			t.Errorf("%d reports:\n got %s\nwant %s", len(c.in), got, c.want)
		}
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{-1: "0s", 0: "0s", 1: "0.1s", 3 * time.Second: "3s", 59940 * time.Millisecond: "59.9s", 59990 * time.Millisecond: "1m00s",
		723 * time.Second: "12m03s", 3599600 * time.Millisecond: "1h00m00s", 100*time.Hour + time.Minute: "100h01m00s"} {
		if got := Duration(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

// userDir is a directory of the user 65534, and a file in it.
func userDir(t *testing.T) (dir, file string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("the Epilog is root's: run as root")
	}
	dir, err := os.MkdirTemp("", "sluicereport")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file = filepath.Join(dir, "slurm-7.out")
	if err := os.WriteFile(file, []byte("loss 0.1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{dir, file} {
		if err := os.Chown(p, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	return dir, file
}

func run(file string) rpc.JobRun {
	return rpc.JobRun{Job: "7", UID: 65534, GID: 65534, Options: map[string]string{Option: "yes"}, Stdout: file}
}

func TestAppend(t *testing.T) {
	dir, file := userDir(t)
	rs := []lease.Report{report("n1", 1, 0)}
	if err := Append(t.Context(), run(file), rs); err != nil {
		t.Fatal(err)
	}
	relative := run("slurm-7.out")
	relative.WorkDir = dir
	if err := Append(t.Context(), relative, rs); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if want := "loss 0.1\n" + Line(rs) + "\n" + Line(rs) + "\n"; err != nil || string(b) != want {
		t.Fatalf("%v\n%q, want\n%q", err, b, want)
	}
	// Nothing to do, and no error.
	quiet, none, null := run(file), run(""), run("/dev/null")
	quiet.Options = nil
	for i, c := range []struct {
		run rpc.JobRun
		rs  []lease.Report
	}{{quiet, rs}, {none, rs}, {null, rs}, {run(file), nil}} {
		if err := Append(t.Context(), c.run, c.rs); err != nil {
			t.Errorf("case %d: %v", i, err)
		}
	}
	if again, _ := os.ReadFile(file); string(again) != string(b) {
		t.Errorf("written all the same: %q", again)
	}
}

// The user's file is opened as the user, and nothing else is opened at all.
func TestAppendRefuses(t *testing.T) {
	dir, file := userDir(t)
	roots := filepath.Join(t.TempDir(), "roots")
	if err := os.WriteFile(roots, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(dir, "closed")
	if err := os.WriteFile(closed, nil, 0o600); err != nil { // root's, in the user's directory
		t.Fatal(err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	rs := []lease.Report{report("n1", 1, 0)}
	for _, path := range []string{roots, closed, link, fifo, dir, "/dev/zero", filepath.Join(dir, "not there"), "/etc/passwd"} {
		if err := Append(t.Context(), run(path), rs); err == nil || !strings.Contains(err.Error(), "no regular file") {
			t.Errorf("%s: %v", path, err)
		}
	}
	for _, path := range []string{roots, closed} {
		if b, err := os.ReadFile(path); err != nil || len(b) > 0 {
			t.Errorf("%s: %v, %q", path, err, b)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "not there")); err == nil {
		t.Error("a file was made")
	}
	other := run(file)
	other.UID = 0
	if err := Append(t.Context(), other, rs); err == nil || !strings.Contains(err.Error(), "Slurm calls its user 0") {
		t.Errorf("another's uid: %v", err)
	}
	if err := Append(t.Context(), run("x"), rs); err == nil || !strings.Contains(err.Error(), "is no path") {
		t.Errorf("no path: %v", err)
	}
}

// The child has nothing of root's but its three descriptors, and nobody but root may
// trace it.
func TestAppendChild(t *testing.T) {
	dir, _ := userDir(t)
	// What this test has inherited, as a lock of the shell that runs it, is not Append's to close.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	who := filepath.Join(dir, "who")
	if err := os.WriteFile(who, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(who, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if err := Append(t.Context(), run(who), []lease.Report{report("n1", 1, 0)}); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(who)
	words := strings.Fields(string(b))
	if got := strings.Join(words[:min(5, len(words))], " "); got != "65534 65534 [65534] 0 0" {
		t.Errorf("uid, gid, groups, variables and whether it may be traced: %s", got)
	}
	for _, to := range words[min(5, len(words)):] {
		switch { // what Go's runtime has open by itself
		case to == "/dev/null", strings.HasPrefix(to, "/sys/fs/cgroup/"), strings.HasPrefix(to, "pipe:"), strings.HasPrefix(to, "anon_inode:"), strings.HasPrefix(to, "/proc/"):
		default:
			t.Errorf("descriptor of %s", to)
		}
	}
}

// A file system that does not answer holds up the Epilog for a moment only.
func TestAppendHangs(t *testing.T) {
	dir, _ := userDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	err := Append(ctx, run(filepath.Join(dir, "hangs")), []lease.Report{report("n1", 1, 0)})
	if err == nil || !strings.Contains(err.Error(), "does not answer") || time.Since(began) > 2*time.Second {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

func TestAppendTo(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "out")
	if err := os.WriteFile(file, []byte("x\n"), 0o200); err != nil { // may be written only
		t.Fatal(err)
	}
	if got := AppendTo(file, strings.NewReader("y\n")); got != 0 {
		t.Errorf("exit status %d", got)
	}
	if b, _ := os.ReadFile(file); string(b) != "x\ny\n" {
		t.Errorf("%q", b)
	}
}

func TestBecome(t *testing.T) {
	for _, as := range []string{"", "0", "-1,0", "65534", "65534,x", "4294967296,1", "4294967295,1", "65534,4294967295", "1,2,,3"} {
		if err := Become(as); err == nil {
			t.Errorf("%q: it is somebody", as)
		}
	}
}
