package turns

// The owner's part: seats come and go, policies change, dead sessions are cleared up.

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Board is a GPU's board as its owner has it. Safe for concurrent use.
type Board struct {
	mu     sync.Mutex
	p      *page
	policy *os.File // read-only, for sessions
	state  *os.File
	own    *os.File // the policy file, writable
}

// Create opens the board of a GPU in dir, or makes it: the files UUID.policy and
// UUID.state, mode 0600. What an earlier owner left is used if its version fits.
func Create(dir, uuid string, site Site) (*Board, error) {
	base := filepath.Join(dir, uuid)
	own, err := openFile(base+".policy", policySize)
	if err != nil {
		return nil, err
	}
	state, err := openFile(base+".state", stateSize)
	if err != nil {
		own.Close()
		return nil, err
	}
	return newBoard(own, state, site)
}

// CreateAnonymous makes a board that lives as long as somebody has it open.
func CreateAnonymous(site Site) (*Board, error) {
	var fs [2]*os.File
	for i, n := range [...]int64{policySize, stateSize} {
		fd, err := unix.MemfdCreate("sluice-turns", unix.MFD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("turns: memory file: %w", err)
		}
		fs[i] = os.NewFile(uintptr(fd), "turns")
		if err := unix.Fallocate(fd, 0, 0, n); err != nil {
			return nil, fmt.Errorf("turns: memory file of %d bytes: %w", n, err)
		}
	}
	return newBoard(fs[0], fs[1], site)
}

// openFile opens a file of a board and gives it its size; blocks now, so that a full
// file system refuses here and does not kill a session by SIGBUS.
func openFile(path string, size int64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("turns: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("turns: %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		f.Close()
		return nil, fmt.Errorf("turns: %s: mode %#o, owner %d: it must be a file of mode 0600 owned by %d; remove it", path, st.Mode&0o7777, st.Uid, os.Geteuid())
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		f.Close()
		return nil, fmt.Errorf("turns: %d bytes for %s: %w", size, path, err)
	}
	return f, nil
}

func newBoard(own, state *os.File, site Site) (*Board, error) {
	b := &Board{own: own, state: state}
	ro, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", own.Fd()), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		own.Close()
		state.Close()
		return nil, fmt.Errorf("turns: policy file: %w", err)
	}
	b.policy = ro
	if b.p, err = mapPages(int(own.Fd()), int(state.Fd()), true); err != nil {
		b.closeFiles()
		return nil, err
	}
	if !b.p.valid() {
		b.p.format()
	}
	b.SetSite(site)
	return b, nil
}

func (b *Board) closeFiles() {
	b.policy.Close()
	b.state.Close()
	b.own.Close()
}

// Close unmaps the board; the files stay, and its sessions go on.
func (b *Board) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p != nil {
		b.p.unmap()
		b.p = nil
		b.closeFiles()
	}
}

// Files gives the files that a session needs; they stay the board's.
func (b *Board) Files() (policy, state *os.File) { return b.policy, b.state }

// SetSite changes what holds for all; it counts from the next turn on.
func (b *Board) SetSite(s Site) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil {
		return
	}
	if s.Quantum <= 0 {
		s.Quantum = DefaultQuantum
	}
	if s.Grace <= 0 {
		s.Grace = DefaultGrace
	}
	b.p.setSite(s)
}

// Seat gives a lease its seat: the one it has already, with this policy from now on, or
// a new one.
func (b *Board) Seat(lease string, p Policy) (int, error) {
	name, err := packName(lease)
	if err != nil {
		return 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil {
		return 0, os.ErrClosed
	}
	free := -1
	for i := range MaxSeats {
		switch pol := b.p.seatPolicy(i); {
		case pol.present() && b.p.seatName(i) == name:
			b.p.setPolicy(i, p)
			return i, nil
		case !pol.present() && free < 0:
			free = i
		}
	}
	if free < 0 {
		return 0, fmt.Errorf("turns: %w: %d leases", ErrFull, MaxSeats)
	}
	b.p.openSeat(free, name, p)
	return free, nil
}

// Set changes a seat's policy; it counts from the next turn on, and what the seat had
// too much or too little until then is forgotten.
func (b *Board) Set(seat int, p Policy) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil || seat < 0 || seat >= MaxSeats || !b.p.seatPolicy(seat).present() {
		return fmt.Errorf("turns: seat %d: %w", seat, ErrEnded)
	}
	b.p.setPolicy(seat, p)
	return nil
}

// Leave takes a lease's seat away. Its sessions must end.
func (b *Board) Leave(seat int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil || seat < 0 || seat >= MaxSeats {
		return
	}
	b.p.closeSeat(seat)
}

// Gone clears up after a session's process that has been reaped: its chairs are freed
// and its turn goes on to the next. start is its start time as in package process.
func (b *Board) Gone(pid int, start uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p != nil && pid > 0 {
		b.p.gone(pid, start)
	}
}

// Sweep clears up after sessions that ended unseen. Sessions that wait do the same;
// who calls this now and then keeps the counters right while nobody waits.
func (b *Board) Sweep() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p != nil {
		b.p.sweep()
	}
}

// Read gives the seats in use.
func (b *Board) Read() []SeatCounters {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil {
		return nil
	}
	return b.p.read()
}

// leaseName is a lease's name as the policy file keeps it.
type leaseName [seatNameSize]byte

func packName(lease string) (leaseName, error) {
	var n leaseName
	if lease == "" || len(lease) > len(n) {
		return n, fmt.Errorf("turns: lease %q: its name must have 1 to %d bytes", lease, len(n))
	}
	copy(n[:], lease)
	return n, nil
}

func (n leaseName) String() string {
	i := len(n)
	for i > 0 && n[i-1] == 0 {
		i--
	}
	for _, c := range n[:i] {
		if c < ' ' || c > '~' {
			return hex.EncodeToString(n[:i])
		}
	}
	return string(n[:i])
}

func ns(d time.Duration) uint64 { return uint64(max(d, 0)) }

// Chairs counts the sessions on the board; those of dead processes too, until somebody
// frees theirs.
func (b *Board) Chairs() int {
	n := 0
	for i := range b.p.chairs() {
		if b.p.chair(i, scOwner).Load() != 0 {
			n++
		}
	}
	return n
}
