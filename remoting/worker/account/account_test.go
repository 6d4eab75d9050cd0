package account

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/internal/process"
)

func TestGrantsNeverAddUpToMore(t *testing.T) {
	b := NewBook([]uint64{100 << 20, 60 << 20})
	l, err := b.Grant(40 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Grant(40 << 20); !errors.Is(err, ErrNoMemory) {
		t.Fatalf("the second device has only 20 MiB left: %v", err)
	}
	rest, err := b.Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	if rest.Cap(0) != 60<<20 || rest.Cap(1) != 20<<20 {
		t.Fatalf("rest: %d, %d", rest.Cap(0), rest.Cap(1))
	}
	s, err := l.Open(Client{PID: 1})
	if err != nil {
		t.Fatal(err)
	}
	if !s.Reserve(0, 40<<20) || s.Reserve(0, 1) {
		t.Fatal("the cap is 40 MiB, not more and not less")
	}
	l.End()
	if _, err := b.Grant(Granule); err == nil {
		t.Fatal("a lease that ended is granted again while its session lives")
	}
	if _, err := l.Open(Client{}); err == nil {
		t.Fatal("a session opened on an ended lease")
	}
	s.Close()
	s.Close()
	if _, err := b.Grant(40 << 20); err != nil {
		t.Fatal(err)
	}
}

// Random operations of several sessions, against a model that only adds.
func TestAccountAgainstModel(t *testing.T) {
	const cap = 1 << 30
	n := 1_000_000
	if testing.Short() {
		n = 100_000
	}
	r := rand.New(rand.NewSource(1))
	b := NewBook([]uint64{cap})
	l, err := b.Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	type model struct {
		s          *Session
		held, over uint64
	}
	var ms []*model
	open := func() {
		s, err := l.Open(Client{PID: uint32(len(ms))})
		if err != nil {
			t.Fatal(err)
		}
		ms = append(ms, &model{s: s})
	}
	for range 4 {
		open()
	}
	sum := func() (n uint64) {
		for _, m := range ms {
			n += m.held + m.over
		}
		return n
	}
	for i := range n {
		k := r.Intn(len(ms))
		m := ms[k]
		switch op := r.Intn(100); {
		case op < 50:
			size := uint64(r.Intn(64)+1) * Granule
			if op == 0 {
				size = ^uint64(0) - uint64(r.Intn(1<<20))
			}
			fits := size <= cap && sum() <= cap-size
			if got := m.s.Reserve(0, size); got != fits {
				t.Fatalf("op %d: reserve %d of %d used: %v", i, size, sum(), got)
			} else if got {
				m.held += size
			}
		case op < 94:
			size := min(m.held, uint64(r.Intn(64))*Granule)
			m.s.Release(0, size)
			m.held -= size
		case op < 98:
			size := uint64(r.Intn(32)) * Granule / 3
			fits := size <= m.over || sum()-m.over+size <= cap
			if got := m.s.Overhead(0, size, false); got != fits {
				t.Fatalf("op %d: overhead %d: %v", i, size, got)
			} else if got {
				m.over = size
			}
		default:
			m.s.Close()
			ms = append(ms[:k], ms[k+1:]...)
			open()
		}
		if got := ms[0].s.Info(0).Used; got != sum() || got > cap {
			t.Fatalf("op %d: account says %d, model %d, cap %d", i, got, sum(), cap)
		}
	}
	for _, m := range ms {
		m.s.Close()
	}
	s, _ := l.Open(Client{})
	if got := s.Info(0).Used; got != 0 {
		t.Fatalf("%d bytes of drift", got)
	}
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "churn" {
		churn(os.Args[2:])
		return
	}
	os.Exit(m.Run())
}

// churn is a session process: it opens its slot of the account on descriptor 3 and
// reserves and frees until it is killed, or so many times.
func churn(args []string) {
	slot, _ := strconv.Atoi(args[0])
	n, _ := strconv.Atoi(args[1])
	a, err := FromFD(3, nil)
	if err != nil {
		panic(err)
	}
	s, err := a.Session(slot)
	if err != nil {
		panic(err)
	}
	fmt.Println("open")
	go func() { // not longer than the test
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	r := rand.New(rand.NewSource(int64(os.Getpid())))
	held := uint64(0)
	for i := 0; n == 0 || i < n; i++ {
		switch size := uint64(r.Intn(48)+1) * Granule; {
		case r.Intn(20) == 0:
			s.Overhead(0, size/3, false)
		case r.Intn(2) == 0 && s.Reserve(0, size):
			held += size
		default:
			size = min(size, held)
			s.Release(0, size)
			held -= size
		}
		s.Counts().Calls++
		if i := s.Info(0); i.Used > i.Total {
			fmt.Println("over", i.Used-i.Total)
			os.Exit(1)
		}
	}
	s.Release(0, held)
	s.Overhead(0, 0, false)
	fmt.Println("done", s.Counts().Calls)
	if n > 0 {
		select {}
	}
}

type churner struct {
	*exec.Cmd
	slot int
	in   *os.File
	out  *bufio.Scanner
}

func startChurn(t *testing.T, a *File, n int) *churner {
	t.Helper()
	slot, err := a.Claim(Client{PID: 5, Name: "churn"}, 1, time.Now().UnixNano())
	if err != nil {
		t.Fatal(err)
	}
	c := &churner{Cmd: exec.Command("/proc/self/exe", "churn", strconv.Itoa(slot), strconv.Itoa(n)), slot: slot}
	c.ExtraFiles = []*os.File{a.f}
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var r *os.File
	if r, c.in, err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	c.Stdin = r
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	start, err := process.Start(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Bind(slot, c.Process.Pid, start); err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	if !c.out.Scan() || c.out.Text() != "open" {
		t.Fatalf("session process: %q", c.out.Text())
	}
	return c
}

// Processes reserve and free against each other and are killed in the middle of
// it, while the starter is there and while it is not: never over, and no drift.
func TestKilled(t *testing.T) {
	const total = 256 << 20
	path := filepath.Join(t.TempDir(), "account")
	a, err := Create(path, []uint64{total})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	rounds := 150
	if testing.Short() {
		rounds = 20
	}
	r := rand.New(rand.NewSource(6))
	check := func() Use {
		u, err := a.Use(0)
		if err != nil {
			t.Fatal(err)
		}
		if u.Peak > total {
			t.Fatalf("over the cap: %+v", u)
		}
		return u
	}
	var live []*churner
	for range rounds {
		for len(live) < 4 {
			live = append(live, startChurn(t, a, 0))
		}
		for range r.Intn(2000) {
			check()
		}
		k := r.Intn(len(live))
		c := live[k]
		live = append(live[:k], live[k+1:]...)
		_ = c.Process.Kill()
		_ = c.Wait()
		c.in.Close()
		if err := a.Free(c.slot); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range live {
		_ = c.Process.Kill()
		_ = c.Wait()
		c.in.Close()
	}
	// Nobody frees the slots of these: the next session finds them dead.
	before := len(live)
	c := startChurn(t, a, 20000)
	if !c.out.Scan() || c.out.Text() != "done 20000" {
		t.Fatalf("session process: %q", c.out.Text())
	}
	all, err := a.Sessions()
	if err != nil || len(all) != before+1 {
		t.Fatalf("%d slots: %v", len(all), err)
	}
	slot, err := a.Slot(c.slot)
	if err != nil || slot.Counts.Calls != 20000 || slot.Use[0].Used != 0 || slot.Use[0].Peak == 0 || slot.Client.Name != "churn" || slot.PID != c.Process.Pid {
		t.Fatalf("%+v %v", slot, err)
	}
	c.in.Close()
	_ = c.Wait()
	for _, s := range all {
		_ = a.Free(s.N)
	}
	if u := check(); u.Used != 0 || u.Overhead != 0 {
		t.Fatalf("%d bytes of drift", u.Used)
	}
}

// A session that finds no room takes what dead ones held.
func TestDeadAreBuried(t *testing.T) {
	const total = 64 << 20
	a, err := CreateAnonymous([]uint64{total})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	open := func() *Session {
		slot, err := a.Claim(Client{}, 1, 0)
		if err != nil {
			t.Fatal(err)
		}
		s, err := a.again(slot)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	dead, other := open(), open()
	if !dead.Reserve(0, total) || other.Reserve(0, Granule) {
		t.Fatal("the cap does not hold")
	}
	dead.file.Close() // as the kernel does it
	if !other.Reserve(0, total) {
		t.Fatal("what a dead session held is not to be had")
	}
	if i := other.Info(0); i.Used != total || i.Sessions != 1 {
		t.Fatalf("%+v", i)
	}
}

// A neighbour that is stopped in the middle of a decision holds up its own lease; who
// leaves meanwhile can still say why.
func TestReasonDoesNotWait(t *testing.T) {
	a, err := CreateAnonymous([]uint64{64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var all [2]*Session
	for i := range all {
		slot, err := a.Claim(Client{}, 1, 0)
		if err != nil {
			t.Fatal(err)
		}
		if all[i], err = a.again(slot); err != nil {
			t.Fatal(err)
		}
	}
	if !all[0].enter() { // and is stopped here
		t.Fatal("no lock")
	}
	reserved := make(chan bool)
	go func() { reserved <- all[1].Reserve(0, Granule) }()
	for all[1].mu.TryLock() {
		all[1].mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	said := make(chan bool)
	go func() { all[1].SetReason("client closed"); close(said) }()
	select {
	case <-said:
	case <-time.After(2 * time.Second):
		t.Error("a session that leaves waits for a stopped neighbour")
	}
	all[0].leave()
	if !<-reserved {
		t.Error("not reserved")
	}
	<-said
	if s, err := a.Slot(all[1].slot); err != nil || s.Reason != "client closed" {
		t.Errorf("%+v %v", s, err)
	}
}

// Threads of several processes at once: the sum never passes the cap.
func TestRace(t *testing.T) {
	l, err := NewBook([]uint64{64 << 20}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 3 {
		s, err := l.Open(Client{})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			wg.Go(func() {
				for range 3000 {
					if s.Reserve(0, 16<<20) {
						if i := s.Info(0); i.Used > i.Total {
							t.Errorf("%d over", i.Used-i.Total)
						}
						s.Release(0, 16<<20)
					}
				}
			})
		}
		defer s.Close()
	}
	wg.Wait()
}

// Cuts and the link are read as they were noted, within bounds whatever a session has written, and are not the next session's of that slot.
func TestCuts(t *testing.T) {
	l, err := NewBook([]uint64{1 << 30}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	want := func(n uint64, d time.Duration) {
		t.Helper()
		if s, err := l.file.Slot(0); err != nil || s.Cuts != n || s.CutTime != d {
			t.Errorf("%d cuts of %v, error %v; want %d of %v", s.Cuts, s.CutTime, err, n, d)
		}
	}
	for range 2 {
		s, err := l.Open(Client{PID: 1})
		if err != nil {
			t.Fatal(err)
		}
		want(0, 0)
		if slot, err := l.file.Slot(0); err != nil || slot.Cut != 0 {
			t.Errorf("a cut of the session before: %v, %v", slot.Cut, err)
		}
		s.Cuts().Add(2 * time.Second)
		s.Cuts().Add(time.Second)
		want(2, 3*time.Second)
		s.Cuts().Add(-4 * time.Second)
		want(3, 1<<62)
		for _, c := range []struct{ noted, read time.Duration }{{5, 5}, {0, 0}, {-1, 1 << 62}} {
			s.Cut(c.noted)
			if slot, err := l.file.Slot(0); err != nil || slot.Cut != c.read {
				t.Errorf("cut since %v, error %v; want %v", slot.Cut, err, c.read)
			}
		}
		if slot, err := l.file.Slot(0); err != nil || slot.RoundTrip != 0 || slot.Resent != 0 {
			t.Errorf("a link of the session before: %+v, %v", slot, err)
		}
		if slot, err := l.file.Slot(0); err != nil || slot.Compress != (Compress{}) {
			t.Errorf("compressed bytes of the session before: %+v, %v", slot.Compress, err)
		}
		*s.Compress() = Compress{Bytes: 1 << 63, Sent: 5}
		if slot, err := l.file.Slot(0); err != nil || slot.Compress != (Compress{Bytes: 1 << 63, Sent: 5}) {
			t.Errorf("compressed bytes: %+v, %v", slot.Compress, err)
		}
		for _, d := range []time.Duration{time.Millisecond, -1} {
			s.Link().Note(d, 7)
			if slot, err := l.file.Slot(0); err != nil || slot.RoundTrip != time.Duration(min(uint64(d), 1<<62)) || slot.Resent != 7 {
				t.Errorf("round trip of %v: %v, %d sent again, %v", d, slot.RoundTrip, slot.Resent, err)
			}
		}
		s.Close()
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "account")
	if _, err := Create(path, make([]uint64, MaxDevices+1)); err == nil {
		t.Error("17 devices")
	}
	if _, err := Create(path, []uint64{1 << 60}); err == nil {
		t.Error("an exabyte")
	}
	a, err := Create(path, []uint64{1 << 30, 2 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := Create(path, []uint64{1 << 30}); !errors.Is(err, os.ErrExist) {
		t.Errorf("made again: %v", err)
	}
	slot, _ := a.Claim(Client{PID: 9, Name: strings.Repeat("n", 99)}, 2, 77)
	s, err := a.again(slot)
	if err != nil {
		t.Fatal(err)
	}
	s.Reserve(1, 10<<20)
	s.Overhead(1, 3<<20, false)
	s.Release(1, 4<<20)
	s.SetReason(strings.Repeat("why ", 99))
	// What bounds a lease is not read from where its sessions can write it.
	a.layout().cap[1].Store(1 << 40)
	if _, err := Open(path, []uint64{1 << 30}); err == nil || !strings.Contains(err.Error(), "for 2 devices, and the lease has 1") {
		t.Errorf("an account of another lease: %v", err)
	}
	b, err := Open(path, []uint64{1 << 30, 2 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	got, err := b.Slot(slot)
	if err != nil || b.Cap(1) != 2<<30 || got.Kind != 2 || got.Opened != 77 || got.Client.PID != 9 || len(got.Client.Name) != 39 || len(got.Reason) != 256 ||
		got.Use[1] != (Use{Granted: 2 << 30, Used: 9 << 20, Overhead: 3 << 20, Peak: 13 << 20}) {
		t.Errorf("%+v %v", got, err)
	}
	// A session that cuts the file short harms its own lease only.
	if err := unix.Ftruncate(b.FD(), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Sessions(); !errors.Is(err, ErrFile) {
		t.Errorf("a damaged file: %v", err)
	}
	if _, err := a.Use(0); !errors.Is(err, ErrFile) {
		t.Errorf("a damaged file: %v", err)
	}
	if _, err := Open(path, nil); !errors.Is(err, ErrFile) {
		t.Errorf("a damaged file: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, nil); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Errorf("a file that others can read: %v", err)
	}
}

// Whatever a session has written into the file, a reader gets numbers in bounds.
func FuzzFile(f *testing.F) {
	f.Add(0, []byte{1})
	f.Add(int(unsafe.Offsetof(accountFile{}.high)), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Add(headerSize+int(unsafe.Offsetof(slotRecord{}.devices)), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	a, err := CreateAnonymous([]uint64{1 << 30})
	if err != nil {
		f.Fatal(err)
	}
	first, err := a.Claim(Client{}, 1, 0)
	if err != nil {
		f.Fatal(err)
	}
	clean := append([]byte(nil), a.mem...)
	f.Fuzz(func(t *testing.T, at int, b []byte) {
		copy(a.mem, clean)
		if at >= 0 && at < fileSize {
			copy(a.mem[at:], b)
		}
		all, err := a.Sessions()
		if err != nil || len(all) > MaxSlots {
			t.Fatal(len(all), err)
		}
		if u, err := a.Use(0); err != nil || u.Used > MaxSlots*2*maxBytes || u.Granted != 1<<30 {
			t.Fatal(u, err)
		}
		if fd, err := unix.FcntlInt(a.f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			if c, err := FromFD(fd, nil); err == nil {
				c.Close()
			}
		}
		_ = a.Free(first)
	})
}

func BenchmarkReserve(b *testing.B) {
	l, _ := NewBook([]uint64{1 << 30}).Grant(0)
	s, err := l.Open(Client{})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	for b.Loop() {
		s.Reserve(0, Granule)
		s.Release(0, Granule)
	}
}

// TestInherit: what an ended session had lent stays charged until those who have it open are charged for it, and they need no
// room for it, whoever else wants some.
func TestInherit(t *testing.T) {
	b := NewBook([]uint64{100 << 20})
	l, err := b.Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	open := func(pid uint32) *Session {
		t.Helper()
		s, err := l.Open(Client{PID: pid})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	left := func(s *Session, want uint64) {
		t.Helper()
		if i := s.Info(0); i.Total-i.Used != want<<20 {
			t.Errorf("%d MiB are left, not %d", (i.Total-i.Used)>>20, want)
		}
	}
	maker, user, second, other := open(1), open(2), open(3), open(4)
	life := user.Life(maker.slot)
	if !maker.Reserve(0, 70<<20) {
		t.Fatal("70 of 100 MiB do not fit")
	}
	user.Borrow(1)
	second.Borrow(1)
	maker.Lend(0, 60<<20)
	maker.Lend(0, -10<<20)
	maker.Lend(0, 10<<20)
	if user.Inherit(0, maker.slot, life, 60<<20) {
		t.Error("inherited from a session that is there")
	}
	maker.Close()
	left(other, 40) // 10 of the 70 were nobody else's
	if other.Reserve(0, 41<<20) {
		t.Error("others get what is still open")
	}
	if !other.Reserve(0, 40<<20) {
		t.Error("others do not get what is free")
	}
	if next := open(5); next.slot == maker.slot {
		t.Error("a slot that counts with an estate is given away")
	}
	if !user.Inherit(0, maker.slot, life, 60<<20) {
		t.Error("an heir needs room")
	}
	left(other, 0)
	user.Borrow(-1)
	if second.Inherit(0, maker.slot, life, 60<<20) {
		t.Error("what has been inherited is charged again without room")
	}
	other.Release(0, 40<<20)
	user.Release(0, 60<<20)
	left(other, 100)
	if !second.Inherit(0, maker.slot, life, 60<<20) {
		t.Error("no room for a second heir where there is some")
	}
	if next := open(6); next.slot != maker.slot {
		t.Errorf("slot %d is not given away again", maker.slot)
	} else if !user.Inherit(0, next.slot, life, 30<<20) || user.Inherit(0, next.slot, life, 30<<20) {
		t.Error("with another session in the slot, room decides")
	}
	for _, bad := range []int{-1, MaxSlots, user.slot} {
		if user.Inherit(0, bad, life, 1) {
			t.Errorf("inherited from slot %d", bad)
		}
	}
	if user.Inherit(0, maker.slot, life, 1<<60) || user.Inherit(1, maker.slot, life, 1) {
		t.Error("inherited what no device has")
	}
}

// TestEstateEnds: memory that no session inherits is free once no session can, or after a while; a damaged time does not keep it.
func TestEstateEnds(t *testing.T) {
	l, err := NewBook([]uint64{100 << 20}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	maker, _ := l.Open(Client{PID: 1})
	other, err := l.Open(Client{PID: 2})
	if err != nil || !maker.Reserve(0, 100<<20) {
		t.Fatal(err)
	}
	maker.Lend(0, 100<<20)
	other.Borrow(1)
	maker.Close()
	if other.Reserve(0, 1<<20) {
		t.Error("an estate does not count")
	}
	other.Borrow(-1)
	if !other.Reserve(0, 1<<20) {
		t.Error("an estate counts although nobody has borrowed anything")
	}
	other.Borrow(1)
	for _, ended := range []int64{int64(boottime.Now() - estateTime), int64(boottime.Now() + time.Hour), -1} {
		other.file.rec(maker.slot).ended.Store(uint64(ended))
		if !other.Reserve(0, 1<<20) {
			t.Errorf("an estate of %d counts", ended)
		}
	}
}

// What a slot holds counts no more once its starter knows that the process has ended, and nobody else gets the slot before it is free.
func TestEnded(t *testing.T) {
	a, err := CreateAnonymous([]uint64{4 * Granule})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	claim := func() int {
		t.Helper()
		slot, err := a.Claim(Client{PID: 1, Name: "one"}, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return slot
	}
	one := claim()
	s, err := a.again(one)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.Reserve(0, 3*Granule) {
		t.Fatal("no room")
	}
	if err := a.Ended(one); err != nil {
		t.Fatal(err)
	}
	if u, err := a.Use(0); err != nil || u.Used != 0 {
		t.Errorf("%+v, %v", u, err)
	}
	if two := claim(); two == one {
		t.Error("the slot was given away")
	}
	if err := a.Free(one); err != nil {
		t.Fatal(err)
	}
	if three := claim(); three != one {
		t.Errorf("slot %d", three)
	}
}
