package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/leasesock"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func TestAcquireTwiceIsOneLease(t *testing.T) {
	s := newSite(t, newFake("a", 2), newFake("b", 2))
	l := s.must(ask("1", 50))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if again := s.must(ask("1", 50)); again.ID != l.ID {
				t.Errorf("%s, then %s", l.ID, again.ID)
			}
		})
	}
	wg.Wait()
	if s.total() != 1 {
		t.Fatalf("%d leases", s.total())
	}
	for range 2 {
		if err := s.Release(t.Context(), root, "", lease.Key{Job: "1"}, ""); err != nil {
			t.Fatal(err)
		}
	}
	s.wait("release", func() bool { return s.total() == 0 })
	if _, _, err := s.Acquire(t.Context(), root, ask("1", 50)); lease.CodeOf(err) != lease.Over {
		t.Fatalf("a job that has ended: %v", err)
	}
	r := ask("1", 50)
	r.Key.Incarnation = 1
	s.must(r)
}

// What a lease does not say of its grace its pool does, and the owner is told.
func TestGrace(t *testing.T) {
	a := newFake("a", 1)
	s := newSite(t, a)
	for i, c := range []struct{ pool, asked, want time.Duration }{
		{0, 0, 0}, {time.Hour, 0, time.Hour}, {lease.NoGrace, 0, lease.NoGrace},
		{time.Hour, lease.NoGrace, lease.NoGrace}, {time.Hour, time.Minute, time.Minute}, {0, lease.MaxGrace, lease.MaxGrace},
	} {
		s.mu.Lock()
		pool := s.pools["default"]
		pool.Grace = c.pool
		s.pools["default"] = pool
		s.mu.Unlock()
		r := ask(fmt.Sprint("run-", i), 10)
		r.Grace = c.asked
		if l := s.must(r); l.Request.Grace != c.want {
			t.Errorf("asked for %v in a pool with %v: %v, want %v", c.asked, c.pool, l.Request.Grace, c.want)
		}
	}
	for _, wrong := range []time.Duration{-2, lease.MaxGrace + 1} {
		r := ask("run-wrong", 10)
		r.Grace = wrong
		if _, _, err := s.Acquire(t.Context(), root, r); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "grace") {
			t.Errorf("grace %v: %v", wrong, err)
		}
	}
}

func TestAllOrNothing(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	b.set(func() { b.confirms = lease.Errorf(lease.Internal, "disk full") })
	if _, _, err := s.Acquire(t.Context(), root, ask("1", 100, 100)); lease.CodeOf(err) != lease.Internal {
		t.Fatal(err)
	}
	s.wait("nothing is left", func() bool { return s.total() == 0 })
	b.set(func() { b.confirms = nil })
	l := s.must(ask("1", 100, 100))
	if len(lease.Owners(l.Grants)) != 2 || s.total() != 2 {
		t.Fatalf("%+v", l.Grants)
	}
	_, _, err := s.Acquire(t.Context(), root, ask("2", 1))
	if lease.CodeOf(err) != lease.NoRoom {
		t.Fatal(err)
	}
	_, _, err = s.Acquire(t.Context(), root, ask("2", 1, 1, 1))
	if lease.CodeOf(err) != lease.Never {
		t.Fatal(err)
	}
}

// A reservation that runs out before it is confirmed, since another owner was slow, is asked for again.
func TestReservationRunsOut(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "n1")
	h := w.hosts["n1"]
	h.cfg.Reserve = 200 * time.Millisecond
	times := 0
	w.mu.Lock()
	w.reserved = func(lease.Lease) bool {
		w.mu.Lock()
		times++
		first := times == 1
		w.mu.Unlock()
		if first {
			w.wait("the reservations have run out", func() bool { return w.have() == "" })
		}
		return false
	}
	w.mu.Unlock()
	r := job("7", 0, []string{"n1"}, 100, 100, 100)[0] // more than one owner has
	r.Key.Incarnation = h.Epoch()
	if _, _, err := h.Acquire(t.Context(), root, r); err != nil {
		t.Fatal(err)
	}
	if times < 4 {
		t.Errorf("%d reservations, want two at each owner", times)
	}
}

func TestConflictPlacesAnew(t *testing.T) {
	a := newFake("a", 1)
	s := newSite(t, a)
	a.set(func() { a.refuse = tries - 1 })
	s.must(ask("1", 50))
	a.set(func() { a.refuse = tries })
	if _, _, err := s.Acquire(t.Context(), root, ask("2", 10)); lease.CodeOf(err) != lease.Conflict {
		t.Fatal(err)
	}
	if a.count() != 1 {
		t.Fatal("something is left")
	}
}

func TestDeadOwner(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	l := s.must(ask("1", 100, 100))
	a.set(func() { a.down = true })
	start := time.Now()
	if err := s.Release(t.Context(), root, l.ID, lease.Key{}, "test"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(s.Socket(l.ID)); !os.IsNotExist(err) {
		t.Fatal("the socket is there")
	}
	s.must(ask("2", 60))
	if _, _, err := s.Acquire(t.Context(), root, ask("3", 60)); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "a is down") {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 2*time.Second {
		t.Fatalf("took %v", d)
	}
	s.restart()
	a.set(func() { a.down = false })
	s.wait("the release arrives after a restart", func() bool { return a.count() == 0 })
}

// An owner that is only started later than its hosts is asked again at once, not at
// the next look for what needs no owner.
func TestOwnerStartsLater(t *testing.T) {
	a := newFake("a", 1)
	a.down = true
	s := newSite(t, a)
	s.end()
	s.cfg.Renew, s.cfg.BackOff = 10*time.Second, 5*time.Second
	s.start()
	start := time.Now()
	p, err := s.peer("a", "")
	if err != nil {
		t.Fatal(err)
	}
	s.wait("it is asked", func() bool { return p.down() != nil })
	a.set(func() { a.down = false })
	s.wait("it is asked again", func() bool { return p.down() == nil })
	if d := time.Since(start); d > look*3/4 {
		t.Fatalf("left out for %v", d)
	}
}

func TestRefused(t *testing.T) {
	s := newSite(t, newFake("a", 2))
	user := rpc.Peer{UID: 1000, GID: 1000, PID: os.Getpid()}
	for what, c := range map[string]struct {
		p    rpc.Peer
		r    lease.Request
		want lease.Code
	}{
		"no fraction":    {root, ask("1"), lease.Invalid},
		"too much":       {root, ask("1", 101), lease.Invalid},
		"nothing":        {root, ask("1", 0), lease.Invalid},
		"pool":           {root, lease.Request{Key: lease.Key{Job: "1"}, Pool: "x", Fractions: []lease.Fraction{{Percent: 1}}}, lease.NotFound},
		"type":           {root, lease.Request{Key: lease.Key{Job: "1"}, Type: "x", Fractions: []lease.Fraction{{Percent: 1}}}, lease.Never},
		"node":           {root, lease.Request{Key: lease.Key{Job: "1", Node: "x"}, Fractions: []lease.Fraction{{Percent: 1}}}, lease.Invalid},
		"job":            {root, ask("", 1), lease.Invalid},
		"slurm's job":    {user, ask("1", 1), lease.Denied},
		"foreign holder": {user, lease.Request{Key: lease.Key{Job: "run-1"}, Holder: lease.Process{PID: 1}, Fractions: []lease.Fraction{{Percent: 1}}}, lease.Denied},
		"foreign uid":    {user, lease.Request{Key: lease.Key{Job: "run-1"}, UID: 1001, Fractions: []lease.Fraction{{Percent: 1}}}, lease.Denied},
		"escape":         {root, ask("run-\x1b[31m", 1), lease.Invalid},
		"job name":       {root, lease.Request{Key: lease.Key{Job: "1"}, JobName: "a\tb", Fractions: []lease.Fraction{{Percent: 1}}}, lease.Invalid},
		"negative life":  {root, lease.Request{Key: lease.Key{Job: "1"}, Life: -1, Fractions: []lease.Fraction{{Percent: 1}}}, lease.Invalid},
		"dead holder":    {root, lease.Request{Key: lease.Key{Job: "1"}, Holder: lease.Process{PID: os.Getpid(), Start: 1}, Fractions: []lease.Fraction{{Percent: 1}}}, lease.Over},
	} {
		if _, _, err := s.Acquire(t.Context(), c.p, c.r); err == nil || lease.CodeOf(err) != c.want {
			t.Errorf("%s: %v, want %s", what, err, c.want)
		}
	}
	r := ask("run-1", 10)
	r.UID = 0 // which says nobody
	l, _, err := s.Acquire(t.Context(), user, r)
	if err != nil || l.Request.UID != 1000 || l.Request.Holder.PID != os.Getpid() {
		t.Fatalf("%+v %v", l.Request, err)
	}
	other := rpc.Peer{UID: 1001, PID: os.Getpid()}
	if _, _, err := s.Acquire(t.Context(), other, ask("run-1", 10)); lease.CodeOf(err) != lease.Denied {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), other, l.ID, lease.Key{}, ""); lease.CodeOf(err) != lease.Denied {
		t.Fatal(err)
	}
	if list, _ := s.List(t.Context(), other); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
	if list, err := s.List(t.Context(), user); err != nil || len(list) != 1 || len(list[0].Use) != 1 {
		t.Fatalf("%+v %v", list, err)
	}
	s.SetUsers(false)
	if _, _, err := s.Acquire(t.Context(), user, ask("run-2", 10)); lease.CodeOf(err) != lease.Denied {
		t.Fatal(err)
	}
	if ev, err := s.Explain(t.Context(), root, "run-1"); err != nil || len(ev) < 2 {
		t.Fatalf("%+v %v", ev, err)
	}
}

func TestHolderEnds(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	for _, restart := range []bool{false, true} {
		cmd := exec.Command("sleep", "100")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		r := ask("run-"+strconv.Itoa(cmd.Process.Pid), 50)
		r.Holder.PID = cmd.Process.Pid
		s.must(r)
		if restart {
			s.restart()
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		s.wait("the lease ends with its holder", func() bool { return s.total() == 0 })
	}
}

// noWait is a pidfd that cannot be waited for.
type noWait struct{ syscall.RawConn }

func (noWait) Read(func(uintptr) bool) error { return errors.New("no poller") }

// A holder that cannot be waited for is looked at instead.
func TestHolderWithoutWait(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := ask("run-1", 50)
	r.Holder.PID = cmd.Process.Pid
	l := s.must(r)
	s.mu.Lock()
	hd := s.leases[l.ID]
	hd.stop() // the wait that works
	s.mu.Unlock()
	s.waitHolder(hd, noWait{}, func() {})
	s.wait("the wait fails", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return hd.stop == nil })
	if n := s.total(); n != 1 {
		t.Errorf("%d leases while the holder lives", n)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	s.wait("the lease ends with its holder", func() bool { return s.total() == 0 })
}

func TestLifeEnds(t *testing.T) {
	s := newSite(t, newFake("a", 1), newFake("b", 1))
	r := ask("1", 100, 100)
	r.Life = 300 * time.Millisecond
	s.must(r)
	s.wait("the lease ends with its time", func() bool { return s.total() == 0 })
}

func TestLostLease(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	l := s.must(ask("1", 100, 100))
	a.set(func() { clear(a.leases) })
	s.wait("the other owner's part is released", func() bool { return b.count() == 0 })
	if ok, err := s.log.Has(audit.RenewLost, l.ID, "a", 0); !ok || err != nil {
		t.Fatal("not in the audit log", err)
	}
}

// TestEndedThere checks that a node does not call a lease lost that the owner has ended, or is still ending, and that the node records the owner's reason.
func TestEndedThere(t *testing.T) {
	t.Run("ended", func(t *testing.T) { endedThere(t, 0) })
	t.Run("still ending", func(t *testing.T) { endedThere(t, 3) })
}

// endedThere has the owner be ending the lease until it was asked so many times.
func endedThere(t *testing.T, asked int) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	l := s.must(ask("1", 100, 100))
	a.set(func() {
		clear(a.leases)
		a.told = []lease.Report{{Lease: "another", Ended: time.Now(), Reason: "not it"}, {Lease: l.ID}}
	})
	s.wait("the owner was asked", func() (yes bool) { a.set(func() { yes = a.calls["reports"] >= asked }); return yes })
	a.set(func() {
		a.told = []lease.Report{a.told[0], {Lease: l.ID, Ended: time.Now(), Reason: "the job has ended"}}
	})
	s.wait("the other owner's part is released", func() bool { return b.count() == 0 })
	why := ""
	err := audit.Read(s.cfg.AuditFile, func(e *audit.Event) bool {
		if e.Event == audit.RenewLost {
			why = e.Reason
		}
		return true
	})
	if err != nil || why != "its owner has ended it: the job has ended" {
		t.Errorf("%q, %v", why, err)
	}
}

func TestAdopt(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	l := s.must(ask("1", 100, 50))
	s.end()
	if err := os.Remove(filepath.Join(s.dir, "host.db")); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.wait("socket is back", func() bool { _, err := os.Stat(s.Socket(l.ID)); return err == nil })
	if again := s.must(ask("1", 100, 50)); again.ID != l.ID || len(again.Grants) != 2 {
		t.Fatalf("%+v", again)
	}
}

func TestAcquiringIsTakenBack(t *testing.T) {
	a := newFake("a", 1)
	s := newSite(t, a)
	l := s.must(ask("1", 50))
	s.mu.Lock()
	rec := s.leases[l.ID].rec
	s.mu.Unlock()
	rec.Phase = acquiring // as a crash before the last write leaves it
	if err := s.put(&rec); err != nil {
		t.Fatal(err)
	}
	s.restart()
	if again := s.must(ask("1", 100)); again.ID == l.ID {
		t.Fatal("the unfinished lease was given")
	}
	if a.count() != 1 {
		t.Fatal("it was not taken back")
	}
}

// client asks on a lease's socket.
func client(t testing.TB, path string, kind, index uint32) (status, owners uint32, reason string, f *os.File) {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, wire.LeaseRequestSize)
	copy(b, wire.LeaseRequestMagic)
	binary.LittleEndian.PutUint32(b[8:], wire.LeaseVersion)
	binary.LittleEndian.PutUint32(b[12:], kind)
	binary.LittleEndian.PutUint32(b[16:], index)
	copy(b[24:], "a.out")
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	h, oob := make([]byte, wire.LeaseAnswerSize), make([]byte, 64)
	n, oobn, _, _, err := c.ReadMsgUnix(h, oob)
	if err != nil || n != wire.LeaseAnswerSize || binary.LittleEndian.Uint32(h) != wire.LeaseAnswerMagic {
		t.Fatal(n, err)
	}
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
		fds, err := unix.ParseUnixRights(&msgs[0])
		if err != nil || len(fds) != 1 {
			t.Fatal(fds, err)
		}
		f = os.NewFile(uintptr(fds[0]), "session")
	}
	rest, err := io.ReadAll(c)
	if err != nil || uint32(len(rest)) != binary.LittleEndian.Uint32(h[12:]) {
		t.Fatal(len(rest), err)
	}
	return binary.LittleEndian.Uint32(h[4:]), binary.LittleEndian.Uint32(h[8:]), string(rest), f
}

func TestSocket(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	l := s.must(ask("1", 100, 50))
	path := s.Socket(l.ID)
	inode := func() (uint64, uint32, uint32) {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Dir(path), &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino, st.Mode & 0o777, st.Uid
	}
	ino, mode, uid := inode()
	if mode != 0o711 || int(uid) != os.Geteuid() { // or its user could fill the node's memory with files
		t.Fatalf("mode %o uid %d", mode, uid)
	}
	for range 2 {
		for i, o := range lease.Owners(l.Grants) {
			status, n, reason, f := client(t, path, 1, uint32(i))
			if status != 0 || n != 2 || f == nil {
				t.Fatal(status, n, reason)
			}
			got, _ := io.ReadAll(f)
			f.Close()
			if string(got) != "I am "+o+"\n" {
				t.Fatalf("owner %d: %q", i, got)
			}
		}
		s.restart()
		if again, _, _ := inode(); again != ino {
			t.Fatal("the directory is another one")
		}
	}
	if status, n, reason, f := client(t, path, 1, 2); status != 3 || n != 2 || f != nil || reason == "" {
		t.Fatal(status, reason)
	}
	if status, _, reason, _ := client(t, path, 9, 0); status != 3 || reason == "" {
		t.Fatal(status, reason)
	}
	a.set(func() { a.down = true })
	b.set(func() { b.down = true })
	if status, _, reason, _ := client(t, path, 1, 0); status != 6 || !strings.Contains(reason, "is down") {
		t.Fatal(status, reason)
	}
}

// Half-open connections of one lease hold up neither others of it nor another's.
func TestFlood(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l, m := s.must(ask("1", 50)), s.must(ask("2", 50))
	for range leasesock.MaxOpen / 2 {
		c, err := net.Dial("unix", s.Socket(l.ID))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	for _, id := range []string{l.ID, m.ID} {
		start := time.Now()
		status, _, reason, f := client(t, s.Socket(id), 1, 0)
		if status != 0 || time.Since(start) > 4*time.Second { // half-open ones may stay for 5 s
			t.Fatal(status, reason, time.Since(start))
		}
		f.Close()
	}
}
