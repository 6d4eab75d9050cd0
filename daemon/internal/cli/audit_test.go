package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// auditLog writes a log of n jobs of two users, whose files are rotated several times, and returns its path.
func auditLog(t *testing.T, n int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.Chmod(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := audit.Open(path, audit.Options{MaxSize: 16 << 10, Keep: 100})
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Date(2026, 11, 20, 8, 0, 0, 0, time.UTC)
	for i := range n {
		at, id := begin.Add(time.Duration(i)*time.Hour), fmt.Sprintf("%032x", i+1)
		uid := audit.UID(uint32(2001 + i%2))
		key := fmt.Sprintf("prod/%d@node01", 4700+i)
		g := []lease.Grant{{Owner: "gpu01", GPU: "GPU-aaaa", Percent: 50, Mem: 20 << 30}}
		for _, e := range []audit.Event{
			{Event: audit.Grant, Time: at, Lease: id, Key: key, UID: uid, Host: "node01", Owner: "gpu01", GPUs: g},
			{Event: audit.SessionOpen, Time: at.Add(time.Minute), Lease: id, Owner: "gpu01", Session: "s1", Program: "python3"}, // names neither user nor job
			{Event: audit.Set, Time: at.Add(2 * time.Minute), Lease: id, Key: key, UID: uid, Owner: "gpu01", GPUs: g, Change: 1},
			{Event: audit.Refuse, Time: at.Add(3 * time.Minute), Key: key, UID: uid, Reason: "no room\x1b[2J", Skipped: 3},
			{Event: audit.Release, Time: at.Add(4 * time.Minute), Lease: id, Key: key, UID: uid, Owner: "gpu01"},
		} {
			if err := l.Write(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func callAudit(args ...string) (out, errs string, status int) {
	var o, e bytes.Buffer
	status = Main(append([]string{"audit"}, args...), &o, &e)
	return o.String(), e.String(), status
}

func TestAudit(t *testing.T) {
	const jobs = 100
	path := auditLog(t, jobs)
	if rotated, _ := filepath.Glob(path + ".*"); len(rotated) < 6 {
		t.Fatalf("the log was rotated too seldom: %v", rotated)
	}
	count := func(args ...string) int {
		t.Helper()
		out, errs, status := callAudit(append(args, "--json", "--file", path)...)
		var got []map[string]any
		if err := json.Unmarshal([]byte(out), &got); err != nil || status != 0 || errs != "" {
			t.Fatalf("%v: status %d, %v, %s", args, status, err, errs)
		}
		last := 0.0
		for _, e := range got {
			if e["seq"].(float64) <= last {
				t.Errorf("%v: line %v after line %v", args, e["seq"], last)
			}
			last = e["seq"].(float64)
		}
		return len(got)
	}
	for _, c := range []struct {
		args string
		want int
	}{
		{"", 5 * jobs}, {"--user 2001", 5 * jobs / 2}, {"--user 7", 0}, {"--job 4711", 5}, {"--job 471", 0}, {"--user 2001 --job 4711", 0}, {"--user 2002 --job 4711", 5},
		{"--lease 0000000000000000000000000000000c", 4}, {"--lease ffff", 0}, {"--event refuse", jobs}, {"--event grant,release --job 4711", 2}, {"--event session-open --user 2001", jobs / 2},
		{"--since 2026-11-20T08:00:00Z --until 2026-11-20T09:00:00Z", 5}, {"--since 2026-11-21T08:00:00Z --job 4711", 0}, {"--last 7", 7}, {"--last 7 --job 4711", 5},
	} {
		if got := count(strings.Fields(c.args)...); got != c.want {
			t.Errorf("%s: %d lines, want %d", c.args, got, c.want)
		}
	}
	out, errs, status := callAudit("--job", "4711", "--file", path)
	for _, w := range []string{"TIME", "grant", "session-open", "python3", "set", "refuse", "no room", "(and 3 more before)", "release", "50%:20G of GPU-aaaa", "4711", "node01", "gpu01"} {
		if !strings.Contains(out, w) {
			t.Errorf("the table has no %q:\n%s", w, out)
		}
	}
	if status != 0 || errs != "" || strings.Contains(out, "\x1b") || strings.Count(out, "\n") != 6 {
		t.Errorf("status %d, %q:\n%s", status, errs, out)
	}
	if _, errs, status := callAudit("--job", "9", "--file", path); status != 1 || !strings.Contains(errs, "has no line that fits") {
		t.Errorf("nothing: status %d, %s", status, errs)
	}
	for args, want := range map[string]string{
		"--since soon": `--since "soon" is not a time`, "--user nobodi": "give the number", "--event gramt": "is none of reserve", "--since today --until yesterday": "is not before",
		"--file /nowhere/audit.log": "sluiced makes it at its first start", "--config /nowhere.yaml": "name it by --file", "--last -1": "give a number",
	} {
		args := strings.Fields(args)
		if args[0] != "--file" && args[0] != "--config" {
			args = append(args, "--file", path)
		}
		if _, errs, status := callAudit(args...); status != 1 || !strings.Contains(errs, want) {
			t.Errorf("%v: status %d, %s, want %q", args, status, errs, want)
		}
	}
}

// Damaged lines are reported by file and line; all other lines are read.
func TestAuditDamaged(t *testing.T) {
	path := auditLog(t, 60)
	spoil := func(file string, how func(lines [][]byte)) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.SplitAfter(text, []byte("\n"))
		how(lines)
		if err := os.WriteFile(file, bytes.Join(lines, nil), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	spoil(path+".1", func(l [][]byte) {
		l[3] = []byte("{\"time\":\"2026-11-20T08 cut short\n")
		l[5] = append(bytes.Repeat([]byte{0}, 300<<10), '\n') // longer than any line, as a crash of the machine leaves it
		l[7] = []byte("\xff\xfe\n")
	})
	spoil(path+".refused", func(l [][]byte) { l[0] = []byte("{}}\n") })
	for _, args := range [][]string{nil, {"--job", "4750"}} {
		out, errs, status := callAudit(append(args, "--json", "--file", path)...)
		var got []audit.Event
		if err := json.Unmarshal([]byte(out), &got); err != nil || status != 0 {
			t.Fatalf("status %d, %v", status, err)
		}
		if args == nil && len(got) != 5*60-4 {
			t.Errorf("%d lines, want %d", len(got), 5*60-4)
		}
		for _, want := range []string{path + ".1: 3 damaged lines are skipped: 4,6,8", path + ".refused: 1 damaged lines are skipped: 1"} {
			if !strings.Contains(errs, want) {
				t.Errorf("%v: %q, want %q", args, errs, want)
			}
		}
	}
}

// TestAuditAsUser: a user without permission to read the files gets an error that says so.
func TestAuditAsUser(t *testing.T) {
	if file := os.Getenv("SLUICE_TEST_AUDIT"); file != "" {
		os.Exit(Main([]string{"audit", "--file", file}, os.Stdout, os.Stderr))
	}
	if os.Geteuid() != 0 {
		t.Skip("root only")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestAuditAsUser$")
	cmd.Env = append(os.Environ(), "SLUICE_TEST_AUDIT="+auditLog(t, 1))
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err == nil || !regexp.MustCompile(`permission denied; .*sudo sluice audit, or sluice explain JOB`).Match(out) {
		t.Errorf("%v: %s", err, out)
	}
}

func TestPointInTime(t *testing.T) {
	now := time.Date(2026, 11, 23, 14, 30, 0, 0, time.UTC)
	for s, want := range map[string]string{
		"2h": "2026-11-23T12:30:00Z", "90s": "2026-11-23T14:28:30Z", "7d": "2026-11-16T14:30:00Z", "today": "2026-11-23T00:00:00Z", "yesterday": "2026-11-22T00:00:00Z",
		"9:05": "2026-11-23T09:05:00Z", "09:05:07": "2026-11-23T09:05:07Z", "2026-11-01": "2026-11-01T00:00:00Z", "2026-11-01T10:00": "2026-11-01T10:00:00Z", "2026-11-01 10:00:01": "2026-11-01T10:00:01Z",
		"2026-11-01T10:00:00+01:00": "2026-11-01T09:00:00Z", "now": "2026-11-23T14:30:00Z",
	} {
		if got, err := pointInTime("--since", s, now); err != nil || got.UTC().Format(time.RFC3339) != want {
			t.Errorf("%s: %v, %v, want %s", s, got, err, want)
		}
	}
	for _, s := range []string{"25:00", "-2h", "0s", "d", "99999999999d", "2026-13-01", "tomorrow", "2h ago"} {
		if got, err := pointInTime("--since", s, now); err == nil {
			t.Errorf("%s is taken for %v", s, got)
		}
	}
}
