package owner

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/boottime"
)

// Clock is time. Up counts since boot, sleep included, and cannot be set.
type Clock interface {
	Now() time.Time
	Up() time.Duration
	Boot() string // differs from boot to boot
}

type systemClock struct{ boot string }

// SystemClock is this machine's clock.
func SystemClock() (Clock, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("clock: %w", err)
	}
	return systemClock{strings.TrimSpace(string(b))}, nil
}

func (c systemClock) Now() time.Time    { return time.Now() }
func (c systemClock) Boot() string      { return c.boot }
func (c systemClock) Up() time.Duration { return boottime.Now() }

// record is a lease in the ledger.
type record struct {
	Lease lease.Lease `json:"lease"`
	// Deadline counts since the boot of that id.
	Boot     string        `json:"boot,omitempty"`
	Deadline time.Duration `json:"deadline,omitempty"`
	Ending   *ending       `json:"ending,omitempty"`
	Changes  uint64        `json:"changes,omitempty"` // how often Set has changed it
	Claimed  bool          `json:"claimed,omitempty"` // its own host has attached it for its job
	// Began is the boot in which the lease was made. What its sessions counted is lost with that boot.
	Began string `json:"began,omitempty"`
}

// ending says why and how a lease ends.
type ending struct {
	Event  string `json:"event"` // audit.Release or audit.Reclaim
	Reason string `json:"reason"`
	Over   bool   `json:"over"` // the key gets a tombstone
}

// deadline is when the lease ends, on c's clock, 0 for never.
func (r *record) deadline(c Clock) time.Duration {
	switch {
	case r.Lease.Expires.IsZero():
		return 0
	case r.Boot == c.Boot():
		return r.Deadline
	case r.Lease.State == lease.Reserved:
		return 1 // at once: a reboot is longer than any reservation
	}
	// The machine was rebooted, so only the wall clock is left. If it is wrong, the lease has
	// its whole life again, or ends: no session is left to lose.
	left := r.Lease.Expires.Sub(c.Now())
	return max(1, c.Up()+max(0, min(left, r.Lease.Request.Life)))
}

// expire sets when the lease ends: after d, or never if d is 0.
func (r *record) expire(c Clock, d time.Duration) {
	r.Boot, r.Deadline, r.Lease.Expires = "", 0, time.Time{}
	if d > 0 {
		r.Boot, r.Deadline, r.Lease.Expires = c.Boot(), c.Up()+d, c.Now().Add(d).UTC()
	}
}

// tombstone remembers an id or a key that has ended.
type tombstone struct {
	Lease       string        `json:"lease,omitempty"`
	Key         string        `json:"key,omitempty"`
	Incarnation uint64        `json:"incarnation,omitempty"` // this and smaller ones have ended
	Host        string        `json:"host,omitempty"`
	Reason      string        `json:"reason"`
	Ended       time.Time     `json:"ended"`
	Boot        string        `json:"boot"`
	Up          time.Duration `json:"up"`
	Unknown     bool          `json:"unknown,omitempty"` // the lease never existed here
	Report      *lease.Report `json:"report,omitempty"`  // of an id that was granted
}

// tombSeen is a tombstone and since when it counts, on the clock since boot.
type tombSeen struct {
	tombstone
	since time.Duration
}

// idTomb and keyTomb name tombstones. A key's parts may hold any character.
func idTomb(id string) string { return "id/" + id }
func keyTomb(k lease.Key) string {
	return fmt.Sprintf("key/%q/%q/%q", k.Cluster, k.Job, k.Node)
}

// jobTomb names the tombstone of a job on all nodes.
func jobTomb(k lease.Key) string { return fmt.Sprintf("job/%q/%q", k.Cluster, k.Job) }

// ended returns the tombstone that says that k has ended, if there is one.
func (o *Owner) ended(k lease.Key) (tombSeen, bool) {
	for _, name := range []string{keyTomb(k), jobTomb(k)} {
		if t, ok := o.tombs[name]; ok && t.Incarnation >= k.Incarnation {
			return t, true
		}
	}
	return tombSeen{}, false
}

// bury takes a tombstone into memory. A tombstone of another boot counts from now: too long
// rather than too short.
func (o *Owner) bury(name string, t tombstone) {
	since := t.Up
	if t.Boot != o.clock.Boot() {
		since = o.clock.Up()
	}
	if old, ok := o.tombs[name]; ok && old.Unknown {
		o.unknown[old.Host]--
	}
	if t.Unknown {
		o.unknown[t.Host]++
	}
	o.tombs[name] = tombSeen{t, since}
}

func (o *Owner) tombstone(reason string) tombstone {
	return tombstone{Reason: reason, Ended: o.clock.Now().UTC(), Boot: o.clock.Boot(), Up: o.clock.Up()}
}

// line is a line of the outbox that is to go into the audit log.
type line struct {
	seq   uint64 // in the ledger's outbox
	event audit.Event
	doubt bool // from before a crash: the log may have it already
}

// flush writes queued lines, in order, until one fails. They stay in the ledger's outbox
// until settle has had them synced. write is held.
func (o *Owner) flush() error {
	for len(o.queue) > 0 {
		l := &o.queue[0]
		has := false
		if l.doubt {
			var err error
			if has, err = o.cfg.Audit.Has(l.event.Event, l.event.Lease, o.cfg.Name, l.event.Change); err != nil {
				return err
			}
		}
		if !has {
			if err := o.cfg.Audit.Write(l.event); err != nil {
				return err
			}
		}
		o.written = append(o.written, l.seq)
		o.queue = o.queue[1:]
	}
	o.queue = nil
	return nil
}

// settle syncs the lines that were written, and only then deletes them from the ledger. write
// is not held: a sync may take long.
func (o *Owner) settle() error {
	o.write.Lock()
	err := o.flush()
	seqs := o.written
	o.written = nil
	o.write.Unlock()
	if len(seqs) == 0 {
		return err
	}
	if serr := o.cfg.Audit.Sync(); serr != nil {
		o.write.Lock()
		o.written = append(seqs, o.written...)
		o.write.Unlock()
		return errors.Join(err, serr)
	}
	for _, seq := range seqs {
		o.cfg.Ledger.Flushed(seq)
	}
	return err
}

// event is an audit line about a lease here.
func (o *Owner) event(event string, l *lease.Lease, reason string) audit.Event {
	e := audit.Of(event, l, reason)
	e.Owner = o.cfg.Name
	e.Time = o.clock.Now()
	return e
}
