package turns

// The records of a schedule's two files, and how their words are packed.
//
// A session that has gone wrong may have written anything into the state file. So every number
// read from it is bounded before it is used, and no loop runs longer than a table is long.

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	policyMagic = 0x4c4f50534e525554 // "TURNSPOL"
	stateMagic  = 0x4154535352554e54
	version     = 2 // changes with every record below

	leaseNameSize = 64
	headerSize    = 4096

	policySize = int64(unsafe.Sizeof(policyFile{}))
	stateSize  = int64(unsafe.Sizeof(stateFile{}))
)

// policyFile is written by the schedule's owner and read by sessions.
type policyFile struct {
	magic, version atomic.Uint64
	quantum, grace atomic.Uint64 // ns
	flags          atomic.Uint64
	high           atomic.Uint64 // tenant records ever used
	limit, overrun atomic.Uint64 // ns; an Overrun
	_              [headerSize - 64]byte
	tenants        [MaxTenants]tenantPolicy
}

// tenantPolicy is a tenant's record in the policy file.
type tenantPolicy struct {
	word atomic.Uint64 // a policyWord
	// of is packTenant of the lease that the tenant is a part of; 0: it is a lease.
	of   atomic.Uint64
	name leaseName
	_    [16]byte
}

const equalActive = 1 // in policyFile.flags

// stateFile is written by everybody. Words that are written often have a cache line each.
type stateFile struct {
	magic, version atomic.Uint64
	high           atomic.Uint64 // member records ever used
	clock          atomic.Uint64 // the sessions' clock: not known yet, the machine's, or a simulated one,
	now            atomic.Uint64 // of which this is the latest time that a session has seen, ns
	_              [24]byte
	token          atomic.Uint64
	_              [56]byte
	recalled       atomic.Uint64 // a borrowed turn that a tenant with time of its own wants back
	_              [56]byte
	pool           atomic.Uint64 // virtual time of the pool of borrowed time, ns
	_              [headerSize - 200]byte
	tenants        [MaxTenants]tenantState
	members        [MaxMembers]memberState
}

// Values of stateFile.clock.
const (
	clockMachine   = 1
	clockSimulated = 2
)

// tenantState is a tenant's record in the state file. Turns are named by their token.
type tenantState struct {
	vt         atomic.Uint64 // virtual time, ns
	borrowedVT atomic.Uint64 // the same for borrowed time
	wakeup     atomic.Uint32 // futex of the members that wait for a turn
	_          [4]byte
	prewake    atomic.Uint64 // the turn after which this tenant is likely to be next
	closing    atomic.Uint64 // the turn that is being ended
	taken      atomic.Uint64 // the last turn that a member has entered
	skipUntil  atomic.Uint64 // no turns before then, ns: it did not take one
	misses     atomic.Uint64 // how many turns in a row it did not take
	counters   [11]atomic.Uint64
	// unresponsive is since when it has not taken a turn, ns; 0: it takes them.
	unresponsive atomic.Uint64
	debt         atomic.Uint64 // a debtWord, a copy if the lease has a DebtStore
	debited      atomic.Uint64 // until when work after turns has been charged, ns; not used if the lease has a DebtStore
	_            [80]byte
}

// Places in tenantState.counters.
const (
	cHeld = iota
	cBusy
	cWaited
	cThrottled
	cLent
	cBorrowed
	cTurns
	cOverruns
	cLongest
	cRevoked
)

// memberState is a member's record in the state file.
type memberState struct {
	owner   atomic.Uint64 // the process, and whether it is clearing the record; 0: free
	start   atomic.Uint64 // start time of the process, as in proc(5); 0: not known
	tenant  atomic.Uint64 // packTenant
	want    atomic.Uint64 // 1: it has work
	open    atomic.Uint64 // the turn in which it works, 0: in none
	overdue atomic.Uint64 // since when work of an ended turn is on the GPU, ns; 0: none is
	wakeup  atomic.Uint32 // futex of the session's keeper
	_       [4]byte
	seen    atomic.Uint64 // when the session last looked at its overdue work, ns; 0: it has none, or is of an older build
	_       [64]byte
}

// Processes of different builds share these files, so nothing may move while version stays.
var (
	_ [48]byte                        = [unsafe.Offsetof(policyFile{}.high) + 8]byte{}
	_ [48]byte                        = [unsafe.Offsetof(policyFile{}.limit)]byte{}
	_ [headerSize]byte                = [unsafe.Offsetof(policyFile{}.tenants)]byte{}
	_ [96]byte                        = [unsafe.Sizeof(tenantPolicy{})]byte{}
	_ [16]byte                        = [unsafe.Offsetof(tenantPolicy{}.name)]byte{}
	_ [16]byte                        = [unsafe.Offsetof(stateFile{}.high)]byte{}
	_ [24]byte                        = [unsafe.Offsetof(stateFile{}.clock)]byte{}
	_ [32]byte                        = [unsafe.Offsetof(stateFile{}.now)]byte{}
	_ [64]byte                        = [unsafe.Offsetof(stateFile{}.token)]byte{}
	_ [128]byte                       = [unsafe.Offsetof(stateFile{}.recalled)]byte{}
	_ [192]byte                       = [unsafe.Offsetof(stateFile{}.pool)]byte{}
	_ [headerSize]byte                = [unsafe.Offsetof(stateFile{}.tenants)]byte{}
	_ [256]byte                       = [unsafe.Sizeof(tenantState{})]byte{}
	_ [16]byte                        = [unsafe.Offsetof(tenantState{}.wakeup)]byte{}
	_ [24]byte                        = [unsafe.Offsetof(tenantState{}.prewake)]byte{}
	_ [56]byte                        = [unsafe.Offsetof(tenantState{}.misses)]byte{}
	_ [64]byte                        = [unsafe.Offsetof(tenantState{}.counters)]byte{}
	_ [152]byte                       = [unsafe.Offsetof(tenantState{}.unresponsive)]byte{}
	_ [160]byte                       = [unsafe.Offsetof(tenantState{}.debt)]byte{}
	_ [128]byte                       = [unsafe.Sizeof(memberState{})]byte{}
	_ [16]byte                        = [unsafe.Offsetof(memberState{}.tenant)]byte{}
	_ [40]byte                        = [unsafe.Offsetof(memberState{}.overdue)]byte{}
	_ [48]byte                        = [unsafe.Offsetof(memberState{}.wakeup)]byte{}
	_ [56]byte                        = [unsafe.Offsetof(memberState{}.seen)]byte{}
	_ [4096 + 128*96]byte             = [policySize]byte{}
	_ [4096 + 128*256 + 1024*128]byte = [stateSize]byte{}
)

// pages is a mapped schedule.
type pages struct {
	policyBytes, stateBytes []byte
	policy                  *policyFile
	state                   *stateFile
	stores                  [MaxTenants]DebtStore // of the tenants whose debts this process can reach
	excused                 excused
}

func mapPages(policyFD, stateFD int, write bool) (*pages, error) {
	for fd, n := range map[int]int64{policyFD: policySize, stateFD: stateSize} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, fmt.Errorf("turns: schedule: %w", err)
		}
		if st.Size < n {
			return nil, fmt.Errorf("%w: %d bytes", ErrFile, st.Size)
		}
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	p := &pages{}
	var err error
	if p.policyBytes, err = unix.Mmap(policyFD, 0, int(policySize), prot, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("turns: policy file: %w", err)
	}
	if p.stateBytes, err = unix.Mmap(stateFD, 0, int(stateSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		_ = unix.Munmap(p.policyBytes)
		return nil, fmt.Errorf("turns: state file: %w", err)
	}
	p.policy = (*policyFile)(unsafe.Pointer(unsafe.SliceData(p.policyBytes)))
	p.state = (*stateFile)(unsafe.Pointer(unsafe.SliceData(p.stateBytes)))
	return p, nil
}

func (p *pages) unmap() {
	_ = unix.Munmap(p.policyBytes)
	_ = unix.Munmap(p.stateBytes)
}

func (p *pages) token() token                     { return token(p.state.token.Load()) }
func (p *pages) tenant(i int) *tenantState        { return &p.state.tenants[i] }
func (p *pages) member(i int) *memberState        { return &p.state.members[i] }
func (p *pages) policyOf(i int) policyWord        { return policyWord(p.policy.tenants[i].word.Load()) }
func (p *pages) nameOf(i int) leaseName           { return p.policy.tenants[i].name }
func (p *pages) count(i, what int) *atomic.Uint64 { return &p.tenant(i).counters[what] }

// leaseOf returns the tenant that a tenant is a part of, or the tenant itself.
func (p *pages) leaseOf(i int) int {
	w := p.policy.tenants[i].of.Load()
	k := int(uint32(w)) - 1
	if k < 0 || k >= MaxTenants || k == i {
		return i
	}
	if pol := p.policyOf(k); !pol.present() || pol.gen() != uint32(w>>32) {
		return i
	}
	return k
}

func (p *pages) tenants() int { return int(min(p.policy.high.Load(), MaxTenants)) }
func (p *pages) members() int { return int(min(p.state.high.Load(), MaxMembers)) }

func (p *pages) quantum() int64 { return bounded(p.policy.quantum.Load(), DefaultQuantum) }
func (p *pages) grace() int64   { return bounded(p.policy.grace.Load(), DefaultGrace) }

func bounded(n uint64, def time.Duration) int64 {
	if n == 0 || n > uint64(10*time.Second) {
		return int64(def)
	}
	return int64(n)
}

func (p *pages) policyValid() bool {
	return p.policy.magic.Load() == policyMagic && p.policy.version.Load() == version
}

func (p *pages) valid() bool {
	return p.policyValid() &&
		p.state.magic.Load() == stateMagic && p.state.version.Load() == version
}

// upgrade makes a schedule of this version out of one of version 1, which live sessions may have
// mapped. Version 2 only adds words where version 1 has zeros. An upgrade that was interrupted may
// have left one file at each version.
func (p *pages) upgrade() {
	old := func(v uint64) bool { return v == 1 || v == version }
	if p.policy.magic.Load() == policyMagic && old(p.policy.version.Load()) &&
		p.state.magic.Load() == stateMagic && old(p.state.version.Load()) {
		p.policy.version.Store(version)
		p.state.version.Store(version)
	}
}

// format makes an empty schedule. The magic numbers come last: a schedule that was left half
// made is formatted again.
func (p *pages) format() {
	p.policy.magic.Store(0)
	p.state.magic.Store(0)
	clear(p.policyBytes[8:])
	clear(p.stateBytes[8:])
	p.policy.version.Store(version)
	p.state.version.Store(version)
	p.state.magic.Store(stateMagic)
	p.policy.magic.Store(policyMagic)
}

func (p *pages) setSite(s Site) {
	p.policy.quantum.Store(ns(s.Quantum))
	p.policy.grace.Store(ns(s.Grace))
	var f uint64
	if s.EqualActive {
		f |= equalActive
	}
	p.policy.flags.Store(f)
	p.policy.limit.Store(ns(s.Limit))
	p.policy.overrun.Store(uint64(s.Overrun))
}

// A policyWord has a policy's kind, flags and weight, and the generation of the tenant's
// record, which tells a lease from the next one that gets the same record.
type policyWord uint64

const (
	pwLend    = 1 << 8
	pwPresent = 1 << 9
)

func packPolicy(p Policy, gen uint32) policyWord {
	w := policyWord(p.Kind&0xff) | policyWord(min(max(p.Weight, 1), FullWeight))<<16 | policyWord(gen)<<32 | pwPresent
	if p.Lend {
		w |= pwLend
	}
	return w
}

func (w policyWord) present() bool  { return w&pwPresent != 0 }
func (w policyWord) gen() uint32    { return uint32(w >> 32) }
func (w policyWord) weight() uint32 { return min(max(uint32(w>>16)&0xffff, 1), FullWeight) }
func (w policyWord) policy() Policy {
	return Policy{Kind: min(Kind(w&0xff), Fixed), Weight: w.weight(), Lend: w&pwLend != 0}
}

// A token names a turn: the tenant that has it, whether it is borrowed, and when it began, us.
type token uint64

const (
	tokenBorrowed = 1 << 55
	tokenBegin    = tokenBorrowed - 1
)

// nobody is the tenant of a token that is free.
const nobody = -1

func packToken(tenant int, borrowed bool, begin int64) token {
	t := token(tenant+1)<<56 | token(begin)&tokenBegin
	if borrowed {
		t |= tokenBorrowed
	}
	return t
}

func (t token) tenant() int {
	if i := int(t>>56) - 1; i < MaxTenants {
		return i
	}
	return nobody
}
func (t token) borrowed() bool { return t&tokenBorrowed != 0 }
func (t token) us() int64      { return int64(t & tokenBegin) }
func (t token) begin() int64   { return min(t.us(), 1<<53) * 1000 }

// after returns when the turn after t begins, us: now, but never when t itself began, so that
// the two differ. A begin too far in the future is not believed (police).
func (t token) after(now int64) int64 {
	us := now / 1000
	if t.us() >= us && t.begin() <= now+future {
		us = t.us() + 1
	}
	return us
}

// packTenant makes the word that says to which tenant a member belongs.
func packTenant(tenant int, gen uint32) uint64 { return uint64(tenant+1) | uint64(gen)<<32 }

// tenantOf returns the tenant that a member belongs to, or nobody.
func (p *pages) tenantOf(member int) int {
	m := p.member(member)
	if m.owner.Load() == 0 {
		return nobody
	}
	w := m.tenant.Load()
	i := int(uint32(w)) - 1
	if i < 0 || i >= MaxTenants {
		return nobody
	}
	if pol := p.policyOf(i); !pol.present() || pol.gen() != uint32(w>>32) {
		return nobody
	}
	return i
}

// now returns the time for an owner, which only knows the machine's clock.
func (p *pages) now() int64 {
	if p.state.clock.Load() == clockSimulated {
		return int64(p.state.now.Load())
	}
	return monotonic()
}

// ptr is a futex word's address.
func ptr(w *atomic.Uint32) *uint32 { return (*uint32)(unsafe.Pointer(w)) }
