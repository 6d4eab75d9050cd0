package account

// The file of a lease's account.
//
// Every session process of the lease maps the file and changes its own slot
// only; whoever started them (the daemon, or the stand-alone worker) maps it to
// hand out slots, to read, and to free the slots of processes that have ended.
//
//	     0  header, one page
//	  4096  slots, 1024 bytes each
//
//	header   0 magic  8 version  16 devices  24 slots used so far
//	        32 cap[16]  160 peak[16]  288 others[16]
//	       416 1 if the lease's debts are here  424 debt[16]  552 debited[16]
//	       680 overdue[256], by slot: a bit for each device on which its session has overdue work
//	      2728 excused[16]  2856 span[16], of the debts
//	slot     0 state  8 pid  16 start time  24 kind  32 client pid  40 opened
//	        48 calls, waits, bytes in, bytes out, launches, errors, throttle
//	       112 device[16] of reserved, overhead, peak
//	       496 bytes that were compressed  504 what was sent for them
//	       512 program name, 40 bytes  560 length of the reason
//	       568 reason of the end, 256 bytes
//	       824 1 once the name is there  832 name of the session's exchange, 16 bytes
//	       848 lent[16]  976 when its session was found to have ended  984 borrowed
//	       992 cuts  1000 their time in nanoseconds
//	      1008 round trip of the link in nanoseconds  1016 segments that were sent again
//
// All numbers are little-endian 64-bit words that are read and written whole, so
// a process that is killed anywhere leaves each of them as it was or as it should
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
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Sizes of an account.
const (
	MaxDevices = wire.MaxDevices
	MaxSlots   = 256
	maxReason  = 256
	nameSize   = 40
)

const (
	fileMagic   = 0x544e434143554c53 // "SLUCACNT"
	fileVersion = 1
	headerSize  = 4096
	slotSize    = 1024
	fileSize    = headerSize + MaxSlots*slotSize
)

// Places of words.
const (
	atMagic   = 0
	atVersion = 8
	atDevices = 16
	atHigh    = 24
	atCap     = 32
	atPeak    = 160
	atOthers  = 288
	atDebts   = 416 // package turns says what they are
	atDebt    = atDebts + 8
	atDebited = atDebt + 8*MaxDevices
	atOverdue = atDebited + 8*MaxDevices
	atExcused = atOverdue + 8*MaxSlots
	atSpan    = atExcused + 8*MaxDevices

	slState  = 0
	slPID    = 8
	slStart  = 16
	slKind   = 24
	slClient = 32
	slOpened = 40
	slCounts = 48
	slDev    = 112
	slName   = 512
	slReason = 560
	slLent   = 848
	slEnded  = 976 // boottime.Now, in nanoseconds
	slBorrow = 984 // how many things of other sessions it has open and is not charged for
	slCuts   = 992
	slPath   = 1008
	slComp   = 496

	devSize     = 24
	devReserved = 0
	devOverhead = 8
	devPeak     = 16
)

// The layout has room for so many devices.
var (
	_ [atPeak - atCap - 8*MaxDevices]byte
	_ [atOthers - atPeak - 8*MaxDevices]byte
	_ [atDebts - atOthers - 8*MaxDevices]byte
	_ [headerSize - atSpan - 8*MaxDevices]byte
	_ [slComp - slDev - devSize*MaxDevices]byte
	_ [slotSize - slReason - 8 - maxReason]byte
	_ [slEnded - slLent - 8*MaxDevices]byte
	_ [slDev - slCounts - unsafe.Sizeof(Counts{})]byte
	_ [slPath - slCuts - unsafe.Sizeof(Cuts{})]byte
	_ [slotSize - slPath - unsafe.Sizeof(Link{})]byte
	_ [slName - slComp - unsafe.Sizeof(Compress{})]byte
)

// States of a slot.
const (
	stateFree    = 0
	stateClaimed = 1 // given to a process that has not opened it yet
	stateLive    = 2 // its owner holds the slot's lock
	stateDead    = 3 // found dead by another session; holds nothing
)

// estateTime is how long what an ended session had lent stays charged: longer than any of those who have it open takes to
// learn of the end.
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
	caps []uint64 // as they were when it was opened
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
		a.word(atCap + 8*d).Store(n)
	}
	a.word(atDevices).Store(uint64(len(caps)))
	a.word(atDebts).Store(1)
	a.word(atVersion).Store(fileVersion)
	a.word(atMagic).Store(fileMagic)
	return a, nil
}

// Open opens the account file of a lease. It must belong to this process's user
// and nobody else may be able to write it.
func Open(path string) (*File, error) {
	f, err := openOwn(path)
	if err != nil {
		return nil, err
	}
	return attach(f)
}

// FromFD opens the account behind a descriptor that another process has passed,
// and closes that. The locks of the new one are its own.
func FromFD(fd int) (*File, error) {
	defer unix.Close(fd)
	// A passed descriptor shares its locks with the sender; reopened, it does not.
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("account: reopen: %w", err)
	}
	return attach(f)
}

func attach(f *os.File) (*File, error) {
	a := &File{}
	if err := a.open(f, fileSize); err != nil {
		return nil, err
	}
	n := a.word(atDevices).Load()
	if a.word(atMagic).Load() != fileMagic || a.word(atVersion).Load() != fileVersion || n == 0 || n > MaxDevices {
		a.Close()
		return nil, fmt.Errorf("account: %s: %w", f.Name(), ErrFile)
	}
	for d := range int(n) {
		a.caps = append(a.caps, min(a.word(atCap+8*d).Load(), maxBytes))
	}
	return a, nil
}

// Devices is the number of devices.
func (a *File) Devices() int { return len(a.caps) }

// Cap is what the lease grants of a device, in bytes.
func (a *File) Cap(dev int) uint64 { return a.caps[dev] }

func slotAt(i int) int { return headerSize + i*slotSize }

func (a *File) slotWord(i, at int) *atomic.Uint64 { return a.word(slotAt(i) + at) }

func (a *File) devWord(i, dev, at int) *atomic.Uint64 {
	return a.word(slotAt(i) + slDev + dev*devSize + at)
}

// high is how many slots have ever been used.
func (a *File) high() int { return int(min(a.word(atHigh).Load(), MaxSlots)) }

// held is what a slot holds of a device.
func (a *File) held(i, dev int) (reserved, overhead uint64) {
	switch a.slotWord(i, slState).Load() {
	case stateClaimed, stateLive:
		return min(a.devWord(i, dev, devReserved).Load(), maxBytes), min(a.devWord(i, dev, devOverhead).Load(), maxBytes)
	}
	return 0, 0
}

// estate is what a slot whose session has ended still counts with: what it had lent and nobody has inherited yet.
func (a *File) estate(i, dev int) uint64 {
	switch a.slotWord(i, slState).Load() {
	case stateFree, stateDead:
	default:
		return 0
	}
	lent := min(a.slotWord(i, slLent+8*dev).Load(), maxBytes)
	if lent == 0 || !a.fresh(i) || !a.borrowed() {
		return 0
	}
	return lent
}

// borrowed says whether any session that has not ended has something of another's open.
func (a *File) borrowed() bool {
	for i := range a.high() {
		if a.slotWord(i, slState).Load() == stateLive && a.slotWord(i, slBorrow).Load() > 0 {
			return true
		}
	}
	return false
}

// fresh says whether a slot's session ended within estateTime.
func (a *File) fresh(i int) bool {
	since := int64(boottime.Now()) - int64(a.slotWord(i, slEnded).Load())
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

func (a *File) text(at, size int) string {
	b := make([]byte, size)
	copy(b, a.mem[at:at+size])
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// The starter's side. One process hands out the slots of an account.

// Claim takes a free slot for a session of the client.
func (a *File) Claim(c Client, kind uint32, opened int64) (slot int, err error) {
	slot = -1
	if err := a.guard(func() {
		for i := range MaxSlots {
			if a.slotWord(i, slState).Load() != stateFree || !a.settled(i) {
				continue
			}
			for at := 8; at < slotSize; at += 8 {
				a.slotWord(i, at).Store(0)
			}
			a.word(atOverdue + 8*i).Store(0)
			a.slotWord(i, slKind).Store(uint64(kind))
			a.slotWord(i, slClient).Store(uint64(c.PID))
			a.slotWord(i, slOpened).Store(uint64(opened))
			at := slotAt(i) + slName
			copy(a.mem[at:at+nameSize-1], c.Name)
			if h := a.word(atHigh); h.Load() <= uint64(i) {
				h.Store(uint64(i) + 1)
			}
			a.slotWord(i, slState).Store(stateClaimed)
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
		a.slotWord(slot, slPID).Store(uint64(pid))
		a.slotWord(slot, slStart).Store(start)
	})
}

// Ended notes that the process of a slot has ended: what the slot holds counts no more. Nobody else has the slot before Free.
func (a *File) Ended(slot int) error {
	return a.guard(func() {
		if s := a.slotWord(slot, slState); s.Load() != stateDead {
			a.slotWord(slot, slEnded).Store(uint64(boottime.Now()))
			s.Store(stateDead)
		}
	})
}

// Free gives back a slot and everything it holds; call it once the process has
// ended, not before, because until then the memory is not free.
func (a *File) Free(slot int) error {
	return a.guard(func() {
		if a.slotWord(slot, slState).Load() != stateDead { // otherwise a neighbour has noted when
			a.slotWord(slot, slEnded).Store(uint64(boottime.Now()))
		}
		a.slotWord(slot, slState).Store(stateFree)
	})
}

// SetOthers says how many sessions of other leases are on a device, for those who
// must know whether the device's use is their own.
func (a *File) SetOthers(dev int, n uint64) error {
	return a.guard(func() { a.word(atOthers + 8*dev).Store(n) })
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
	w := func(at int) uint64 { return a.slotWord(i, at).Load() }
	s := Slot{
		N: i, PID: int(w(slPID)), Start: w(slStart), Kind: uint32(w(slKind)), Opened: int64(w(slOpened)),
		Client: Client{PID: uint32(w(slClient)), Name: a.text(slotAt(i)+slName, nameSize)},
		Counts: Counts{
			Calls: w(slCounts), Waits: w(slCounts + 8), BytesIn: w(slCounts + 16), BytesOut: w(slCounts + 24),
			Launches: w(slCounts + 32), Errors: w(slCounts + 40), Throttle: w(slCounts + 48),
		},
		Cuts: w(slCuts), CutTime: time.Duration(min(w(slCuts+8), 1<<62)),
		RoundTrip: time.Duration(min(w(slPath), 1<<62)), Resent: w(slPath + 8),
		Compress: Compress{Bytes: w(slComp), Sent: w(slComp + 8)},
		Reason:   a.text(slotAt(i)+slReason+8, int(min(w(slReason), maxReason))),
	}
	for d := range a.caps {
		r, o := a.held(i, d)
		s.Use = append(s.Use, Use{Granted: a.caps[d], Used: r + o, Overhead: o, Peak: min(a.devWord(i, d, devPeak).Load(), maxBytes)})
	}
	return s
}

// Sessions reads every slot that is taken.
func (a *File) Sessions() (all []Slot, err error) {
	err = a.guard(func() {
		for i := range a.high() {
			if a.slotWord(i, slState).Load() != stateFree {
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
		u.Peak = min(a.word(atPeak+8*dev).Load(), maxBytes)
	})
	return u, err
}
