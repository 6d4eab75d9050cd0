package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/fault"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// ofJobs says whether a point is passed only for Slurm's jobs.
func ofJobs(name string) bool {
	return strings.HasPrefix(name, "sponsor-") || strings.HasPrefix(name, "attach-") || strings.HasPrefix(name, "endjob-")
}

// slurmStub is Slurm's commands, which tell of the jobs in a file: daemons are tested here, and Slurm in test/slurm.
type slurmStub struct {
	dir  string
	next int
}

func newSlurmStub(t *testing.T) *slurmStub {
	t.Helper()
	dir, err := os.MkdirTemp("", "slurmstub")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &slurmStub{dir: dir, next: 100}
	for name, text := range map[string]string{
		"squeue":   "case \"$*\" in *UserID*) cat '" + s.jobs() + "' ;; *) cut -d'|' -f1-4 '" + s.jobs() + "' | sed 's/$/|/' ;; esac",
		"scontrol": "case \"$*\" in *licenses*) echo LicenseName=rgpu Total=400 Used=0 Free=400 Reserved=0 Remote=no ;; *config*) echo ClusterName = test ;; esac",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *slurmStub) jobs() string { return filepath.Join(s.dir, "jobs") }

// set makes a job the only one that Slurm knows.
func (s *slurmStub) set(t *testing.T, id, state string, percent int, nodes ...string) {
	t.Helper()
	line := fmt.Sprintf("%s|0|%s|%s|%d|%d|1|1|main|rgpu:%d|gres:rgpu:%d|N/A|N/A|N/A|\n", id, state, strings.Join(nodes, ","), user, user, percent*len(nodes), percent)
	tmp := s.jobs() + ".new"
	if err := os.WriteFile(tmp, []byte(line), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, s.jobs()); err != nil {
		t.Fatal(err)
	}
}

// TestJobFaultPoints kills the controller's daemon, a node's, or an owner, at every step that only Slurm's jobs come by.
func TestJobFaultPoints(t *testing.T) {
	t.Parallel()
	stub := newSlurmStub(t)
	config := map[string]string{"slurm.controllers": "[host00]", "slurm.bin": stub.dir, "slurm.room_wait": "1s", "slurm.reconcile": "1s"}
	for k, v := range quick {
		config[k] = v
	}
	s := start(t, site.Options{Hosts: 3, Owners: 2, GPUs: 2, Faults: true, Config: config})
	j := steady(t, s, s.Hosts[0], "run-steady", 30, 30, 30)
	hit := make(map[string]int)
	points := 0
	for _, name := range fault.Names() {
		if !ofJobs(name) {
			continue
		}
		points++
		for _, pass := range []int{1, 2} {
			hit[name] += jobFaultAt(t, s, stub, fmt.Sprintf("%s:%d", name, pass))
			if err := j.lost(); err != nil {
				t.Fatalf("%s:%d: %v", name, pass, err)
			}
			if t.Failed() {
				return
			}
		}
		if hit[name] == 0 {
			t.Errorf("point %s was never passed", name)
		}
	}
	j.stop(t)
	allFree(t, s, nil)
	t.Logf("%d points, daemons killed at each: %v", points, hit)
}

// jobFaultAt arms the controller's daemon, a node's and an owner, and leads jobs of two nodes through their lives, as
// slurmctld and slurmd do. It answers how many daemons died.
func jobFaultAt(t *testing.T, s *site.Site, stub *slurmStub, where string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	ctl, nodes := s.Hosts[0], s.Hosts[1:]
	names := []string{nodes[0].Node.Name, nodes[1].Node.Name}
	var keepers []*keeper
	for _, d := range []*site.Daemon{s.Owners[0], ctl, nodes[0]} {
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Up(ctx, "SLUICE_FAULT="+where); err != nil && !d.Process().Ended() {
			t.Fatalf("%s: %v", where, err)
		}
		keepers = append(keepers, keep(d))
	}
	run := rpc.JobRun{UID: user, GID: user, Nodes: names}
	over := run
	// prolog asks until somebody answers.
	prolog := func(d *site.Daemon, what string, f func(*rpc.LocalClient, context.Context) (rpc.JobAnswer, error)) (a rpc.JobAnswer) {
		t.Helper()
		c, err := d.Local()
		if err != nil {
			t.Fatal(err)
		}
		if err := again(ctx, func(ctx context.Context) (err error) { a, err = f(c, ctx); return err }); err != nil {
			t.Fatalf("%s: %s of job %s: %v", where, what, run.Job, err)
		}
		return a
	}
	controller := func() rpc.JobAnswer {
		return prolog(ctl, "PrologSlurmctld", func(c *rpc.LocalClient, ctx context.Context) (rpc.JobAnswer, error) {
			return c.PrologController(ctx, rpc.Peer{}, run)
		})
	}
	finish := func() {
		t.Helper()
		c, err := ctl.Local()
		if err != nil {
			t.Fatal(err)
		}
		over.Job = run.Job
		stub.set(t, run.Job, "COMPLETED", 1, names...)
		if err := again(ctx, func(ctx context.Context) error { _, err := c.EpilogController(ctx, rpc.Peer{}, over); return err }); err != nil {
			t.Fatalf("%s: EpilogSlurmctld: %v", where, err)
		}
	}
	for _, over.Nodes = range [][]string{names, nil} { // what ended on some nodes, and wherever it was
		// More than there is for the second node: none of it is kept.
		stub.next++
		run.Job = fmt.Sprint(stub.next)
		stub.set(t, run.Job, "CONFIGURING", 160, names...)
		if a := controller(); a.Outcome != rpc.JobRequeue {
			t.Errorf("%s: 160 %% on each of two nodes, of what the steady job leaves of four GPUs: %+v", where, a)
		}
		finish()

		stub.next++
		run.Job = fmt.Sprint(stub.next)
		stub.set(t, run.Job, "CONFIGURING", 50, names...)
		if a := controller(); a.Outcome != rpc.JobGranted {
			t.Errorf("%s: PrologSlurmctld: %+v", where, a)
		}
		for _, d := range nodes {
			a := prolog(d, "Prolog", func(c *rpc.LocalClient, ctx context.Context) (rpc.JobAnswer, error) {
				return c.Prolog(ctx, rpc.Peer{}, run)
			})
			if a.Outcome != rpc.JobGranted || a.Lease == "" {
				t.Errorf("%s: Prolog on %s: %+v", where, d.Node.Name, a)
				continue
			}
			socket := "/run/sluice/leases/" + a.Lease + "/sock"
			eventually(t, 20*time.Second, where+": a program on "+d.Node.Name+" computes", func() error {
				out, err := d.Node.Run(ctx, onLease(s, d, socket, user, s.Program("vecadd")))
				if err == nil && !strings.Contains(out, "PASS") {
					err = fmt.Errorf("%s", out)
				}
				return err
			})
		}
		// One node's Epilog comes, the other's is lost.
		c, err := nodes[0].Local()
		if err != nil {
			t.Fatal(err)
		}
		if err := again(ctx, func(ctx context.Context) error { _, err := c.Epilog(ctx, rpc.Peer{}, run); return err }); err != nil {
			t.Fatalf("%s: Epilog: %v", where, err)
		}
		finish()
	}
	eventually(t, 30*time.Second, where+": all has ended but the steady job", func() error {
		if err := onlySteady(ctl); err != nil {
			return err
		}
		for _, d := range nodes {
			ls, err := list(d)
			if err != nil {
				return err
			}
			if len(ls) > 0 {
				return fmt.Errorf("%s has lease %s of %s (%s)", d.Node.Name, ls[0].ID, ls[0].Request.Key, ls[0].State)
			}
		}
		return nil
	})
	died := 0
	for _, k := range keepers {
		if err := k.end(); err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		died += int(k.died.Load())
	}
	return died
}
