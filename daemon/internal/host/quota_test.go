package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func some[T any](v T) *T { return &v }

// bounded gives all hosts of a town quotas, and users: 1000 is alice of group staff, 1001 is bob of students and staff.
func bounded(w *town, quotas ...Quota) {
	for i := range quotas {
		if quotas[i].Whose == "" {
			quotas[i].Whose, quotas[i].Of = "each user", "pool default"
		}
	}
	for _, h := range w.hosts {
		h.SetQuotas(quotas)
		h.cfg.Who = func(_ context.Context, uid uint32) (Who, error) {
			switch uid {
			case 1000:
				return Who{"alice", []string{"50", "staff"}}, nil
			case 1001:
				return Who{"bob", []string{"51", "students", "50", "staff"}}, nil
			}
			return Who{}, errors.New("no such user")
		}
	}
}

func (w *town) try(host string, r lease.Request) (lease.Lease, error) {
	l, _, err := w.hosts[host].Acquire(context.Background(), root, r)
	return l, err
}

// Hosts that ask for the same user at the same time get no more than the quota together, whatever owner has room, and what is free of
// it again is given.
func TestQuotaOfAllHosts(t *testing.T) {
	hosts := []string{"n1", "n2", "n3"}
	w := newTown(t, []string{"a", "b"}, hosts...)
	bounded(w, Quota{Pool: "default", Percent: some[uint64](100)})
	for round := range 10 {
		var mu sync.Mutex
		var got []string
		var wg sync.WaitGroup
		for i, h := range hosts {
			for j := range 2 {
				wg.Go(func() {
					l, err := w.try(h, ask(fmt.Sprintf("run-%d-%d-%d", round, i, j), 20, 20))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						got = append(got, h+" "+l.ID)
					case lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "quota: each user may hold 100% of GPUs of pool default"):
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
		if len(got) > 2 {
			t.Fatalf("%d leases of 40%%, and 100%% may be had: %s", len(got), w.have())
		}
		// What met each other's reservations only may have been refused. Now nothing is in the way.
		for len(got) < 2 {
			l, err := w.try("n1", ask(fmt.Sprintf("run-%d-late-%d", round, len(got)), 20, 20))
			if err != nil {
				t.Fatalf("%v; there is %s", err, w.have())
			}
			got = append(got, "n1 "+l.ID)
		}
		if _, err := w.try("n2", ask("run-more", 30)); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "80% held, 30% asked; wait until a lease ends") {
			t.Fatalf("%v; there is %s", err, w.have())
		}
		for _, g := range got {
			h, id, _ := strings.Cut(g, " ")
			if err := w.hosts[h].Release(t.Context(), root, id, lease.Key{}, "test"); err != nil {
				t.Fatal(err)
			}
		}
		if w.have() != "" {
			t.Fatalf("left: %s", w.have())
		}
	}
}

// Users are bounded one by one; another user's leases, and leases of Slurm's jobs, do not count unless the site says so.
func TestQuotaOfWhom(t *testing.T) {
	as := func(r lease.Request, uid uint32, account string) lease.Request {
		r.UID, r.Account = uid, account
		return r
	}
	two := some[uint64](200)
	for _, c := range []struct {
		name    string
		quotas  []Quota
		have    []lease.Request
		ask     lease.Request
		code    lease.Code // "" granted
		mention string
	}{
		{"another user's", []Quota{{Percent: some[uint64](50)}}, []lease.Request{as(ask("run-1", 50), 1001, "")}, as(ask("run-2", 50), 1000, ""), "", ""},
		{"a name before everybody", []Quota{{Percent: some[uint64](10)}, {User: "alice", Percent: two}}, nil, as(ask("run-2", 50), 1000, ""), "", ""},
		{"a number before everybody", []Quota{{Percent: two}, {User: "1000", Percent: some[uint64](10), Whose: "user 1000", Of: "all"}}, nil, as(ask("run-2", 50), 1000, ""), lease.Never, "user 1000 may hold 10% of GPUs of all, 50% asked"},
		{"a name before a group", []Quota{{Group: "staff", Percent: some[uint64](10)}, {User: "alice", Percent: two}}, nil, as(ask("run-2", 50), 1000, ""), "", ""},
		{"a group before everybody", []Quota{{Percent: some[uint64](10)}, {Group: "staff", Percent: two}}, nil, as(ask("run-2", 50), 1000, ""), "", ""},
		{"the first of two groups", []Quota{{Group: "students", Percent: some[uint64](10)}, {Group: "staff", Percent: two}}, nil, as(ask("run-2", 50), 1001, ""), lease.Never, "10%"},
		{"a group by its number", []Quota{{Group: "51", Percent: some[uint64](10)}}, nil, as(ask("run-2", 50), 1001, ""), lease.Never, "10%"},
		{"a user whom nobody knows", []Quota{{Group: "staff", Percent: two}, {Percent: some[uint64](10)}}, nil, as(ask("run-2", 50), 7, ""), lease.Never, "10%"},
		{"memory", []Quota{{Mem: some[uint64](60 << 30)}}, []lease.Request{as(ask("run-1", 50), 1000, "")}, as(ask("run-2", 50), 1000, ""), lease.NoRoom, "may hold 61440 MiB of pool default, 40960 MiB held, 40960 MiB asked"},
		{"leases", []Quota{{Leases: some(1)}}, []lease.Request{as(ask("run-1", 5, 5), 1000, "")}, as(ask("run-2", 5), 1000, ""), lease.NoRoom, "may hold 1 lease of pool default, 1 held, 1 asked"},
		{"none at all", []Quota{{Leases: some(0)}}, nil, as(ask("run-2", 5), 1000, ""), lease.Never, "0 leases"},
		{"another pool's", []Quota{{Pool: "other", Percent: some[uint64](1)}}, nil, as(ask("run-2", 50), 1000, ""), "", ""},
		{"all pools and this one", []Quota{{Pool: "default", Percent: two}, {Percent: some[uint64](60), Of: "all pools together", Whose: "each user"}}, []lease.Request{as(ask("run-1", 50), 1000, "")}, as(ask("run-2", 50), 1000, ""), lease.NoRoom, "60% of GPUs of all pools together"},
		{"Slurm's are Slurm's to bound", []Quota{{Percent: some[uint64](10)}}, nil, as(ask("7", 50), 1000, "phys"), "", ""},
		{"Slurm's do not count", []Quota{{Percent: some[uint64](60)}}, []lease.Request{as(ask("7", 50), 1000, "phys")}, as(ask("run-1", 50), 1000, ""), "", ""},
		{"Slurm's count", []Quota{{Jobs: true, Percent: some[uint64](60)}}, []lease.Request{as(ask("7", 50), 1000, "phys")}, as(ask("run-1", 50), 1000, ""), lease.NoRoom, "50% held"},
		{"an account", []Quota{{Account: "phys", Jobs: true, Percent: some[uint64](60), Whose: "account phys", Of: "all"}}, []lease.Request{as(ask("7", 50), 1001, "phys")}, as(ask("8", 50), 1000, "phys"), lease.NoRoom, "account phys may hold 60% of GPUs of all, 50% held"},
		{"each account", []Quota{{Account: "*", Jobs: true, Percent: some[uint64](60)}}, []lease.Request{as(ask("7", 50), 1000, "phys")}, as(ask("8", 50), 1000, "chem"), "", ""},
		{"an account before each", []Quota{{Account: "*", Jobs: true, Percent: some[uint64](60)}, {Account: "phys", Jobs: true, Percent: two}}, nil, as(ask("8", 80), 1000, "phys"), "", ""},
		{"no account outside of Slurm's jobs", []Quota{{Account: "*", Jobs: true, Leases: some(0)}}, nil, as(ask("run-1", 50), 1000, "phys"), "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newTown(t, []string{"a", "b"}, "n1", "n2")
			for _, r := range c.have {
				if _, err := w.try("n1", r); err != nil {
					t.Fatal(err)
				}
			}
			bounded(w, c.quotas...)
			_, err := w.try("n2", c.ask)
			if err == nil && c.code == "" {
				return
			}
			if err == nil || lease.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.mention) || !strings.Contains(err.Error(), "quota: ") {
				t.Errorf("%v, want %q and %q", err, c.code, c.mention)
			}
			for _, h := range []string{"a", "b"} {
				list, _ := w.owners[h].List(t.Context(), "n2")
				if len(list) > 0 {
					t.Errorf("%s has %v of what was refused", h, list)
				}
			}
		})
	}
}

// A job that a quota can never let through is refused; one that another lease is in the way of may wait. Neither leaves a lease at a node.
func TestQuotaOfJobs(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	bounded(w, Quota{Jobs: true, Percent: some[uint64](100)})
	_, err := w.hosts["ctl"].Sponsor(t.Context(), job("7", 0, both, 60))
	const text = "100% of GPUs of pool default, 120% asked: no lease that ends will make room"
	if lease.CodeOf(err) != lease.Never || !strings.Contains(err.Error(), text) {
		t.Fatal(err)
	}
	r := job("7", 0, both, 60)[0] // what a node does by itself then
	r.Nodes = 2
	if _, err := w.try("n1", r); lease.CodeOf(err) != lease.Never || !strings.Contains(err.Error(), text) {
		t.Fatal(err)
	}
	r.Nodes = maxNodes + 1
	if _, err := w.try("n1", r); lease.CodeOf(err) != lease.Invalid {
		t.Fatal(err)
	}
	first := w.sponsor(job("8", 0, both, 40))
	_, err = w.hosts["ctl"].Sponsor(t.Context(), job("9", 0, both, 20))
	if lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "node n2: quota: each user may hold 100% of GPUs of pool default, 100% held, 20% asked") {
		t.Fatal(err)
	}
	if got := w.have(); strings.Contains(got, "7@") || strings.Contains(got, "9@") {
		t.Fatal(got)
	}
	for i, l := range w.sponsor(job("8", 0, both, 40)) { // a repeated script
		if l.ID != first[i].ID {
			t.Errorf("another lease: %+v", l)
		}
	}
}

// A share that sluice set has taken counts as it was granted: it can be given back.
func TestQuotaAfterSet(t *testing.T) {
	w := newTown(t, []string{"a"}, "n1")
	bounded(w, Quota{Percent: some[uint64](100)})
	l, err := w.try("n1", ask("run-1", 80))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.owners["a"].Set(t.Context(), "n1", lease.Change{Lease: l.ID, Shares: []uint32{10}}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.try("n1", ask("run-2", 50)); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "80% held") {
		t.Fatal(err)
	}
	bounded(w) // a reload without quotas
	if _, err := w.try("n1", ask("run-2", 50)); err != nil {
		t.Fatal(err)
	}
}

// An owner that does not answer, or that is of a release that knows no quotas, is left out, but for what this node has there.
func TestQuotaOfSilentOwner(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	s.SetQuotas([]Quota{{Percent: some[uint64](100), Whose: "each user", Of: "all pools together"}})
	s.must(ask("run-1", 60))
	_, _, err := s.Acquire(t.Context(), root, ask("run-2", 50))
	if lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "60% held, 50% asked") || !strings.Contains(err.Error(), "not asked: a: the owner's release knows no quotas; b: ") {
		t.Fatal(err)
	}
	found := false
	if err := audit.Read(s.cfg.AuditFile, func(e *audit.Event) bool {
		found = found || e.Event == audit.Refuse && strings.Contains(e.Reason, "quota: each user may hold 100%")
		return true
	}); err != nil || !found {
		t.Errorf("no line of the refusal: %v", err)
	}

	w := newTown(t, []string{"a", "b"}, "n1", "n2")
	bounded(w, Quota{Percent: some[uint64](100)})
	away := func(h, o string, cut bool) {
		w.sever(h, o, cut)
		w.wait(o+" is noticed", func() bool {
			p, _ := w.hosts[h].peer(o, "")
			_, _ = p.inventory(t.Context(), w.hosts[h], 0)
			return (p.down() != nil) == cut
		})
	}
	away("n1", "b", true)
	if _, err := w.try("n1", ask("run-1", 100)); err != nil {
		t.Fatal(err)
	}
	away("n2", "a", true)
	if _, err := w.try("n2", ask("run-2", 50)); err != nil { // nobody can say what the user has at a
		t.Fatal(err)
	}
	away("n2", "a", false)
	if _, err := w.try("n2", ask("run-3", 10)); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "150% held") {
		t.Fatal(err)
	}
}

// A reservation that is beyond a quota is taken back, and a lease that quotas hold for is confirmed only after they were looked at again.
func TestQuotaCountsReservations(t *testing.T) {
	w := newTown(t, []string{"a"}, "n1", "n2")
	bounded(w, Quota{Percent: some[uint64](100)})
	stopped, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.hosts["n1"].cfg.hook = func(p string) {
		if p == "acquire-2-reserved" {
			once.Do(func() { close(stopped); <-goOn })
		}
	}
	done := make(chan error)
	go func() { _, err := w.try("n1", ask("run-1", 60)); done <- err }()
	<-stopped
	// The other host's request meets the reservation, and gives up as long as it stands.
	if _, err := w.try("n2", ask("run-2", 60)); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "60% held") {
		t.Error(err)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := w.have(); got != "run-1@n1:a:60" {
		t.Error(got)
	}
}

// A directory of users that hangs holds up few requests, and those not for long.
func TestDirectory(t *testing.T) {
	d := newDirectory()
	w, err := d.who(t.Context(), 0)
	if err != nil || w.Name != "root" || len(w.Groups) < 2 {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := d.who(t.Context(), 1<<31-7); err == nil {
		t.Error("a user who does not exist is known")
	}
	for range whoMost { // which hang
		d <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := d.who(ctx, 0); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Error(err)
	}
}

// The longest life time of leases outside of Slurm's jobs does not hold for Slurm's.
func TestRunLife(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	s.SetRunLife(3600e9)
	r := ask("run-1", 10)
	r.Life = 3601e9
	if _, _, err := s.Acquire(t.Context(), root, r); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "users.max_life of sluice.yaml") {
		t.Error(err)
	}
	r.Key.Job = "7"
	s.must(r)
}
