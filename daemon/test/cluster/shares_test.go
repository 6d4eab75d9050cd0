package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// TestShares changes the shares of leases whose programs run, by the doors of a user and
// of root on both nodes, kills the daemons in between, and sees that turns go on.
func TestShares(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 1, Config: quick})
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	a, b := steady(t, s, h, "a", 30), steady(t, s, h, "b", 20)
	set := func(d *site.Daemon, uid int, args ...string) (string, error) {
		return d.Node.Run(ctx, node.Command{Argv: append([]string{s.Opt("bin/sluice"), "set"}, args...), Env: d.Env(), UID: uid, GID: uid, Dir: "/"})
	}
	refused := func(uid int, want string, args ...string) {
		t.Helper()
		if out, err := set(h, uid, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s, %v; want %q", args, out, err, want)
		}
	}
	id := a.lease.ID[:12]
	refused(user, "want 1 to 100 percent", id, "--share", "101")
	refused(user, "best-effort, equal, equal-lend, fixed, fixed-lend", id, "--policy", "most")
	refused(user, "want 1 to 30", id, "--share", "31")
	refused(other, "no lease", id, "--share", "10")
	refused(other, "not yours", a.lease.ID, "--share", "10")
	refused(0, "want 1 to 80", id, "--share", "81")
	changed := func(d *site.Daemon, uid int, args ...string) {
		t.Helper()
		if out, err := set(d, uid, args...); err != nil || !strings.HasPrefix(out, a.lease.ID) {
			t.Errorf("%q: %s, %v", args, out, err)
		}
	}
	// As the host and its owner see it, in the lease and on the GPU's schedule.
	held := map[string]time.Duration{}
	shows := func(policy string, percent, due uint32) {
		t.Helper()
		for _, d := range []*site.Daemon{h, o} {
			eventually(t, 20*time.Second, d.Node.Name+" shows "+policy, func() error {
				ls, err := list(d)
				for _, l := range ls {
					if l.ID == a.lease.ID && l.Request.PolicyName() == policy && l.Grants[0].Percent == percent && len(l.Shares) == 1 && l.Shares[0].Due == 100*due && l.Shares[0].Held >= held[d.Node.Name] && len(l.Sessions) == 1 {
						held[d.Node.Name] = l.Shares[0].Held
						return nil
					}
				}
				return fmt.Errorf("%w: %+v", err, ls)
			})
		}
	}
	shows("best-effort", 30, 60) // of what nobody else has, by weight
	changed(h, user, id, "--share", "25", "--policy", "fixed")
	shows("fixed", 25, 25)
	changed(h, 0, id, "--share", "80", "--lend")
	shows("fixed-lend", 80, 80)
	// Root of the node that has the GPU.
	changed(o, 0, a.lease.ID, "--share", "60%", "--policy", "fixed", "--lend=false")
	shows("fixed", 60, 60)

	// Daemons die; programs go on taking turns meanwhile, and what was set stays.
	before := held[o.Node.Name]
	for _, d := range []*site.Daemon{o, h} {
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Up(ctx); err != nil {
			t.Fatal(err)
		}
		shows("fixed", 60, 60)
	}
	eventually(t, 20*time.Second, "turns go on", func() error {
		ls, err := list(o)
		for _, l := range ls {
			if l.ID == a.lease.ID && l.Shares[0].Held > before && l.Shares[0].Turns > 0 {
				return nil
			}
		}
		return fmt.Errorf("%w: held %v before, %+v", err, before, ls)
	})
	page, err := o.Node.Run(ctx, node.Command{Argv: []string{"curl", "-sS", "--fail", fmt.Sprintf("http://127.0.0.1:%d/metrics", site.Metrics)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"sluice_lease_share_seconds_total{", `kind="held"`, `policy="fixed"`, "sluice_lease_due_ratio{", "sluice_lease_turns_total{"} {
		if !strings.Contains(page, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	sets := 0
	err = audit.Read(o.Audit, func(e *audit.Event) bool {
		if e.Event == audit.Set && e.Lease == a.lease.ID {
			sets++
			if e.Change != uint64(sets) || e.UID == nil || (*e.UID == user) != (sets == 1) {
				t.Errorf("%+v", e)
			}
		}
		return true
	})
	if err != nil || sets != 3 {
		t.Errorf("%d changes in the audit log, want 3; %v", sets, err)
	}
	a.stop(t)
	b.stop(t)
	allFree(t, s, nil)
	// No tenant outlives its lease.
	eventually(t, 10*time.Second, "no tenants remain", func() error {
		l, _, err := acquire(ctx, h, "alone", user, 10)
		if err != nil {
			return err
		}
		defer func() { _ = release(ctx, h, l) }()
		ls, err := list(o)
		if err != nil || len(ls) != 1 || len(ls[0].Shares) != 1 || ls[0].Shares[0].Due != 10000 {
			return fmt.Errorf("%w: %+v", err, ls)
		}
		return nil
	})
}
