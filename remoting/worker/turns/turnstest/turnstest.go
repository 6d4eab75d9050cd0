// Package turnstest makes boards, seats and chairs for tests, and a clock that a test sets.
package turnstest

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Clock is a clock that a test sets; ns. Waiting takes no time.
type Clock struct{ T int64 }

// Now is T.
func (c *Clock) Now() int64 { return c.T }

// Spins says yes, as the machine's clock does.
func (c *Clock) Spins() bool { return true }

// Wait returns at once.
func (c *Clock) Wait(*uint32, uint32, int64, bool) {}

// Board makes a board that is closed when the test ends.
func Board(t testing.TB, site turns.Site) *turns.Board {
	t.Helper()
	b, err := turns.CreateAnonymous(site)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// Seat gives a lease a seat on b.
func Seat(t testing.TB, b *turns.Board, lease string, p turns.Policy) int {
	t.Helper()
	seat, err := b.Seat(lease, p)
	if err != nil {
		t.Fatal(err)
	}
	return seat
}

// Chair takes a chair on a seat of b.
func Chair(t testing.TB, b *turns.Board, seat int, c turns.Clock) *turns.Chair {
	t.Helper()
	var fds [2]int
	policy, state := b.Files()
	for i, f := range []*os.File{policy, state} {
		var err error
		if fds[i], err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			t.Fatal(err)
		}
	}
	chair, err := turns.OpenFDs(fds[0], fds[1], seat, c)
	if err != nil {
		t.Fatal(err)
	}
	return chair
}
