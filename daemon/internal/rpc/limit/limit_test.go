package limit

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"
)

// fake is a connection that only knows whether it is closed.
type fake struct {
	net.Conn
	closed chan struct{}
}

func newFake() *fake         { return &fake{closed: make(chan struct{})} }
func (f *fake) Close() error { close(f.closed); return nil }
func (f *fake) open() bool {
	select {
	case <-f.closed:
		return false
	default:
		return true
	}
}

func TestTable(t *testing.T) {
	tab := New(Bounds{Pending: 4, PendingKey: 2, Trusted: 3, TrustedKey: 2})
	a1, a2, a3 := newFake(), newFake(), newFake()
	c1, c2 := tab.Add(a1, "a"), tab.Add(a2, "a")
	for range 2 { // once more changes nothing
		if !c2.Trust("a") {
			t.Fatal("not trusted")
		}
	}
	tab.Add(a3, "a")
	a4 := newFake()
	c4 := tab.Add(a4, "a") // a has two pending: the oldest goes
	if a1.open() || !a2.open() || !a3.open() || !a4.open() || c1.Trust("a") {
		t.Error("not the oldest pending one of the peer was closed")
	}
	b1, b2 := newFake(), newFake()
	tab.Add(b1, "b")
	tab.Add(b2, "b")
	d := newFake()
	cd := tab.Add(d, "d") // four pending: the oldest of all goes
	if a3.open() || !a4.open() || !b1.open() || !b2.open() || !d.open() {
		t.Error("not the oldest of all was closed")
	}
	if !c4.Trust("a") {
		t.Error("second of a refused")
	}
	a5 := newFake()
	c5 := tab.Add(a5, "a")
	if c5.Trust("a") {
		t.Error("third of a trusted")
	}
	_ = c2.Close()
	if !c5.Trust("a") {
		t.Error("the place was not given back")
	}
	if !cd.Trust("d") {
		t.Error("third of all refused")
	}
	if tab.Dropped() != 3 {
		t.Errorf("%d dropped", tab.Dropped())
	}
	for _, c := range []*Conn{c1, c2, c4, c5, cd} {
		_ = c.Close()
		_ = c.Close()
	}
	if tab.trusted != 0 || len(tab.peers) != 1 || len(tab.names) != 0 {
		t.Errorf("left: %d trusted, %d peers", tab.trusted, len(tab.peers))
	}
}

func TestTableAtOnce(t *testing.T) {
	tab := New(Bounds{Pending: 8, PendingKey: 4, Trusted: 8, TrustedKey: 4})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 500 {
				c := tab.Add(newFake(), string(rune('a'+(i+w)%3)))
				if i%2 == 0 {
					c.Trust(c.key)
				}
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	if tab.trusted != 0 || len(tab.peers) != 0 || len(tab.names) != 0 || tab.oldest.Len() != 0 {
		t.Errorf("left: %d trusted, %d peers, %d pending", tab.trusted, len(tab.peers), tab.oldest.Len())
	}
}

func TestReports(t *testing.T) {
	r := Reports{PerSecond: 2}
	n := 0
	for range 10 {
		if _, ok := r.Pass(); ok {
			n++
		}
	}
	if n < 2 || n > 4 {
		t.Errorf("%d of 10 pass", n)
	}
	r.since = time.Now().Add(-2 * time.Second)
	if skipped, ok := r.Pass(); !ok || skipped == 0 {
		t.Errorf("%d %v", skipped, ok)
	}
}

func TestSources(t *testing.T) {
	s := Sources{PerSecond: 2}
	pass := func(source string, n int) (passed int) {
		for range n {
			if _, ok := s.Pass(source); ok {
				passed++
			}
		}
		return passed
	}
	if n := pass("a", 100); n < 2 || n > 6 {
		t.Errorf("%d of 100 pass", n)
	}
	if n := pass("b", 1); n != 1 {
		t.Error("one source is held up by another")
	}
	s.of["a"].since = time.Now().Add(-2 * time.Second)
	if skipped, ok := s.Pass("a"); !ok || skipped < 90 {
		t.Errorf("%d %v", skipped, ok)
	}
	for i := range 2 * maxSources {
		s.Pass(strconv.Itoa(i))
	}
	if len(s.of) > maxSources+1 {
		t.Errorf("%d sources are remembered", len(s.of))
	}
	for _, r := range s.of {
		r.since = time.Now().Add(-time.Hour)
	}
	if s.Pass("new"); len(s.of) != 1 {
		t.Errorf("%d sources are remembered, and all but one have been quiet", len(s.of))
	}
}

type addr string

func (a addr) Network() string { return "tcp" }
func (a addr) String() string  { return string(a) }

type from struct {
	net.Conn
	a addr
}

func (f from) RemoteAddr() net.Addr { return f.a }

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1:5": "10.0.0.1", "[::ffff:10.0.0.1]:5": "10.0.0.1",
		"[2001:db8::1:2:3:4]:5": "2001:db8::/64", "[fe80::1%eth0]:5": "fe80::/64", "pipe": "pipe",
	} {
		if got := Address(from{a: addr(in)}); got != want {
			t.Errorf("%s: %s, not %s", in, got, want)
		}
	}
}

// A cluster's nodes share the 64 bits of an IPv6 network, and each has its places.
func TestNodesOfOneNetwork(t *testing.T) {
	tab := New(Bounds{})
	for i := range 300 {
		c := from{newFake(), addr(fmt.Sprintf("[2001:db8::%x]:7", i+1))}
		if !tab.Add(c, Address(c)).Trust(Host(c)) {
			t.Fatalf("node %d is refused", i+1)
		}
	}
}

// Many addresses that keep all places full cost one that is honest nothing.
func TestFullest(t *testing.T) {
	tab := New(Bounds{Pending: 64, PendingKey: 8})
	honest := newFake()
	for i := range 1000 {
		if i == 100 {
			tab.Add(honest, "honest")
		}
		tab.Add(newFake(), fmt.Sprint("bad", i%16))
	}
	if !honest.open() {
		t.Error("the only connection of its address was closed for others'")
	}
	if n := tab.oldest.Len(); n != 64 {
		t.Errorf("%d pending, not 64", n)
	}
}
