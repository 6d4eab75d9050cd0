package shares

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// lost is the most that tenants may lose by what happens to another.
const lost = 100 * time.Millisecond

// undisturbed checks that a tenant was never without the GPU for longer than its share explains, and lost more.
func (w *world) undisturbed(n *tenant, from, to time.Duration) {
	w.t.Helper()
	longest, at := w.trace.gap(n.tag, from, to)
	w.t.Logf("tenant %d of %d %%: longest gap %v", n.tag, n.percent, longest)
	if longest > lost {
		w.t.Errorf("tenant %d was without the GPU for %v, from %v on", n.tag, longest, at-from)
	}
}

// TestComingAndGoing: who stays notices of those who come and go what its policy says, and no more.
func TestComingAndGoing(t *testing.T) {
	w := newWorld(t)
	first := w.start(share{50, "fixed", "gemm"})[0]
	w.hold(wants{first: 50})
	begin := w.trace.now()
	second := w.start(share{25, "fixed", "copy"})[0]
	w.hold(wants{first: 50, second: 25})
	rest := w.start(share{25, "best-effort", "gemm"})[0]
	w.hold(wants{first: 50, second: 25, rest: 25})
	second.end(syscall.SIGTERM)
	w.eventually("its lease is gone", func() error {
		if n := len(w.leases()); n != 2 {
			return fmt.Errorf("%d leases", n)
		}
		return nil
	})
	w.hold(wants{first: 50, rest: 50})
	w.undisturbed(first, begin, w.trace.now())
	first.end(syscall.SIGTERM)
	w.eventually("its lease is gone", func() error {
		if n := len(w.leases()); n != 1 {
			return fmt.Errorf("%d leases", n)
		}
		return nil
	})
	w.hold(wants{rest: 100})
	w.endAll([]*tenant{rest})
}

// TestLending: idle time is lent, and the owner has it back as soon as it has work.
func TestLending(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{60, "fixed-lend", "gemm"}, share{20, "best-effort", "gemm"}, share{20, "best-effort", "copy"})
	owner, a, b := all[0], all[1], all[2]
	w.hold(wants{owner: 60, a: 20, b: 20})
	for i := 1; i <= 3; i++ {
		owner.tell("pause")
		owner.expect("paused", i)
		w.hold(wants{owner: 0, a: 50, b: 50})
		said := w.trace.now()
		owner.tell("go")
		w.eventually("the owner works again", func() error {
			w.trace.read()
			if w.trace.busy(owner.tag, said, w.trace.now()) == 0 {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		back := said
		for _, s := range w.trace.within(said, w.trace.now()) {
			if s.tag == owner.tag {
				back = s.start
				break
			}
		}
		const soon = 200 * time.Millisecond
		w.run(2 * soon)
		if got := w.trace.part(owner.tag, back, back+soon); got < 57 {
			t.Errorf("the owner had %.2f %% of the first %v after it came back", got, soon)
		}
		w.hold(wants{owner: 60, a: 20, b: 20})
	}
	c := w.counters(owner)
	if c.Lent < 3*windows*window*50/100 {
		t.Errorf("only %v are counted as lent", c.Lent)
	}
	if c := w.counters(a); c.Borrowed < windows*window*50/100 {
		t.Errorf("only %v are counted as borrowed", c.Borrowed)
	}
	w.endAll(all)
}

// TestOverrun: kernels longer than a turn take nothing from others' shares, and one that is much longer only delays them.
func TestOverrun(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{50, "fixed", "long"}, share{50, "fixed", "gemm"})
	w.hold(wants{all[0]: 50, all[1]: 50})
	w.endAll(all)

	// What is longer than the site's limit is written down, or ended.
	for _, action := range []string{"warn", "end"} {
		w.set(map[string]string{"shares.overrun.limit": "100ms", "shares.overrun.action": action})
		all = w.start(share{30, "fixed", "none"}, share{50, "fixed", "gemm"})
		long, other := all[0], all[1]
		from := w.trace.now()
		long.tell("once 1000000000000")
		w.eventually("the audit log has the overrun", func() error {
			if !w.audited(`"overrun"`, long.lease, "shares.overrun.limit is 100ms") {
				return fmt.Errorf("it has not")
			}
			return nil
		})
		if action == "warn" {
			if c := w.counters(long); c.Overruns == 0 {
				t.Errorf("no overrun was counted: %+v", c)
			}
			w.session(long)
			long.end(syscall.SIGKILL)
		}
		w.eventually("its session is ended", func() error {
			if pid := w.find(long); pid != 0 {
				return fmt.Errorf("it has process %d", pid)
			}
			return nil
		})
		_, to := w.run(window)
		w.undisturbed(other, from, to)
		w.hold(wants{other: 50})
		w.endAll(all)
	}
}

// TestWaitedFor: a host function that does not return keeps nobody waiting for it. What its program has on the GPU beside
// it is charged as any other's, and what waits behind it is no overrun, for however long it does.
func TestWaitedFor(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{50, "fixed", "sly"}, share{50, "fixed", "gemm"})
	w.hold(wants{all[0]: 50, all[1]: 50})
	w.endAll(all)
	all = w.start(share{50, "fixed", "trickle"}, share{50, "fixed", "gemm"})
	w.run(settle)
	from, to := w.run(windows * window)
	if got := w.trace.part(all[0].tag, from, to); got > 50+offMean { // it may well be less: it waits for its functions
		t.Errorf("with functions that return now and then it had %.2f %%", got)
	}
	w.endAll(all)

	// Kernels that outlast the grace run beside others: nobody gains by a function that does not return.
	got := map[string]float64{}
	w.set(map[string]string{"shares.overrun.limit": "200ms", "shares.overrun.action": "end"})
	for _, load := range []string{"longer", "slier"} {
		all = w.start(share{50, "fixed", load}, share{50, "fixed", "gemm"})
		w.run(settle)
		from, to = w.run(windows * window)
		got[load] = w.trace.part(all[0].tag, from, to)
		if w.find(all[0]) == 0 {
			t.Errorf("the session of %s was ended", load)
		}
		w.endAll(all)
	}
	t.Logf("of the GPU, in percent: %v", got)
	if got["slier"]-got["longer"] > 4 { // a kernel more is a point
		t.Errorf("by a host function that does not return %.2f %% became %.2f", got["longer"], got["slier"])
	}

	// Nor by one that comes after the work.
	all = w.start(share{50, "fixed", "gemm"}, share{50, "fixed", "before"})
	w.eventually("its session is ended", func() error {
		if pid := w.find(all[1]); pid != 0 {
			return fmt.Errorf("it has process %d", pid)
		}
		return nil
	})
	w.endAll(all)
}

// TestStopped: a session or a program that is stopped keeps nobody from the GPU.
func TestStopped(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{40, "fixed", "gemm"}, share{60, "fixed", "gemm"})
	for range 5 {
		pid := w.stop(all[0])
		from, to := w.run(window)
		w.undisturbed(all[1], from, to)
		w.signal(pid, syscall.SIGCONT)
	}
	w.run(window) // it was out for a second
	w.hold(wants{all[0]: 40, all[1]: 60})
	for range 3 {
		if err := all[0].proc.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		from, to := w.run(window)
		w.undisturbed(all[1], from, to)
		if err := all[0].proc.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	w.hold(wants{all[0]: 40, all[1]: 60})
	w.endAll(all)
}

// TestHeld: nor does one whose work waits for its own program.
func TestHeld(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{40, "fixed", "gemm"}, share{60, "fixed", "gemm"})
	from := w.trace.now()
	all[0].tell("hold")
	all[0].expect("held", 1)
	_, to := w.run(settle)
	w.undisturbed(all[1], from, to)
	all[0].tell("release")
	all[0].expect("released", 1)
	w.hold(wants{all[0]: 40, all[1]: 60})
	w.endAll(all)
}

// TestKilled: one that is killed in its turn keeps nobody from the GPU either.
func TestKilled(t *testing.T) {
	w := newWorld(t)
	stay := w.start(share{50, "best-effort", "gemm"})[0]
	within := 0
	for i := range 12 {
		n := w.start(share{40, "fixed", []string{"gemm", "long", "sync"}[i%3]})[0]
		from, _ := w.run(settle)
		pid := w.session(n)
		w.inTurn(n)
		if i%2 == 0 {
			w.signal(pid, syscall.SIGKILL)
		} else {
			n.end(syscall.SIGKILL)
		}
		_, to := w.run(window)
		w.undisturbed(stay, from, to)
		n.end(syscall.SIGKILL)
		if w.turn(n) < quantum*9/10 {
			within++
		}
	}
	t.Logf("%d were killed in their turn", within)
	if within < 3 {
		t.Errorf("only %d were killed in their turn", within)
	}
	w.hold(wants{stay: 100})
	w.endAll([]*tenant{stay})
}

// TestChange: shares and policies change while programs run.
func TestChange(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{70, "fixed", "gemm"}, share{30, "fixed", "copy"})
	a, b := all[0], all[1]
	w.hold(wants{a: 70, b: 30})
	w.sluice("set", a.lease, "--share", "20")
	w.sluice("set", b.lease, "--share", "80")
	w.hold(wants{a: 20, b: 80})
	w.sluice("set", b.lease, "--share", "40")
	w.hold(wants{a: 20, b: 40})
	w.sluice("set", a.lease, "--policy", "best-effort")
	a.policy = "best-effort"
	w.hold(wants{a: 60, b: 40})
	w.sluice("set", b.lease, "--policy", "best-effort")
	b.policy = "best-effort"
	from, to := w.hold(wants{a: 33.33, b: 66.67})

	// And how long a turn is.
	before := w.trace.switches(from, to)
	w.set(map[string]string{"shares.quantum": (2 * quantum).String()})
	from, to = w.hold(wants{a: 33.33, b: 66.67})
	if n := w.trace.switches(from, to); n < before*4/10 || n > before*6/10 {
		t.Errorf("%d switches with turns of twice the length, %d before", n, before)
	}
	w.endAll(all)
}

// TestMany: 24 tenants, from two percent on, that all open the GPU at once.
func TestMany(t *testing.T) {
	w := newWorld(t)
	var ask []share
	for i, n := range []int{12, 8, 4} {
		for k := range n {
			ask = append(ask, share{[]int{2, 5, 9}[i], "fixed", []string{"gemm", "copy", "graph", "mixed"}[k%4]})
		}
	}
	all := w.start(ask...)
	want := wants{}
	for _, n := range all {
		want[n] = float64(n.percent)
	}
	w.run(window)
	from, to := w.run(windows * window)
	to = w.held(want, from, to)
	if got := w.trace.part(0, from, to); got < 95 {
		t.Errorf("the GPU worked for %.2f %% of the time", got)
	}
	for _, n := range all {
		// A turn of everybody's, and the time that its own share takes for one.
		most := quantum * time.Duration(len(all)+100/n.percent)
		if longest, _ := w.trace.gap(n.tag, from, to); longest > most {
			t.Errorf("tenant %d of %d %% was without the GPU for %v", n.tag, n.percent, longest)
		}
	}
	w.endAll(all)
}

// TestChaos: tenants come, pause and are killed, stopped or changed at random; whoever stays is not kept from the GPU,
// and in the end nothing is left.
func TestChaos(t *testing.T) {
	w := newWorld(t)
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	stay := w.start(share{20, "fixed", "gemm"})[0]
	var all []*tenant
	_, begin := w.run(settle)
	for range 40 {
		switch k := r.IntN(6); {
		case len(all) < 3 || k == 0 && len(all) < 7:
			all = append(all, w.start(share{10, []string{"fixed", "fixed-lend", "equal", "best-effort"}[r.IntN(4)], []string{"gemm", "copy", "sync", "long"}[r.IntN(4)]})...)
		case k == 1:
			all[r.IntN(len(all))].tell([]string{"pause", "go"}[r.IntN(2)])
		case k == 2:
			w.sluice("set", all[r.IntN(len(all))].lease, "--share", fmt.Sprint(1+r.IntN(10)), "--policy", []string{"fixed", "equal", "best-effort"}[r.IntN(3)])
		case k == 3:
			n := all[r.IntN(len(all))]
			if w.find(n) != 0 {
				w.signal(w.stop(n), syscall.SIGCONT)
			}
		default:
			i := r.IntN(len(all))
			n := all[i]
			if pid := w.find(n); pid != 0 && k == 4 {
				w.signal(pid, syscall.SIGKILL)
			}
			n.end(syscall.SIGKILL)
			all = append(all[:i], all[i+1:]...)
		}
		w.run(50 * time.Millisecond)
	}
	if longest, _ := w.trace.gap(stay.tag, begin, w.trace.now()); longest > 5*lost {
		t.Errorf("the one that stayed was without the GPU for %v", longest)
	}
	w.hold(wants{stay: 20})
	w.endAll(append(all, stay))
	w.empty()
}
