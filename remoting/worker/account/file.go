package account

// The file of a lease's account.
//
// Every session process of the lease maps the file and changes its own slot
// only; whoever started them (the daemon, or the stand-alone worker) maps it to
// hand out slots, to read, and to free the slots of processes that have ended.
// layout.go has the records.
//
// All words are read and written whole, so a process that is killed anywhere leaves each of them as it was or as it should
// be: there is no sum to repair, because sums are never stored.
//
// Lent is what other sessions of the lease have open of a session's memory, once for each of them. The driver keeps that
// memory for them when the session ends, so a slot that is free or dead still counts with it, until each of those who
// have it open has taken the charge over (Inherit), no session is left that has borrowed anything, or estateTime has passed.
//
// Locks are open file description locks (fcntl(2), F_OFD_SETLK) on bytes of the
// file. Byte 0 is held while a reservation is decided; the kernel lets go of it
// when its holder dies. Byte 1+n is held by the owner of slot n for life, or for a
// moment by a session that declares the owner dead. Only
// sessions take locks, so a stopped one can hold up its own lease and nobody
// else. Freeing only makes sums smaller and takes no lock.

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// States of a slot.
const (
	stateFree    = 0
	stateClaimed = 1 // given to a process that has not opened it yet
	stateLive    = 2 // its owner holds the slot's lock
	stateDead    = 3 // found dead by another session; holds nothing
)

// estateTime is how long memory that a session had lent stays charged after the session's end: longer than the sessions that
// have it open take to learn of the end.
const estateTime = 10 * time.Second

// maxBytes is more than any device has; a damaged word cannot make sums overflow.
const maxBytes = 1 << 50

// Errors.
var (
	// ErrFull says that every slot is taken.
	ErrFull = errors.New("the lease has as many sessions as its account holds")
	// ErrFile says that a file is no account of this version.
	ErrFile = errors.New("no account file of this version")
)

// File is an account that this process has mapped.
type File struct {
	mapping
	caps []uint64 // as the caller of Open gave them
}

// Create makes the account file of a lease, mode 0600, with so many bytes of each
// device. A file that is there already is an error.
func Create(path string, caps []uint64) (*File, error) {
	// The name appears only once the header is whole.
	p, err := safefile.Create(path, safefile.How{Mode: 0o600, Volatile: true})
	if err != nil {
		return nil, fmt.Errorf("account: %w", err)
	}
	defer p.Close()
	a, err := format(p.File, caps)
	if err == nil {
		if err = p.CommitNew(); err != nil {
			a.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("account: %w", err)
	}
	p.Detach()
	return a, nil
}

// CreateAnonymous makes an account that lives as long as somebody has it open.
func CreateAnonymous(caps []uint64) (*File, error) {
	fd, err := unix.MemfdCreate("sluice-account", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("account: memory file: %w", err)
	}
	return format(os.NewFile(uintptr(fd), "account"), caps)
}

func format(f *os.File, caps []uint64) (*File, error) {
	if len(caps) == 0 || len(caps) > MaxDevices {
		f.Close()
		return nil, fmt.Errorf("account of %d devices: 1 to %d fit", len(caps), MaxDevices)
	}
	for d, n := range caps {
		if n > maxBytes {
			f.Close()
			return nil, fmt.Errorf("account: device %d: %d bytes are more than any device has", d, n)
		}
	}
	a := &File{}
	if err := a.allocate(f, fileSize); err != nil {
		return nil, err
	}
	a.caps = append([]uint64(nil), caps...)
	for d, n := range caps {
		a.layout().cap[d].Store(n)
	}
	a.layout().devices.Store(uint64(len(caps)))
	a.layout().keepsDebts.Store(1)
	a.layout().version.Store(fileVersion)
	a.layout().magic.Store(fileMagic)
	return a, nil
}

// Open opens the account file of a lease, which grants so many bytes of each device. It must belong to this process's
// user and nobody else may be able to write it.
//
// Every session of the lease can write the caps in the file, so they are not read from there. Without caps they are: a daemon of
// an earlier release passes none.
func Open(path string, caps []uint64) (*File, error) {
	f, err := openOwn(path)
	if err != nil {
		return nil, err
	}
	return attach(f, caps)
}

// FromFD is Open of the account behind a descriptor that another process has passed,
// and closes that. The locks of the new one are its own.
func FromFD(fd int, caps []uint64) (*File, error) {
	defer unix.Close(fd)
	// A passed descriptor shares its locks with the sender; reopened, it does not.
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("account: reopen: %w", err)
	}
	return attach(f, caps)
}

func attach(f *os.File, caps []uint64) (*File, error) {
	a := &File{}
	if err := a.open(f, fileSize); err != nil {
		return nil, err
	}
	n := a.layout().devices.Load()
	if a.layout().magic.Load() != fileMagic || a.layout().version.Load() != fileVersion || n == 0 || n > MaxDevices {
		a.Close()
		return nil, fmt.Errorf("account: %s: %w", f.Name(), ErrFile)
	}
	a.caps = slices.Clone(caps)
	for d := 0; len(caps) == 0 && d < int(n); d++ {
		a.caps = append(a.caps, min(a.layout().cap[d].Load(), maxBytes))
	}
	if len(a.caps) != int(n) {
		a.Close()
		return nil, fmt.Errorf("account: %s: it is for %d devices, and the lease has %d", f.Name(), n, len(caps))
	}
	return a, nil
}

// Devices is the number of devices.
func (a *File) Devices() int { return len(a.caps) }

// Cap is what the lease grants of a device, in bytes.
func (a *File) Cap(dev int) uint64 { return a.caps[dev] }

// high is how many slots have ever been used.
func (a *File) high() int { return int(min(a.layout().high.Load(), MaxSlots)) }

// held is what a slot holds of a device.
func (a *File) held(i, dev int) (reserved, overhead uint64) {
	switch a.rec(i).state.Load() {
	case stateClaimed, stateLive:
		return min(a.rec(i).devices[dev].reserved.Load(), maxBytes), min(a.rec(i).devices[dev].overhead.Load(), maxBytes)
	}
	return 0, 0
}

// estate is what a slot whose session has ended still counts with: what it had lent and nobody has inherited yet.
func (a *File) estate(i, dev int) uint64 {
	switch a.rec(i).state.Load() {
	case stateFree, stateDead:
	default:
		return 0
	}
	lent := min(a.rec(i).lent[dev].Load(), maxBytes)
	if lent == 0 || !a.fresh(i) || !a.borrowed() {
		return 0
	}
	return lent
}

// borrowed says whether any session that has not ended has something of another's open.
func (a *File) borrowed() bool {
	for i := range a.high() {
		if a.rec(i).state.Load() == stateLive && a.rec(i).borrowed.Load() > 0 {
			return true
		}
	}
	return false
}

// fresh says whether a slot's session ended within estateTime.
func (a *File) fresh(i int) bool {
	since := int64(boottime.Now()) - int64(a.rec(i).ended.Load())
	return since >= 0 && since < int64(estateTime)
}

// settled says whether a slot counts with nothing of its last session's.
func (a *File) settled(i int) bool {
	for d := range a.caps {
		if a.estate(i, d) > 0 {
			return false
		}
	}
	return true
}

// used is what all slots hold of a device, or those of a part unless it is nil.
func (a *File) used(dev int, of *Part) (used, overhead uint64, sessions uint32) {
	for i := range a.high() {
		if of != nil && !a.in(of, i) {
			continue
		}
		r, o := a.held(i, dev)
		used += r + o + a.estate(i, dev)
		overhead += o
		if r+o > 0 {
			sessions++
		}
	}
	return used, overhead, sessions
}

// text is what stands before the first zero.
func text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// The starter's side. One process hands out the slots of an account.

// Claim takes a free slot for a session of the client.
func (a *File) Claim(c Client, kind uint32, opened int64) (slot int, err error) {
	slot = -1
	if err := a.guard(func() {
		for i := range MaxSlots {
			if a.rec(i).state.Load() != stateFree || !a.settled(i) {
				continue
			}
			r := a.rec(i)
			words := (*[slotSize / 8]atomic.Uint64)(unsafe.Pointer(r))
			for w := range words[1:] { // all but the state
				words[1+w].Store(0)
			}
			a.layout().overdue[i].Store(0)
			r.kind.Store(uint64(kind))
			r.client.Store(uint64(c.PID))
			r.opened.Store(uint64(opened))
			copy(r.name[:nameSize-1], c.Name)
			if h := &a.layout().high; h.Load() <= uint64(i) {
				h.Store(uint64(i) + 1)
			}
			r.state.Store(stateClaimed)
			slot = i
			return
		}
	}); err != nil {
		return -1, err
	}
	if slot < 0 {
		return -1, ErrFull
	}
	return slot, nil
}

// Bind notes the process that a claimed slot is for.
func (a *File) Bind(slot, pid int, start uint64) error {
	return a.guard(func() {
		a.rec(slot).pid.Store(uint64(pid))
		a.rec(slot).start.Store(start)
	})
}

// Ended notes that the process of a slot has ended: what the slot holds counts no more. Nobody else has the slot before Free.
func (a *File) Ended(slot int) error {
	return a.guard(func() {
		if s := &a.rec(slot).state; s.Load() != stateDead {
			a.rec(slot).ended.Store(uint64(boottime.Now()))
			s.Store(stateDead)
		}
	})
}

// Free gives back a slot and everything it holds; call it once the process has
// ended, not before, because until then the memory is not free.
func (a *File) Free(slot int) error {
	return a.guard(func() {
		if a.rec(slot).state.Load() != stateDead { // otherwise a neighbour has noted when
			a.rec(slot).ended.Store(uint64(boottime.Now()))
		}
		a.rec(slot).state.Store(stateFree)
	})
}

// SetOthers says how many sessions of other leases are on a device, for those who
// must know whether the device's use is their own.
func (a *File) SetOthers(dev int, n uint64) error {
	return a.guard(func() { a.layout().others[dev].Store(n) })
}

// Slot is a session as its slot shows it. Everything in it was written by the
// session's own process and is worth as much as that.
type Slot struct {
	N      int
	PID    int
	Start  uint64 // field 22 of /proc/PID/stat
	Kind   uint32
	Client Client
	Opened int64 // nanoseconds since 1970
	Counts Counts
	Use    []Use // by device
	Reason string

	Cuts    uint64        // of the connection to the client that are over
	CutTime time.Duration // without the client
	Cut     time.Duration // since when there is no connection, by boottime.Now; 0: there is one, or the session's release does not say

	RoundTrip time.Duration // see Link; 0 for not known
	Resent    uint64

	Compress Compress
}

// Use is what is used of a device, in bytes.
type Use struct {
	Granted, Used, Overhead, Peak uint64
	Sessions                      uint32 // that hold anything of it
}

// Slot reads one slot.
func (a *File) Slot(i int) (s Slot, err error) {
	if i < 0 || i >= MaxSlots {
		return s, fmt.Errorf("account: slot %d of %d", i, MaxSlots)
	}
	err = a.guard(func() { s = a.slot(i) })
	return s, err
}

func (a *File) slot(i int) Slot {
	r, w := a.rec(i), atomic.LoadUint64
	s := Slot{
		N: i, PID: int(r.pid.Load()), Start: r.start.Load(), Kind: uint32(r.kind.Load()), Opened: int64(r.opened.Load()),
		Client: Client{PID: uint32(r.client.Load()), Name: text(r.name[:])},
		Counts: Counts{
			Calls: w(&r.counts.Calls), Waits: w(&r.counts.Waits), BytesIn: w(&r.counts.BytesIn), BytesOut: w(&r.counts.BytesOut),
			Launches: w(&r.counts.Launches), Errors: w(&r.counts.Errors), Throttle: w(&r.counts.Throttle),
		},
		Cuts: w(&r.cuts.number), CutTime: time.Duration(min(w(&r.cuts.time), 1<<62)),
		Cut:       time.Duration(min(r.cut.Load(), 1<<62)),
		RoundTrip: time.Duration(min(w(&r.link.roundTrip), 1<<62)), Resent: w(&r.link.resent),
		Compress: Compress{Bytes: w(&r.compress.Bytes), Sent: w(&r.compress.Sent)},
		Reason:   text(r.reason[:min(r.reasonSize.Load(), maxReason)]),
	}
	for d := range a.caps {
		r, o := a.held(i, d)
		s.Use = append(s.Use, Use{Granted: a.caps[d], Used: r + o, Overhead: o, Peak: min(a.rec(i).devices[d].peak.Load(), maxBytes)})
	}
	return s
}

// Sessions reads every slot that is taken.
func (a *File) Sessions() (all []Slot, err error) {
	err = a.guard(func() {
		for i := range a.high() {
			if a.rec(i).state.Load() != stateFree {
				all = append(all, a.slot(i))
			}
		}
	})
	return all, err
}

// Use reads what all sessions together use of a device. It takes no lock, so what
// moves from one session to another meanwhile may be seen twice or not at all; Peak
// is exact.
func (a *File) Use(dev int) (u Use, err error) {
	err = a.guard(func() {
		u.Granted = a.caps[dev]
		u.Used, u.Overhead, u.Sessions = a.used(dev, nil)
		for range 3 {
			if used, over, n := a.used(dev, nil); used < u.Used {
				u.Used, u.Overhead, u.Sessions = used, over, n
			}
		}
		u.Peak = min(a.layout().peak[dev].Load(), maxBytes)
	})
	return u, err
}
