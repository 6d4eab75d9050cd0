package owner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

var ctx = context.Background()

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// code wants err to be a refusal with this code, "" for none.
func code(t testing.TB, err error, want lease.Code) {
	t.Helper()
	var e *lease.Error
	if want == "" && err != nil || want != "" && (!errors.As(err, &e) || e.Code != want) {
		t.Fatalf("%v, want code %q", err, want)
	}
}

func (n *node) free(i int) (uint32, uint64) {
	n.t.Helper()
	inv, err := n.Inventory(ctx)
	must(n.t, err)
	return inv.GPUs[i].FreePercent, inv.GPUs[i].FreeMem
}

func (n *node) granted(host, job string, percents ...uint32) lease.Lease {
	n.t.Helper()
	l, err := n.Reserve(ctx, host, n.want(host, job, percents...), 0)
	must(n.t, err)
	return l
}

func (n *node) events(id string) (s string) {
	for _, e := range n.history() {
		if e.Lease == id {
			s += e.Event + " "
		}
	}
	return strings.TrimSpace(s)
}

func TestLife(t *testing.T) {
	n := newNode(t, "gpu01", 2)
	w := n.want("h1", "1", 50, 30)
	l, err := n.Reserve(ctx, "h1", w, 15*time.Second)
	must(t, err)
	if l.State != lease.Reserved || l.Epoch != 1 || l.Expires.Sub(l.Made) != 15*time.Second || l.Host != "h1" {
		t.Fatalf("%+v", l)
	}
	if p, m := n.free(0); p != 50 || m != 20*gib {
		t.Fatal(p, m)
	}
	again, err := n.Reserve(ctx, "h1", w, 15*time.Second)
	if err != nil || again.ID != l.ID {
		t.Fatal(again, err)
	}
	_, err = n.Offer(ctx, "h1", request(l.ID))
	code(t, err, lease.Conflict)
	for range 2 {
		must(t, n.Confirm(ctx, "h1", l.ID))
	}
	_, err = n.Offer(ctx, "h1", request(l.ID))
	must(t, err)
	must(t, n.admitOne(l.ID))
	known, err := n.Renew(ctx, "h1", []string{l.ID, "no"})
	if err != nil || len(known) != 1 || known[0] != l.ID {
		t.Fatal(known, err)
	}
	list, err := n.List(ctx, "h1")
	if err != nil || len(list) != 1 || list[0].State != lease.Granted || len(list[0].Sessions) != 1 || !list[0].Expires.IsZero() {
		t.Fatalf("%+v %v", list, err)
	}
	if list, _ := n.List(ctx, "h2"); len(list) != 0 {
		t.Fatal(list)
	}
	for range 2 {
		must(t, n.Release(ctx, "h1", l.ID, l.Request.Key, "job ended"))
	}
	if p, m := n.free(0); p != 100 || m != 40*gib {
		t.Fatal(p, m)
	}
	if s := n.events(l.ID); s != "reserve session-refuse grant session-open session-end release" {
		t.Error(s)
	}
	n.check(true)
	_, err = n.Reserve(ctx, "h1", w, 0)
	code(t, err, lease.Over)
	_, err = n.Reserve(ctx, "h1", n.want("h1", "1", 10), 0)
	code(t, err, lease.Over)
	code(t, n.Confirm(ctx, "h1", l.ID), lease.Over)
	later := n.want("h1", "1", 10)
	later.Request.Key.Incarnation = 1
	_, err = n.Reserve(ctx, "h1", later, 0)
	must(t, err)
	c := n.Counters()
	if c.Reserved != 1 || c.Granted != 2 || c.Released != 1 || c.Opened != 1 {
		t.Errorf("%+v", c)
	}
}

func TestNotTwice(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	a := n.granted("h1", "1", 60)
	have, err := n.Reserve(ctx, "h1", n.want("h1", "1", 10), 0)
	code(t, err, lease.Conflict)
	if have.ID != a.ID {
		t.Fatal("the key's lease does not come back:", have)
	}
	have, err = n.Reserve(ctx, "h1", n.want("h1", "2", 41), 0)
	code(t, err, lease.Conflict)
	if have.ID != "" {
		t.Fatal(have)
	}
	w := n.want("h1", "3", 10)
	w.Grants[0].Mem = 17 * gib
	_, err = n.Reserve(ctx, "h1", w, 0)
	code(t, err, lease.Conflict)
	n.granted("h1", "4", 40)
	if p, m := n.free(0); p != 0 || m > lease.Granule*2 {
		t.Fatal(p, m)
	}
}

func TestRefusals(t *testing.T) {
	n := newNode(t, "gpu01", 2)
	n.limits.MaxPerGPU, n.limits.Reserve = 2, time.Minute
	n.SetLimits(n.limits)
	n.refusals.PerSecond = 1000
	for _, c := range []struct {
		name string
		code lease.Code
		ttl  time.Duration
		f    func(*lease.Lease)
	}{
		{"id", lease.Invalid, 0, func(l *lease.Lease) { l.ID = "x" }},
		{"long id", lease.Invalid, 0, func(l *lease.Lease) { l.ID = strings.Repeat("ab", 1<<19) }},
		{"no job", lease.Invalid, 0, func(l *lease.Lease) { l.Request.Key.Job = "" }},
		{"long job", lease.Invalid, 0, func(l *lease.Lease) { l.Request.Key.Job = strings.Repeat("x", 1<<19) }},
		{"another node's", lease.Denied, 0, func(l *lease.Lease) { l.Request.Key.Node = "h2" }},
		{"no grant", lease.Invalid, 0, func(l *lease.Lease) { l.Grants = nil }},
		{"another owner's", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Owner = "gpu02" }},
		{"no percent", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Percent = 0 }},
		{"101 percent", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Percent = 101 }},
		{"no memory", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Mem = 0 }},
		{"part of a granule", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Mem = gib + 1 }},
		{"less than a context", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Mem = 512 << 20 }},
		{"more than there is", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Mem = 41 * gib }},
		{"absurd memory", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[0].Mem = -lease.Granule & (1<<64 - 1) }},
		{"the same GPU", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[1].GPU = l.Grants[0].GPU }},
		{"the same fraction", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[1].Order = 0 }},
		{"no such fraction", lease.Invalid, 0, func(l *lease.Lease) { l.Grants[1].Order = 2 }},
		{"no such GPU", lease.Conflict, 0, func(l *lease.Lease) { l.Grants[0].GPU = "GPU-x" }},
		{"fractions", lease.Invalid, 0, func(l *lease.Lease) { l.Request.Fractions[0].Percent = 1000 }},
		{"life", lease.Invalid, 0, func(l *lease.Lease) { l.Request.Life = -1 }},
		{"negative reservation", lease.Invalid, -1, func(l *lease.Lease) {}},
		{"long reservation", lease.Invalid, time.Hour, func(l *lease.Lease) {}},
	} {
		l := n.want("h1", "1", 10, 10)
		c.f(&l)
		_, err := n.Reserve(ctx, "h1", l, c.ttl)
		var e *lease.Error
		if !errors.As(err, &e) || e.Code != c.code {
			t.Errorf("%s: %v, want %s", c.name, err, c.code)
		}
		if len(err.Error()) > 2000 {
			t.Errorf("%s: reason of %d bytes", c.name, len(err.Error()))
		}
	}
	if h := n.history(); len(h) != 22 || h[0].Event != audit.Refuse || h[0].Reason == "" || n.audit.Failed() != 0 {
		t.Errorf("%d lines, %d failed", len(h), n.audit.Failed())
	}
	n.devices[1].Healthy, n.devices[1].Why = false, "Xid 79"
	_, err := n.Reserve(ctx, "h1", n.want("h1", "1", 10, 10), 0)
	code(t, err, lease.Conflict)
	n.granted("h1", "1", 10)
	n.granted("h1", "2", 10)
	_, err = n.Reserve(ctx, "h1", n.want("h1", "3", 10), 0)
	code(t, err, lease.Conflict)
	if p, _ := n.free(0); p != 0 {
		t.Error("room is offered on a GPU with as many leases as it may have")
	}
}

func TestHosts(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l := n.granted("h1", "1", 50)
	r, err := n.Reserve(ctx, "h1", n.want("h1", "2", 10), time.Minute)
	must(t, err)
	same := n.want("h2", "1", 10)
	same.ID = l.ID
	_, err = n.Reserve(ctx, "h2", same, 0)
	code(t, err, lease.Denied)
	code(t, n.Confirm(ctx, "h2", r.ID), lease.Denied)
	code(t, n.Release(ctx, "h2", l.ID, lease.Key{}, ""), lease.Denied)
	code(t, n.Release(ctx, "h2", "", l.Request.Key, ""), lease.Denied)
	_, err = n.Offer(ctx, "h2", request(l.ID))
	code(t, err, lease.Denied)
	if known, _ := n.Renew(ctx, "h2", []string{l.ID}); len(known) != 0 {
		t.Error(known)
	}
	code(t, n.Confirm(ctx, "h1", "zz"), lease.NotFound)
	code(t, n.Release(ctx, "h1", "", lease.Key{}, ""), lease.Invalid)
	code(t, n.Release(ctx, "h1", "zz", lease.Key{}, ""), lease.Invalid)
	if s := n.events(l.ID); strings.Contains(s, "release") {
		t.Error(s)
	}
}

func TestIncarnations(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	at := func(i uint64) lease.Lease {
		l := n.want("h1", "1", 80)
		l.Request.Key.Incarnation, l.Request.Restart = i, uint32(i)
		return l
	}
	old, err := n.Reserve(ctx, "h1", at(1), 0)
	must(t, err)
	must(t, n.admitOne(old.ID))
	_, err = n.Reserve(ctx, "h1", at(0), 0)
	code(t, err, lease.Over)
	now, err := n.Reserve(ctx, "h1", at(2), 0)
	must(t, err)
	if s := n.events(old.ID); s != "grant session-open session-end release" {
		t.Error(s)
	}
	// The end of the earlier life comes late.
	must(t, n.Release(ctx, "h1", "", old.Request.Key, "late"))
	must(t, n.Release(ctx, "h1", old.ID, old.Request.Key, "late"))
	if known, _ := n.Renew(ctx, "h1", []string{now.ID}); len(known) != 1 {
		t.Error("a late release of an earlier life ended the later one")
	}
	n.check(false)
}

func TestTakenBack(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l, err := n.Reserve(ctx, "h1", n.want("h1", "1", 80), time.Minute)
	must(t, err)
	must(t, n.Release(ctx, "h1", l.ID, lease.Key{}, "no room elsewhere"))
	_, err = n.Reserve(ctx, "h1", l, 0)
	code(t, err, lease.Over)
	// Its release can overtake a reserve.
	w := n.want("h1", "1", 80)
	must(t, n.Release(ctx, "h1", w.ID, w.Request.Key, "no room elsewhere"))
	_, err = n.Reserve(ctx, "h1", w, 0)
	code(t, err, lease.Over)
	n.kill()
	_, err = n.Reserve(ctx, "h1", w, 0)
	code(t, err, lease.Over)
	n.granted("h1", "1", 80) // the job may still ask
	must(t, n.Release(ctx, "h1", "", lease.Key{Cluster: "c", Job: "2", Node: "h1"}, "job ended"))
	_, err = n.Reserve(ctx, "h1", n.want("h1", "2", 10), 0)
	code(t, err, lease.Over)
	for range maxUnknown + 10 {
		must(t, n.Release(ctx, "h1", form.NewLeaseID(), lease.Key{}, ""))
	}
	if len(n.tombs) > maxUnknown+10 {
		t.Error(len(n.tombs))
	}
	n.clock.pass(2 * time.Hour)
	for range 6 {
		must(t, n.Sweep(ctx))
	}
	if len(n.tombs) != 2 || len(n.unknown) != 0 { // of the lease that has just been reclaimed
		t.Error("tombstones stay:", len(n.tombs), n.unknown)
	}
}

func TestReclaim(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	r, err := n.Reserve(ctx, "h1", n.want("h1", "1", 10), 15*time.Second)
	must(t, err)
	w := n.want("h1", "2", 10)
	w.Request.Life = time.Hour
	life, err := n.Reserve(ctx, "h1", w, 0)
	must(t, err)
	must(t, n.admitOne(life.ID))
	silent, used := n.granted("h1", "3", 10), n.granted("h1", "4", 10)
	must(t, n.admitOne(used.ID))
	live := func(want ...lease.Lease) {
		t.Helper()
		must(t, n.Sweep(ctx))
		var have, ids []string
		list, _ := n.List(ctx, "")
		for _, l := range list {
			have = append(have, l.ID)
		}
		for _, l := range want {
			ids = append(ids, l.ID)
		}
		slices.Sort(have)
		slices.Sort(ids)
		if !slices.Equal(have, ids) {
			t.Fatalf("%d leases, want %d", len(have), len(ids))
		}
	}
	live(r, life, silent, used)
	// The wall clock may say what it likes.
	for _, d := range []time.Duration{-20, 20} {
		n.clock.set(n.clock.Now().Add(d * 365 * 24 * time.Hour))
		live(r, life, silent, used)
	}
	n.kill()
	live(r, life, silent, used)
	n.clock.pass(14 * time.Second)
	live(r, life, silent, used)
	n.clock.pass(time.Second)
	live(life, silent, used)
	code(t, n.Confirm(ctx, "h1", r.ID), lease.Over)
	n.clock.pass(4 * time.Minute)
	_, _ = n.Renew(ctx, "h1", []string{silent.ID})
	n.clock.pass(4 * time.Minute)
	live(life, silent, used)
	n.clock.pass(time.Minute)
	live(life, used)
	// Silence counts from the start of the daemon too.
	n.workers.exit(used.ID, 0)
	n.kill()
	n.clock.pass(4 * time.Minute)
	live(life, used)
	n.clock.pass(time.Minute)
	live(life)
	n.clock.pass(45 * time.Minute)
	live(life)
	_, _ = n.Renew(ctx, "h1", []string{life.ID})
	n.clock.pass(time.Minute)
	live()
	_, err = n.Reserve(ctx, "h1", n.want("h1", "2", 10), 0)
	code(t, err, lease.Over)
	_, err = n.Reserve(ctx, "h1", n.want("h1", "1", 10), 0)
	must(t, err)
	n.check(false)
}

func TestReboot(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l := n.granted("h1", "1", 10)
	w := n.want("h1", "2", 10)
	w.Request.Life = time.Hour
	long, err := n.Reserve(ctx, "h1", w, 0)
	must(t, err)
	w = n.want("h1", "3", 10)
	w.Request.Life = time.Minute
	_, err = n.Reserve(ctx, "h1", w, 0)
	must(t, err)
	_, err = n.Reserve(ctx, "h1", n.want("h1", "4", 10), time.Minute)
	must(t, err)
	n.clock.pass(10 * time.Minute)
	n.clock.reboot()
	n.kill()
	must(t, n.Sweep(ctx))
	if known, _ := n.Renew(ctx, "h1", []string{l.ID, long.ID}); len(known) != 2 || len(n.leases) != 2 {
		t.Fatal(known, len(n.leases))
	}
	n.clock.pass(51 * time.Minute)
	must(t, n.Sweep(ctx))
	if known, _ := n.Renew(ctx, "h1", []string{long.ID}); len(known) != 0 {
		t.Error("a reboot made a life longer")
	}
}

// What sessions counted is lost with the machine's memory: a lease from before says so, also when it has ended.
func TestReportAfterReboot(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	report := func(job string, sessions uint64, lost bool) {
		t.Helper()
		r, err := n.Reports(ctx, "h1", "c", job)
		must(t, err)
		if len(r) != 1 || r[0].Sessions != sessions || r[0].Lost != lost {
			t.Errorf("job %s: %+v, want %d sessions, lost %v", job, r, sessions, lost)
		}
	}
	old, unused := n.granted("h1", "1", 10), n.granted("h1", "2", 10)
	must(t, n.admitOne(old.ID))
	n.kill() // the daemon alone
	report("1", 1, false)
	report("2", 0, false)
	n.clock.reboot()
	clear(n.workers.made)
	n.kill()
	n.granted("h1", "3", 10)
	report("1", 0, true)
	report("2", 0, true)
	report("3", 0, false)
	must(t, n.admitOne(old.ID)) // the job goes on
	report("1", 1, true)
	must(t, n.Release(ctx, "h1", old.ID, old.Request.Key, "job ended"))
	report("1", 1, true)
	n.kill()
	report("1", 1, true)
	// A record of an earlier release does not say when it began.
	if r := n.report(&record{Lease: unused}); r.Lost {
		t.Errorf("%+v", r)
	}
}

func TestMaxLife(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	n.SetLimits(Limits{MaxLife: time.Hour})
	if l := n.granted("h1", "1", 10); l.Request.Life != time.Hour || l.Expires.IsZero() {
		t.Fatalf("%+v", l)
	}
}

// An owner with MinUID set grants nothing to root and system users, whichever host asks.
func TestLeastUID(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	n.SetLimits(Limits{MinUID: 1000})
	for uid, want := range map[uint32]lease.Code{0: lease.Denied, 999: lease.Denied, 1000: ""} {
		w := n.want("h1", fmt.Sprint(uid), 10)
		w.Request.UID = uid
		for _, ttl := range []time.Duration{0, time.Second} {
			have, err := n.Reserve(ctx, "h1", w, ttl)
			code(t, err, want)
			if want == "" {
				break
			}
			if have.ID != "" || !strings.Contains(err.Error(), "worker.root_user") {
				t.Errorf("uid %d: %+v, %v", uid, have, err)
			}
		}
	}
}

// A user asks in vain as often as the host can send, for a lease or for a session.
func TestRefusalsAreBounded(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	n.SetLimits(Limits{MinUID: 1000})
	w := n.want("h1", "1", 10)
	w.Request.UID = 7
	begin := time.Now()
	for range 300 {
		_, err := n.Reserve(ctx, "h1", w, 0)
		code(t, err, lease.Denied)
	}
	lines := 0
	for _, e := range n.history() {
		if e.Event == audit.Refuse {
			lines++
		}
	}
	if most := 10 * (1 + int(time.Since(begin)/time.Second)); lines < 10 || lines > most+10 {
		t.Errorf("300 refusals have %d lines, want at most %d", lines, most)
	}
}

// Without a line in the audit log nothing is granted, and what ends still ends.
func TestAuditFails(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	old := n.granted("h1", "1", 50)
	reserved, err := n.Reserve(ctx, "h1", n.want("h1", "2", 10), time.Minute)
	must(t, err)
	n.audit.fail(errors.New("no space left on device"))
	w := n.want("h1", "3", 10)
	_, err = n.Reserve(ctx, "h1", w, 0)
	code(t, err, lease.Internal)
	code(t, n.Confirm(ctx, "h1", reserved.ID), lease.Internal)
	must(t, n.Release(ctx, "h1", old.ID, old.Request.Key, "job ended"))
	if p, _ := n.free(0); p != 100 {
		t.Fatal(p)
	}
	n.audit.fail(nil)
	must(t, n.Sweep(ctx))
	if s := n.events(old.ID); s != "grant release" {
		t.Error(s)
	}
	n.granted("h1", "4", 100)
	if all, err := ledger.All[record](n.ledger, ledger.Leases); err != nil || len(all) != 1 {
		t.Error(all, err)
	}
	n.kill()
	n.check(false)
	if len(n.queue) != 0 {
		must(t, n.Sweep(ctx))
	}
	if s := n.events(old.ID); s != "grant release" {
		t.Error("doubled:", s)
	}
}

// A ledger that cannot be written grants nothing and frees nothing.
func TestLedgerFails(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l := n.granted("h1", "1", 50)
	must(t, n.ledger.Close())
	_, err := n.Reserve(ctx, "h1", n.want("h1", "2", 10), 0)
	code(t, err, lease.Internal)
	code(t, n.Release(ctx, "h1", l.ID, lease.Key{}, ""), lease.Internal)
	if p, _ := n.free(0); p != 50 {
		t.Error(p)
	}
	n.kill()
	must(t, n.Release(ctx, "h1", l.ID, lease.Key{}, ""))
	n.check(true)
}

func TestSessions(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	n.limits.Sessions = 2
	n.SetLimits(n.limits)
	l := n.granted("gpu01", "1", 50)
	kind := request(l.ID)
	kind.Kind = wire.SessionLease
	_, err := n.Offer(ctx, "gpu01", kind)
	code(t, err, lease.Invalid)
	_, err = n.Offer(ctx, "gpu01", request(form.NewLeaseID()))
	code(t, err, lease.NotFound)
	f, err := n.Open(ctx, request(l.ID))
	must(t, err)
	f.Close()
	must(t, n.admitOne(l.ID))
	code(t, n.admitOne(l.ID), lease.NoRoom)
	_, err = n.Offer(ctx, "gpu01", request(l.ID))
	code(t, err, lease.NoRoom)
	n.workers.exit(l.ID, 0)
	must(t, n.admitOne(l.ID))
	other := n.granted("h1", "2", 10)
	_, err = n.Open(ctx, request(other.ID))
	code(t, err, lease.Denied)
	n.devices[0].Healthy = false
	code(t, n.admitOne(other.ID), lease.Down)
	n.devices[0].Healthy = true
	n.SetTickets(nil)
	_, err = n.Offer(ctx, "h1", request(other.ID))
	code(t, err, lease.Down)
	// A session that will not die holds its GPU.
	n.workers.endErr = errors.New("process 123 is in the kernel")
	code(t, n.Release(ctx, "gpu01", l.ID, lease.Key{}, ""), lease.Down)
	code(t, n.Release(ctx, "gpu01", l.ID, lease.Key{}, ""), lease.Down)
	code(t, n.admitOne(l.ID), lease.Over)
	if p, _ := n.free(0); p != 40 {
		t.Error(p)
	}
	n.kill()
	if p, _ := n.free(0); p != 40 {
		t.Error(p)
	}
	n.workers.endErr = nil
	must(t, n.Sweep(ctx))
	if p, _ := n.free(0); p != 90 {
		t.Error(p)
	}
	n.check(false)
}

// A release waits for a session that is being started, and none outlives it.
func TestReleaseWhileStarting(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l := n.granted("h1", "1", 50)
	n.workers.gate = make(chan struct{})
	admitted := make(chan error, 1)
	go func() { admitted <- n.admitOne(l.ID) }()
	for len(n.workers.started) == 0 {
		time.Sleep(time.Millisecond)
	}
	must(t, n.Release(ctx, "h1", l.ID, lease.Key{}, ""))
	if err := <-admitted; err == nil {
		t.Error("a session began on a lease that ended")
	}
	if s := n.workers.Sessions(l.ID); len(s) != 0 {
		t.Error(s)
	}
	n.check(true)
}

func TestOrphans(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	l := n.granted("h1", "1", 50)
	must(t, n.admitOne(l.ID))
	n.workers.live["lost"] = []lease.Session{{ID: "x", Lease: "lost"}}
	run, cancel := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- n.Run(run) }()
	for slices.Contains(n.workers.Leases(), "lost") {
		time.Sleep(time.Millisecond)
	}
	cancel()
	must(t, <-done)
	if len(n.workers.Sessions(l.ID)) != 1 {
		t.Error("a session with a lease was ended")
	}
}

func TestConfig(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("an owner of nothing")
	}
	n := newNode(t, "gpu01", 1)
	must(t, n.ledger.Put(ledger.Leases, "x", "no lease"))
	_, err := New(n.cfg)
	if !errors.Is(err, ledger.ErrCorrupt) {
		t.Error(err)
	}
	c, err := SystemClock()
	must(t, err)
	if c.Boot() == "" || c.Up() <= 0 || c.Now().IsZero() {
		t.Error(c)
	}
}
