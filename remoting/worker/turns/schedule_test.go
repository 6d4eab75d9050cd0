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
	"unsafe"

	"golang.org/x/sys/unix"
)

// A fake clock only moves when somebody waits.
type fake struct{ now int64 }

func (f *fake) Now() int64  { return f.now }
func (f *fake) Spins() bool { return false }
func (f *fake) Wait(word *uint32, old uint32, until int64, _ bool) {
	if word == nil || *word == old {
		f.now = max(f.now, until)
	}
}

func newTestSchedule(t *testing.T, s Site) *Schedule {
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

// join makes a member of a tenant.
func join(t *testing.T, b *Schedule, tenant int, c Clock) *Member {
	t.Helper()
	policy, state := b.Files()
	ch, err := OpenFDs(dup(t, policy), dup(t, state), tenant, c)
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func tenantFor(t *testing.T, b *Schedule, lease string, p Policy) int {
	t.Helper()
	s, err := b.Add(lease, p)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var never atomic.Bool

// take returns when a member is in a turn.
func take(t *testing.T, c *Member) Turn {
	t.Helper()
	c.Request()
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
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	var cs []*Member
	for i, n := range []uint32{50, 30, 20} {
		cs = append(cs, join(t, b, tenantFor(t, b, fmt.Sprint("lease", i), fixedShare(n)), clock))
	}
	for _, c := range cs {
		c.Request()
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
			cs[0].Request()
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

// deadPID returns the number of a process that has ended.
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
	"claimed", "named", "joined", "asking", "asked", "open", "entered", "renewing", "renewed",
	"closing", "left", "decided", "passed", "charged", "clearing",
}

type death struct{}

// A process that dies, or stops for good, between any two steps costs the others less than
// 100 ms. Of a process that died nothing remains.
func TestDeathAtEveryPoint(t *testing.T) {
	dead := deadPID(t)
	for _, point := range points {
		for nth := range 8 {
			for _, stopped := range []bool{false, true} {
				name := fmt.Sprintf("%s %d stopped %v", point, nth, stopped)
				b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
				other := join(t, b, tenantFor(t, b, "other", fixedShare(50)), clock)
				tenant := tenantFor(t, b, "victim", fixedShare(50))
				if !dieAt(t, b, other, tenant, clock, point, nth) {
					continue
				}
				for i := range other.p.members() {
					if w := &other.p.member(i).owner; !stopped && i != other.at.Load().i && w.Load() != 0 {
						w.Store(dead | w.Load()&clearing)
						other.p.member(i).start.Store(0)
					}
				}
				from := clock.now
				tn := other.Turn()
				if tn == 0 || !other.Enter(tn) {
					tn = take(t, other)
				}
				if gap := time.Duration(clock.now - from); gap > 100*time.Millisecond {
					t.Errorf("%s: the other waited %v", name, gap)
				}
				clock.now += 5 * ms
				other.Done(tn)
				if !stopped {
					other.Withdraw()
					b.Sweep()
					if s := b.Read()[1]; s.Members != 0 || s.Wants {
						t.Errorf("%s: after the sweep the victim has %d members, wants %v", name, s.Members, s.Wants)
					}
					if n := other.p.token().tenant(); n == tenant {
						t.Errorf("%s: the dead one has the turn", name)
					}
				}
			}
		}
	}
}

// dieAt runs a victim beside another session until it dies at a step for the nth time; false: the
// victim does not come there so often.
func dieAt(t *testing.T, b *Schedule, other *Member, tenant int, clock *fake, point string, nth int) (fell bool) {
	t.Helper()
	mine := false
	onStep = func(p string) {
		if mine && p == point {
			if nth--; nth < 0 {
				panic(death{})
			}
		}
	}
	defer func() {
		onStep = nil
		if r := recover(); r != nil {
			if _, ok := r.(death); !ok {
				panic(r)
			}
			fell = true
		}
	}()
	mine = true
	c := join(t, b, tenant, clock)
	for range 4 {
		tn := take(t, c)
		clock.now += 3 * ms
		if n, ok := c.Renew(tn); ok {
			tn = n
		}
		mine = false
		other.Request()
		mine = true
		clock.now += 3 * ms
		c.Done(tn)
		c.Withdraw()
		mine = false
		tn = take(t, other)
		mine = true
		c.Request() // while the other has the turn
		mine = false
		clock.now += 3 * ms
		other.Done(tn)
		other.Withdraw()
		mine = true
	}
	c.Quit()
	mine = false
	return false
}

// One tenant keeps its turn, the next one does not take it, and the third gets it in time.
func TestStoppedHolder(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	var cs []*Member
	for i := range 3 {
		cs = append(cs, join(t, b, tenantFor(t, b, fmt.Sprint("lease", i), fixedShare(30)), clock))
	}
	take(t, cs[0])
	cs[1].Request() // then it is stopped
	from := clock.now
	take(t, cs[2])
	if gap := time.Duration(clock.now - from); gap > DefaultQuantum+DefaultGrace+5*time.Millisecond {
		t.Errorf("the third waited %v", gap)
	}
	if r := b.Read(); r[0].Revoked != 1 || r[0].Overruns != 0 && r[0].Longest == 0 {
		t.Errorf("after the grace: %+v", r[0])
	}
}

// A tenant that was stopped for a long time has no claim to that time when it goes on: no other
// waits longer than before.
func TestGoesOn(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	var cs []*Member
	for i, n := range []uint32{50, 25, 25} {
		cs = append(cs, join(t, b, tenantFor(t, b, fmt.Sprint("lease", i), fixedShare(n)), clock))
		cs[i].Request()
	}
	// work lets the sessions in awake work, and returns the longest time in which neither of the
	// last two had a turn.
	work := func(long time.Duration, awake ...*Member) (longest time.Duration) {
		last := clock.now
		for end := clock.now + int64(long); clock.now < end; {
			busy := false
			for _, c := range awake {
				c.responds(clock.now)
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
				cs[1].p.police(cs[1].p.token(), clock.now)
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

// Two sessions of a lease share its turn, and the last one to leave passes it on.
func TestTwoMembers(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "two", fixedShare(50))
	one, two := join(t, b, tenant, clock), join(t, b, tenant, clock)
	other := join(t, b, tenantFor(t, b, "other", fixedShare(50)), clock)
	tn := take(t, one)
	if !two.Enter(tn) {
		t.Fatal("the second session may not enter")
	}
	other.Request()
	one.Done(tn)
	if one.Turn() != tn {
		t.Error("the first one to leave ended the turn")
	}
	if one.Enter(tn) {
		t.Error("a turn that is being closed was entered")
	}
	clock.now += 10 * ms
	two.Done(tn)
	if other.Turn() == 0 {
		t.Error("the last one to leave did not pass the turn on")
	}
}

func TestSchedulesOutliveTheirOwner(t *testing.T) {
	dir := t.TempDir()
	b, err := Create(dir, "GPU-1", Site{})
	if err != nil {
		t.Fatal(err)
	}
	clock := &fake{now: 1e9}
	tenant := tenantFor(t, b, "lease", fixedShare(40))
	c := join(t, b, tenant, clock)
	tn := take(t, c)
	b.Close()
	if b, err = Create(dir, "GPU-1", Site{Quantum: 5 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if again := tenantFor(t, b, "lease", fixedShare(40)); again != tenant {
		t.Errorf("tenant %d, was %d", again, tenant)
	}
	if c.Turn() != tn {
		t.Error("the turn was lost")
	}
	if c.Quantum() != int64(5*time.Millisecond) {
		t.Error("the session does not see the new quantum")
	}
	c.Done(tn)
	// A state file that is no schedule is formatted.
	b.Close()
	if err := os.WriteFile(filepath.Join(dir, "GPU-1.state"), make([]byte, stateSize), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err = Create(dir, "GPU-1", Site{}); err != nil {
		t.Fatal(err)
	}
	if n := len(b.Read()); n != 0 {
		t.Errorf("%d tenants on a new schedule", n)
	}
	if err := os.Chmod(filepath.Join(dir, "GPU-1.state"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(dir, "GPU-1", Site{}); err == nil {
		t.Error("a file that others may read was used")
	}
}

// Whatever a faulty session writes into the state file, the others neither crash nor hang, and
// have turns again once it is gone.
func FuzzDamagedState(f *testing.F) {
	f.Add(uint64(1), uint16(1))
	f.Add(uint64(2), uint16(500))
	f.Fuzz(func(t *testing.T, seed uint64, n uint16) {
		r := rand.New(rand.NewPCG(seed, 7))
		b, clock := newTestSchedule(t, Site{}), &fake{now: 1e12}
		one := join(t, b, tenantFor(t, b, "one", fixedShare(40)), clock)
		two := join(t, b, tenantFor(t, b, "two", Policy{Kind: BestEffort, Weight: 100}), clock)
		one.Request()
		for range n {
			st := one.p.state
			w := (*atomic.Uint64)(unsafe.Pointer(&one.p.stateBytes[r.IntN(int(stateSize)/8)*8]))
			if r.IntN(2) == 0 { // where something is
				records := [...]unsafe.Pointer{unsafe.Pointer(&st.tenants), unsafe.Pointer(&st.members)}
				first := (*[64]atomic.Uint64)(records[r.IntN(2)])
				w = []*atomic.Uint64{&st.token, &st.recalled, &st.pool, &st.high, &st.now, &first[r.IntN(64)], &first[r.IntN(64)]}[r.IntN(7)]
			}
			n := r.Uint64()
			if r.IntN(3) == 0 {
				n >>= r.IntN(64)
			}
			if w == &st.clock || w == &st.magic || w == &st.version { // then it would be no schedule
				continue
			}
			w.Store(n)
		}
		for _, c := range []*Member{one, two} {
			c.Request()
			if tn, err := c.Wait(&never); err == nil && tn != 0 && c.Enter(tn) {
				c.Ends(tn)
				c.Prewake(tn)
				c.Contended()
				c.Capped()
				if n, ok := c.Renew(tn); ok {
					tn = n
				}
				c.Debit(clock.now-int64(time.Second), clock.now)
				c.Done(tn)
			}
			c.Close()
		}
		b.Sweep()
		b.Read()
		fresh := join(t, b, tenantFor(t, b, "three", fixedShare(10)), clock)
		from := clock.now
		fresh.Done(take(t, fresh))
		fresh.Close()
		if d := time.Duration(clock.now - from); d > 12*time.Second {
			t.Errorf("a new session waited %v", d)
		}
	})
}

// The sessions of an owner before version 2 go on beside one of this version. So does what an interrupted upgrade left.
func TestUpgrade(t *testing.T) {
	for _, versions := range [][2]uint64{{1, 1}, {version, 1}, {1, version}} {
		dir, clock := t.TempDir(), &fake{now: 1e12}
		b, err := Create(dir, "GPU-1", Site{})
		if err != nil {
			t.Fatal(err)
		}
		m := join(t, b, tenantFor(t, b, "old", fixedShare(30)), clock)
		tn := take(t, m)
		b.p.policy.version.Store(versions[0])
		b.p.state.version.Store(versions[1])
		b.Close()
		if b, err = Create(dir, "GPU-1", Site{Limit: time.Second}); err != nil {
			t.Fatal(err)
		}
		if all := b.Read(); len(all) != 1 || all[0].Lease != "old" || all[0].Members != 1 || all[0].Owes != 0 || m.ended() || m.Turn() != tn {
			t.Errorf("%v: %+v, the session has ended: %v", versions, all, m.ended())
		}
		if clock.now = m.Ends(tn); !b.p.valid() {
			t.Errorf("%v: not upgraded", versions)
		}
		m.Done(tn)
		m.Done(take(t, m))
		m.Close()
		join(t, b, 0, clock).Close()
		b.p.state.version.Store(version + 1)
		b.Close()
		if b, err = Create(dir, "GPU-1", Site{}); err != nil {
			t.Fatal(err)
		}
		if all := b.Read(); len(all) != 0 {
			t.Errorf("a later version is used: %+v", all)
		}
		b.Close()
	}
}

// TestMain also runs the session processes of TestProcesses.
func TestMain(m *testing.M) {
	if os.Getenv("TURNS_TENANT") == "" {
		os.Exit(m.Run())
	}
	tenant, err := strconv.Atoi(os.Getenv("TURNS_TENANT"))
	if err == nil {
		err = work(tenant)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// work takes turns for ever.
func work(tenant int) error {
	c, err := OpenFDs(3, 4, tenant, Monotonic{})
	if err != nil {
		return err
	}
	for {
		c.Request()
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
			c.Withdraw()
		}
		c.Done(t)
	}
}

// Processes that take turns are killed at any time: the others go on, and at the end nothing
// remains of the dead.
func TestProcesses(t *testing.T) {
	b := newTestSchedule(t, Site{})
	policy, state := b.Files()
	var cmds []*exec.Cmd
	start := func(i int) *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("TURNS_TENANT=%d", i))
		cmd.ExtraFiles = []*os.File{policy, state}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	for i := range 3 {
		cmds = append(cmds, start(tenantFor(t, b, fmt.Sprint("lease", i), Policy{Kind: BestEffort, Weight: 100})))
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
		if s.Members != 0 || s.Wants {
			t.Errorf("%s: %d members remain, wants %v", s.Lease, s.Members, s.Wants)
		}
	}
	if n := b.p.token().tenant(); n != nobody {
		t.Errorf("tenant %d still has the turn", n)
	}
}
