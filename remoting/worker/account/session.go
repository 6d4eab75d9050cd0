package account

import (
	"errors"
	"fmt"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/internal/process"
)

// Counts is what a session has done so far. It lies in the slot: its one writer
// adds to it in place, and whoever has mapped the account reads it there.
type Counts struct {
	Calls    uint64
	Waits    uint64
	BytesIn  uint64 // from the client
	BytesOut uint64 // to the client
	Launches uint64
	Errors   uint64
	Throttle uint64 // ns
}

// Compress counts copies to the device that the client has compressed, or that came from the store of content. It lies in the slot.
type Compress struct {
	Bytes uint64 // that were compressed
	Sent  uint64 // what they were compressed to
}

// Saved is how many bytes less have come than without compression.
func (c Compress) Saved() uint64 { return c.Bytes - min(c.Bytes, c.Sent) }

// Cuts are the cuts of a session's connection that are over: how many, and for how long it had no client. They lie in the slot.
type Cuts struct{ number, time uint64 }

// Add counts a cut that lasted for d.
func (c *Cuts) Add(d time.Duration) {
	atomic.AddUint64(&c.number, 1)
	c.Extend(d)
}

// Extend notes that the last cut was not over, and lasted for d more.
func (c *Cuts) Extend(d time.Duration) { atomic.AddUint64(&c.time, uint64(d)) }

// Link is what the kernel measures of a session's connection to its client. It lies in the slot.
type Link struct{ roundTrip, resent uint64 }

// Note puts down the round trip, and how many segments had to be sent again over the present connection.
func (l *Link) Note(roundTrip time.Duration, resent uint64) {
	atomic.StoreUint64(&l.roundTrip, uint64(roundTrip))
	atomic.StoreUint64(&l.resent, resent)
}

// Session is one slot of an account, as its owner has it. Safe for concurrent use.
type Session struct {
	file *File
	slot int
	part *Part  // nil: all of the lease
	done func() // after Close

	mu     sync.Mutex // over the owner's threads; byte 0 is over processes
	closed bool

	// end guards the reason, what is lent and borrowed and, with mu, closing. A holder of mu may be waiting for another
	// process, and a session that ends must not wait for that.
	end sync.Mutex
}

// Session opens a claimed slot for this process, which keeps it for life.
func (a *File) Session(slot int) (*Session, error) {
	if slot < 0 || slot >= MaxSlots || a.rec(slot).state.Load() != stateClaimed {
		return nil, fmt.Errorf("account: slot %d is not claimed", slot)
	}
	// Only a neighbour that looks whether the last owner is dead can hold it now.
	if err := a.setLock(unix.F_OFD_SETLKW, unix.F_WRLCK, 1+slot); err != nil {
		return nil, fmt.Errorf("account: lock of slot %d: %w", slot, err)
	}
	a.rec(slot).state.Store(stateLive)
	return &Session{file: a, slot: slot}, nil
}

// setLock does one lock operation on one byte.
func (a *File) setLock(cmd int, kind int16, at int) error {
	l := unix.Flock_t{Type: kind, Whence: 0, Start: int64(at), Len: 1}
	for {
		err := unix.FcntlFlock(a.f.Fd(), cmd, &l)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// enter begins a decision; leave ends it.
func (s *Session) enter() bool {
	return s.file.setLock(unix.F_OFD_SETLKW, unix.F_WRLCK, 0) == nil
}

func (s *Session) leave() { _ = s.file.setLock(unix.F_OFD_SETLK, unix.F_UNLCK, 0) }

// bury frees what dead sessions still hold because the process that started them is gone too. It says whether there was any. Byte 0 is held.
func (s *Session) bury() bool {
	a, some := s.file, false
	for i := range a.high() {
		if i == s.slot || a.rec(i).state.Load() != stateLive || a.setLock(unix.F_OFD_SETLK, unix.F_WRLCK, 1+i) != nil {
			continue
		}
		// With its lock taken nobody new can have the slot.
		if !alive(a, i) {
			a.rec(i).ended.Store(uint64(boottime.Now()))
			some = a.rec(i).state.CompareAndSwap(stateLive, stateDead) || some
		}
		_ = a.setLock(unix.F_OFD_SETLK, unix.F_UNLCK, 1+i)
	}
	return some
}

// alive says whether a slot's process has not wholly ended: its lock goes some
// time before the device's memory does.
func alive(a *File, i int) bool {
	pid := int(a.rec(i).pid.Load())
	if pid <= 0 {
		return false
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return !errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(p, 0)
	if n > 0 {
		return false
	}
	start, err := process.Start(pid)
	return err == nil && start == a.rec(i).start.Load()
}

func (s *Session) valid(dev int) bool { return !s.closed && dev >= 0 && dev < len(s.file.caps) }

// Reserve takes bytes of a device, or says that they are not there.
func (s *Session) Reserve(dev int, bytes uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid(dev) || bytes > s.file.caps[dev] || !s.enter() {
		return false
	}
	defer s.leave()
	if !s.room(dev, 0, bytes) {
		return false
	}
	a := s.file
	w := &a.rec(s.slot).devices[dev].reserved
	w.Store(w.Load() + bytes)
	used, _, _ := a.used(dev, nil)
	s.peak(dev, used)
	return true
}

// peak notes new heights; byte 0 is held.
func (s *Session) peak(dev int, all uint64) {
	a := s.file
	r, o := a.held(s.slot, dev)
	if w := &a.rec(s.slot).devices[dev].peak; r+o > w.Load() {
		w.Store(r + o)
	}
	if w := &a.layout().peak[dev]; all > w.Load() {
		w.Store(all)
	}
}

// Release gives bytes back; more than is held gives back what is held.
func (s *Session) Release(dev int, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid(dev) {
		return
	}
	w := &s.file.rec(s.slot).devices[dev].reserved
	held := w.Load()
	w.Store(held - min(bytes, held))
}

// Lend notes that another session has so many bytes more, or less, of this one's memory open than before. They stay
// charged when this session ends, see Inherit. It does not wait for other processes.
func (s *Session) Lend(dev int, more int64) {
	s.end.Lock()
	defer s.end.Unlock()
	if s.closed || dev < 0 || dev >= len(s.file.caps) {
		return
	}
	add(&s.file.rec(s.slot).lent[dev], more)
}

// Borrow notes that this session has more, or less, things of others open that it is not charged for. Call it before one is
// opened, and after it has been closed or inherited. It does not wait for other processes.
func (s *Session) Borrow(more int) {
	s.end.Lock()
	defer s.end.Unlock()
	if !s.closed {
		add(&s.file.rec(s.slot).borrowed, int64(more))
	}
}

// add changes a word that nobody else writes as long as its session lives; it stays within 0 and maxBytes.
func add(w *atomic.Uint64, more int64) {
	w.Store(uint64(min(max(int64(min(w.Load(), maxBytes))+min(max(more, -maxBytes), maxBytes), 0), maxBytes)))
}

// Life tells the sessions apart that have a slot one after another.
func (s *Session) Life(slot int) uint64 {
	s.end.Lock()
	defer s.end.Unlock()
	if s.closed || slot < 0 || slot >= MaxSlots {
		return 0
	}
	return s.file.rec(slot).opened.Load()
}

// Inherit charges bytes to this session that an earlier one was charged for, which has ended and whose memory this one
// has open: the one with that life in that slot. Memory that the earlier one had lent, and no other session has inherited,
// needs no free room; anything beyond that does, and Inherit says whether there was enough. It says no as long as the bytes
// are charged in the slot itself.
func (s *Session) Inherit(dev, from int, life, bytes uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid(dev) || from < 0 || from >= MaxSlots || from == s.slot || bytes > maxBytes || !s.enter() {
		return false
	}
	defer s.leave()
	a := s.file
	left := uint64(0)
	if a.rec(from).opened.Load() == life {
		s.bury()
		switch a.rec(from).state.Load() {
		case stateClaimed, stateLive:
			return false
		}
		left = min(a.estate(from, dev), bytes)
	}
	ofPart := uint64(0) // of what is left
	if s.part != nil && a.in(s.part, from) && a.rec(from).opened.Load() == life {
		ofPart = left
	}
	if (left < bytes || s.part != nil && ofPart < bytes) && !s.fits(dev, left, ofPart, bytes) {
		return false
	}
	used, _, _ := a.used(dev, nil)
	// In this order: a death between the two charges too much, for estateTime, and not too little.
	w := &a.rec(s.slot).devices[dev].reserved
	w.Store(w.Load() + bytes)
	if left > 0 {
		l := &a.rec(from).lent[dev]
		l.Store(l.Load() - left)
	}
	s.peak(dev, min(used-left+bytes, a.caps[dev])) // several heirs are each charged for what is there once
	return true
}

// Overhead sets what the driver takes for the session beside its reservations.
// Without force an increase that does not fit is refused and changes nothing.
func (s *Session) Overhead(dev int, bytes uint64, force bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	// An absurd figure must not overflow the sum.
	if !s.valid(dev) || bytes > maxBytes {
		return false
	}
	a := s.file
	w := &a.rec(s.slot).devices[dev].overhead
	old := w.Load()
	if bytes <= old {
		w.Store(bytes)
		return true
	}
	if !s.enter() {
		return false
	}
	defer s.leave()
	if !force && !s.room(dev, old, bytes) {
		return false
	}
	w.Store(bytes)
	used, _, _ := a.used(dev, nil)
	s.peak(dev, used)
	return true
}

// Info gives a device's state.
func (s *Session) Info(dev int) Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid(dev) {
		return Info{}
	}
	// Under the lock, so that a neighbour's memory is not seen twice while it moves.
	if !s.enter() {
		return Info{}
	}
	defer s.leave()
	a := s.file
	i := Info{Total: a.caps[dev]}
	i.Used, _, i.Sessions = a.used(dev, nil)
	if p := s.part; p != nil {
		// What is free is what can be allocated: less than the part has left if others have taken most of the lease.
		free := i.Total - min(i.Used, i.Total)
		i.Total = p.caps[dev]
		i.Used, _, _ = a.used(dev, p)
		i.Used = max(i.Used, i.Total-min(free, i.Total))
	}
	// Everybody on the device counts here, whatever the lease: the caller
	// wants to know whether the device's use is its own.
	i.Sessions += uint32(min(a.layout().others[dev].Load(), 1<<20))
	return i
}

// Processes lists the lease's processes that use the device, or the part's, by their ids.
func (s *Session) Processes(dev int) []Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid(dev) {
		return nil
	}
	a := s.file
	var ps []Process
	for i := range a.high() {
		if r, o := a.held(i, dev); r+o > 0 && (s.part == nil || a.in(s.part, i)) {
			ps = append(ps, Process{Client{uint32(a.rec(i).client.Load()), text(a.rec(i).name[:])}, r + o})
		}
	}
	sort.Slice(ps, func(i, j int) bool { return ps[i].PID < ps[j].PID })
	return ps
}

// Counts is the place where the session counts. Words are added to by one thread
// each, or atomically.
func (s *Session) Counts() *Counts {
	return &s.file.rec(s.slot).counts
}

// Compress is the place where the session counts compressed bytes.
func (s *Session) Compress() *Compress {
	return &s.file.rec(s.slot).compress
}

// Cuts is the place where the session counts cuts.
func (s *Session) Cuts() *Cuts {
	return &s.file.rec(s.slot).cuts
}

// Cut notes since when the session has no connection to its client, by boottime.Now; 0 is that it has one.
func (s *Session) Cut(since time.Duration) {
	s.end.Lock()
	defer s.end.Unlock()
	if !s.closed {
		s.file.rec(s.slot).cut.Store(uint64(since))
	}
}

// Link is the place where the session notes what its connection is like.
func (s *Session) Link() *Link {
	return &s.file.rec(s.slot).link
}

// SetClient notes who the client says it is, and the kind of session.
func (s *Session) SetClient(c Client, kind uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	a := s.file
	a.rec(s.slot).kind.Store(uint64(kind))
	a.rec(s.slot).client.Store(uint64(c.PID))
	var name [nameSize]byte
	copy(name[:nameSize-1], c.Name)
	copy(a.rec(s.slot).name[:], name[:])
}

// SetReason says why the session ends, for whoever reads the slot after that. The
// first one stands.
func (s *Session) SetReason(why string) {
	s.end.Lock()
	defer s.end.Unlock()
	if s.closed || why == "" {
		return
	}
	a := s.file
	n := &a.rec(s.slot).reasonSize
	if n.Load() != 0 {
		return
	}
	why = why[:min(len(why), maxReason)]
	copy(a.rec(s.slot).reason[:], why)
	n.Store(uint64(len(why)))
}

// Close ends the session in a process that goes on, and closes the account there.
func (s *Session) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end.Lock()
	defer s.end.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	s.file.rec(s.slot).ended.Store(uint64(boottime.Now()))
	s.file.rec(s.slot).state.Store(stateDead)
	s.file.Close()
	if s.done != nil {
		s.done()
	}
}

// AddError counts a call that failed; any thread may.
func (c *Counts) AddError() { atomic.AddUint64(&c.Errors, 1) }
