package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// reload has a daemon take over a configuration.
func reload(t *testing.T, d *site.Daemon, more map[string]string) {
	t.Helper()
	count := func() int {
		b, _ := os.ReadFile(d.Log)
		return strings.Count(string(b), "configuration reloaded")
	}
	before := count()
	if err := d.Configure(more); err != nil {
		t.Fatal(err)
	}
	if err := d.Process().Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, d.Node.Name+" reloads", func() error {
		if count() == before {
			return fmt.Errorf("not yet: %s", site.Tail(d.Log, 3))
		}
		return nil
	})
}

// TestQuota is the door that a user takes: from whatever node a user asks, all leases of the user count, and the refusal is in the
// audit log. A reload changes the quotas.
func TestQuota(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 2, Owners: 2, GPUs: 2, Config: map[string]string{
		"quotas": fmt.Sprintf("[{pool: default, percent: 100}, {user: %d, pool: default, leases: 0}]", other)}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	one, two := s.Hosts[0], s.Hosts[1]
	if _, _, err := acquire(ctx, one, "run-first", user, 60); err != nil {
		t.Fatal(err)
	}
	refused := func(h *site.Daemon, uid int, percent, want string) {
		t.Helper()
		out, err := h.Node.Run(ctx, h.Run(uid, "--fraction", percent, "--", "true"))
		if err == nil || !strings.Contains(err.Error()+out, want) {
			t.Errorf("%s%% of uid %d on %s: %v: %s; want %s", percent, uid, h.Node.Name, err, out, want)
		}
	}
	const what = "quota: each user may hold 100% of GPUs of pool default, outside of Slurm's jobs, 60% held, 60% asked; wait until a lease ends"
	refused(two, user, "60", what)
	refused(two, user, "60,60", "100% of GPUs of pool default, outside of Slurm's jobs, 120% asked: no lease that ends will make room")
	refused(two, other, "1", fmt.Sprintf("quota: user %d may hold 0 leases of pool default", other))
	if out, err := two.Node.Run(ctx, two.Run(user, "--fraction", "40", "--", "echo", "granted")); err != nil || out != "granted\n" {
		t.Errorf("what the quota leaves: %v: %s", err, out)
	}
	// Slurm's jobs have limits of Slurm's.
	if _, _, err := acquire(ctx, one, "4711", user, 60); err != nil {
		t.Error(err)
	}
	out, err := two.Node.Run(ctx, node.Command{Argv: []string{s.Opt("bin/sluice"), "audit", "--event", "refuse", "--file", two.Audit}, Env: two.Env()})
	if err != nil || !strings.Contains(out, what) {
		t.Errorf("sluice audit: %v: %s", err, out)
	}
	reload(t, two, map[string]string{"quotas": "[{pool: default, percent: 200}]"})
	if out, err := two.Node.Run(ctx, two.Run(user, "--fraction", "60,60", "--", "echo", "granted")); err != nil || out != "granted\n" {
		t.Errorf("after a reload: %v: %s", err, out)
	}
}

// TestIdle: a lease without work ends, and the site's command learns of it; a lease that computes goes on.
func TestIdle(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 2})
	h, o := s.Hosts[0], s.Owners[0]
	told := filepath.Join(o.Node.Dir, "told")
	command := filepath.Join(o.Node.Dir, "command")
	if err := os.WriteFile(command, []byte("#!/bin/sh\nenv | grep ^SLUICE_ >>"+told+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	works := steady(t, s, h, "steady", 30)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	reload(t, o, map[string]string{"lease.idle.after": "10s", "lease.idle.action": "end", "lease.idle.command": command})
	begun := time.Now()
	out, err := h.Node.Run(ctx, h.Run(user, "--fraction", "20", "--", "sh", "-c", "while [ -e ${SLUICE_SOCKET%/*} ]; do sleep 0.1; done; sleep 2"))
	if took := time.Since(begun); err != nil || took < 10*time.Second || took > 50*time.Second {
		t.Errorf("%v after %v: %s", err, took, out)
	}
	b, err := os.ReadFile(told)
	if err != nil || !strings.Contains(string(b), "SLUICE_EVENT=idle\n") || !strings.Contains(string(b), fmt.Sprintf("SLUICE_UID=%d\n", user)) || strings.Contains(string(b), "SLUICE_JOB=steady\n") {
		t.Errorf("the site's command was told %s (%v)", b, err)
	}
	out, err = o.Node.Run(ctx, node.Command{Argv: []string{s.Opt("bin/sluice"), "audit", "--event", "idle", "--file", o.Audit}, Env: o.Env()})
	if err != nil || !strings.Contains(out, "lease.idle in sluice.yaml of gpu00: end") || strings.Count(out, "lease.idle in") != 1 {
		t.Errorf("sluice audit: %v: %s", err, out)
	}
	page, err := o.Node.Run(ctx, node.Command{Argv: []string{"curl", "-sS", "--fail", fmt.Sprintf("http://127.0.0.1:%d/metrics", site.Metrics)}})
	if err != nil || !strings.Contains(page, `sluice_lease_idle_seconds{lease="`+works.lease.ID+`"} `) {
		t.Errorf("no metric: %v", err)
	}
	ls, err := list(h)
	if err != nil || len(ls) != 1 || ls[0].Idle > 15*time.Second {
		t.Errorf("%+v, %v", ls, err)
	}
	works.stop(t)
	allFree(t, s, nil)
}
