package cli

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// jobDaemon answers Slurm's scripts.
type jobDaemon struct {
	rpc.LocalService
	rpc.JobService
	mu     sync.Mutex
	answer rpc.JobAnswer
	list   []lease.Report
	refuse error
	hang   bool
	calls  []string
	runs   []rpc.JobRun
}

func (d *jobDaemon) heard(ctx context.Context, what string, run rpc.JobRun) error {
	d.mu.Lock()
	d.calls, d.runs = append(d.calls, what), append(d.runs, run)
	hang, refuse := d.hang, d.refuse
	d.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err() // which races with the caller's own end
	}
	return refuse
}

func (d *jobDaemon) told() (rpc.JobAnswer, []lease.Report) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.answer, d.list
}

func (d *jobDaemon) Prolog(ctx context.Context, _ rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	a, _ := d.told()
	return a, d.heard(ctx, "prolog", run)
}

func (d *jobDaemon) PrologController(ctx context.Context, _ rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	a, _ := d.told()
	return a, d.heard(ctx, "prolog-ctld", run)
}

func (d *jobDaemon) Epilog(ctx context.Context, _ rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	_, list := d.told()
	return list, d.heard(ctx, "epilog", run)
}

func (d *jobDaemon) EpilogController(ctx context.Context, _ rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	_, list := d.told()
	return list, d.heard(ctx, "epilog-ctld", run)
}

func startJobDaemon(t *testing.T) (*jobDaemon, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "slu") // short: it holds a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d, socket := &jobDaemon{}, filepath.Join(dir, "s")
	l, err := rpc.ListenLocal(socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s := rpc.NewServer(rpc.LocalCreds(), "test")
	rpc.ServeLocal(s, d)
	rpc.ServeJobs(s, d)
	go func(s *grpc.Server) { _ = s.Serve(l) }(s)
	t.Cleanup(s.Stop)
	return d, socket
}

// hook runs a script as Slurm does, without a PATH.
func hook(t *testing.T, socket string, env []string, args ...string) (stderr string, status int) {
	t.Helper()
	cmd := sluice(append(args, "--socket", socket)...)
	cmd.Env = append(asSluice(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	status = exitStatus(t, cmd.Run())
	if out.Len() > 0 {
		t.Errorf("%s says on its standard output: %s", args[0], &out)
	}
	return errs.String(), status
}

var ctldEnv = []string{
	"SLURM_JOB_ID=7", "SLURM_JOB_UID=1000", "SLURM_JOB_GID=1001", "SLURM_JOB_USER=alice", "SLURM_JOB_ACCOUNT=phys", "SLURM_JOB_NAME=a\nb",
	"SLURM_JOB_PARTITION=main", "SLURM_JOB_RESTART_COUNT=2", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_JOB_LICENSES=matlab:1,rgpu:100",
	"SPANK_RGPU_MEM=20G", "SPANK_RGPU_SPREAD=1", "SPANK_RGPU_OTHER=x", "SPANK_RGPU_POOL=", "SLURM_SCRIPT_CONTEXT=prolog_slurmctld",
}

func TestScripts(t *testing.T) {
	d, socket := startJobDaemon(t)
	want := rpc.JobRun{
		Job: "7", Restart: 2, UID: 1000, GID: 1001, User: "alice", Account: "phys", Name: "a\nb", Partition: "main", Nodes: []string{"n1", "n2"},
		Licences: new("matlab:1,rgpu:100"), Options: map[string]string{"mem": "20G", "spread": "1"},
	}
	d.mu.Lock()
	d.list = []lease.Report{{Lease: idA}, {Lease: idA}, {Lease: idB}}
	d.mu.Unlock()
	for _, c := range []struct {
		script string
		answer rpc.JobAnswer
		says   string
		status int
	}{
		{"prolog-ctld", rpc.JobAnswer{Outcome: rpc.JobGranted, Lease: idA}, "sluice: prolog-ctld: job 7: granted, lease " + idA, 0},
		{"prolog-ctld", rpc.JobAnswer{Outcome: rpc.JobRequeue, Reason: "no\nroom"}, "sluice: prolog-ctld: job 7: requeue: no", 1},
		{"prolog-ctld", rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "two pools"}, "refused: two pools", 0},
		{"prolog-ctld", rpc.JobAnswer{Outcome: rpc.JobNone, Reason: "left to the nodes"}, "none: left to the nodes", 0},
		{"prolog-ctld", rpc.JobAnswer{Outcome: rpc.JobNone}, "", 0},
		{"prolog", rpc.JobAnswer{Outcome: rpc.JobRequeue, Reason: "no room"}, "requeue: no room", 0},
		{"prolog", rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "two pools"}, "refused: two pools", 0},
		{"prolog", rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "job 7: this run of it has ended"}, "sluice: prolog: job 7: refused: this run of it has ended\n", 0},
		{"epilog", rpc.JobAnswer{}, "ended, " + idA + " " + idB, 0},
		{"epilog-ctld", rpc.JobAnswer{}, "ended, " + idA + " " + idB, 0},
	} {
		d.mu.Lock()
		d.answer, d.calls, d.runs = c.answer, nil, nil
		d.mu.Unlock()
		says, status := hook(t, socket, ctldEnv, c.script)
		if status != c.status || !strings.Contains(says, c.says) || strings.Count(says, "\n") > 1 || c.says == "" && says != "" {
			t.Errorf("%s %+v: %d, %q", c.script, c.answer, status, says)
		}
		d.mu.Lock()
		if !reflect.DeepEqual(d.calls, []string{c.script}) {
			t.Fatalf("%s calls %v", c.script, d.calls)
		}
		got := d.runs[0]
		if !strings.HasSuffix(c.script, "-ctld") {
			got.Nodes = want.Nodes // which not all releases tell a node
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", c.script, got)
		}
		d.mu.Unlock()
	}
}

// Whatever goes wrong, no node is drained and no job is put back for it.
func TestScriptsNeverFail(t *testing.T) {
	d, socket := startJobDaemon(t)
	scripts := []string{"prolog", "epilog", "prolog-ctld", "epilog-ctld"}
	for _, s := range scripts {
		for _, c := range []struct {
			what   string
			socket string
			env    []string
			args   []string
		}{
			{"no daemon", socket + "x", ctldEnv, nil},
			{"no environment", socket, nil, nil},
			{"no job", socket, []string{"SLURM_JOB_ID=", "SLURM_JOB_UID=0"}, nil},
			{"no user", socket, []string{"SLURM_JOB_ID=7"}, nil},
			{"a wrong flag", socket, ctldEnv, []string{"--wrong"}},
			{"a wrong argument", socket, ctldEnv, []string{"more"}},
		} {
			for _, kv := range ctldEnv {
				k, _, _ := strings.Cut(kv, "=")
				t.Setenv(k, "")
				if err := os.Unsetenv(k); err != nil {
					t.Fatal(err)
				}
			}
			for _, kv := range c.env {
				k, v, _ := strings.Cut(kv, "=")
				t.Setenv(k, v)
			}
			var out, errs bytes.Buffer // in this process: starting another takes long
			status := Main(append(append([]string{s}, c.args...), "--socket", c.socket), &out, &errs)
			says := errs.String()
			if status != 0 || says == "" {
				t.Errorf("%s, %s: %d, %q", s, c.what, status, says)
			}
		}
		d.mu.Lock()
		d.refuse = lease.Errorf(lease.Internal, "disk full")
		d.mu.Unlock()
		if says, status := hook(t, socket, ctldEnv, s); status != 0 || !strings.Contains(says, "disk full") {
			t.Errorf("%s, refused: %d, %q", s, status, says)
		}
		d.mu.Lock()
		d.refuse, d.hang = nil, true
		d.mu.Unlock()
		start := time.Now()
		if says, status := hook(t, socket, ctldEnv, s, "--timeout", "300ms"); status != 0 || says == "" || time.Since(start) > 5*time.Second {
			t.Errorf("%s, a daemon that hangs: %d after %v, %q", s, status, time.Since(start), says)
		}
		d.mu.Lock()
		d.hang = false
		d.mu.Unlock()
	}
	// slurmd ends what takes too long by SIGTERM.
	d.mu.Lock()
	d.hang, d.calls = true, nil
	d.mu.Unlock()
	cmd := sluice("prolog", "--socket", socket)
	cmd.Env = append(asSluice(), ctldEnv...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		d.mu.Lock()
		called := len(d.calls) > 0
		d.mu.Unlock()
		if called {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status := exitStatus(t, cmd.Wait()); status != 0 {
		t.Errorf("after SIGTERM: %d", status)
	}
}

// Jobs that ask for nothing cost the controller no question.
func TestScriptsAskNobody(t *testing.T) {
	d, socket := startJobDaemon(t)
	for _, env := range [][]string{
		{"SLURM_JOB_ID=7", "SLURM_JOB_UID=1000", "SLURM_JOB_NODELIST=n1"},
		{"SLURM_JOB_ID=7", "SLURM_JOB_UID=1000", "SLURM_JOB_NODELIST=n1", "SLURM_JOB_LICENSES=matlab:1,xrgpu:5"},
	} {
		for _, s := range []string{"prolog-ctld", "epilog-ctld"} {
			says, status := hook(t, socket, env, s)
			d.mu.Lock()
			if status != 0 || says != "" || len(d.calls) != 0 {
				t.Errorf("%s: %d, %q, %v", s, status, says, d.calls)
			}
			d.mu.Unlock()
		}
	}
}

// A node's environment says in some releases that there is no licence, in others nothing.
func TestJobRunLicences(t *testing.T) {
	for _, c := range []struct {
		env        map[string]string
		controller bool
		want       *string
	}{
		{map[string]string{}, false, nil},
		{map[string]string{"SLURM_JOB_START_TIME": "1"}, false, new("")},
		{map[string]string{"SLURM_JOB_LICENSES": "rgpu:5"}, false, new("rgpu:5")},
		{map[string]string{}, true, new("")},
	} {
		c.env["SLURM_JOB_ID"], c.env["SLURM_JOB_UID"] = "7", "0"
		run, err := jobRun(c.controller, func(k string) (string, bool) { v, ok := c.env[k]; return v, ok })
		if err != nil || !reflect.DeepEqual(run.Licences, c.want) {
			t.Errorf("%v: %+v, %v", c.env, run, err)
		}
	}
}
