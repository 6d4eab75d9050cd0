// Package account is the memory account of leases: which session holds how much of which
// device, with a cap that is never passed. Sizes are bytes.
//
// An account is a file (see file.go) that the session processes of one lease
// share: each reserves in its own slot, under a lock that dies with its holder, so
// that no message and no other process is needed for it, and no kill leaves
// anything wrong. A Book grants leases of the devices of a stand-alone worker.
package account

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/process"
)

// Granule is the unit of device memory in bytes.
const Granule = form.Granule

// RoundUp rounds a size up to whole granules. It saturates.
func RoundUp(n uint64) uint64 {
	if n > ^uint64(0)-Granule {
		return ^uint64(0) &^ (Granule - 1)
	}
	return (n + Granule - 1) &^ (Granule - 1)
}

// ErrNoMemory says that a lease cannot be granted.
var ErrNoMemory = errors.New("not enough memory")

// Client is the process at the other end of a session.
type Client struct {
	PID  uint32
	Name string
}

// Process is one client process of a lease and the bytes it uses.
type Process struct {
	Client
	Used uint64
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

// Book holds the leases of a stand-alone worker.
type Book struct {
	mu      sync.Mutex
	offered []uint64 // per device
	granted []uint64
	leases  map[*Lease]bool
}

// NewBook opens a book that offers so many bytes of each device.
func NewBook(offered []uint64) *Book {
	return &Book{offered: append([]uint64(nil), offered...), granted: make([]uint64, len(offered)), leases: make(map[*Lease]bool)}
}

// Grant makes a lease of want bytes per device, 0 for all that is left.
func (b *Book) Grant(want uint64) (*Lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	caps := make([]uint64, len(b.offered))
	for d := range b.offered {
		left := b.offered[d] - b.granted[d]
		n := want
		if n == 0 {
			n = left
		}
		if n > left || n < Granule {
			return nil, fmt.Errorf("device %d: %d MiB asked, %d MiB of %d left to grant: %w", d, want>>20, left>>20, b.offered[d]>>20, ErrNoMemory)
		}
		caps[d] = n
	}
	f, err := CreateAnonymous(caps)
	if err != nil {
		return nil, err
	}
	for d := range b.offered {
		b.granted[d] += caps[d]
	}
	l := &Lease{book: b, file: f, slots: make(map[int]bool)}
	b.leases[l] = true
	return l, nil
}

// others tells every lease how many sessions of other leases there are.
func (b *Book) others() {
	all := 0
	for l := range b.leases {
		all += len(l.slots)
	}
	for l := range b.leases {
		for d := range b.offered {
			_ = l.file.SetOthers(d, uint64(all-len(l.slots)))
		}
	}
}

// Lease is a grant on every device of the book.
type Lease struct {
	book  *Book
	file  *File
	slots map[int]bool
	ended bool
}

// Cap is what the lease grants of a device.
func (l *Lease) Cap(dev int) uint64 { return l.file.Cap(dev) }

// End takes the lease back. What its sessions still hold stays granted until
// they have been freed.
func (l *Lease) End() {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	l.ended = true
	l.settle()
}

func (l *Lease) settle() {
	if !l.ended || len(l.slots) > 0 || !l.book.leases[l] {
		return
	}
	delete(l.book.leases, l)
	for d := range l.book.granted {
		l.book.granted[d] -= l.file.Cap(d)
	}
	l.file.Close()
}

// Sessions is the number of sessions.
func (l *Lease) Sessions() int {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	return len(l.slots)
}

// FD is the descriptor of the account, to pass to a session that has a slot of it.
func (l *Lease) FD() int { return l.file.FD() }

// Claim takes a slot for a session.
func (l *Lease) Claim(c Client, kind uint32) (int, error) {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if l.ended {
		return -1, errors.New("the lease has ended")
	}
	slot, err := l.file.Claim(c, kind, time.Now().UnixNano())
	if err != nil {
		return -1, err
	}
	l.slots[slot] = true
	l.book.others()
	return slot, nil
}

// Bind notes a slot's process.
func (l *Lease) Bind(slot, pid int) error {
	start, err := process.Start(pid)
	if err != nil {
		return err
	}
	return l.file.Bind(slot, pid, start)
}

// Free gives back a slot; call it once its process has been reaped, not before,
// because until then the memory is not free.
func (l *Lease) Free(slot int) {
	l.book.mu.Lock()
	defer l.book.mu.Unlock()
	if !l.slots[slot] {
		return
	}
	_ = l.file.Free(slot)
	delete(l.slots, slot)
	l.book.others()
	l.settle()
}

// Open adds a session in this process, which has the account open like any other.
func (l *Lease) Open(c Client) (*Session, error) {
	slot, err := l.Claim(c, 0)
	if err != nil {
		return nil, err
	}
	s, err := l.file.again(slot)
	if err != nil {
		l.Free(slot)
		return nil, err
	}
	s.done = func() { l.Free(slot) }
	return s, nil
}

// again opens a slot through an opening of the file of its own.
func (a *File) again(slot int) (*Session, error) {
	fd, err := unix.FcntlInt(a.f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("account: %w", err)
	}
	f, err := FromFD(fd, a.caps)
	if err != nil {
		return nil, err
	}
	s, err := f.Session(slot)
	if err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}
