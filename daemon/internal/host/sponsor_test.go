package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// A job's whole life, its scripts twice each.
func TestSponsoredJob(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	all := w.sponsor(job("7", 0, both, 60))
	for i, again := range w.sponsor(job("7", 0, both, 60)) {
		if again.ID != all[i].ID {
			t.Errorf("%s, then %s", all[i].ID, again.ID)
		}
	}
	if all[0].Sponsor != "ctl" || all[0].Host != "n1" || all[0].Request.Key.Incarnation == 0 || all[0].Request.Key.Incarnation != all[1].Request.Key.Incarnation {
		t.Errorf("%+v", all[0])
	}
	if _, _, ok := w.hosts["n1"].Held(lease.Key{Job: "7"}); ok {
		t.Error("held before the Prolog")
	}
	for i, n := range both {
		l := w.attach(n, "7")
		if again := w.attach(n, "7"); l.ID != all[i].ID || again.ID != l.ID {
			t.Errorf("%s, %s, %s", all[i].ID, l.ID, again.ID)
		}
		have, sock, ok := w.hosts[n].Held(lease.Key{Job: "7"})
		if fi, err := os.Stat(sock); !ok || have.ID != l.ID || err != nil || fi.Mode().Type() != os.ModeSocket {
			t.Error(ok, have.ID, err)
		}
	}
	w.wait("the sponsor forgets what its nodes have", func() bool { return w.records("ctl") == 0 })
	if w.have() == "" {
		t.Fatal("forgotten, and ended")
	}
	// One node's Epilog, the controller's, the other node's, each twice.
	for range 2 {
		l, _, ok := w.hosts["n1"].Held(lease.Key{Job: "7"})
		k := l.Request.Key
		if !ok {
			k = lease.Key{Job: "7", Incarnation: w.hosts["n1"].Epoch()}
		}
		if err := w.hosts["n1"].Release(t.Context(), root, "", k, "epilog"); err != nil {
			t.Error(err)
		}
	}
	if got := w.have(); got != "7@n2:b:60" && got != "7@n2:a:60" {
		t.Errorf("%q", got)
	}
	for range 2 {
		if left, err := w.hosts["ctl"].EndJob(t.Context(), "", "7", nil, w.hosts["ctl"].Epoch(), ""); err != nil || len(left) > 0 {
			t.Error(left, err)
		}
	}
	if w.have() != "" {
		t.Errorf("%q", w.have())
	}
	w.wait("the node hears of it", func() bool { _, _, ok := w.hosts["n2"].Held(lease.Key{Job: "7"}); return !ok })
	reports, err := w.hosts["ctl"].Reports(t.Context(), "", "7")
	if err != nil || len(reports) != 2 || reports[0].Ended.IsZero() || reports[0].Grants[0].Percent != 60 {
		t.Errorf("%+v, %v", reports, err)
	}
	if mine, err := w.hosts["n1"].Reports(t.Context(), "c", "7"); err != nil || len(mine) != 1 || mine[0].Key.Node != "n1" {
		t.Errorf("a node's own reports: %+v, %v", mine, err)
	}
	// The job runs again.
	w.sponsor(job("7", 1, both, 60))
	w.attach("n1", "7")
}

// All nodes or none; and what was given up may be asked for again.
func TestSponsorAllOrNone(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2", "n3")
	w.sponsor(job("1", 0, []string{"n3"}, 80, 80, 80)) // of four GPUs
	before := w.have()
	for range 2 {
		_, err := w.hosts["ctl"].Sponsor(t.Context(), job("2", 0, []string{"n1", "n2"}, 70))
		if lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "node n2: ") {
			t.Fatal(err)
		}
		if w.have() != before {
			t.Fatalf("left behind: %q", w.have())
		}
	}
	if _, err := w.hosts["ctl"].EndJob(t.Context(), "", "1", []string{"n3"}, w.hosts["ctl"].Epoch(), ""); err != nil {
		t.Fatal(err)
	}
	w.sponsor(job("2", 0, []string{"n1", "n2"}, 70, 70))
	w.attach("n1", "2")
	w.attach("n2", "2")
	for _, bad := range [][]lease.Request{nil, job("3", 0, []string{"n1", "n1"}, 1), job("3", 0, []string{""}, 1), job("", 0, both, 1), job("3", 0, both, 101)} {
		if _, err := w.hosts["ctl"].Sponsor(t.Context(), bad); lease.CodeOf(err) != lease.Invalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// A node that is no controller cannot reserve leases for other nodes.
func TestSponsorDenied(t *testing.T) {
	w := newTown(t, []string{"a"}, "ctl", "n1", "n2")
	if _, err := w.hosts["n1"].Sponsor(t.Context(), job("1", 0, []string{"n2"}, 10)); lease.CodeOf(err) != lease.Denied || !strings.Contains(err.Error(), "slurm.controllers") {
		t.Error(err)
	}
	w.sponsor(job("1", 0, []string{"n2"}, 10))
	if _, err := w.hosts["n1"].EndJob(t.Context(), "", "1", nil, 1<<60, ""); lease.CodeOf(errors.Unwrap(err)) != lease.Denied && !strings.Contains(err.Error(), "not of node") {
		t.Error(err)
	}
	if _, errs := w.hosts["n1"].All(t.Context()); lease.CodeOf(errs["a"]) != lease.Denied {
		t.Error(errs)
	}
	if all, errs := w.hosts["ctl"].All(t.Context()); len(errs) > 0 || len(all["a"]) != 1 {
		t.Error(all, errs)
	}
	if w.have() == "" {
		t.Error("a node ended another's lease")
	}
}

// A run that came after another, whose Epilogs were lost, ends what is left of it; a
// daemon that was away finds its place.
func TestSponsorRequeued(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.sponsor(job("1", 0, both, 100, 100))
	w.attach("n1", "1")
	w.attach("n2", "1")
	w.wait("the sponsor forgets", func() bool { return w.records("ctl") == 0 })
	again := w.sponsor(job("1", 1, both, 30))
	if l := w.attach("n1", "1"); l.ID != again[0].ID {
		t.Errorf("%s, not %s", l.ID, again[0].ID)
	}
	if l := w.attach("n2", "1"); l.ID != again[1].ID {
		t.Errorf("%s, not %s", l.ID, again[1].ID)
	}
	w.wait("only the second run is left", func() bool { return strings.Count(w.have(), " ") == 1 && !strings.Contains(w.have(), "100") })
	// The node asks by itself, for the same run, since its daemon was asked twice.
	r := job("1", 1, []string{"n1"}, 30)[0]
	r.Key.Incarnation = w.hosts["n1"].Epoch()
	if l, _, err := w.hosts["n1"].Acquire(t.Context(), root, r); err != nil || l.ID != again[0].ID {
		t.Errorf("%+v, %v", l, err)
	}
	// A third run, asked for by the node alone, is another one.
	r.Restart, r.Key.Incarnation = 2, w.hosts["n1"].Epoch()
	if l, _, err := w.hosts["n1"].Acquire(t.Context(), root, r); err != nil || l.ID == again[0].ID {
		t.Errorf("%+v, %v", l, err)
	}
}

// An Epilog, or the end of the job, before the Prolog: the Prolog gets nothing.
func TestEndBeforeAttach(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.wait("the node has looked through its owners' leases", func() bool {
		for _, p := range w.hosts["n1"].owners() {
			p.mu.Lock()
			known := p.known
			p.mu.Unlock()
			if !known {
				return false
			}
		}
		return true
	})
	// An owner that is away at the Epilog: its part is found, and ended, by the Prolog.
	first := w.sponsor(job("1", 0, both, 10))
	gone := first[0].Grants[0].Owner
	w.sever("n1", gone, true)
	if err := w.hosts["n1"].Release(t.Context(), root, "", lease.Key{Job: "1", Incarnation: w.hosts["n1"].Epoch() + 10000}, "epilog"); err != nil {
		t.Fatal(err)
	}
	if got := w.have(); !strings.Contains(got, "n1") {
		t.Error(got)
	}
	h := w.hosts["n1"]
	h.mu.Lock()
	p := h.peers[gone]
	h.mu.Unlock()
	_, done, err := h.fly(t.Context(), first[0].Request.Key) // has it not taken up meanwhile
	if err != nil {
		t.Fatal(err)
	}
	w.sever("n1", gone, false)
	w.wait("the owner is there again", func() bool { return p.down() == nil })
	if _, found, err := h.attach(t.Context(), h.full(lease.Key{Job: "1"})); found || lease.CodeOf(err) != lease.Over {
		t.Error(found, err)
	}
	done()
	if got := w.have(); strings.Contains(got, "n1") {
		t.Error(got)
	}
	// A lease that was never attached ends with the Epilog, and with it alone: the clock of
	// this node may be ahead of the controller's.
	w.sponsor(job("2", 0, both, 10))
	if err := h.Release(t.Context(), root, "", lease.Key{Job: "2", Incarnation: h.Epoch() + 1e6}, "epilog"); err != nil {
		t.Fatal(err)
	}
	if got := w.have(); strings.Contains(got, "2@n1") {
		t.Error(got)
	}
	w.sponsor(job("2", 1, both, 10))
	w.attach("n1", "2")
	if _, err := w.hosts["ctl"].EndJob(t.Context(), "", "2", nil, w.hosts["ctl"].Epoch(), ""); err != nil {
		t.Fatal(err)
	}
	upTo := w.hosts["ctl"].Epoch()
	if _, err := w.hosts["ctl"].EndJob(t.Context(), "", "1", nil, upTo, ""); err != nil {
		t.Fatal(err)
	}
	if _, found, err := w.hosts["n2"].Attach(t.Context(), lease.Key{Job: "1"}); found || err != nil {
		t.Error(found, err)
	}
	// Of this run nothing comes any more, by whomever.
	r := job("1", 0, []string{"n2"}, 10)[0]
	r.Key.Incarnation = upTo
	if _, _, err := w.hosts["n2"].Acquire(t.Context(), root, r); lease.CodeOf(err) != lease.Over {
		t.Error(err)
	}
	if _, err := w.hosts["ctl"].Sponsor(t.Context(), []lease.Request{r}); lease.CodeOf(err) != lease.Over {
		t.Error(err)
	}
	if w.have() != "" {
		t.Error(w.have())
	}
}

// An owner that is away when a job ends is told when it is back, even by another
// process; an owner that is away at the Prolog leaves it unknown.
func TestOwnerAway(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.sponsor(job("1", 0, []string{"n1"}, 60, 60, 60, 60)) // on both
	w.sever("", "b", true)
	if _, found, err := w.hosts["n1"].Attach(t.Context(), lease.Key{Job: "1"}); found || lease.CodeOf(err) != lease.Down {
		t.Error(found, err)
	}
	w.sever("", "b", false)
	w.attach("n1", "1")
	w.sever("", "b", true)
	if _, found, err := w.hosts["n2"].Attach(t.Context(), lease.Key{Job: "1"}); found || lease.CodeOf(err) != lease.Down {
		t.Error("no lease is known to be there:", found, err)
	}
	left, err := w.hosts["ctl"].EndJob(t.Context(), "", "1", nil, w.hosts["ctl"].Epoch(), "")
	if err != nil || !slices.Equal(left, []string{"b"}) {
		t.Error(left, err)
	}
	if got := w.have(); got != "1@n1:b:60 1@n1:b:60" {
		t.Errorf("%q", got)
	}
	w.stop("n1") // which would tell it too
	w.restart("ctl")
	w.sever("", "b", false)
	w.wait("b is told", func() bool { return w.have() == "" })
	w.wait("the note goes", func() bool {
		h := w.hosts["ctl"]
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.ends) == 0
	})
}

// Ledgers are lost, daemons die in the middle: whatever is left is taken up or ends.
func TestSponsorForgets(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	all := w.sponsor(job("1", 0, both, 60, 60)) // fills what 60 % fit on
	w.restart("ctl")
	if again := w.sponsor(job("1", 0, both, 60, 60)); again[0].ID != all[0].ID {
		t.Error("after a restart:", again[0].ID)
	}
	w.lose("ctl")
	if again := w.sponsor(job("1", 0, both, 60, 60)); again[0].ID != all[0].ID || again[1].ID != all[1].ID || len(again[0].Grants) != 2 {
		t.Error("after the loss of the ledger:", again)
	}
	w.attach("n1", "1")
	w.lose("n1")
	w.wait("the node takes it up", func() bool { l, _, ok := w.hosts["n1"].Held(lease.Key{Job: "1"}); return ok && l.ID == all[0].ID })
	w.lose("ctl")
	if again := w.sponsor(job("1", 0, both, 60, 60)); again[0].ID != all[0].ID || again[1].ID != all[1].ID {
		t.Error("what its node has:", again)
	}
}

// A node that dies after the Prolog falls silent, though its sponsor lives; one whose
// Prolog has not come does not.
func TestSilence(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.met("n1", "n2") // or one would find its lease there before its Prolog
	w.sponsor(job("1", 0, both, 60))
	w.attach("n1", "1")
	w.stop("n1")
	for range 8 {
		w.renewed("ctl", 3)
		w.clock.pass(20 * time.Second)
		for _, o := range w.owners {
			if err := o.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := w.have(); !strings.HasPrefix(got, "1@n2:") || strings.Contains(got, "n1") {
		t.Errorf("%q", got)
	}
	w.stop("ctl")
	w.clock.pass(2 * time.Minute)
	for _, o := range w.owners {
		if err := o.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if w.have() != "" {
		t.Errorf("without anybody: %q", w.have())
	}
}

// The controller is a node of the pool too.
func TestSponsorOfItself(t *testing.T) {
	w := newTown(t, []string{"a"}, "ctl", "n1")
	all := w.sponsor(job("1", 0, []string{"ctl", "n1"}, 60))
	if l, _, ok := w.hosts["ctl"].Held(lease.Key{Job: "1"}); !ok || l.ID != all[0].ID || l.Sponsor != "" {
		t.Errorf("%+v", l)
	}
	w.attach("ctl", "1")
	w.attach("n1", "1")
	if _, err := w.hosts["ctl"].Sponsor(t.Context(), job("2", 0, []string{"ctl", "n1"}, 41)); lease.CodeOf(err) != lease.NoRoom {
		t.Error(err)
	}
	if _, err := w.hosts["ctl"].EndJob(t.Context(), "", "1", nil, w.hosts["ctl"].Epoch(), ""); err != nil {
		t.Error(err)
	}
	if _, _, ok := w.hosts["ctl"].Held(lease.Key{Job: "1"}); ok || w.have() != "" {
		t.Error(ok, w.have())
	}
	w.sponsor(job("2", 0, []string{"ctl", "n1"}, 41))
}

func TestEpoch(t *testing.T) {
	w := newTown(t, nil, "n1")
	h := w.hosts["n1"]
	last := h.Epoch()
	if now := uint64(time.Now().UnixMilli()); last > now+1 || last+1000 < now {
		t.Errorf("%d, and it is %d", last, now)
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	seen := make(map[uint64]bool)
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				e := h.Epoch()
				mu.Lock()
				if seen[e] {
					t.Errorf("%d twice", e)
				}
				seen[e] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	last = h.Epoch()
	w.restart("n1")
	if e := w.hosts["n1"].Epoch(); e <= last {
		t.Errorf("%d after %d and a restart", e, last)
	}
}

// Everything at once, for the race detector: what is left at the end is nothing.
func TestSponsorConcurrent(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	ctl := w.hosts["ctl"]
	var wg sync.WaitGroup
	rounds := 15
	if testing.Short() {
		rounds = 4
	}
	for i := range 6 {
		wg.Go(func() {
			for r := range rounds {
				id := fmt.Sprint(100 + i)
				_, _ = ctl.Sponsor(t.Context(), job(id, uint32(r), both, uint32(10+10*i)))
				var in sync.WaitGroup
				for _, n := range both {
					in.Go(func() {
						_, _, _ = w.hosts[n].Attach(t.Context(), lease.Key{Job: id})
						_, _ = ctl.Reports(t.Context(), "", id)
					})
				}
				if r%2 == 0 {
					in.Wait()
				}
				if _, err := ctl.EndJob(t.Context(), "", id, nil, ctl.Epoch(), ""); err != nil {
					t.Error(err)
				}
				in.Wait()
				_, _ = ctl.All(t.Context())
			}
		})
	}
	wg.Wait()
	w.wait("nothing is left", func() bool { return w.have() == "" && w.records("ctl")+w.records("n1")+w.records("n2") == 0 })
}

// A controller's or node's daemon is killed at each of its points, at the first and at
// later passes; whoever asked asks again. Nothing leaks, and a job keeps its lease.
func TestSponsorCrash(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "fault", "names.go"))
	if err != nil {
		t.Fatal(err)
	}
	points := []string{"acquire-1-written", "acquire-2-reserved", "acquire-3-confirmed", "acquire-4-granted", "sponsor-1-granted", "sponsor-2-all", "sponsor-3-undone",
		"attach-1-found", "attach-2-renewed", "attach-3-written", "attach-4-socket", "endjob-a-written", "endjob-b-told", "endjob-c-forgotten",
		"renew-a-answered", "release-a-written", "release-b-delivered", "release-c-forgotten"}
	for _, p := range points {
		if !strings.Contains(string(b), `"`+p+`"`) {
			t.Errorf("point %s is not among the sources' points", p)
		}
		for pass := 1; pass == 1 || pass <= 3 && !testing.Short(); pass++ {
			t.Run(fmt.Sprintf("%s:%d", p, pass), func(t *testing.T) { sponsorCrash(t, p, pass) })
		}
	}
}

// A node's Prolog runs beside the controller's. What the node has attached is the job's lease, even if the controller's
// daemon is killed before it knows that it has got it, or takes it back because another node got none.
func TestAttachedBesideSponsor(t *testing.T) {
	for _, point := range []string{"acquire-3-confirmed", "acquire-4-granted", "sponsor-1-granted"} {
		t.Run(point, func(t *testing.T) {
			w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
			w.crashAt, w.crashIn = point, 1
			reqs := job("1", 0, both, 20, 30)
			killed := make(chan struct{})
			go func() { defer close(killed); _, _ = w.hosts["ctl"].Sponsor(t.Context(), reqs) }()
			<-killed
			had := w.attach("n1", "1")
			w.restart("ctl")
			reqs[1].Fractions = slices.Repeat(reqs[0].Fractions[1:], 5) // of four GPUs
			if _, err := w.hosts["ctl"].Sponsor(t.Context(), reqs); lease.CodeOf(err) != lease.Never || !strings.Contains(err.Error(), "node n2: ") {
				t.Fatal(err)
			}
			if got := w.attach("n1", "1"); got.ID != had.ID {
				t.Errorf("lease %s, not %s", got.ID, had.ID)
			}
			all := w.sponsor(job("1", 0, both, 20, 30))
			if got := w.attach("n1", "1"); all[0].ID != had.ID || got.ID != had.ID {
				t.Errorf("leases %s and %s, not %s", all[0].ID, got.ID, had.ID)
			}
			w.attach("n2", "1")
			w.wait("the sponsor forgets", func() bool { return w.records("ctl") == 0 })
			if got := w.have(); strings.Count(got, "1@n1:") != 2 || strings.Count(got, "1@n2:") != 2 {
				t.Errorf("%q", got)
			}
			if left, err := w.hosts["ctl"].EndJob(t.Context(), "", "1", nil, w.hosts["ctl"].Epoch(), ""); err != nil || len(left) > 0 {
				t.Error(left, err)
			}
			if w.have() != "" {
				t.Errorf("%q", w.have())
			}
		})
	}
}

// A node attaches a lease whose grant the sponsor never hears of. The job has that lease, and no second one.
func TestAttachedUnheard(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	var had lease.Lease
	w.mu.Lock()
	w.reserved = func(l lease.Lease) bool {
		w.mu.Lock()
		w.reserved = nil
		w.mu.Unlock()
		had = w.attach("n1", "1")
		return true
	}
	w.mu.Unlock()
	all := w.sponsor(job("1", 0, []string{"n1"}, 100, 100))
	if all[0].ID != had.ID || had.ID == "" {
		t.Errorf("the sponsor has %s, the node %s", all[0].ID, had.ID)
	}
	if got := w.have(); strings.Count(got, "1@n1:") != 2 {
		t.Errorf("%q", got)
	}
	w.wait("the sponsor forgets", func() bool { return w.records("ctl") == 0 })
	released := 0
	if err := audit.Read(w.hosts["ctl"].cfg.AuditFile, func(e *audit.Event) bool {
		if e.Event == audit.Release {
			released++
		}
		return true
	}); err != nil || released > 0 {
		t.Errorf("%d releases in the controller's audit log, %v", released, err)
	}
}

// A lease that a node's daemon has found by itself, before any Prolog, is no job's yet: its sponsor can take it back.
func TestFoundBeforeProlog(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.mu.Lock()
	w.reserved = func(l lease.Lease) bool {
		if l.Host == "n1" {
			w.restart("n1")
			w.wait("the node has found it", func() bool { return w.records("n1") == 1 })
		}
		return false
	}
	w.mu.Unlock()
	reqs := job("1", 0, both, 70)
	reqs[1].Fractions = slices.Repeat(reqs[1].Fractions, 5) // of four GPUs
	if _, err := w.hosts["ctl"].Sponsor(t.Context(), reqs); lease.CodeOf(err) != lease.Never {
		t.Error(err)
	}
	w.wait("nothing is left", func() bool { return w.have() == "" })
}

func sponsorCrash(t *testing.T, point string, pass int) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	w.crashAt, w.crashIn = point, pass
	for i := range 3 {
		id := fmt.Sprint(i)
		// Too much for the second node: the first one's is given up.
		w.again("ctl", func(h *Host) error {
			if _, err := h.Sponsor(t.Context(), job("x"+id, 0, both, 60, 60, 60)); lease.CodeOf(err) != lease.NoRoom {
				return fmt.Errorf("too much: %w", err)
			}
			return nil
		})
		w.wait("nothing is left of it", func() bool { return w.have() == "" })
		var all []lease.Lease
		w.again("ctl", func(h *Host) (err error) { all, err = h.Sponsor(t.Context(), job(id, 0, both, 20, 30)); return err })
		for k, n := range both {
			w.again(n, func(h *Host) error {
				l, found, err := h.Attach(t.Context(), lease.Key{Job: id})
				if err == nil && (!found || l.ID != all[k].ID) {
					err = fmt.Errorf("%v: lease %s, not %s", found, l.ID, all[k].ID)
				}
				return err
			})
		}
		w.wait("the sponsor forgets", func() bool {
			if w.lives["ctl"].over() {
				w.restart("ctl")
			}
			return w.records("ctl") == 0
		})
		if got := w.have(); strings.Count(got, id+"@n1:") != 2 || strings.Count(got, id+"@n2:") != 2 {
			t.Fatalf("%q", got)
		}
		w.again("n1", func(h *Host) error {
			l, _, ok := h.Held(lease.Key{Job: id})
			if !ok {
				l.Request.Key = lease.Key{Job: id, Incarnation: h.Epoch()}
			}
			return h.Release(t.Context(), root, "", l.Request.Key, "epilog")
		})
		w.again("ctl", func(h *Host) error {
			left, err := h.EndJob(t.Context(), "", id, nil, h.Epoch(), "")
			if len(left) > 0 {
				err = fmt.Errorf("%v are not told", left)
			}
			return err
		})
		w.wait("the job's leases end", func() bool { return !strings.Contains(w.have(), id+"@") })
		w.wait("the nodes hear of it", func() bool {
			n := 0
			for _, name := range []string{"n1", "n2", "ctl"} {
				if w.lives[name].over() {
					w.restart(name)
				}
				n += w.records(name)
			}
			return n == 0
		})
	}
	if w.crashes != 1 {
		t.Errorf("%d crashes, want 1", w.crashes)
	}
}
