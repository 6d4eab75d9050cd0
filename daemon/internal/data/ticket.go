package data

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	maxTickets = 8192
	// maxWrong is the most wrong answers to a ticket: a stranger on the network who saw its
	// number must be able neither to use it up at once nor to go on guessing.
	maxWrong = 3
	// maxProbes is the most tickets of probes, which an owner lets in one after the other: those of some that were given up.
	maxProbes = 64
	// maxBulkTickets is the most tickets for bulk connections of a lease, which count for themselves: a process opens some at a time.
	maxBulkTickets = 4 * wire.MaxBulk
)

// ticket is good for one connection.
type ticket struct {
	secret  [32]byte
	request lease.SessionRequest
	key     tls.Certificate // of the owner's end, encrypted connections only
	probe   taker           // of a probe; nil: the connection is a session's
	until   time.Time       // has a monotonic reading, since clocks may jump
	wrong   int
}

// kept is the key under which tickets are counted: one for all probes, and two for each lease, for its bulk connections and for its
// other sessions. No lease id is the same as another key.
func kept(r *lease.SessionRequest, probe taker) string {
	if probe != nil {
		return "probe"
	}
	if _, ok := wire.Bulks(r.Kind); ok {
		return "bulk " + r.Lease
	}
	return r.Lease
}

// named adds to an error that the ticket was a probe's: in logs it stands for no lease. k may be nil.
func (k *ticket) named(err error) error {
	if k != nil && k.probe != nil {
		return fmt.Errorf("a probe's connection: %w", err)
	}
	return err
}

// tickets are the tickets that can be used. One mutex guards them, and is held for
// microseconds.
type tickets struct {
	life     time.Duration
	perLease int
	now      func() time.Time

	mu    sync.Mutex
	out   map[[16]byte]*ticket
	count map[string]int // by kept
	swept time.Time      // when old tickets were last dropped
}

func newTickets(life time.Duration, perLease int) *tickets {
	return &tickets{life: life, perLease: perLease, now: time.Now, out: map[[16]byte]*ticket{}, count: map[string]int{}}
}

// add makes a ticket. probe is nil for a session's.
func (t *tickets) add(r lease.SessionRequest, key tls.Certificate, probe taker) (id [16]byte, secret [32]byte, err error) {
	_, _ = rand.Read(id[:]) // never fails
	_, _ = rand.Read(secret[:])
	t.mu.Lock()
	defer t.mu.Unlock()
	now, most, by := t.now(), t.perLease, kept(&r, probe)
	_, bulk := wire.Bulks(r.Kind)
	switch {
	case probe != nil:
		most = maxProbes
	case bulk:
		most = maxBulkTickets
	}
	if len(t.out) >= maxTickets || t.count[by] >= most || now.Sub(t.swept) >= time.Second {
		t.expire(now)
	}
	n := t.count[by]
	switch {
	case n >= most && probe != nil:
		return id, secret, lease.Errorf(lease.Conflict, "%d connections of probes have not been used; try again in %v", n, t.life)
	case n >= most && bulk:
		return id, secret, lease.Errorf(lease.NoRoom, "lease %s: %d bulk connections are being made already", r.Lease, n)
	case n >= most:
		return id, secret, lease.Errorf(lease.NoRoom, "lease %s: %d sessions are being opened already; see session.max_per_lease", r.Lease, n)
	case len(t.out) >= maxTickets:
		return id, secret, lease.Errorf(lease.NoRoom, "%d sessions are being opened already; try again in %v", len(t.out), t.life)
	}
	t.out[id] = &ticket{secret: secret, request: r, key: key, probe: probe, until: now.Add(t.life)}
	t.count[by]++
	return id, secret, nil
}

// peek returns the secret of a ticket that is good now.
func (t *tickets) peek(id [16]byte) (secret [32]byte, r lease.SessionRequest, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k, err := t.get(id)
	if err != nil {
		return secret, r, err
	}
	return k.secret, k.request, nil
}

// use uses up a ticket if answer is right. A second right answer is refused.
func (t *tickets) use(id [16]byte, want, answer []byte) (*ticket, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k, err := t.get(id)
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(want, answer) {
		if k.wrong++; k.wrong >= maxWrong {
			t.drop(id, k)
		}
		return k, fmt.Errorf("%w: wrong answer to the challenge, number %d for this ticket", ErrRefused, k.wrong)
	}
	t.drop(id, k)
	return k, nil
}

// get finds a ticket that is good. t.mu is held.
func (t *tickets) get(id [16]byte) (*ticket, error) {
	k := t.out[id]
	if k == nil {
		return nil, fmt.Errorf("%w: the ticket is unknown or has been used", errStranger)
	}
	if !t.now().Before(k.until) {
		t.drop(id, k)
		if k.probe != nil {
			return nil, k.named(fmt.Errorf("%w: the ticket is older than %v", ErrRefused, t.life))
		}
		return nil, fmt.Errorf("%w: the ticket for lease %s is older than %v", ErrRefused, k.request.Lease, t.life)
	}
	return k, nil
}

// expire drops old tickets. t.mu is held.
func (t *tickets) expire(now time.Time) {
	t.swept = now
	for id, k := range t.out {
		if !now.Before(k.until) {
			t.drop(id, k)
		}
	}
}

// drop forgets a ticket. t.mu is held.
func (t *tickets) drop(id [16]byte, k *ticket) {
	delete(t.out, id)
	by := kept(&k.request, k.probe)
	if t.count[by]--; t.count[by] <= 0 {
		delete(t.count, by)
	}
}
