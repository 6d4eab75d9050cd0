package owner

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// status is what List says of a lease.
func (n *node) status(id string) (s lease.Status, ok bool) {
	n.t.Helper()
	all, err := n.List(ctx, "")
	must(n.t, err)
	for _, s := range all {
		if s.ID == id {
			return s, true
		}
	}
	return lease.Status{}, false
}

// later passes time, and looks.
func (n *node) later(d time.Duration) {
	n.clock.pass(d)
	n.lookIdle(ctx)
}

func (n *node) idleFor(id string, want time.Duration, noted bool) {
	n.t.Helper()
	if s, ok := n.status(id); !ok || s.Idle != want || s.IdleNoted != noted {
		n.t.Fatalf("%v: idle for %v, noted %v; want %v, %v", ok, s.Idle, s.IdleNoted, want, noted)
	}
}

// What is work, and what is not.
func TestWork(t *testing.T) {
	n := newNode(t, "a", 1)
	l := n.granted("h", "1", 10)
	for _, c := range []struct {
		what  string
		f     func(c *lease.Counts, busy *time.Duration)
		works bool
	}{
		{"nothing", func(*lease.Counts, *time.Duration) {}, false},
		{"a launch", func(c *lease.Counts, _ *time.Duration) { c.Launches++ }, true},
		{"calls", func(c *lease.Counts, _ *time.Duration) {
			c.Calls += 1000
			c.Waits += 1000
			c.BytesIn += 64000
			c.BytesOut += 64000
		}, false},
		{"the GPU computes", func(_ *lease.Counts, busy *time.Duration) { *busy += time.Millisecond }, true},
		{"a copy from the GPU", func(c *lease.Counts, _ *time.Duration) { c.BytesOut += copied }, true},
		{"half a copy", func(c *lease.Counts, _ *time.Duration) { c.BytesIn += copied / 2 }, false},
		{"and its other half", func(c *lease.Counts, _ *time.Duration) { c.BytesIn += copied / 2 }, true},
	} {
		before, _ := n.status(l.ID)
		n.workers.works(l.ID, c.f)
		n.later(time.Hour)
		want := before.Idle + time.Hour
		if c.works {
			want = 0
		}
		if s, _ := n.status(l.ID); s.Idle != want {
			t.Errorf("%s: idle for %v, want %v", c.what, s.Idle, want)
		}
	}
}

func TestIdleNote(t *testing.T) {
	n := newNode(t, "a", 1)
	n.limits.Idle = Idles{Default: Idle{After: 30 * time.Minute, Action: IdleNote, Command: "/usr/local/sbin/mail-idle"}}
	n.SetLimits(n.limits)
	l := n.granted("h", "1", 10)
	reserved, err := n.Reserve(ctx, "h", n.want("h", "2", 10), time.Minute)
	must(t, err)
	n.later(29 * time.Minute)
	n.idleFor(l.ID, 29*time.Minute, false)
	if len(n.notices) != 0 {
		t.Fatalf("%+v", n.notices)
	}
	n.idleFor(reserved.ID, 0, false)
	for range 3 { // once
		n.later(time.Minute)
	}
	n.idleFor(l.ID, 32*time.Minute, true)
	if len(n.notices) != 1 || n.notices[0].Lease.ID != l.ID || n.notices[0].Idle != 30*time.Minute || n.notices[0].Action != IdleNote || n.notices[0].Command != "/usr/local/sbin/mail-idle" {
		t.Fatalf("%+v", n.notices)
	}
	n.workers.works(l.ID, func(c *lease.Counts, _ *time.Duration) { c.Launches++ })
	n.later(time.Minute)
	n.idleFor(l.ID, 0, false)
	n.later(30 * time.Minute) // and again
	n.idleFor(l.ID, 30*time.Minute, true)
	if got := n.events(l.ID); got != "grant idle idle" || len(n.notices) != 2 {
		t.Errorf("%q, %d notices", got, len(n.notices))
	}
	var reason string
	for _, e := range n.history() {
		if e.Event == audit.Idle {
			reason = e.Reason
			if e.Owner != "a" || e.UID == nil || *e.UID != 1000 || !strings.Contains(e.Key, "c/1@h") {
				t.Errorf("%+v", e)
			}
		}
	}
	if reason != "idle: no work for 30m0s, lease.idle in sluice.yaml of a: note" {
		t.Errorf("%q", reason)
	}
	// The next daemon counts from its start.
	n.kill()
	n.later(0)
	n.idleFor(l.ID, 0, false)
	n.later(29 * time.Minute)
	n.idleFor(l.ID, 29*time.Minute, false)
	n.later(time.Minute)
	n.idleFor(l.ID, 30*time.Minute, true)
	n.SetLimits(Limits{}) // the site has changed its mind
	n.later(time.Minute)
	n.idleFor(l.ID, 31*time.Minute, false)
	n.check(false)
}

// An idle lease lends until it works, or until the site says otherwise; a pool may have its own rule.
func TestIdleLend(t *testing.T) {
	n := newNode(t, "a", 1)
	n.limits.Idle = Idles{Default: Idle{After: time.Hour, Action: IdleNote}, Pools: map[string]Idle{"batch": {After: 10 * time.Minute, Action: IdleLend}, "never": {}}}
	n.SetLimits(n.limits)
	get := func(job, pool string) lease.Lease {
		l := n.want("h", job, 10)
		l.Request.Pool = pool
		l, err := n.Reserve(ctx, "h", l, 0)
		must(t, err)
		return l
	}
	batch, other, never := get("1", "batch"), get("2", "default"), get("3", "never")
	n.later(10 * time.Minute)
	if !n.workers.lends[batch.ID] || n.workers.lends[other.ID] {
		t.Fatalf("%v", n.workers.lends)
	}
	n.workers.works(batch.ID, func(_ *lease.Counts, busy *time.Duration) { *busy += time.Second })
	n.later(5 * time.Second)
	if n.workers.lends[batch.ID] {
		t.Fatal("it works, and lends")
	}
	n.later(time.Hour)
	n.idleFor(never.ID, time.Hour+10*time.Minute+5*time.Second, false)
	if !n.workers.lends[batch.ID] || n.workers.lends[other.ID] || n.events(other.ID) != "grant idle" || n.events(never.ID) != "grant" {
		t.Fatalf("%v, %q, %q", n.workers.lends, n.events(other.ID), n.events(never.ID))
	}
	n.limits.Idle.Pools = nil
	n.SetLimits(n.limits)
	n.later(5 * time.Second)
	if n.workers.lends[batch.ID] || n.events(batch.ID) != "grant idle idle idle" {
		t.Fatalf("%v, %q", n.workers.lends, n.events(batch.ID))
	}
}

func TestIdleEnd(t *testing.T) {
	n := newNode(t, "a", 1)
	n.limits.Idle = Idles{Default: Idle{After: 10 * time.Minute, Action: IdleEnd, Command: "/mail"}}
	n.SetLimits(n.limits)
	l := n.granted("h", "1", 100)
	must(t, n.admitOne(l.ID))
	n.workers.works(l.ID, func(c *lease.Counts, _ *time.Duration) { c.Launches++ })
	n.later(9 * time.Minute)
	n.later(9 * time.Minute)
	n.idleFor(l.ID, 9*time.Minute, false)

	// A session that is just being started is no idle lease's.
	n.workers.gate = make(chan struct{})
	started := make(chan error)
	go func() { started <- n.admitOne(l.ID) }()
	<-n.workers.started
	n.later(time.Minute)
	if _, ok := n.status(l.ID); !ok || len(n.notices) != 0 {
		t.Fatalf("ended while a session was being started: %v, %+v", ok, n.notices)
	}
	n.workers.started <- struct{}{}
	close(n.workers.gate)
	must(t, <-started)
	n.later(time.Minute) // what the new session has done is work to this fake
	n.later(10 * time.Minute)
	must(t, n.Sweep(ctx)) // waits for its end
	if _, ok := n.status(l.ID); ok || len(n.workers.Sessions(l.ID)) != 0 {
		t.Fatal("the lease is there")
	}
	if p, _ := n.free(0); p != 100 {
		t.Errorf("%d%% free", p)
	}
	if got := n.events(l.ID); !strings.HasPrefix(got, "grant session-open session-open idle") || !strings.HasSuffix(got, "reclaim") || len(n.notices) != 1 {
		t.Errorf("%q, %+v", got, n.notices)
	}
	reports, err := n.Reports(ctx, "h", "c", "1")
	must(t, err)
	if len(reports) != 1 || reports[0].Reason != "idle: no work for 10m0s, lease.idle in sluice.yaml of a: end" {
		t.Errorf("%+v", reports)
	}
	_, err = n.Reserve(ctx, "h", l, 0)
	code(t, err, lease.Over)
	n.check(true)
}

// The time of a cut is not idle time, for as long as the grace.
func TestIdleCut(t *testing.T) {
	const never = -1
	for _, c := range []struct {
		what       string
		grace, cut time.Duration // cut: how long ago at the first look, never: not
		idle       time.Duration // for which the lease has been idle then
		want       []time.Duration
	}{
		{"no cut", time.Hour, never, 5 * time.Minute, []time.Duration{5 * time.Minute, 10 * time.Minute}},
		{"a cut within the grace", time.Hour, 2 * time.Minute, 5 * time.Minute, []time.Duration{3 * time.Minute, 3 * time.Minute, 3 * time.Minute}},
		{"a cut older than the grace", 2*time.Minute - cutMargin, 3 * time.Minute, 5 * time.Minute, []time.Duration{3 * time.Minute, 8 * time.Minute}},
		{"a cut that grows older than the grace", 7*time.Minute - cutMargin, 4 * time.Minute, 5 * time.Minute, []time.Duration{time.Minute, 3 * time.Minute, 8 * time.Minute}},
		{"a cut from before the lease", 6*time.Minute - cutMargin, 3 * time.Hour, 5 * time.Minute, []time.Duration{0, 4 * time.Minute}},
		{"a cut that is to come", time.Hour, -time.Hour, 5 * time.Minute, []time.Duration{5 * time.Minute, 10 * time.Minute}},
	} {
		t.Run(c.what, func(t *testing.T) {
			n := newNode(t, "a", 1)
			l := n.granted("h", "1", 10)
			n.clock.pass(c.idle)
			if c.cut != never {
				n.workers.cut, n.workers.grace = max(1, n.clock.Up()-c.cut), c.grace
			}
			n.lookIdle(ctx)
			for i, want := range c.want {
				if i > 0 {
					n.later(5 * time.Minute)
				}
				n.idleFor(l.ID, want, false)
			}
		})
	}
}

// A lease whose session is cut does not end, ends when it idles afterwards, and a session cannot keep it by saying that it is cut again and again.
func TestIdleEndCut(t *testing.T) {
	for _, lies := range []bool{false, true} {
		n := newNode(t, "a", 1)
		n.limits.Idle = Idles{Default: Idle{After: 10 * time.Minute, Action: IdleEnd}}
		n.SetLimits(n.limits)
		l := n.granted("h", "1", 100)
		n.later(5 * time.Minute)
		n.workers.cut, n.workers.grace = n.clock.Up(), 20*time.Minute
		for range 4 {
			n.later(5 * time.Minute)
			if lies { // or its connection flaps
				n.workers.cut = n.clock.Up()
			}
		}
		n.idleFor(l.ID, 5*time.Minute, false)
		if !lies {
			n.workers.cut = 0
			n.later(4 * time.Minute)
			n.idleFor(l.ID, 9*time.Minute, false)
			n.workers.works(l.ID, func(c *lease.Counts, _ *time.Duration) { c.Launches++ })
			n.later(time.Minute)
			n.idleFor(l.ID, 0, false)
		}
		n.later(5 * time.Minute)
		if lies {
			n.workers.cut = n.clock.Up()
		}
		n.later(6 * time.Minute)
		must(t, n.Sweep(ctx)) // waits for its end
		if _, ok := n.status(l.ID); ok {
			t.Errorf("lies %v: the lease is there", lies)
		}
	}
}

func TestHeld(t *testing.T) {
	n := newNode(t, "a", 2)
	run := n.granted("h", "run-1", 20, 30)
	jobs := n.want("h", "7", 40)
	jobs.Request.Account, jobs.Request.Pool = "phys", "big"
	_, err := n.Reserve(ctx, "h", jobs, time.Minute)
	must(t, err)
	other := n.want("h", "run-2", 5)
	other.Request.UID = 1001
	_, err = n.Reserve(ctx, "h", other, 0)
	must(t, err)
	_, err = n.Set(ctx, "h", lease.Change{Lease: run.ID, Shares: []uint32{1}})
	must(t, err)
	mem := run.Grants[0].Mem + run.Grants[1].Mem
	for _, c := range []struct {
		of   lease.Holding
		want lease.Held
	}{
		{lease.Holding{UID: 1000}, lease.Held{Percent: 50, Mem: mem, Leases: 1}},
		{lease.Holding{UID: 1000, Except: run.ID}, lease.Held{}},
		{lease.Holding{UID: 1000, Jobs: true}, lease.Held{Percent: 90, Mem: mem + jobs.Grants[0].Mem, Leases: 2, Reserved: 1}},
		{lease.Holding{UID: 1000, Jobs: true, Pool: "big"}, lease.Held{Percent: 40, Mem: jobs.Grants[0].Mem, Leases: 1, Reserved: 1}},
		{lease.Holding{UID: 1000, Pool: "big"}, lease.Held{}},
		{lease.Holding{UID: 1001, Jobs: true}, lease.Held{Percent: 5, Mem: other.Grants[0].Mem, Leases: 1}},
		{lease.Holding{Account: "phys", Cluster: "c"}, lease.Held{Percent: 40, Mem: jobs.Grants[0].Mem, Leases: 1, Reserved: 1}},
		{lease.Holding{Account: "phys", Cluster: "other"}, lease.Held{}},
	} {
		got, err := n.Held(ctx, "h2", []lease.Holding{{UID: 5}, c.of})
		if must(t, err); len(got) != 2 || got[0] != (lease.Held{}) || got[1] != c.want {
			t.Errorf("%+v: %+v, want %+v", c.of, got, c.want)
		}
	}
	_, err = n.Held(ctx, "h", make([]lease.Holding, lease.MaxHoldings+1))
	code(t, err, lease.Invalid)
}

// A lease outside of Slurm's jobs has a life time of its own, and its end is in the log before it comes.
func TestRunLife(t *testing.T) {
	n := newNode(t, "a", 1)
	var out bytes.Buffer
	n.stop()
	n.log = slog.New(slog.NewTextHandler(&out, nil))
	n.limits.MaxLife, n.limits.RunLife = 24*time.Hour, time.Hour
	n.start()
	run, job := n.granted("h", "run-1", 10), n.granted("h", "7", 10)
	short := n.want("h", "run-2", 10)
	short.Request.Life = time.Minute
	short, err := n.Reserve(ctx, "h", short, 0)
	must(t, err)
	if run.Request.Life != time.Hour || job.Request.Life != 24*time.Hour || short.Request.Life != time.Minute {
		t.Errorf("%v, %v, %v", run.Request.Life, job.Request.Life, short.Request.Life)
	}
	must(t, n.Release(ctx, "h", short.ID, lease.Key{}, "test"))
	const words = "the life time of a lease is nearly over"
	pass := func(d time.Duration) {
		t.Helper()
		n.clock.pass(d)
		_, err := n.Renew(ctx, "h", []string{run.ID, job.ID})
		must(t, err)
		must(t, n.Sweep(ctx))
	}
	pass(53 * time.Minute)
	if strings.Contains(out.String(), words) {
		t.Error(out.String())
	}
	for range 3 {
		pass(time.Minute)
	}
	if got := strings.Count(out.String(), words); got != 1 || !strings.Contains(out.String(), "lease="+run.ID) || !strings.Contains(out.String(), "left=6m0s") {
		t.Errorf("%d times: %s", got, out.String())
	}
}
