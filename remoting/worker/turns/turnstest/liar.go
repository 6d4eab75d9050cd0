package turnstest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Liar is a session that was taken over. It has mapped a schedule as every session has, and writes into the state file
// whatever it wants. The places are those of the layout, which may not move while the version of the files stays.
type Liar struct {
	policy, state []byte
}

// Word is a word of a record in the state file.
type Word int

// Words of a tenant's record.
const (
	TenantVT           Word = 0
	TenantSkipUntil    Word = 48
	TenantMisses       Word = 56
	TenantUnresponsive Word = 152
	TenantDebt         Word = 160
	TenantDebited      Word = 168
)

// Words of a member's record.
const (
	MemberOwner   Word = 0
	MemberStart   Word = 8
	MemberTenant  Word = 16
	MemberWant    Word = 24
	MemberOpen    Word = 32
	MemberOverdue Word = 40
	MemberSeen    Word = 56
)

// Words of the state file's header.
const (
	StateMagic   Word = 0
	StateVersion Word = 8
	StateHigh    Word = 16
	StateClock   Word = 24
	StateNow     Word = 32
	StateToken   Word = 64
)

const clockMachine = 1 // in StateClock

const (
	pageSize     = 4096
	policyRecord = 96
	tenantRecord = 256
	memberRecord = 128
	policySize   = pageSize + turns.MaxTenants*policyRecord
	stateSize    = pageSize + turns.MaxTenants*tenantRecord + turns.MaxMembers*memberRecord
)

// NewLiar maps the files of a schedule until the test ends.
func NewLiar(t testing.TB, s *turns.Schedule) *Liar {
	t.Helper()
	l, err := mapLiar(s.Files())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// OpenLiar maps the files of the only schedule in a directory, as the daemon's run_dir has one, for as long as the process lives.
func OpenLiar(dir string) (*Liar, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.state"))
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("%s has the schedules %v, want one", dir, files)
	}
	state, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer state.Close()
	policy, err := os.Open(strings.TrimSuffix(files[0], "state") + "policy")
	if err != nil {
		return nil, err
	}
	defer policy.Close()
	return mapLiar(policy, state)
}

func mapLiar(policy, state *os.File) (*Liar, error) {
	l := &Liar{}
	var err error
	if l.policy, err = unix.Mmap(int(policy.Fd()), 0, policySize, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", policy.Name(), err)
	}
	if l.state, err = unix.Mmap(int(state.Fd()), 0, stateSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", state.Name(), err)
	}
	return l, nil
}

// Close unmaps the files.
func (l *Liar) Close() {
	_ = unix.Munmap(l.policy)
	_ = unix.Munmap(l.state)
}

// Now is the time by the clock of the schedule's sessions, ns: the machine's, or a simulated one.
func (l *Liar) Now() int64 {
	if l.Head(StateClock).Load() == clockMachine {
		return turns.Monotonic{}.Now()
	}
	return int64(l.Head(StateNow).Load())
}

func word(mem []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&mem[at])) }

// Head is a word of the header.
func (l *Liar) Head(w Word) *atomic.Uint64 { return word(l.state, int(w)) }

// Tenant is a word of a tenant's record.
func (l *Liar) Tenant(i int, w Word) *atomic.Uint64 {
	return word(l.state, pageSize+i*tenantRecord+int(w))
}

// Member is a word of a member's record.
func (l *Liar) Member(i int, w Word) *atomic.Uint64 {
	return word(l.state, pageSize+turns.MaxTenants*tenantRecord+i*memberRecord+int(w))
}

// TenantOf returns the number of a lease's tenant; -1: there is none.
func (l *Liar) TenantOf(lease string) int {
	for i := range turns.MaxTenants {
		at := pageSize + i*policyRecord
		name := string(bytes.TrimRight(l.policy[at+16:at+16+64], "\x00"))
		if name == lease && word(l.policy, at).Load()&(1<<9) != 0 {
			return i
		}
	}
	return -1
}

// gen is the generation of a tenant's record. Every session reads it.
func (l *Liar) gen(i int) uint64 { return word(l.policy, pageSize+i*policyRecord).Load() >> 32 }

// Debt is the word of a debt that lasts until a time, ns, as good as any that a session of that tenant writes.
func (l *Liar) Debt(tenant int, until int64) uint64 {
	us := uint64(until) / 1000
	sum := (us ^ uint64(tenant+1)<<56 ^ l.gen(tenant)<<24) * 0x9e3779b97f4a7c15 >> 48
	return us<<16 | sum
}

// Belongs is the word of a member of a tenant.
func (l *Liar) Belongs(tenant int) uint64 { return uint64(tenant+1) | l.gen(tenant)<<32 }

// MembersOf returns the numbers of a tenant's members.
func (l *Liar) MembersOf(tenant int) (all []int) {
	for i := range turns.MaxMembers {
		if l.Member(i, MemberOwner).Load() != 0 && l.Member(i, MemberTenant).Load() == l.Belongs(tenant) {
			all = append(all, i)
		}
	}
	return all
}

// Free returns the number of a record that no member has.
func (l *Liar) Free() int {
	for i := range turns.MaxMembers {
		if l.Member(i, MemberOwner).Load() == 0 {
			return i
		}
	}
	return -1
}

// Members counts the records that are somebody's.
func (l *Liar) Members() (n int) {
	for i := range turns.MaxMembers {
		if l.Member(i, MemberOwner).Load() != 0 {
			n++
		}
	}
	return n
}
