package workers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// tenantOf returns what the schedule of GPU n says of a lease; false if it is no tenant there.
func (p *Pool) tenantOf(n int, id string) (turns.TenantCounters, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.schedules[simUUID(n)]
	if b == nil {
		return turns.TenantCounters{}, false
	}
	for _, c := range b.Read() {
		if c.Lease == id {
			return c, true
		}
	}
	return turns.TenantCounters{}, false
}

// A lease is a tenant of its GPUs from its grant to its end, with its policy, and stays one when the
// daemon is replaced. Its sessions are the tenant's members.
func TestTenants(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	l := testLease("a", 0, 1)
	want := func(p *Pool, n int, pol turns.Policy) turns.TenantCounters {
		t.Helper()
		c, ok := p.tenantOf(n, l.ID)
		if !ok || c.Policy != pol {
			t.Fatalf("gpu %d: %+v, %v; want %+v", n, c, ok, pol)
		}
		return c
	}
	share := func(p *Pool) {
		t.Helper()
		if err := p.Share(l); err != nil {
			t.Fatal(err)
		}
	}
	share(p)
	want(p, 0, turns.Policy{Kind: turns.BestEffort, Weight: 5000})
	want(p, 1, turns.Policy{Kind: turns.BestEffort, Weight: 5000})
	l.Request.Policy, l.Grants[1].Percent = lease.Fixed, 20
	share(p)
	want(p, 1, turns.Policy{Kind: turns.Fixed, Weight: 2000})
	// The site's setting for lending holds where the lease has none.
	p.SetSharing(Sharing{Lend: true})
	want(p, 0, turns.Policy{Kind: turns.Fixed, Weight: 5000, Lend: true})
	l.Request.Lend = lease.LendNo
	share(p)
	want(p, 0, turns.Policy{Kind: turns.Fixed, Weight: 5000})
	// A lease that is idle lends whatever it says, until it works again.
	p.Lend(l.ID, true)
	want(p, 0, turns.Policy{Kind: turns.Fixed, Weight: 5000, Lend: true})
	want(p, 1, turns.Policy{Kind: turns.Fixed, Weight: 2000, Lend: true})
	p.Lend("of nobody", true)
	p.Lend(l.ID, false)
	want(p, 0, turns.Policy{Kind: turns.Fixed, Weight: 5000})
	l.Request.Policy, l.Request.Lend = lease.Equal, lease.LendYes
	p.SetSharing(Sharing{})
	share(p)
	want(p, 0, turns.Policy{Kind: turns.Equal, Weight: 5000, Lend: true})

	c, w := pair(t)
	s, err := p.Start(t.Context(), l, request("a"), w, gpus(0, 1))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	if err := c.activate(0); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a member", func() bool { c, _ := p.tenantOf(0, l.ID); return c.Members == 1 })
	if all := p.Shares(l.ID); len(all) != 2 || all[0].Due != 10000 {
		t.Errorf("%+v", all)
	}

	// The next daemon finds the tenant and its member.
	p.Close()
	q := newPool(t, dir, nil)
	q.OnEnd(func(lease.Session, string) {})
	if got := want(q, 0, turns.Policy{Kind: turns.Equal, Weight: 5000, Lend: true}); got.Members != 1 {
		t.Errorf("%+v", got)
	}
	if q.Shares(l.ID) != nil {
		t.Error("shares of a lease that nobody has told of yet")
	}
	if err := q.Share(l); err != nil {
		t.Fatal(err)
	}
	if got := want(q, 0, turns.Policy{Kind: turns.Equal, Weight: 5000, Lend: true}); got.Members != 1 || len(q.Shares(l.ID)) != 2 {
		t.Errorf("%+v", got)
	}
	if err := syscall.Kill(s.Worker.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "its member is gone", func() bool { c, ok := q.tenantOf(0, l.ID); return ok && c.Members == 0 })
	waitFor(t, "the first pool, which lives on in this process, has seen its end", func() bool { return p.gone(s) })

	// A tenant without a lease is listed, so that the owner ends it. End alone keeps its counters.
	other := testLease("b", 0)
	if err := q.Share(other); err != nil {
		t.Fatal(err)
	}
	if ids := strings.Join(q.Leases(), " "); !strings.Contains(ids, other.ID) || !strings.Contains(ids, l.ID) {
		t.Error(ids)
	}
	for _, id := range []string{l.ID, other.ID} {
		if err := q.End(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		if _, ok := q.tenantOf(0, id); !ok {
			t.Error("End removed the tenant")
		}
		if err := q.Forget(id); err != nil {
			t.Fatal(err)
		}
		if _, ok := q.tenantOf(0, id); ok {
			t.Error("Forget left the tenant")
		}
	}
	if ids := q.Leases(); len(ids) != 0 {
		t.Error(ids)
	}
}

// Without turns there are no schedules, and sessions start nevertheless.
func TestWithoutTurns(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, func(c *Config) { c.Turns = "" })
	p.OnEnd(func(lease.Session, string) {})
	if err := p.Share(testLease("a", 0)); err != nil {
		t.Fatal(err)
	}
	c, _ := open(t, p, 1)
	defer c.Close()
	if _, err := os.Stat(filepath.Join(dir, "turns")); err == nil || p.Shares(strings.Repeat("a", 32)) != nil {
		t.Error("there are schedules")
	}
}

// If others could write a schedule, no session starts on its GPU, and the reason is given.
func TestScheduleOfOthers(t *testing.T) {
	dir := setup(t)
	if err := os.MkdirAll(filepath.Join(dir, "turns"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "turns", simUUID(0)+".state"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "turns", simUUID(0)+".state"), 0o666); err != nil {
		t.Fatal(err)
	}
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	if err := p.Share(testLease("a", 0)); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Error(err)
	}
	if err := p.Unscheduled()[strings.Repeat("a", 32)]; err == nil {
		t.Error("health is not told")
	}
	_, w := pair(t)
	if _, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0)); err == nil || !strings.Contains(err.Error(), "share of compute time") {
		t.Error(err)
	}
	if err := p.Share(testLease("b", 1)); err != nil {
		t.Error("another GPU:", err)
	}
}

// join makes a member of a lease's tenant on GPU n, as a session does.
func (p *Pool) join(t *testing.T, n int, id string) *turns.Member {
	t.Helper()
	at, ok := p.tenantOf(n, id)
	if !ok {
		t.Fatal("no tenant")
	}
	policy, state := p.schedules[simUUID(n)].Files()
	var fds [2]int
	for i, f := range []*os.File{policy, state} {
		fd, err := syscall.Dup(int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		fds[i] = fd
	}
	c, err := turns.OpenFDs(fds[0], fds[1], at.Tenant, turns.Monotonic{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Work beyond the limit is told once as long as it lasts, and ends its session where the
// site wants that.
func TestOverrun(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	ends := make(chan string, 1)
	p.OnEnd(func(_ lease.Session, reason string) { ends <- reason })
	id := strings.Repeat("a", 32)
	c, s := open(t, p, 1)
	defer c.Close()
	member := p.join(t, 0, id)
	now := turns.Monotonic{}.Now()
	member.SetOverdue(now - int64(time.Minute))
	at := time.Now()
	look := func(after time.Duration) []Overrun { at = at.Add(after); return p.overruns(at) }
	for range 2 {
		if o := look(2 * time.Second); len(o) != 0 {
			t.Errorf("nobody else wants the GPU: %+v", o)
		}
	}
	if err := p.Share(testLease("b", 0)); err != nil {
		t.Fatal(err)
	}
	other := p.join(t, 0, strings.Repeat("b", 32))
	for range 2 { // what it took before the other lease asked, or asked again, harmed nobody
		other.Request()
		for _, d := range []time.Duration{time.Second, time.Millisecond, 999 * time.Millisecond} {
			if o := look(d); len(o) != 0 {
				t.Errorf("below the limit since the other lease wants the GPU: %+v", o)
			}
		}
		other.Withdraw()
		if o := look(time.Second); len(o) != 0 {
			t.Errorf("%+v", o)
		}
	}
	other.Request()
	_ = look(0)
	if o := look(1100 * time.Millisecond); len(o) != 1 || o[0].Time != 1100*time.Millisecond {
		t.Errorf("since the other lease wants the GPU: %+v", o)
	}
	member.SetOverdue(0)
	if o := look(0); len(o) != 0 {
		t.Errorf("%+v", o)
	}
	member.SetOverdue(now - int64(900*time.Millisecond))
	for range 2 {
		if o := look(2 * time.Second); len(o) != 0 {
			t.Errorf("below the limit: %+v", o)
		}
	}
	member.SetOverdue(0)
	_ = look(0)
	for range 2 {
		member.SetOverdue(now - int64(1500*time.Millisecond))
		if o := look(0); len(o) != 0 {
			t.Errorf("at the first look: %+v", o)
		}
		o := look(1500 * time.Millisecond)
		if len(o) != 1 || o[0].Lease.ID != id || o[0].GPU != simUUID(0) || o[0].PID != os.Getpid() || o[0].Time < 1500*time.Millisecond || o[0].Ended || !strings.Contains(o[0].Reason, "shares.overrun.limit is 1s") {
			t.Errorf("%+v", o)
		}
		if o := look(0); len(o) != 0 {
			t.Errorf("told twice: %+v", o)
		}
		// While it lasts the site decides that such work is to be ended.
		p.SetSharing(Sharing{Limit: time.Second, Overrun: turns.OverrunEnds})
		if o := look(0); len(o) != 1 {
			t.Errorf("not looked at again: %+v", o)
		}
		if o := look(0); len(o) != 0 {
			t.Errorf("told twice: %+v", o)
		}
		p.SetSharing(Sharing{Limit: time.Second})
		member.SetOverdue(0)
		_ = look(0)
	}
	// The session's own: it ends.
	p.SetSharing(Sharing{Limit: 10 * time.Second, Overrun: turns.OverrunEnds})
	if o := p.overruns(time.Now()); len(o) != 0 {
		t.Errorf("%+v", o)
	}
	p.mu.Lock()
	if p.endOverrun(id, s.Worker.PID+1, "not its") || !p.endOverrun(id, s.Worker.PID, "its work stayed on the GPU") {
		t.Error("another session is ended, or not this one")
	}
	p.mu.Unlock()
	waitFor(t, "its end", func() bool { return p.gone(s) })
	if why := <-ends; why != "its work stayed on the GPU" {
		t.Error(why)
	}

	// The watch tells by itself. This process is no session, so none is ended.
	told := make(chan Overrun, 10)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.WatchTurns(ctx, func(o Overrun) { told <- o }) }()
	p.SetSharing(Sharing{Limit: 100 * time.Millisecond, Overrun: turns.OverrunEnds})
	member.SetOverdue(turns.Monotonic{}.Now())
	select {
	case o := <-told:
		if o.Ended || o.Time < 100*time.Millisecond {
			t.Errorf("%+v", o)
		}
	case <-time.After(20 * time.Second):
		at, ok := p.tenantOf(0, id)
		t.Errorf("the watch says nothing of %+v, %v", at, ok)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A session that ended itself for its work is told of with the reason that it gave.
func TestEndedItself(t *testing.T) {
	p := newPool(t, setup(t), nil)
	p.OnEnd(func(lease.Session, string) {})
	l := testLease("a", 0)
	if err := p.Share(l); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		status int
		why    string
		want   bool
	}{{0, "", false}, {control.ExitOverrun, "it was killed", false}, {control.ExitOverrun, "", true}} {
		cmd := exec.Command("sh", "-c", fmt.Sprintf("exit %d", c.status))
		_ = cmd.Run() // with that status
		s := &session{
			Session: lease.Session{Lease: l.ID, Worker: lease.Process{PID: 77}}, why: c.why,
			l: &leased{id: l.ID, gpus: []string{simUUID(0)}}, proc: &worker{Process: &control.Process{Cmd: cmd}},
		}
		p.mu.Lock()
		p.endedItself(s, "its work stayed")
		p.mu.Unlock()
		o := p.overruns(time.Now())
		if !c.want {
			if len(o) != 0 {
				t.Errorf("%+v: %+v", c, o)
			}
			continue
		}
		if len(o) != 1 || o[0].Lease.ID != l.ID || o[0].GPU != simUUID(0) || o[0].PID != 77 || !o[0].Ended || o[0].Reason != "its work stayed" {
			t.Errorf("%+v: %+v", c, o)
		}
		if o := p.overruns(time.Now()); len(o) != 0 {
			t.Errorf("told twice: %+v", o)
		}
	}
	// Of one that an earlier daemon started only its word is known.
	for reason, want := range map[string]int{control.OverrunReason("a GPU", 2*time.Second, 0, time.Second): 1, "ended": 0, "": 0} {
		p.mu.Lock()
		p.endedItself(&session{Session: lease.Session{Lease: l.ID, Worker: lease.Process{PID: 78}}, l: &leased{id: l.ID, gpus: []string{simUUID(0)}}}, reason)
		p.mu.Unlock()
		if o := p.overruns(time.Now()); len(o) != want || want == 1 && (o[0].PID != 78 || !o[0].Ended || o[0].Reason != reason) {
			t.Errorf("a session of an earlier daemon ended with %q: %+v", reason, o)
		}
	}
}
