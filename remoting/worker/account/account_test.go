package account

import (
	"bytes"
	"errors"
	"math/rand"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
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
		t.Fatalf("rest: %v", rest.Caps())
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

func serve(s *Session) *Remote {
	return NewRemote(func(req, reply []byte) (int, error) {
		b, err := Serve(s, append([]byte(nil), req...), nil)
		return copy(reply, b), err
	}, func(err error) { panic(err) })
}

func TestRemote(t *testing.T) {
	b := NewBook([]uint64{64 << 20})
	l, _ := b.Grant(0)
	s, _ := l.Open(Client{PID: 77, Name: "prog"})
	r := serve(s)
	if !r.Reserve(0, 60<<20) || r.Reserve(0, 6<<20) {
		t.Fatal("reserve")
	}
	r.Release(0, 20<<20)
	if !r.Overhead(0, 10<<20, false) || r.Overhead(0, 30<<20, false) || !r.Overhead(0, 30<<20, true) {
		t.Fatal("overhead")
	}
	i := r.Info(0)
	if i.Total != 64<<20 || i.Used != 70<<20 || i.Free() != 0 || i.Sessions != 1 {
		t.Fatalf("info %+v", i)
	}
	ps := r.Processes(0)
	if len(ps) != 1 || ps[0].PID != 77 || ps[0].Name != "prog" || ps[0].Used != 70<<20 {
		t.Fatalf("processes %+v", ps)
	}
}

func FuzzControl(f *testing.F) {
	for op := uint32(0); op < 8; op++ {
		var e wire.Encoder
		e.U32(op)
		e.U32(0)
		e.U64(1 << 21)
		e.U32(op & 1)
		e.U32(0)
		f.Add(append([]byte(nil), e.Buf()...))
	}
	f.Add(bytes.Repeat([]byte{0xff}, requestSize))
	f.Fuzz(func(t *testing.T, req []byte) {
		b := NewBook([]uint64{1 << 30, 1 << 30})
		l, _ := b.Grant(0)
		s, _ := l.Open(Client{PID: 1, Name: "x"})
		other, _ := l.Open(Client{PID: 2})
		other.Reserve(0, 1<<29)
		before := other.Info(1).Used
		for ; len(req) >= requestSize; req = req[requestSize:] {
			_, _ = Serve(s, req[:requestSize], nil)
		}
		_, _ = Serve(s, req, nil)
		s.Close()
		if got := other.Info(0); got.Used != 1<<29 || got.Sessions != 1 {
			t.Fatalf("another session's account changed: %+v", got)
		}
		if other.Info(1).Used != before {
			t.Fatal("drift")
		}
	})
}
