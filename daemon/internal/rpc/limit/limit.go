// Package limit bounds the connections of a listener. Those that have not shown
// yet who they are ("pending") share few places, and the oldest of the peer that
// has most makes room for the newest: a flood then costs its own connections, and
// an honest peer, which needs milliseconds, gets through. Those that have ("trusted") are bounded for
// each peer by the name it has shown, and the newest is refused.
//
// Flow: Accept -> Add (pending) -> handshake -> Trust -> ... -> Close. One mutex
// guards the table; nothing is closed while it is held.
package limit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
)

// Bounds of a Table. Zero means the default in brackets.
type Bounds struct {
	Pending    int // connections that have not shown who they are, all together (1024)
	PendingKey int // the same of one peer (128)
	Trusted    int // connections that have, all together (4096)
	TrustedKey int // the same of one name (64)
}

// Table counts connections by peer: an address or a user while they are pending,
// then what Trust was told.
type Table struct {
	b       Bounds
	dropped atomic.Uint64

	mu      sync.Mutex
	oldest  *list.List            // of *Conn, pending, oldest first
	peers   map[string]*list.List // of *Conn, pending, oldest first
	trusted int
	names   map[string]int // trusted
}

// New makes a table.
func New(b Bounds) *Table {
	def := func(n *int, d int) {
		if *n <= 0 {
			*n = d
		}
	}
	def(&b.Pending, 1024)
	def(&b.PendingKey, 128)
	def(&b.Trusted, 4096)
	def(&b.TrustedKey, 64)
	return &Table{b: b, oldest: list.New(), peers: map[string]*list.List{}, names: map[string]int{}}
}

// Dropped is how many connections were closed or refused for want of room.
func (t *Table) Dropped() uint64 { return t.dropped.Load() }

// Conn is a counted connection. Its place is free again when it is closed.
type Conn struct {
	net.Conn
	t    *Table
	key  string // while pending
	once sync.Once

	// Guarded by t.mu. all and mine are set while the connection is pending.
	all, mine *list.Element
	trusted   bool
	name      string // that was trusted
	gone      bool
}

// Add counts a connection of peer key as pending, and closes a pending one where
// there is no place left.
func (t *Table) Add(c net.Conn, key string) *Conn {
	out := &Conn{Conn: c, t: t, key: key}
	var victim *Conn
	t.mu.Lock()
	p := t.peers[key]
	if p == nil {
		p = list.New()
		t.peers[key] = p
	}
	switch {
	case p.Len() >= t.b.PendingKey:
		victim = p.Front().Value.(*Conn)
	case t.oldest.Len() >= t.b.Pending:
		victim = t.fullest()
	}
	if victim != nil {
		t.forget(victim)
		// That drops a peer without connections, which may be this one.
		t.peers[key] = p
	}
	out.all, out.mine = t.oldest.PushBack(out), p.PushBack(out)
	t.mu.Unlock()
	if victim != nil {
		t.dropped.Add(1)
		_ = victim.Close() // best effort: the place is free either way
	}
	return out
}

// fullest is the oldest pending connection of the peer that has most, or of one of
// those: a crowd at few addresses makes its own room. It needs t.mu.
func (t *Table) fullest() *Conn {
	most := 0
	for _, p := range t.peers {
		most = max(most, p.Len())
	}
	for e := t.oldest.Front(); e != nil; e = e.Next() {
		if c := e.Value.(*Conn); t.peers[c.key].Len() == most {
			return c
		}
	}
	return nil // never: Pending is at least 1
}

// Trust says that the peer has shown who it is: name, of which there may be so
// many. With false there are too many of it, or the connection has been closed to
// make room.
func (c *Conn) Trust(name string) bool {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.gone {
		return false
	}
	if c.trusted {
		return true
	}
	if t.trusted >= t.b.Trusted || t.names[name] >= t.b.TrustedKey {
		t.dropped.Add(1)
		return false
	}
	c.unpend()
	c.trusted, c.name = true, name
	t.names[name]++
	t.trusted++
	return true
}

// Close closes the connection and gives its place back.
func (c *Conn) Close() error {
	c.t.Remove(c)
	var err error
	c.once.Do(func() { err = c.Conn.Close() })
	return err
}

// Remove gives the place of c back without closing it: somebody else has taken
// the connection over.
func (t *Table) Remove(c *Conn) {
	t.mu.Lock()
	t.forget(c)
	t.mu.Unlock()
}

// forget needs t.mu.
func (t *Table) forget(c *Conn) {
	if c.gone {
		return
	}
	c.gone = true
	c.unpend()
	if c.trusted {
		t.trusted--
		if t.names[c.name]--; t.names[c.name] == 0 {
			delete(t.names, c.name)
		}
	}
}

// unpend needs t.mu.
func (c *Conn) unpend() {
	if c.all == nil {
		return
	}
	p := c.t.peers[c.key]
	c.t.oldest.Remove(c.all)
	p.Remove(c.mine)
	c.all, c.mine = nil, nil
	if p.Len() == 0 {
		delete(c.t.peers, c.key)
	}
}

// Listener counts what l accepts, by the key that keyOf gives.
func (t *Table) Listener(l net.Listener, keyOf func(net.Conn) string) net.Listener {
	return &listener{Listener: l, t: t, keyOf: keyOf}
}

type listener struct {
	net.Listener
	t     *Table
	keyOf func(net.Conn) string
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.t.Add(c, l.keyOf(c)), nil
}

// Address is the key of a TCP connection of a stranger: the address, and of IPv6
// the first 64 bits, since whoever has one of those has all.
func Address(c net.Conn) string {
	a, err := addressOf(c)
	if err != nil {
		return c.RemoteAddr().String()
	}
	if a.Is6() {
		if p, err := a.WithZone("").Prefix(64); err == nil {
			return p.String()
		}
	}
	return a.String()
}

// Host is the name of a TCP connection that is to be trusted: the whole address,
// since a cluster's nodes share those 64 bits.
func Host(c net.Conn) string {
	a, err := addressOf(c)
	if err != nil {
		return c.RemoteAddr().String()
	}
	return a.String()
}

func addressOf(c net.Conn) (netip.Addr, error) {
	ap, err := netip.ParseAddrPort(c.RemoteAddr().String())
	return ap.Addr().Unmap(), err
}
