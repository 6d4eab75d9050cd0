package workers

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// open starts a session of lease a, on which a context is made n times: n calls.
func open(t *testing.T, p *Pool, n int) (*client, lease.Session) {
	t.Helper()
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	for range n {
		if err := c.activate(0); err != nil {
			t.Fatal(err)
		}
	}
	return c, s
}

func (p *Pool) gone(s lease.Session) bool {
	for _, l := range p.Sessions(s.Lease) {
		if l.ID == s.ID {
			return false
		}
	}
	return true
}

// What sessions did is kept when they end, however they do, over daemons, until it is
// forgotten.
func TestTotals(t *testing.T) {
	dir := setup(t)
	id := strings.Repeat("a", 32)
	totals := func(p *Pool, calls, sessions uint64, gpu time.Duration) {
		t.Helper()
		sum := p.Total(id)
		use, c, n, g := sum.Use, sum.Counts, sum.Sessions, sum.GPUTime
		if c.Calls != calls || c.Waits != calls || n != sessions || g != gpu || len(use) != 1 || use[0].Peak < 64<<20 || use[0].Granted != 256<<20 {
			t.Errorf("%d calls, %d waits, %d sessions, %v, %+v; want %d calls, %d sessions, %v", c.Calls, c.Waits, n, g, use, calls, sessions, gpu)
		}
	}
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	c, s := open(t, p, 2)
	totals(p, 2, 1, 0)
	busy := func(pid int, d time.Duration) map[string]map[int]time.Duration {
		return map[string]map[int]time.Duration{simUUID(0): {pid: d, 1: time.Hour}, simUUID(1): {pid: time.Hour}}
	}
	p.AddBusy(time.Now(), busy(s.Worker.PID, 3*time.Second))
	c.Close()
	waitFor(t, "end", func() bool { return p.gone(s) })
	// The sample about its last moments comes later.
	p.AddBusy(time.Now(), busy(s.Worker.PID, 2*time.Second))
	totals(p, 2, 1, 5*time.Second)
	p.AddBusy(time.Now().Add(time.Hour), busy(s.Worker.PID, 0))
	p.AddBusy(time.Now().Add(time.Hour), busy(s.Worker.PID, time.Minute)) // another process by now
	_, s = open(t, p, 3)
	totals(p, 5, 2, 5*time.Second)
	failed := func(n uint64) {
		t.Helper()
		sum, want := p.Total(id), fmt.Sprintf("%s (process %d): killed by signal 9 (killed)", s.Program, s.Client)
		if n == 0 {
			want = ""
		}
		if sum.Failed != n || sum.Failure != want {
			t.Errorf("%d sessions failed, the last one of %q; want %d, %q", sum.Failed, sum.Failure, n, want)
		}
	}
	failed(0)
	if err := syscall.Kill(s.Worker.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "end", func() bool { return p.gone(s) })
	totals(p, 5, 2, 5*time.Second)
	failed(1)

	// A daemon that was killed after it had counted a session: the record is there still.
	waitFor(t, "record gone", func() bool {
		m, _ := filepath.Glob(filepath.Join(dir, "owner", id, sessionPrefix+"*"))
		return len(m) == 0
	})
	_, s = open(t, p, 1)
	record, err := filepath.Glob(filepath.Join(dir, "owner", id, sessionPrefix+"*"))
	if err != nil || len(record) != 1 {
		t.Fatal(record, err)
	}
	saved, err := os.ReadFile(record[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(s.Worker.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "end", func() bool { return p.gone(s) })
	totals(p, 6, 3, 5*time.Second)
	p.Close()
	if err := os.WriteFile(record[0], saved, 0o600); err != nil {
		t.Fatal(err)
	}
	p = newPool(t, dir, nil)
	totals(p, 6, 3, 5*time.Second)
	p.OnEnd(func(lease.Session, string) {})
	totals(p, 6, 3, 5*time.Second)
	failed(2)

	// One that was killed before: the next daemon counts what the account says.
	_, s = open(t, p, 4)
	b, err := os.ReadFile(filepath.Join(dir, "owner", id, "totals"))
	if err != nil {
		t.Fatal(err)
	}
	if saved, err = os.ReadFile(record[0]); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(s.Worker.PID, syscall.SIGKILL)
	waitFor(t, "end", func() bool { return p.gone(s) })
	totals(p, 10, 4, 5*time.Second)
	p.Close()
	for path, b := range map[string][]byte{record[0]: saved, filepath.Join(dir, "owner", id, "totals"): b} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p = newPool(t, dir, nil)
	totals(p, 10, 4, 5*time.Second)
	p.OnEnd(func(lease.Session, string) {})
	totals(p, 10, 4, 5*time.Second)

	// The end: what it used is told until it is forgotten, by the next daemon too.
	if err := p.Forget(id); err != nil || len(p.Leases()) != 1 {
		t.Errorf("forgotten while it lives: %v", err)
	}
	open(t, p, 1)
	for range 2 {
		if err := p.End(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	totals(p, 11, 5, 5*time.Second)
	if sum := p.Total(id); sum.Failed != 3 || !strings.HasSuffix(sum.Failure, "): ended without saying why, as one that is killed") {
		t.Errorf("%d sessions failed, with the one that ended with its lease: %s", sum.Failed, sum.Failure)
	}
	c2, w := pair(t)
	if _, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0)); err == nil {
		t.Error("a session of an ended lease")
	}
	c2.Close()
	p.Close()
	p = newPool(t, dir, nil)
	totals(p, 11, 5, 5*time.Second)
	if err := p.End(t.Context(), id); err != nil {
		t.Error(err)
	}
	if l := p.Leases(); len(l) != 1 || p.Use(id) != nil || p.Sessions(id) != nil {
		t.Errorf("leases %v", l)
	}
	for range 2 {
		if err := p.Forget(id); err != nil {
			t.Error(err)
		}
	}
	if sum := p.Total(id); !reflect.DeepEqual(sum, lease.Total{}) || len(p.Leases()) != 0 {
		t.Errorf("not forgotten: %+v", sum)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "owner")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// Numbers that a session wrote into its account cannot make sums wrap.
func TestSum(t *testing.T) {
	most := lease.Counts{Calls: ^uint64(0), BytesIn: 5, Throttle: 1 << 62, Cuts: 2, CutTime: 1 << 62}
	if got := sum(most, lease.Counts{Calls: 7, BytesIn: 6, Throttle: 1, Cuts: 3, CutTime: 1}); got != (lease.Counts{Calls: ^uint64(0), BytesIn: 11, Throttle: 1 << 62, Cuts: 5, CutTime: 1 << 62}) {
		t.Errorf("%+v", got)
	}
	b, err := json.Marshal(totals{Counts: most, Ended: true})
	var back totals
	if err == nil {
		err = json.Unmarshal(b, &back)
	}
	if err != nil || back.Counts != most || !back.Ended {
		t.Errorf("%s: %v", b, err)
	}
}
