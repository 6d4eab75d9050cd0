package notice

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// logged is a log that may be read while it is written.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.b.Write(p) }
func (l *logged) String() string              { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func (l *logged) waits(t *testing.T, text string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(l.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no %q in %s", text, l)
		}
	}
}

// script makes a program.
func script(t *testing.T, body string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "sluice-notice")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "command")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func running(t *testing.T) (*Runner, *logged) {
	t.Helper()
	out := &logged{}
	r := New(slog.New(slog.NewTextHandler(out, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return r, out
}

func notice(command string) Notice {
	return Notice{Command: command, Event: "idle", Action: "note", Owner: "gpu01", Idle: 90*time.Second + time.Millisecond, Lease: lease.Lease{
		ID: strings.Repeat("a", 32), Made: time.Unix(0, 0), Grants: []lease.Grant{{GPU: "GPU-1", Percent: 50, Mem: 3 << 30}, {GPU: "GPU-2", Percent: 25, Mem: 1 << 30}},
		Request: lease.Request{Key: lease.Key{Cluster: "c", Job: "7", Node: "n1"}, UID: 1000, GID: 100, Account: "phys", Pool: "default", JobName: "$(touch /tmp/no)\nPATH=/evil"},
	}}
}

// The program has the lease in its environment, and nothing of the daemon's.
func TestRun(t *testing.T) {
	t.Setenv("SECRET", "x")
	r, out := running(t)
	n := notice(script(t, "env | sort >$0.out; pwd >>$0.out; echo sent; echo \"to alice\" >&2\n"))
	r.Send(n)
	out.waits(t, "the site's command has run")
	if !strings.Contains(out.String(), `output="sent to alice"`) {
		t.Error(out)
	}
	b, err := os.ReadFile(n.Command + ".out")
	if err != nil {
		t.Fatal(err)
	}
	got := string(b)
	for _, want := range []string{
		"SLUICE_EVENT=idle", "SLUICE_ACTION=note", "SLUICE_OWNER=gpu01", "SLUICE_LEASE_ID=" + n.Lease.ID, "SLUICE_JOB=7", "SLUICE_CLUSTER=c", "SLUICE_NODE=n1",
		"SLUICE_JOB_NAME=$(touch /tmp/no) PATH=/evil", "SLUICE_ACCOUNT=phys", "SLUICE_POOL=default", "SLUICE_UID=1000", "SLUICE_GID=100", "SLUICE_GPUS=GPU-1,GPU-2",
		"SLUICE_PERCENT=75", "SLUICE_MEM_MIB=4096", "SLUICE_IDLE_SECONDS=90", "SLUICE_SINCE=1970-01-01T00:00:00Z",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	if strings.Contains(got, "SECRET") || !strings.HasSuffix(got, "\n/\n") {
		t.Error(got)
	}
}

// A program that fails, is missing, could be changed by others, or says much is a line of the log.
func TestFailures(t *testing.T) {
	r, out := running(t)
	r.Send(notice(script(t, "echo no mail here; exit 3\n")))
	out.waits(t, `error="exit status 3" output="no mail here"`)
	r.Send(notice("/nonexistent/command"))
	out.waits(t, "/nonexistent: no such file or directory")
	gone := script(t, "")
	if err := os.Remove(gone); err != nil {
		t.Fatal(err)
	}
	r.Send(notice(gone))
	out.waits(t, gone+": no such file or directory")
	open := script(t, "exit 0\n")
	if err := os.Chmod(open, 0o722); err != nil {
		t.Fatal(err)
	}
	r.Send(notice(open))
	out.waits(t, "remedy: chmod")
	plain := script(t, "exit 0\n")
	if err := os.Chmod(plain, 0o600); err != nil {
		t.Fatal(err)
	}
	r.Send(notice(plain))
	out.waits(t, "it is no program; remedy: chmod u+x")
	r.Send(notice(script(t, "yes | head -c 1000000; exit 4\n")))
	out.waits(t, "exit status 4")
	if len(out.String()) > 8<<10 {
		t.Errorf("%d bytes of log", len(out.String()))
	}
}

// What takes too long is killed, children too.
func TestTimeout(t *testing.T) {
	n := notice(script(t, "sleep 600 & echo $! >$0.pid; wait\n"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { _, err := run(ctx, &n); done <- err }()
	var child int
	for end := time.Now().Add(20 * time.Second); child == 0; time.Sleep(5 * time.Millisecond) {
		if b, err := os.ReadFile(n.Command + ".pid"); err == nil {
			_, _ = fmt.Sscan(string(b), &child)
		}
		if time.Now().After(end) {
			t.Fatal("it does not run")
		}
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("no error")
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", child))
		if err != nil || strings.Contains(string(b), "State:\tZ") {
			break
		}
		if time.Now().After(end) {
			t.Fatal("its child runs on")
		}
	}
}

func TestTooMany(t *testing.T) {
	out := &logged{}
	r := New(slog.New(slog.NewTextHandler(out, nil)))
	for range waiting + 1 {
		r.Send(Notice{Command: "/x"})
	}
	if got := strings.Count(out.String(), "too many wait for it"); got != 1 {
		t.Errorf("%d lines", got)
	}
	now := time.Unix(1e9, 0)
	r.now = func() time.Time { return now }
	for i := range most {
		if !r.pass() {
			t.Fatalf("the %d. does not pass", i+1)
		}
	}
	if r.pass() {
		t.Error("one more passes")
	}
	if now = now.Add(minute); !r.pass() {
		t.Error("a minute later none passes")
	}
}

// What a command prints is bounded while it prints, not afterwards.
func TestOutputIsBounded(t *testing.T) {
	var out beginning
	n, err := io.Copy(&out, strings.NewReader(strings.Repeat("x", 100*maxOutput)))
	if n != 100*maxOutput || err != nil || len(out.b) != maxOutput {
		t.Errorf("%d bytes taken, %d kept, %v", n, len(out.b), err)
	}
}
