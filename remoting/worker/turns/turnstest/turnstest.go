// Package turnstest makes schedules, tenants and members for tests, and a clock that a test sets.
package turnstest

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Clock is a clock that a test sets, in ns. Waiting takes no time.
type Clock struct{ T int64 }

// Now returns T.
func (c *Clock) Now() int64 { return c.T }

// Spins says yes, as the machine's clock does.
func (c *Clock) Spins() bool { return true }

// Wait returns at once.
func (c *Clock) Wait(*uint32, uint32, int64, bool) {}

// Schedule makes a schedule that is closed when the test ends.
func Schedule(t testing.TB, site turns.Site) *turns.Schedule {
	t.Helper()
	s, err := turns.CreateAnonymous(site)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// Tenant makes a lease a tenant of s.
func Tenant(t testing.TB, s *turns.Schedule, lease string, p turns.Policy) int {
	t.Helper()
	tenant, err := s.Add(lease, p)
	if err != nil {
		t.Fatal(err)
	}
	return tenant
}

// Member makes a member of a tenant of s.
func Member(t testing.TB, s *turns.Schedule, tenant int, c turns.Clock) *turns.Member {
	t.Helper()
	var fds [2]int
	policy, state := s.Files()
	for i, f := range []*os.File{policy, state} {
		var err error
		if fds[i], err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			t.Fatal(err)
		}
	}
	m, err := turns.OpenFDs(fds[0], fds[1], tenant, c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
