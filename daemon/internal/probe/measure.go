package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// The node's side: round trips on a connection that is otherwise idle, then the flows one after the other.

// Plan says how much is measured.
type Plan struct {
	exchanges  int
	exchanging time.Duration // for so long at most, once there are leastExchanges
	flow       time.Duration // each; longer where the round trip is long
	bytes      int64         // of each flow, at most
	bounded    bool

	// Moves, if set, is called before the first bytes are moved that count as load.
	Moves func()
}

const (
	leastExchanges = 3
	warmUp         = 3 // exchanges that do not count: the first ones find caches cold
	// roundTrips is how many of them a flow takes at least, for TCP to find the link's rate, up to maxFlow.
	roundTrips = 20
	maxFlow    = 3 * time.Second
	// drain is how long what is under way may take after the last byte was written.
	drain = 10 * time.Second
	// answer is how long the owner may take for an answer on an idle connection.
	answer = 5 * time.Second
)

// PlanFor is the plan for a user. Root's is longer.
func PlanFor(uid uint32) Plan {
	if uid == 0 {
		return Plan{exchanges: 500, exchanging: time.Second, flow: time.Second, bytes: math.MaxInt64}
	}
	return Plan{exchanges: 100, exchanging: 500 * time.Millisecond, flow: 250 * time.Millisecond, bytes: userBytes, bounded: true}
}

// Stopped says that the owner ended a probe before it was over, or sent what is no answer.
type Stopped struct {
	During string
	Err    error
}

func (e *Stopped) Error() string {
	why := e.Err.Error()
	switch {
	case errors.Is(e.Err, os.ErrDeadlineExceeded):
		why = "no answer in time"
	case errors.Is(e.Err, io.EOF), errors.Is(e.Err, io.ErrUnexpectedEOF):
		why = "the owner ended the connection"
	}
	return e.During + ": " + why
}

func (e *Stopped) Unwrap() error { return e.Err }

// Measure measures over conns: one at a time, or all at once. The caller fills in what the two ends are. The end of ctx is an error.
func Measure(ctx context.Context, conns []*Conn, plan Plan) (lease.Probe, error) {
	p := lease.Probe{Bounded: plan.bounded}
	defer context.AfterFunc(ctx, func() {
		for _, c := range conns {
			_ = c.SetDeadline(time.Unix(1, 0))
		}
	})()
	m := &measuring{ctx: ctx, plan: plan, epoch: time.Now(), buf: dataBuffer()}
	if err := m.exchanges(conns[0], &p); err != nil {
		return p, &Stopped{"round trips", err}
	}
	if plan.Moves != nil {
		plan.Moves()
	}
	counts := []int{1}
	if len(conns) > 1 {
		counts = append(counts, len(conns))
	}
	for _, n := range counts {
		for _, up := range []bool{true, false} {
			f, err := m.flow(conns[:n], up, max(plan.flow, min(roundTrips*p.RoundTripMedian, maxFlow)))
			if err != nil {
				what := "copies from the owner"
				if up {
					what = "copies to the owner"
				}
				return p, &Stopped{what, err}
			}
			p.Flows = append(p.Flows, f)
		}
	}
	to, err := m.stateOf(conns[0])
	if err != nil {
		return p, &Stopped{"the owner's own figures", err}
	}
	p.To, p.From = to.end, conns[0].state().end
	return p, nil
}

type measuring struct {
	ctx   context.Context
	plan  Plan
	epoch time.Time
	buf   []byte // of DATA; only read
}

func (m *measuring) now() int64 { return int64(time.Since(m.epoch)) }

// allow sets a connection's deadline, unless all of it is over.
func (m *measuring) allow(c *Conn, d time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(d)); err != nil {
		return err
	}
	return m.ctx.Err() // after it: the end sets a deadline too
}

// exchanges fills in round trips and the owner's clock, as the quickest exchange had it.
func (m *measuring) exchanges(c *Conn, p *lease.Probe) error {
	var took []time.Duration
	end := time.Now().Add(m.plan.exchanging)
	for n := uint64(0); ; n++ {
		if err := m.allow(c, answer); err != nil {
			return err
		}
		asked := time.Now()
		theirs, err := ping(c, n)
		if err != nil {
			return err
		}
		now := time.Now()
		d := now.Sub(asked)
		if n < warmUp && d < m.plan.exchanging/20 {
			continue
		}
		if len(took) == 0 || d < p.RoundTrip {
			p.RoundTrip, p.Ahead = d, theirs.Sub(asked.Add(d/2).Round(0))
		}
		took = append(took, d)
		if len(took) >= m.plan.exchanges || len(took) >= leastExchanges && now.After(end) {
			break
		}
	}
	slices.Sort(took)
	p.Exchanges = uint32(len(took))
	p.RoundTripMedian, p.RoundTrip99 = took[len(took)/2], took[(len(took)*99+99)/100-1]
	return nil
}

// ping is one exchange. It returns the owner's clock.
func ping(c *Conn, n uint64) (time.Time, error) {
	var b [pingSize]byte
	binary.LittleEndian.PutUint64(b[:], n)
	if _, err := c.Write(message(kindPing, b[:])); err != nil {
		return time.Time{}, err
	}
	got, err := expect(c.in, kindPong)
	if err != nil {
		return time.Time{}, err
	}
	if m := binary.LittleEndian.Uint64(got); m != n {
		return time.Time{}, fmt.Errorf("%w: answer %d to number %d", errGarbage, m, n)
	}
	return time.Unix(0, int64(binary.LittleEndian.Uint64(got[pingSize:]))), nil
}

func (m *measuring) stateOf(c *Conn) (state, error) {
	if err := m.allow(c, answer); err != nil {
		return state{}, err
	}
	if _, err := c.Write(message(kindStateOf, nil)); err != nil {
		return state{}, err
	}
	b, err := expect(c.in, kindState)
	return decodeState(b), err
}

// moved is what one connection had of a flow.
type moved struct {
	samples      []sample
	bytes        uint64
	sent, resent uint64 // segments
	err          error
}

// flow moves bytes in one direction over all conns at a time.
func (m *measuring) flow(conns []*Conn, up bool, d time.Duration) (lease.ProbeFlow, error) {
	f := lease.ProbeFlow{Up: up, Connections: uint32(len(conns))}
	parts := make([]moved, len(conns))
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() { parts[i] = m.move(c, up, d, m.plan.bytes/int64(len(conns))) })
	}
	wg.Wait()
	var all [][]sample
	for _, p := range parts {
		if p.err != nil {
			return f, p.err
		}
		all = append(all, p.samples)
		f.Bytes += p.bytes
		f.Segments += p.sent
		f.Resent += p.resent
	}
	rates(&f, all)
	return f, nil
}

// move is the flow's part of one connection.
func (m *measuring) move(c *Conn, up bool, d time.Duration, limit int64) (p moved) {
	counted := func() (s state) {
		if up { // this end sends
			return c.state()
		}
		if p.err == nil {
			s, p.err = m.stateOf(c)
		}
		return s
	}
	before := counted()
	if p.err == nil {
		p.err = m.allow(c, d+drain)
	}
	switch {
	case p.err != nil:
		return p
	case up:
		p.samples, p.bytes, p.err = m.upload(c, d, limit)
	default:
		p.samples, p.bytes, p.err = m.download(c, d, limit)
	}
	if p.err == nil {
		after := counted()
		p.sent, p.resent = grown(before.sent, after.sent), grown(before.resent, after.resent)
	}
	return p
}

// grown returns by how much a count has grown. The kernel's counts have 32 bits, and may have wrapped.
func grown(before, after uint64) uint64 { return uint64(uint32(after - before)) }

func (m *measuring) upload(c *Conn, d time.Duration, limit int64) ([]sample, uint64, error) {
	sent, err := c.send(m.buf, d, limit)
	if err != nil {
		return nil, sent, err
	}
	b, err := expect(c.in, kindSamples)
	if err != nil {
		return nil, sent, err
	}
	list, err := decodeSamples(b)
	if n := len(list); err == nil && n > 0 && list[n-1].bytes-list[0].bytes > sent+sent/8+bufferSize { // TLS adds less than that
		err = fmt.Errorf("%w: more has arrived than was sent", errGarbage)
	}
	return list, sent, err
}

func (m *measuring) download(c *Conn, d time.Duration, limit int64) ([]sample, uint64, error) {
	var b [sendSize]byte
	binary.LittleEndian.PutUint32(b[:], uint32(d/time.Millisecond))
	kib := min(limit>>10, math.MaxUint32)
	binary.LittleEndian.PutUint32(b[4:], uint32(kib))
	if _, err := c.Write(message(kindSend, b[:])); err != nil {
		return nil, 0, err
	}
	left := min(limit, kib<<10) + bufferSize
	return c.receive(m.now, -1, func(n int) error {
		if left -= int64(n); left < 0 {
			return fmt.Errorf("%w: more DATA than was asked for", errGarbage)
		}
		return nil
	})
}
