// Package account is the memory account of leases: who holds how much of which
// device, with a cap that is never passed. Sizes are bytes.
//
// One Book covers the devices of a worker; a Lease is a part of it; a Session
// belongs to a lease and to one process. All of it is guarded by the book's
// lock, so that a reservation is decided against everything at once.
package account

import (
	"errors"
	"fmt"
	"sort"
	"sync"
)

// Granule is the unit of device memory in bytes.
const Granule = 2 << 20

// RoundUp rounds a size up to whole granules. It saturates.
func RoundUp(n uint64) uint64 {
	if n > ^uint64(0)-Granule {
		return ^uint64(0) &^ (Granule - 1)
	}
	return (n + Granule - 1) &^ (Granule - 1)
}

// ErrNoMemory says that a lease cannot be granted.
var ErrNoMemory = errors.New("not enough memory")

// Book holds the leases of one worker.
type Book struct {
	mu      sync.Mutex
	offered []uint64 // per device
	granted []uint64
	leases  map[*Lease]bool
}

// NewBook opens a book that offers so many bytes of each device.
func NewBook(offered []uint64) *Book {
	b := &Book{offered: append([]uint64(nil), offered...), granted: make([]uint64, len(offered)), leases: make(map[*Lease]bool)}
	return b
}

// Devices is the number of devices.
func (b *Book) Devices() int { return len(b.offered) }

// Grant makes a lease of wish bytes per device, 0 for all that is left.
func (b *Book) Grant(wish uint64) (*Lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := &Lease{book: b, cap: make([]uint64, len(b.offered)), used: make([]uint64, len(b.offered)), sessions: make(map[*Session]bool)}
	for d := range b.offered {
		left := b.offered[d] - b.granted[d]
		n := wish
		if n == 0 {
			n = left
		}
		if n > left || n < Granule {
			return nil, fmt.Errorf("device %d: %d MiB asked, %d MiB of %d left to grant: %w", d, wish>>20, left>>20, b.offered[d]>>20, ErrNoMemory)
		}
		l.cap[d] = n
	}
	for d := range b.offered {
		b.granted[d] += l.cap[d]
	}
	b.leases[l] = true
	return l, nil
}

// Lease is a grant on every device of the book.
type Lease struct {
	book     *Book
	cap      []uint64
	used     []uint64
	sessions map[*Session]bool
	ended    bool
}

// Cap is what the lease grants of a device.
func (l *Lease) Cap(dev int) uint64 { return l.cap[dev] }

// Caps is Cap for all devices.
func (l *Lease) Caps() []uint64 { return append([]uint64(nil), l.cap...) }

// End takes the lease back. What its sessions still hold stays granted until
// they have closed.
func (l *Lease) End() {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	l.ended = true
	l.settle()
}

func (l *Lease) settle() {
	if !l.ended || len(l.sessions) > 0 || !l.book.leases[l] {
		return
	}
	delete(l.book.leases, l)
	for d, n := range l.cap {
		l.book.granted[d] -= n
	}
}

// Sessions is the number of open sessions.
func (l *Lease) Sessions() int {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	return len(l.sessions)
}

// Client is the process at the other end of a session.
type Client struct {
	PID  uint32
	Name string
}

// Open adds a session to the lease.
func (l *Lease) Open(c Client) (*Session, error) {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if l.ended {
		return nil, errors.New("the lease has ended")
	}
	s := &Session{lease: l, client: c, held: make([]uint64, len(l.cap)), over: make([]uint64, len(l.cap))}
	l.sessions[s] = true
	return s, nil
}

// Session is one process's part of a lease.
type Session struct {
	lease  *Lease
	client Client
	held   []uint64 // reserved
	over   []uint64 // what the driver takes beside that
	closed bool
}

// Lease gives the session's lease.
func (s *Session) Lease() *Lease { return s.lease }

// Close gives back everything the session holds; call it once the process has
// been reaped, not before, because until then the memory is not free.
func (s *Session) Close() {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	for d := range s.held {
		l.used[d] -= s.held[d] + s.over[d]
	}
	delete(l.sessions, s)
	l.settle()
}

// Reserve takes bytes of a device, or says that they are not there.
func (s *Session) Reserve(dev int, bytes uint64) bool {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if s.closed || dev < 0 || dev >= len(l.cap) || l.used[dev] > l.cap[dev] || bytes > l.cap[dev]-l.used[dev] {
		return false
	}
	s.held[dev] += bytes
	l.used[dev] += bytes
	return true
}

// Release gives bytes back; more than is held gives back what is held.
func (s *Session) Release(dev int, bytes uint64) {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if s.closed || dev < 0 || dev >= len(l.cap) {
		return
	}
	bytes = min(bytes, s.held[dev])
	s.held[dev] -= bytes
	l.used[dev] -= bytes
}

// Overhead sets what the driver takes for the session beside its reservations.
// Without force an increase that does not fit is refused and changes nothing.
func (s *Session) Overhead(dev int, bytes uint64, force bool) bool {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	// An absurd figure must not overflow the sum.
	if s.closed || dev < 0 || dev >= len(l.cap) || bytes > 1<<50 {
		return false
	}
	used := l.used[dev] - s.over[dev] + bytes
	if !force && bytes > s.over[dev] && used > l.cap[dev] {
		return false
	}
	l.used[dev] = used
	s.over[dev] = bytes
	return true
}

// Info is a device's state in a lease, in bytes.
type Info struct {
	Total    uint64 // the cap
	Used     uint64 // by all sessions, overheads included; may pass the cap by forced overhead
	Sessions uint32 // that hold anything of the device
}

// Free is what can be allocated: whole granules.
func (i Info) Free() uint64 {
	if i.Used >= i.Total {
		return 0
	}
	return (i.Total - i.Used) &^ (Granule - 1)
}

// Info gives a device's state.
func (s *Session) Info(dev int) Info {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if dev < 0 || dev >= len(l.cap) {
		return Info{}
	}
	i := Info{Total: l.cap[dev], Used: l.used[dev]}
	// Everybody on the device counts here, whatever the lease: the caller
	// wants to know whether the device's use is its own.
	for o := range l.book.leases {
		for t := range o.sessions {
			if t.held[dev]+t.over[dev] > 0 {
				i.Sessions++
			}
		}
	}
	return i
}

// Process is one client process of a lease and the bytes it uses.
type Process struct {
	Client
	Used uint64
}

// Processes lists the lease's processes that use the device, at most 1024.
func (s *Session) Processes(dev int) []Process {
	l := s.lease
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if dev < 0 || dev >= len(l.cap) {
		return nil
	}
	var ps []Process
	for t := range l.sessions {
		if n := t.held[dev] + t.over[dev]; n > 0 {
			ps = append(ps, Process{t.client, n})
		}
	}
	sort.Slice(ps, func(i, j int) bool { return ps[i].PID < ps[j].PID })
	return ps[:min(len(ps), 1024)]
}
