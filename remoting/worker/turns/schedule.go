package turns

// The owner's part: tenants come and go, policies change, and what dead sessions leave is
// cleared.

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Schedule is a GPU's schedule as its owner has it. It is safe for concurrent use.
type Schedule struct {
	mu     sync.Mutex
	p      *pages
	policy *os.File // read-only, for sessions
	state  *os.File
	own    *os.File // the policy file, writable

	strangers map[int]stranger // by record
}

// Create opens the schedule of a GPU in dir, or makes it: the files UUID.policy and
// UUID.state, mode 0600. The schedule of an earlier owner is used if its version fits.
func Create(dir, uuid string, site Site) (*Schedule, error) {
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
	return newSchedule(own, state, site)
}

// CreateAnonymous makes a schedule that exists as long as a process has it open.
func CreateAnonymous(site Site) (*Schedule, error) {
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
	return newSchedule(fs[0], fs[1], site)
}

// openFile opens a file of a schedule and allocates all of it, so that a full file system is
// an error here and no SIGBUS in a session.
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

func newSchedule(own, state *os.File, site Site) (*Schedule, error) {
	s := &Schedule{own: own, state: state}
	ro, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", own.Fd()), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		own.Close()
		state.Close()
		return nil, fmt.Errorf("turns: policy file: %w", err)
	}
	s.policy = ro
	if s.p, err = mapPages(int(own.Fd()), int(state.Fd()), true); err != nil {
		s.closeFiles()
		return nil, err
	}
	s.p.upgrade()
	if !s.p.valid() {
		s.p.format()
	}
	s.SetSite(site)
	return s, nil
}

func (s *Schedule) closeFiles() {
	s.policy.Close()
	s.state.Close()
	s.own.Close()
}

// Close unmaps the schedule. Its files stay, and its sessions go on.
func (s *Schedule) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil {
		s.p.unmap()
		s.p = nil
		s.closeFiles()
	}
}

// Files returns the files that a session needs. They stay the schedule's.
func (s *Schedule) Files() (policy, state *os.File) { return s.policy, s.state }

// SetSite changes what holds for all tenants, from the next turn on.
func (s *Schedule) SetSite(site Site) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil {
		return
	}
	if site.Quantum <= 0 {
		site.Quantum = DefaultQuantum
	}
	if site.Grace <= 0 {
		site.Grace = DefaultGrace
	}
	s.p.setSite(site)
}

// Add makes a lease a tenant, and returns its number. A lease that is one already gets this
// policy.
func (s *Schedule) Add(lease string, p Policy) (int, error) { return s.add(lease, nobody, p) }

// AddPart makes a part of a lease a tenant beside the lease, and returns its number. The weights of a lease and its parts add up to what the
// lease has: the caller lowers the lease's before, and raises it after RemovePart. A part that is a tenant already gets this policy.
func (s *Schedule) AddPart(of int, part string, p Policy) (int, error) {
	s.mu.Lock()
	if s.p == nil || of < 0 || of >= MaxTenants || !s.p.policyOf(of).present() {
		s.mu.Unlock()
		return 0, fmt.Errorf("turns: tenant %d: %w", of, ErrEnded)
	}
	lease := s.p.nameOf(of).String()
	s.mu.Unlock()
	return s.add(lease+partSeparator+part, of, p)
}

// add adds a lease, or a part of one.
func (s *Schedule) add(lease string, of int, p Policy) (int, error) {
	name, err := packName(lease)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil {
		return 0, os.ErrClosed
	}
	free := -1
	for i := range MaxTenants {
		switch pol := s.p.policyOf(i); {
		case pol.present() && s.p.nameOf(i) == name:
			s.p.setPolicy(i, p, true)
			return i, nil
		case !pol.present() && free < 0:
			free = i
		}
	}
	if free < 0 {
		return 0, fmt.Errorf("turns: %w: %d leases", ErrFull, MaxTenants)
	}
	s.p.addTenant(free, name, of, p)
	return free, nil
}

// MoveDebt moves num/den of one tenant's debt, and of the time that it has had beyond its share, to another tenant. So a lease
// and its parts owe what they owe together, whichever of them there are.
func (s *Schedule) MoveDebt(from, to int, num, den uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	valid := func(i int) bool { return i >= 0 && i < MaxTenants && s.p.policyOf(i).present() }
	if s.p != nil && den > 0 && valid(from) && valid(to) {
		s.p.moveDebt(from, to, int64(num), int64(den))
		s.p.moveAhead(from, to, int64(num), int64(den))
	}
}

// RemovePart takes a part off the schedule. Its lease, a tenant too, owes what the part owes, and its counters include the part's.
func (s *Schedule) RemovePart(part, of int) {
	s.MoveDebt(part, of, 1, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil || part < 0 || part >= MaxTenants || of < 0 || of >= MaxTenants || !s.p.policyOf(part).present() {
		return
	}
	s.p.addCounters(of, part)
	s.p.removeTenant(part)
}

// Set changes a tenant's policy from the next turn on. What the tenant has had too much or too
// little until then is forgotten.
func (s *Schedule) Set(tenant int, p Policy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil || tenant < 0 || tenant >= MaxTenants || !s.p.policyOf(tenant).present() {
		return fmt.Errorf("turns: tenant %d: %w", tenant, ErrEnded)
	}
	s.p.setPolicy(tenant, p, false)
	return nil
}

// Keep says where a tenant's debt is kept. Without that it is kept in the state file.
func (s *Schedule) Keep(tenant int, debts DebtStore) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil && tenant >= 0 && tenant < MaxTenants && s.p.policyOf(tenant).present() {
		s.p.stores[tenant] = debts
		s.p.debt(tenant)
	}
}

// Remove takes a tenant off the schedule. Its sessions must end.
func (s *Schedule) Remove(tenant int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil || tenant < 0 || tenant >= MaxTenants {
		return
	}
	s.p.removeTenant(tenant)
}

// Gone clears what a session's process that has been reaped left: its members are freed, and its
// turn is passed on. start is the start time as in package process, 0 if it is not known.
func (s *Schedule) Gone(pid int, start uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil && pid > 0 {
		s.p.processEnded(pid, start)
	}
}

// Sweep clears what sessions left that ended without a call of Gone. Sessions that wait for a turn
// do the same; regular calls keep the counters right while none waits.
func (s *Schedule) Sweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil {
		s.p.sweep()
	}
}

// FreeStrangers frees the members that are no sessions that known knows, once that has been so for a while. A session that was taken over
// may have written them, and they would outlast it. The owner calls it every second or so.
func (s *Schedule) FreeStrangers(at time.Time, known func(lease string, pid int) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil {
		s.strangers = s.p.freeStrangers(s.strangers, at, known)
		s.p.passIfAbandoned()
	}
}

// Read describes the tenants.
func (s *Schedule) Read() []TenantCounters {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil {
		return nil
	}
	return s.p.read()
}

// partSeparator stands between a lease and its part in the name of a tenant that is a part.
const partSeparator = "."

// leaseName is a lease's name as the policy file keeps it, or a part's.
type leaseName [leaseNameSize]byte

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

// split returns the name of a lease, and that of its part, "" if it is none.
func (n leaseName) split() (lease, part string) {
	lease, part, _ = strings.Cut(n.String(), partSeparator)
	return lease, part
}

func ns(d time.Duration) uint64 { return uint64(max(d, 0)) }

// Members counts the sessions on the schedule, including those of dead processes that have not
// been cleared yet.
func (s *Schedule) Members() int {
	n := 0
	for i := range s.p.members() {
		if s.p.member(i).owner.Load() != 0 {
			n++
		}
	}
	return n
}
