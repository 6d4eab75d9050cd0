package rpc

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// clerk is a JobService that writes down what it is asked.
type clerk struct {
	call string
	peer Peer
	run  JobRun
	job  string
	err  error
}

func (c *clerk) note(call string, p Peer, run JobRun, job string) error {
	c.call, c.peer, c.run, c.job = call, p, run, job
	return c.err
}

var told = []lease.Report{{Lease: "l1", Owner: "gpu01", Use: []lease.Use{{Peak: 7}}}}

func (c *clerk) Prolog(_ context.Context, p Peer, run JobRun) (JobAnswer, error) {
	return JobAnswer{JobGranted, "l1", ""}, c.note("prolog", p, run, "")
}
func (c *clerk) Epilog(_ context.Context, p Peer, run JobRun) ([]lease.Report, error) {
	return told, c.note("epilog", p, run, "")
}
func (c *clerk) PrologController(_ context.Context, p Peer, run JobRun) (JobAnswer, error) {
	return JobAnswer{Outcome: JobRequeue, Reason: "no room"}, c.note("prolog-ctld", p, run, "")
}
func (c *clerk) EpilogController(_ context.Context, p Peer, run JobRun) ([]lease.Report, error) {
	return nil, c.note("epilog-ctld", p, run, "")
}
func (c *clerk) Env(_ context.Context, p Peer, job string) ([]EnvOp, error) {
	return []EnvOp{{true, "LD_LIBRARY_PATH", "/usr/lib/sluice"}, {false, "SLUICE_SOCKET", "/run/s"}}, c.note("env", p, JobRun{}, job)
}
func (c *clerk) Report(_ context.Context, p Peer, job string) ([]lease.Report, error) {
	return told, c.note("report", p, JobRun{}, job)
}

func TestJobs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenLocal(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d := &clerk{}
	s := NewServer(LocalCreds(), "test")
	ServeJobs(s, d)
	go func() { _ = s.Serve(l) }()
	defer s.Stop()
	c, err := DialLocal(path, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	none := ""
	run := JobRun{
		Job: "7", Restart: 2, Nodes: []string{"n1", "n2"}, UID: 1000, GID: 100, User: "u", Account: "a", Name: "na\nme", Partition: "p",
		Licences: &none, Options: map[string]string{"mem": "20G", "report": ""}, Stdout: "/o", WorkDir: "/w",
	}
	me := Peer{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: os.Getpid()}
	check := func(call string, got, want any, err error) {
		t.Helper()
		if err != nil || d.call != call || d.peer != me || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; asked %+v", call, got, err, d)
		}
		if (d.job == "") != reflect.DeepEqual(d.run, run) {
			t.Errorf("%s was asked of %+v, %q", call, d.run, d.job)
		}
	}
	ctx, stranger := t.Context(), Peer{UID: 99} // what the caller says of itself is not sent
	a, err := c.Prolog(ctx, stranger, run)
	check("prolog", a, JobAnswer{JobGranted, "l1", ""}, err)
	a, err = c.PrologController(ctx, stranger, run)
	check("prolog-ctld", a, JobAnswer{JobRequeue, "", "no room"}, err)
	r, err := c.Epilog(ctx, stranger, run)
	check("epilog", r, told, err)
	r, err = c.EpilogController(ctx, stranger, run)
	check("epilog-ctld", r, []lease.Report(nil), err)
	ops, err := c.Env(ctx, stranger, "7")
	check("env", ops, []EnvOp{{true, "LD_LIBRARY_PATH", "/usr/lib/sluice"}, {false, "SLUICE_SOCKET", "/run/s"}}, err)
	r, err = c.Report(ctx, stranger, "7")
	check("report", r, told, err)

	d.err = lease.Errorf(lease.Denied, "not yours")
	for call, f := range map[string]func() error{
		"prolog":      func() error { _, err := c.Prolog(ctx, me, run); return err },
		"prolog-ctld": func() error { _, err := c.PrologController(ctx, me, run); return err },
		"epilog":      func() error { _, err := c.Epilog(ctx, me, run); return err },
		"epilog-ctld": func() error { _, err := c.EpilogController(ctx, me, run); return err },
		"env":         func() error { _, err := c.Env(ctx, me, "7"); return err },
		"report":      func() error { _, err := c.Report(ctx, me, "7"); return err },
	} {
		if err := f(); code(err) != lease.Denied || err.Error() != "not yours" {
			t.Errorf("%s: %v", call, err)
		}
	}
	// A daemon that has no such service, as one of an earlier release.
	path = filepath.Join(t.TempDir(), "old")
	if l, err = ListenLocal(path, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	old := NewServer(LocalCreds(), "test")
	ServeLocal(old, &desk{})
	go func() { _ = old.Serve(l) }()
	defer old.Stop()
	oc, err := DialLocal(path, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer oc.Close()
	if _, err := oc.Prolog(ctx, me, run); code(err) != lease.WrongPeer {
		t.Errorf("an older daemon: %v", err)
	}
}
