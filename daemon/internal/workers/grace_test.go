package workers

import (
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// A lease's own grace goes before the site's.
func TestGrace(t *testing.T) {
	p := &Pool{cfg: Config{Grace: time.Minute}}
	for asked, want := range map[time.Duration]time.Duration{0: time.Minute, lease.NoGrace: 0, time.Hour: time.Hour} {
		if got := p.grace(lease.Lease{Request: lease.Request{Grace: asked}}); got != want {
			t.Errorf("a lease with grace %v: %v, want %v", asked, got, want)
		}
	}
}

// A session gets further connections of its client's process, and of no other one of the lease.
func TestAttachable(t *testing.T) {
	l := &leased{id: "a", sessions: map[*session]bool{}}
	l.sessions[&session{Session: lease.Session{Client: 4711}, slot: 3}] = true
	l.sessions[&session{Session: lease.Session{Client: 4712}, slot: 4}] = true
	p := &Pool{leases: map[string]*leased{"a": l, "b": {id: "b", ending: true, sessions: l.sessions}}}
	for _, c := range []struct {
		lease  string
		n      int
		client uint32
		want   lease.Code
	}{
		{"a", 3, 4711, ""},
		{"a", 4, 4711, lease.Denied},
		{"a", 3, 4712, lease.Denied},
		{"a", 3, 0, lease.Denied},
		{"a", 5, 4711, lease.NotFound},
		{"b", 3, 4711, lease.NotFound},
		{"c", 3, 4711, lease.NotFound},
	} {
		if err := p.Attachable(c.lease, c.n, c.client); err == nil && c.want != "" || err != nil && lease.CodeOf(err) != c.want {
			t.Errorf("process %d, session %d of lease %s: %v", c.client, c.n, c.lease, err)
		}
	}
}
