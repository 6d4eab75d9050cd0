package host

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// All that the tests of towns show holds where there are too many owners to ask them all.
func TestLargeTowns(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run", "^Test(Sponsor|End|Clocks|OneEpoch|OwnerAway|Silence|Epoch|QuotaOf|QuotaCounts)", "-test.short", "-test.timeout", "5m")
	cmd.Env = append(os.Environ(), "SLUICE_FEW=-1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestOverview(t *testing.T) {
	key := func(job string, n uint64) lease.Key {
		return lease.Key{Cluster: "c", Job: job, Node: "n1", Incarnation: n}
	}
	gpus := func(owner string, free uint32) []lease.GPU {
		return []lease.GPU{{Owner: owner, UUID: "GPU-" + owner, Name: "NVIDIA H200", Mem: fakeMem, Overhead: 512 << 20, Healthy: true, FreePercent: free, FreeMem: fakeMem * uint64(free) / 100}}
	}
	pool := []Peer{{"a", "a:1"}, {"b", "b:1"}}
	place := func(v *overview, percent uint32) (string, []ownerClaim) {
		grants, claims, ready, _, err := v.place("p", pool, ask("1", percent), lease.BestFit)
		switch {
		case !ready:
			return "not known", nil
		case err != nil:
			return string(lease.CodeOf(err)), nil
		}
		return grants[0].Owner, claims
	}
	expect := func(v *overview, percent uint32, want string) []ownerClaim {
		t.Helper()
		got, claims := place(v, percent)
		if got != want {
			t.Errorf("%d %%: %s, want %s", percent, got, want)
		}
		return claims
	}
	v := newOverview()
	learn := func(owner string, c lease.Changes) []lease.Ref {
		t.Helper()
		late, err := v.learn(owner, c)
		if err != nil {
			t.Error(err)
		}
		return late
	}
	learn("a", lease.Changes{Whole: true, Inventory: lease.Inventory{GPUs: gpus("a", 100)}}) // of nobody who is watched
	v.watch("a", true)
	v.watch("b", true)
	learn("a", lease.Changes{Whole: true, At: lease.Mark{Epoch: 1, Seq: 1}, Inventory: lease.Inventory{GPUs: gpus("a", 50)}, Leases: []lease.Ref{{ID: "x", Key: key("7", 3)}}})
	if got := v.unknown(pool); !slices.Equal(got, []string{"b"}) {
		t.Error(got)
	}
	v.settle(expect(v, 10, "a"), "", false) // without b
	learn("b", lease.Changes{Whole: true, At: lease.Mark{Epoch: 1, Seq: 9}, Inventory: lease.Inventory{GPUs: gpus("b", 100)}})
	if at, up := v.mark("b"); len(v.unknown(pool)) > 0 || at.Seq != 9 || !up {
		t.Error("two owners are known")
	}
	// What is being asked for is not chosen again.
	first := expect(v, 50, "a")
	second := expect(v, 50, "b")
	third := expect(v, 50, "b")
	expect(v, 10, "no-room")
	v.settle(first, "", false)
	expect(v, 60, "no-room")
	v.settle(expect(v, 50, "a"), "y", true)
	expect(v, 10, "no-room")
	// The answer that shows the lease takes its place.
	v.settle(second, "z", true)
	learn("b", lease.Changes{At: lease.Mark{Epoch: 1, Seq: 10}, Inventory: lease.Inventory{GPUs: gpus("b", 50)}, Leases: []lease.Ref{{ID: "z", Key: key("8", 1)}}})
	expect(v, 10, "no-room") // the third one's
	v.settle(third, "", false)
	v.settle(expect(v, 50, "b"), "", false)
	// One that is over before any answer shows it leaves nothing.
	learn("a", lease.Changes{At: lease.Mark{Epoch: 1, Seq: 3}, Inventory: lease.Inventory{GPUs: gpus("a", 50)}, Leases: []lease.Ref{{ID: "y", Key: key("9", 1)}, {ID: "y", Key: key("9", 1), Over: true}}})
	v.settle(expect(v, 50, "a"), "", false)
	if owners, last := v.whose("c", "7"); !slices.Equal(owners, []string{"a"}) || last != 3 {
		t.Error(owners, last)
	}
	if owners, last := v.whose("c", "9"); !slices.Equal(owners, []string{"a"}) || last != 1 {
		t.Error("it had one lately:", owners, last)
	}
	// An owner that does not answer gets nothing.
	v.lost("a")
	if got, _ := place(v, 60); got != "no-room" {
		t.Error(got)
	}
	v.lost("b")
	expect(v, 10, "no-room")
	learn("b", lease.Changes{At: lease.Mark{Epoch: 2, Seq: 1}, Whole: true, Inventory: lease.Inventory{GPUs: gpus("b", 100)}})
	v.settle(expect(v, 10, "b"), "", false)
	// Leases of runs that have ended are reported as late, those of later runs are not.
	v.ended("c", "8", nil, 5)
	late := learn("b", lease.Changes{At: lease.Mark{Epoch: 2, Seq: 3}, Inventory: lease.Inventory{GPUs: gpus("b", 100)}, Leases: []lease.Ref{{ID: "l", Key: key("8", 5)}, {ID: "m", Key: key("8", 6)}}})
	if len(late) != 1 || late[0].ID != "l" {
		t.Errorf("%+v", late)
	}
	// Ends of two runs stay apart.
	v.ended("c", "8", []string{"n2"}, 7)
	if late := learn("b", lease.Changes{At: lease.Mark{Epoch: 2, Seq: 4}, Inventory: lease.Inventory{GPUs: gpus("b", 100)}, Leases: []lease.Ref{{ID: "m", Key: key("8", 6)}, {ID: "n", Key: lease.Key{Cluster: "c", Job: "8", Node: "n2", Incarnation: 7}}}}); len(late) != 1 || late[0].ID != "n" {
		t.Errorf("%+v", late)
	}
	many := make([]lease.Ref, maxRefs+1)
	if _, err := v.learn("b", lease.Changes{Leases: many}); lease.CodeOf(err) != lease.Invalid {
		t.Error("an owner with any number of leases:", err)
	}
	v.watch("a", false)
	if got := v.unknown(pool); !slices.Equal(got, []string{"a"}) {
		t.Error("a is not known any more:", got)
	}
}

// What was known of jobs that ended is forgotten.
func TestOverviewForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newOverview()
		v.watch("a", true)
		for i := range 10_000 {
			k := lease.Key{Cluster: "c", Job: fmt.Sprint(i), Node: "n1", Incarnation: 1}
			id := fmt.Sprint("l", i)
			_, _ = v.learn("a", lease.Changes{Leases: []lease.Ref{{ID: id, Key: k}}})
			_, _ = v.learn("a", lease.Changes{Leases: []lease.Ref{{ID: id, Key: k, Over: true}}})
			v.ended("c", k.Job, nil, 1)
			time.Sleep(100 * time.Millisecond)
		}
		if n := len(v.jobs); n > 2*int(pastTime/(100*time.Millisecond)) || n < 1000 {
			t.Errorf("%d jobs are known", n)
		}
		if n := len(v.owners["a"].refs); n != 0 {
			t.Errorf("%d leases", n)
		}
	})
}

// A node's own lease in a large pool: some owners are asked, and all before it is refused.
func TestSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 50, 1, 1)
		defer m.end()
		n, before := m.nodes[0], m.sent()
		own := func(job string, percent uint32) error {
			r := ask(job, percent)
			r.Key.Incarnation = 1
			_, _, err := n.Acquire(t.Context(), rpc.Peer{}, r)
			return err
		}
		if err := own("run-1", 30); err != nil {
			t.Fatal(err)
		}
		after := m.sent()
		if k := after["Inventory"] - before["Inventory"]; k != sampled {
			t.Errorf("%d owners were asked", k)
		}
		for i := range 50 {
			if err := own(fmt.Sprint("run-a", i), 70); err != nil { // the last ones find room at the last owners only
				t.Fatalf("%d: %v", i, err)
			}
		}
		if err := own("run-2", 31); lease.CodeOf(err) != lease.NoRoom {
			t.Error(err)
		}
		if err := own("run-3", 30); err != nil {
			t.Error(err)
		}
	})
}

// An owner that cannot be watched, being of an earlier release, is asked as before.
func TestUnwatchable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 12, 2, 2)
		defer m.end()
		m.mu.Lock()
		m.old = map[string]bool{"gpu0003": true}
		m.mu.Unlock()
		ctl := m.host("ctl2", true)
		m.owners["gpu0003"].SetControllers([]string{"ctl", "ctl2"})
		for _, o := range m.owners {
			o.SetControllers([]string{"ctl", "ctl2"})
		}
		m.heard(ctl, "gpu0003")
		all, err := ctl.Sponsor(t.Context(), job("7", 0, []string{"n00000", "n00001"}, 100, 100))
		if err != nil {
			t.Fatal(err)
		}
		for i, h := range m.nodes {
			l, found, err := h.Attach(t.Context(), lease.Key{Job: "7"})
			if err != nil || !found || l.ID != all[i].ID {
				t.Error(l.ID, found, err)
			}
		}
		if _, err := ctl.EndJob(t.Context(), "c", "7", nil, ctl.Epoch(), "over"); err != nil {
			t.Error(err)
		}
		m.empty(0)
	})
}

// A lease that somebody gets for a job after its end, at an owner that was not told of it, ends.
func TestLateLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 12, 2, 1)
		defer m.end()
		m.heard(m.ctl)
		upTo := m.ctl.Epoch()
		if _, err := m.ctl.EndJob(t.Context(), "c", "7", nil, upTo, "over"); err != nil {
			t.Fatal(err)
		}
		refused := 0
		n := 0
		for _, o := range m.owners {
			n++
			node := fmt.Sprintf("n%05d", n)
			l := lease.Lease{ID: fmt.Sprintf("%032x", n), Request: ask("7", 10), State: lease.Reserved, Host: node}
			l.Request.Key.Cluster, l.Request.Key.Node, l.Request.Key.Incarnation = "c", node, upTo
			inv, _ := o.Inventory(t.Context())
			l.Grants = []lease.Grant{{Owner: inv.Owner, GPU: inv.GPUs[0].UUID, Percent: 10, Mem: fakeMem / 10 / lease.Granule * lease.Granule}}
			if _, err := o.Reserve(t.Context(), node, l, 0); lease.CodeOf(err) == lease.Over && err != nil {
				refused++
			} else if err != nil {
				t.Error(err)
			}
		}
		if refused != 2 {
			t.Errorf("%d owners were told of the end, want the two registrars", refused)
		}
		m.empty(5 * time.Second)
	})
}

// A controller's daemon without a ledger finds the leases of jobs that run, and ends them with their job.
func TestLargeRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 20, 2, 3)
		defer m.end()
		m.heard(m.ctl)
		nodes := []string{"n00000", "n00001", "n00002"}
		all, err := m.ctl.Sponsor(t.Context(), job("7", 0, nodes, 100, 60))
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range m.nodes[:2] {
			if _, found, err := h.Attach(t.Context(), lease.Key{Job: "7"}); !found || err != nil {
				t.Fatal(found, err)
			}
		}
		for _, o := range m.owners {
			o.SetControllers([]string{"ctl", "ctl2"})
		}
		ctl := m.host("ctl2", true) // whose ledger knows nothing
		for _, wait := range []time.Duration{0, time.Second, time.Minute} {
			time.Sleep(wait)
			again, err := ctl.Sponsor(t.Context(), job("7", 0, nodes, 100, 60))
			if err != nil || len(again) != 3 || again[0].ID != all[0].ID || again[2].ID != all[2].ID {
				t.Fatalf("after %v: %v, %v", wait, again, err)
			}
		}
		if left, err := ctl.EndJob(t.Context(), "c", "7", nil, ctl.Epoch(), "over"); err != nil || len(left) > 0 {
			t.Error(left, err)
		}
		m.empty(0)
		reports, err := ctl.Reports(context.Background(), "c", "7")
		if err != nil || len(reports) < 3 || !strings.Contains(reports[0].Reason, "over") {
			t.Errorf("%+v, %v", reports, err)
		}
	})
}

// An owner that was dead before the controller's daemon began costs no job more than a look at whether it answers.
func TestLargeWithDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 30, 2, 3)
		defer m.end()
		m.heard(m.ctl)
		for _, o := range m.owners {
			o.SetControllers([]string{"ctl", "ctl2"})
		}
		m.kill("gpu0007", true)
		ctl := m.host("ctl2", true)
		m.heard(ctl, "gpu0007")
		before := m.sent()
		for i := range 20 {
			id := fmt.Sprint(100 + i)
			if _, err := ctl.Sponsor(t.Context(), job(id, 0, []string{"n00000"}, 50)); err != nil {
				t.Fatal(err)
			}
			upTo := max(ctl.Epoch(), ctl.LastEpoch(t.Context(), "c", id))
			if _, err := ctl.EndJob(t.Context(), "c", id, nil, upTo, "over"); err != nil {
				t.Fatal(err)
			}
		}
		after := m.sent()
		for _, what := range []string{"Inventory", "Reports", "Release", "List"} {
			if n := after[what] - before[what]; n > 20*6 {
				t.Errorf("%d messages %s for 20 jobs", n, what)
			}
		}
		m.empty(0)
	})
}

// After a cut the owners' GPUs are given again as soon as they answer.
func TestLargeCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 12, 1, 1)
		defer m.end()
		m.heard(m.ctl)
		for n := range m.owners {
			m.kill(n, true)
		}
		time.Sleep(time.Minute)
		if _, err := m.ctl.Sponsor(t.Context(), job("6", 0, []string{"n00000"}, 50)); err == nil {
			t.Fatal("nobody answers")
		}
		for n := range m.owners {
			m.kill(n, false)
		}
		// A pause between two tries of an owner that was away for long is a minute at most.
		begun := time.Now()
		for {
			_, err := m.ctl.Sponsor(t.Context(), job("7", 0, []string{"n00000"}, 50))
			if err == nil {
				break
			}
			if time.Since(begun) > 61*time.Second {
				t.Fatalf("after %v: %v", time.Since(begun), err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		ready := time.Now()
		for i := range 12 {
			for time.Since(ready) < 62*time.Second {
				if _, err := m.ctl.Sponsor(t.Context(), job(fmt.Sprint("8", i), 0, []string{"n00000"}, 50)); err == nil {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
		}
		if _, percent := m.check(); percent != 13*50 {
			t.Errorf("%d %% are granted", percent)
		}
	})
}

// The report of a job that ended a while ago is found, and so are all owners that a job's end concerns.
func TestLargeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 20, 1, 4)
		defer m.end()
		m.heard(m.ctl)
		nodes := []string{"n00000", "n00001", "n00002", "n00003"}
		if _, err := m.ctl.Sponsor(t.Context(), job("7", 0, nodes, 100)); err != nil {
			t.Fatal(err)
		}
		// At once, before any owner has told of it.
		if _, err := m.ctl.EndJob(t.Context(), "c", "7", nil, m.ctl.Epoch(), "over"); err != nil {
			t.Fatal(err)
		}
		m.empty(0)
		time.Sleep(3 * pastTime)
		// Somebody's answer has it forget what is old.
		if _, err := m.ctl.Sponsor(t.Context(), job("8", 0, nodes, 100)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if owners, _ := m.ctl.view.whose("c", "7"); len(owners) > 0 {
			t.Errorf("still known: %q", owners)
		}
		reports, err := m.ctl.Reports(t.Context(), "c", "7")
		if err != nil || len(reports) != 4 {
			t.Errorf("%d reports, %v", len(reports), err)
		}
		// An end in the middle of another's acquisition.
		done := make(chan error, 1)
		go func() {
			_, err := m.ctl.Sponsor(context.Background(), job("9", 0, nodes, 100))
			done <- err
		}()
		time.Sleep(2 * time.Millisecond)
		if _, err := m.ctl.EndJob(t.Context(), "c", "8", nil, m.ctl.Epoch(), "over"); err != nil {
			t.Error(err)
		}
		if _, err := m.ctl.EndJob(t.Context(), "c", "9", nil, m.ctl.Epoch(), "over"); err != nil {
			t.Error(err)
		}
		<-done
		m.empty(30 * time.Second)
	})
}

// The registrars of jobs are spread over all owners.
func TestRegistrars(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, 100, 1, 1)
		defer m.end()
		first, near := make(map[string]int), 0
		const jobs = 10_000
		for i := range jobs {
			r := m.ctl.registrars("c", fmt.Sprint(1000+i))
			if len(r) != 2 || r[0] == r[1] {
				t.Fatalf("%v", r)
			}
			first[r[0].name]++
			if r[0].name[:6] == r[1].name[:6] { // of the same ten
				near++
			}
		}
		for n, k := range first {
			if k > 3*jobs/100 {
				t.Errorf("%s is the first for %d of %d jobs", n, k, jobs)
			}
		}
		if len(first) != 100 || near > jobs/5 {
			t.Errorf("%d owners are first ones, and %d times both are of the same ten", len(first), near)
		}
	})
}
