package turns

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A fake clock stands still but for those who wait.
type fake struct{ now int64 }

func (f *fake) Now() int64  { return f.now }
func (f *fake) Spins() bool { return false }
func (f *fake) Wait(word *uint32, old uint32, until int64, _ bool) {
	if word == nil || *word == old {
		f.now = max(f.now, until)
	}
}

func newTestBoard(t *testing.T, s Site) *Board {
	t.Helper()
	b, err := CreateAnonymous(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func dup(t *testing.T, f *os.File) int {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// sit takes a chair for a lease.
func sit(t *testing.T, b *Board, seat int, c Clock) *Chair {
	t.Helper()
	policy, state := b.Files()
	ch, err := OpenFDs(dup(t, policy), dup(t, state), seat, c)
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func seatFor(t *testing.T, b *Board, lease string, p Policy) int {
	t.Helper()
	s, err := b.Seat(lease, p)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var never atomic.Bool

// take waits until a chair is in a turn.
func take(t *testing.T, c *Chair) Turn {
	t.Helper()
	c.Ask()
	for range 1000 {
		tn, err := c.Wait(&never)
		if err != nil {
			t.Fatal(err)
		}
		if tn != 0 && c.Enter(tn) {
			return tn
		}
	}
	t.Fatal("no turn")
	return 0
}

func fixedShare(percent uint32) Policy { return Policy{Kind: Fixed, Weight: percent * 100} }

func TestTurnsGoRound(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	var cs []*Chair
	for i, n := range []uint32{50, 30, 20} {
		cs = append(cs, sit(t, b, seatFor(t, b, fmt.Sprint("lease", i), fixedShare(n)), clock))
	}
	for _, c := range cs {
		c.Ask()
	}
	from := clock.now
	for clock.now < from+int64(20*time.Second) {
		var tn Turn
		for _, c := range cs {
			if tn = c.Turn(); tn != 0 {
				if !c.Enter(tn) {
					t.Fatal("the holder may not enter")
				}
				clock.now = c.Ends(tn)
				c.Done(tn)
				break
			}
		}
		if tn == 0 {
			clock.now += ms
			cs[0].Ask()
			if _, err := cs[0].Wait(&never); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, s := range b.Read() {
		want := float64(s.Policy.Weight) / 100
		if got := 100 * float64(s.Held) / float64(clock.now-from); got < want-0.3 || got > want+0.3 {
			t.Errorf("%s held %.2f %%, want %.0f", s.Lease, got, want)
		}
	}
}

// deadPID is the number of a process that has ended.
func deadPID(t *testing.T) uint64 {
	t.Helper()
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return uint64(cmd.Process.Pid)
}

// points are where a process can die.
var points = []string{
	"claimed", "named", "seated", "asking", "asked", "open", "entered", "renewing", "renewed",
	"closing", "left", "decided", "passed", "charged", "clearing",
}

type death struct{}

// A process that dies, or stops for good, between any two steps costs the others less
// than 100 ms, and leaves nothing behind.
func TestDeathAtEveryPoint(t *testing.T) {
	dead := deadPID(t)
	for _, point := range points {
		for nth := range 8 {
			for _, stopped := range []bool{false, true} {
				name := fmt.Sprintf("%s %d stopped %v", point, nth, stopped)
				b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
				other := sit(t, b, seatFor(t, b, "other", fixedShare(50)), clock)
				seat := seatFor(t, b, "victim", fixedShare(50))
				if !fallAt(t, b, other, seat, clock, point, nth) {
					continue
				}
				for i := range other.p.chairs() {
					if w := other.p.chair(i, scOwner); !stopped && i != other.i && w.Load() != 0 {
						w.Store(dead | w.Load()&clearing)
						other.p.chair(i, scStart).Store(0)
					}
				}
				from := clock.now
				tn := other.Turn()
				if tn == 0 || !other.Enter(tn) {
					tn = take(t, other)
				}
				if gap := time.Duration(clock.now - from); gap > 100*time.Millisecond {
					t.Errorf("%s: the other has waited %v", name, gap)
				}
				clock.now += 5 * ms
				other.Done(tn)
				if !stopped {
					other.Unask()
					b.Sweep()
					if s := b.Read()[1]; s.Chairs != 0 || s.Wants {
						t.Errorf("%s: after the sweep the victim has %d chairs, wants %v", name, s.Chairs, s.Wants)
					}
					if n := token(other.p.token().Load()).seat(); n == seat {
						t.Errorf("%s: the dead one has the turn", name)
					}
				}
			}
		}
	}
}

// fallAt lets a victim work beside another until it falls at a point for the nth time;
// false: it does not come there so often.
func fallAt(t *testing.T, b *Board, other *Chair, seat int, clock *fake, point string, nth int) (fell bool) {
	t.Helper()
	mine := false
	died = func(p string) {
		if mine && p == point {
			if nth--; nth < 0 {
				panic(death{})
			}
		}
	}
	defer func() {
		died = nil
		if r := recover(); r != nil {
			if _, ok := r.(death); !ok {
				panic(r)
			}
			fell = true
		}
	}()
	mine = true
	c := sit(t, b, seat, clock)
	for range 4 {
		tn := take(t, c)
		clock.now += 3 * ms
		if n, ok := c.Renew(tn); ok {
			tn = n
		}
		mine = false
		other.Ask()
		mine = true
		clock.now += 3 * ms
		c.Done(tn)
		c.Unask()
		mine = false
		tn = take(t, other)
		mine = true
		c.Ask() // while the other holds it
		mine = false
		clock.now += 3 * ms
		other.Done(tn)
		other.Unask()
		mine = true
	}
	c.Quit()
	mine = false
	return false
}

// A seat whose holder does not let go, and whose successor does not take it.
func TestStoppedHolder(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	var cs []*Chair
	for i := range 3 {
		cs = append(cs, sit(t, b, seatFor(t, b, fmt.Sprint("lease", i), fixedShare(30)), clock))
	}
	take(t, cs[0])
	cs[1].Ask() // and is stopped
	from := clock.now
	take(t, cs[2])
	if gap := time.Duration(clock.now - from); gap > DefaultQuantum+DefaultGrace+5*time.Millisecond {
		t.Errorf("the third has waited %v", gap)
	}
	if r := b.Read(); r[0].Revoked != 1 || r[0].Overruns != 0 && r[0].Longest == 0 {
		t.Errorf("after the grace: %+v", r[0])
	}
}

// A seat that was stopped for long has no claim to that time when it goes on: nobody waits
// for longer than ever.
func TestGoesOn(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	var cs []*Chair
	for i, n := range []uint32{50, 25, 25} {
		cs = append(cs, sit(t, b, seatFor(t, b, fmt.Sprint("lease", i), fixedShare(n)), clock))
		cs[i].Ask()
	}
	// work lets some of them work, awake, and gives the longest time without one of the last two.
	work := func(long time.Duration, awake ...*Chair) (longest time.Duration) {
		last := clock.now
		for end := clock.now + int64(long); clock.now < end; {
			busy := false
			for _, c := range awake {
				c.awake(clock.now)
				tn := c.Turn()
				if tn == 0 || !c.Enter(tn) {
					continue
				}
				if c != cs[0] {
					longest = max(longest, time.Duration(clock.now-last))
				}
				clock.now = c.Ends(tn)
				if c != cs[0] {
					last = clock.now
				}
				c.Done(tn)
				busy = true
			}
			if !busy {
				clock.now += ms / 2
				cs[1].p.judge(token(cs[1].p.token().Load()), clock.now)
			}
		}
		return longest
	}
	before := work(time.Second, cs...)
	stopped := work(1500*time.Millisecond, cs[1:]...)
	after := work(time.Second, cs...)
	t.Logf("longest gap %v before, %v while one is stopped, %v when it goes on", before, stopped, after)
	if after > before+DefaultQuantum {
		t.Errorf("longest gap %v before, %v after", before, after)
	}
}

// Two sessions of a lease share its turn, and the last one out passes it on.
func TestTwoChairsOnASeat(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	seat := seatFor(t, b, "two", fixedShare(50))
	one, two := sit(t, b, seat, clock), sit(t, b, seat, clock)
	other := sit(t, b, seatFor(t, b, "other", fixedShare(50)), clock)
	tn := take(t, one)
	if !two.Enter(tn) {
		t.Fatal("the second session may not enter")
	}
	other.Ask()
	one.Done(tn)
	if one.Turn() != tn {
		t.Error("the first one out took the turn along")
	}
	if one.Enter(tn) {
		t.Error("a turn that is being closed was entered")
	}
	clock.now += 10 * ms
	two.Done(tn)
	if other.Turn() == 0 {
		t.Error("the last one out did not pass the turn on")
	}
}

func TestBoardsOutliveTheirOwner(t *testing.T) {
	dir := t.TempDir()
	b, err := Create(dir, "GPU-1", Site{})
	if err != nil {
		t.Fatal(err)
	}
	clock := &fake{now: 1e9}
	seat := seatFor(t, b, "lease", fixedShare(40))
	c := sit(t, b, seat, clock)
	tn := take(t, c)
	b.Close()
	if b, err = Create(dir, "GPU-1", Site{Quantum: 5 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if again := seatFor(t, b, "lease", fixedShare(40)); again != seat {
		t.Errorf("seat %d, was %d", again, seat)
	}
	if c.Turn() != tn {
		t.Error("the turn was lost")
	}
	if c.Quantum() != int64(5*time.Millisecond) {
		t.Error("the session does not see the new quantum")
	}
	c.Done(tn)
	// Something else in its place is made anew.
	b.Close()
	if err := os.WriteFile(filepath.Join(dir, "GPU-1.state"), make([]byte, stateSize), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err = Create(dir, "GPU-1", Site{}); err != nil {
		t.Fatal(err)
	}
	if n := len(b.Read()); n != 0 {
		t.Errorf("%d seats on a new board", n)
	}
	if err := os.Chmod(filepath.Join(dir, "GPU-1.state"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(dir, "GPU-1", Site{}); err == nil {
		t.Error("a file that others may read was taken")
	}
}

// Whatever a session gone mad leaves in the state file, the others neither crash nor
// hang, and have turns again once it is gone.
func FuzzDamagedState(f *testing.F) {
	f.Add(uint64(1), uint16(1))
	f.Add(uint64(2), uint16(500))
	f.Fuzz(func(t *testing.T, seed uint64, n uint16) {
		r := rand.New(rand.NewPCG(seed, 7))
		b, clock := newTestBoard(t, Site{}), &fake{now: 1e12}
		one := sit(t, b, seatFor(t, b, "one", fixedShare(40)), clock)
		two := sit(t, b, seatFor(t, b, "two", Policy{Kind: BestEffort, Weight: 100}), clock)
		one.Ask()
		for range n {
			at := r.IntN(stateSize/8) * 8
			if r.IntN(2) == 0 { // where something is
				at = []int{stToken, stHurry, stPool, stHigh, stNow, stSeats + 8*r.IntN(64), stChairs + 8*r.IntN(64)}[r.IntN(7)]
			}
			w := r.Uint64()
			if r.IntN(3) == 0 {
				w >>= r.IntN(64)
			}
			if at == stClock || at == stMagicAt || at == stVersion { // a board no more
				continue
			}
			one.p.word(at).Store(w)
		}
		for _, c := range []*Chair{one, two} {
			c.Ask()
			if tn, err := c.Wait(&never); err == nil && tn != 0 && c.Enter(tn) {
				c.Ends(tn)
				c.Alert(tn)
				c.Contended()
				c.Capped()
				if n, ok := c.Renew(tn); ok {
					tn = n
				}
				c.Owe(time.Second)
				c.Done(tn)
			}
			c.Close()
		}
		b.Sweep()
		b.Read()
		fresh := sit(t, b, seatFor(t, b, "three", fixedShare(10)), clock)
		from := clock.now
		fresh.Done(take(t, fresh))
		fresh.Close()
		if d := time.Duration(clock.now - from); d > 12*time.Second {
			t.Errorf("a new session has waited %v", d)
		}
	})
}

// TestMain also is the session processes of TestProcesses.
func TestMain(m *testing.M) {
	if os.Getenv("TURNS_SEAT") == "" {
		os.Exit(m.Run())
	}
	seat, err := strconv.Atoi(os.Getenv("TURNS_SEAT"))
	if err == nil {
		err = work(seat)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// work takes turns without end.
func work(seat int) error {
	c, err := OpenFDs(3, 4, seat, Monotonic{})
	if err != nil {
		return err
	}
	for {
		c.Ask()
		t, err := c.Wait(&never)
		if err != nil {
			return err
		}
		if t == 0 || !c.Enter(t) {
			continue
		}
		until := c.clock.Now() + rand.Int64N(2*ms)
		for c.clock.Now() < until {
		}
		if rand.IntN(2) == 0 {
			c.Unask()
		}
		c.Done(t)
	}
}

// Processes that take turns and are killed at any time: those that are left go on, and
// at the end nothing is left of the dead.
func TestProcesses(t *testing.T) {
	b := newTestBoard(t, Site{})
	policy, state := b.Files()
	var cmds []*exec.Cmd
	start := func(i int) *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("TURNS_SEAT=%d", i))
		cmd.ExtraFiles = []*os.File{policy, state}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	for i := range 3 {
		cmds = append(cmds, start(seatFor(t, b, fmt.Sprint("lease", i), Policy{Kind: BestEffort, Weight: 100})))
	}
	turnsOf := func() (n [3]uint64) {
		for i, s := range b.Read() {
			n[i] = s.Turns
		}
		return n
	}
	until := time.Now().Add(30 * time.Second)
	for range 12 {
		victim := rand.IntN(3)
		before := turnsOf()
		for wait := true; wait; { // until all have worked
			now := turnsOf()
			wait = false
			for i := range now {
				wait = wait || now[i] < before[i]+5
			}
			if time.Now().After(until) {
				t.Fatalf("turns do not go on: %v, then %v", before, now)
			}
			nap := unix.Timespec{Nsec: rand.Int64N(3e6)}
			_ = unix.Nanosleep(&nap, nil)
		}
		_ = cmds[victim].Process.Kill()
		_ = cmds[victim].Wait()
		if rand.IntN(2) == 0 {
			b.Gone(cmds[victim].Process.Pid, 0)
		}
		cmds[victim] = start(victim)
	}
	for _, cmd := range cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	b.Sweep()
	for _, s := range b.Read() {
		if s.Chairs != 0 || s.Wants {
			t.Errorf("%s: %d chairs are left, wants %v", s.Lease, s.Chairs, s.Wants)
		}
	}
	if n := token(b.p.token().Load()).seat(); n != nobody {
		t.Errorf("seat %d has the turn still", n)
	}
}
