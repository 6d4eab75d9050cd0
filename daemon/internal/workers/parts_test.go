package workers

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// open starts a session of a part, nil for none, and makes its context.
func (p *Pool) open(t *testing.T, l lease.Lease, part *lease.Part) (lease.Session, *client) {
	t.Helper()
	c, w := pair(t)
	r := request(l.ID[:1])
	r.Part = part
	s, err := p.Start(t.Context(), l, r, w, gpus(0))
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
	return s, c
}

// refused is why no session can be opened.
func (p *Pool) refused(t *testing.T, l lease.Lease, part *lease.Part, kind uint32) string {
	t.Helper()
	_, w := pair(t)
	r := request(l.ID[:1])
	r.Part, r.Kind = part, kind
	_, err := p.Start(t.Context(), l, r, w, gpus(0))
	if err == nil {
		t.Fatalf("a session of %v", part)
	}
	return err.Error()
}

// weights are what a lease and its parts have on GPU 0, by part.
func (p *Pool) weights(id string) map[string]turns.Policy {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]turns.Policy{}
	for _, c := range p.schedules[simUUID(0)].Read() {
		if c.Lease == id {
			all[c.Part] = c.Policy
		}
	}
	return all
}

// members are how many sessions take turns as a lease and as its parts on GPU 0, by part.
func (p *Pool) members(id string) map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]int{}
	for _, c := range p.schedules[simUUID(0)].Read() {
		if c.Lease == id {
			all[c.Part] = c.Members
		}
	}
	return all
}

// Steps with a part of the job's fraction: each has its memory and its share of time, whatever the others do, and all together what the lease
// has; also when the daemon is replaced, and when the lease's share is changed.
func TestParts(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	l := testLease("a", 0)
	l.Request.Policy = lease.Fixed
	if err := p.Share(l); err != nil {
		t.Fatal(err)
	}
	want := func(p *Pool, weights map[string]uint32) {
		t.Helper()
		got := p.weights(l.ID)
		ok := len(got) == len(weights)
		for part, w := range weights {
			ok = ok && got[part] == turns.Policy{Kind: turns.Fixed, Weight: w}
		}
		if !ok {
			t.Fatalf("%+v, want %v", got, weights)
		}
	}
	three := &lease.Part{Step: 3, Percent: 10, Mem: 70 << 20}
	s, c := p.open(t, l, three)
	if c.snap.Devices[0].TotalMem != 70<<20 {
		t.Errorf("the program sees %d bytes", c.snap.Devices[0].TotalMem)
	}
	if live := p.Sessions(l.ID); len(live) != 1 || live[0].Part == nil || *live[0].Part != *three || live[0].Use[0].Granted != 70<<20 {
		t.Errorf("%+v", live)
	}
	want(p, map[string]uint32{"": 4000, "3": 1000})
	if n := p.members(l.ID); n["3"] != 1 || n[""] != 0 {
		t.Errorf("members: %v", n)
	}
	if all := p.Shares(l.ID); len(all) != 1 || all[0].Due != 5000 {
		t.Errorf("%+v", all)
	}
	for text, part := range map[string]*lease.Part{
		"of the 50% of lease":                {Step: 4, Percent: 41, Mem: 70 << 20},
		"programs that run have":             {Step: 3, Percent: 20, Mem: 70 << 20},
		"a program's context alone takes 64": {Step: 4, Percent: 10, Mem: 32 << 20},
		"with --rgpu-mem=66M or more":        {Step: 4, Percent: 10, Mem: 64 << 20}, // a context, and nothing else
		"has 50% and 256 MiB":                {Step: 4, Percent: 10, Mem: 300 << 20},
		"step 4: 0%, 70 MiB":                 {Step: 4, Mem: 70 << 20},
	} {
		if got := p.refused(t, l, part, wire.SessionCompute); !strings.Contains(got, text) {
			t.Errorf("%v: %s", part, got)
		}
	}
	// A second session of the step shares its part: two contexts of 64 MiB do not fit into 70.
	cc, w := pair(t)
	r := request("a")
	r.Part = three
	second, err := p.Start(t.Context(), l, r, w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := cc.hello(); err != nil {
		t.Fatal(err)
	}
	if err := cc.activate(0); err == nil {
		t.Error("a second context fits")
	}
	// Those without a part have what is left, and the last of it is not taken from them.
	rest, _ := p.open(t, l, nil)
	if got := p.refused(t, l, &lease.Part{Step: 4, Percent: 40, Mem: 70 << 20}, wire.SessionCompute); !strings.Contains(got, "programs of its job that have no part") {
		t.Error(got)
	}
	kill(t, p, rest)
	four, _ := p.open(t, l, &lease.Part{Step: 4, Percent: 40, Mem: 70 << 20})
	want(p, map[string]uint32{"": 1, "3": 1000, "4": 4000})
	if got := p.refused(t, l, nil, wire.SessionCompute); !strings.Contains(got, "all 50% of lease") || !strings.Contains(got, "step 3: 10%, 70 MiB; step 4: 40%, 70 MiB") {
		t.Error(got)
	}
	// The lease's share may be changed below the sum of its parts.
	l.Grants[0].Percent = 25
	if err := p.Share(l); err != nil {
		t.Fatal(err)
	}
	want(p, map[string]uint32{"": 1, "3": 500, "4": 2000})
	l.Grants[0].Percent = 50

	// The next daemon finds the parts.
	p.Close()
	q := newPool(t, dir, nil)
	q.OnEnd(func(lease.Session, string) {})
	if err := q.Share(l); err != nil {
		t.Fatal(err)
	}
	want(q, map[string]uint32{"": 1, "3": 1000, "4": 4000})
	if got := q.refused(t, l, &lease.Part{Step: 5, Percent: 1, Mem: 70 << 20}, wire.SessionCompute); !strings.Contains(got, "0 are left beside the parts of other steps") {
		t.Error(got)
	}
	for _, s := range []lease.Session{s, second} {
		kill(t, q, s)
	}
	want(q, map[string]uint32{"": 1000, "4": 4000})
	if files, _ := filepath.Glob(filepath.Join(q.cfg.Dir, l.ID, partPrefix+"*")); len(files) != 1 {
		t.Errorf("files of parts: %v", files)
	}
	// And one that ends while no daemon runs.
	q.Close()
	if err := syscall.Kill(four.Worker.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "it has ended", func() bool { return p.gone(four) && q.gone(four) })
	third := newPool(t, dir, nil)
	third.OnEnd(func(lease.Session, string) {})
	if err := third.Share(l); err != nil {
		t.Fatal(err)
	}
	want(third, map[string]uint32{"": 5000})
	if err := third.End(context.Background(), l.ID); err != nil {
		t.Fatal(err)
	}
	if err := third.Forget(l.ID); err != nil {
		t.Fatal(err)
	}
	if len(third.weights(l.ID)) != 0 {
		t.Error("tenants are left")
	}
	if _, err := os.Stat(filepath.Join(third.cfg.Dir, l.ID)); err == nil {
		t.Error("files are left")
	}
}

func kill(t *testing.T, p *Pool, s lease.Session) {
	t.Helper()
	if err := syscall.Kill(s.Worker.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the session is gone", func() bool { return p.gone(s) })
}

// A session of a step that has whole GPUs is as one without a part, and says of which step it is, to the next daemon too.
func TestPartOnGPUs(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	l := testLease("a", 0, 1)
	if err := p.Share(l); err != nil {
		t.Fatal(err)
	}
	_, w := pair(t)
	r := request("a")
	r.Part = &lease.Part{Step: 1, Percent: 100, GPUs: 2}
	if _, err := p.Start(t.Context(), l, r, w, gpus(0, 1)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	one := func(p *Pool) {
		t.Helper()
		if live := p.Sessions(l.ID); len(live) != 1 || live[0].Part == nil || *live[0].Part != *r.Part || len(live[0].Use) != 2 || live[0].Use[1].Granted != l.Grants[1].Mem {
			t.Errorf("%+v", live)
		}
		if n := p.members(l.ID); len(n) != 1 {
			t.Errorf("tenants: %v", n)
		}
		if files, _ := filepath.Glob(filepath.Join(p.cfg.Dir, l.ID, partPrefix+"*")); len(files) != 0 {
			t.Errorf("files of parts: %v", files)
		}
	}
	one(p)
	p.Close()
	q := newPool(t, dir, nil)
	q.OnEnd(func(lease.Session, string) {})
	if err := q.Share(l); err != nil {
		t.Fatal(err)
	}
	one(q)
	kill(t, q, q.Sessions(l.ID)[0])
}

// A lease of several GPUs is not divided otherwise.
func TestNoPartOfTwo(t *testing.T) {
	p := newPool(t, setup(t), nil)
	l := testLease("a", 0, 1)
	_, w := pair(t)
	r := request("a")
	r.Part = &lease.Part{Step: 1, Percent: 10, Mem: 70 << 20}
	if _, err := p.Start(t.Context(), l, r, w, gpus(0, 1)); err == nil || !strings.Contains(err.Error(), "one GPU only") {
		t.Errorf("%v", err)
	}
}
