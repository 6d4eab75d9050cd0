package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// The owner's side. Admission lets one probe in; its Slot serves the probe's connections, each by a goroutine of its own, which share the
// bytes that are left to the probe. The end of any connection, or of the time, ends all of them.

// Bounds of a probe.
const (
	// Connections of a probe.
	Connections = 4
	// Life is the longest that a probe may take.
	Life = 25 * time.Second
	// gather is how long the next connection of a probe may take to arrive. If the node cannot reach the data port, none arrives.
	gather = 5 * time.Second
	// rest is how long an owner takes no probe after one whose connections have come: relays of encrypted ones are processes.
	rest = time.Second
	// After a user's probe, users' probes pause for Share times as long as that probe moved bytes, and for leastRest at least. So users'
	// probes take at most a tenth of a link's time.
	Share     = 9
	leastRest = 5 * time.Second
	// patience is how long a probe that comes too soon waits instead of being refused.
	patience = 3 * time.Second
	// userBytes are those of one flow of a user's probe, and flows how many there are: 1 connection and Connections, both ways.
	userBytes = 32 << 20
	flows     = 4
	// maxSend is the longest that an owner sends for one order.
	maxSend = 5 * time.Second
	// maxSmall bounds the messages of a connection which are not DATA of full size.
	maxSmall = 10_000
)

// Admission decides which probes an owner lets in.
type Admission struct {
	Gate
	Owner string
	Log   *slog.Logger
}

// NewAdmission makes an owner's Admission.
func NewAdmission(owner string, log *slog.Logger) *Admission {
	return &Admission{Owner: owner, Log: log}
}

// Check refuses a request that no probe of this release makes.
func Check(r lease.ProbeRequest) error {
	if r.Connections < 1 || r.Connections > Connections {
		return lease.Errorf(lease.Invalid, "a probe with %d connections: want 1 to %d", r.Connections, Connections)
	}
	if r.Encrypt && uint32(len(r.CertHashes)) != r.Connections {
		return lease.Errorf(lease.Invalid, "an encrypted probe with %d connections and %d hashes of certificates", r.Connections, len(r.CertHashes))
	}
	return nil
}

// Await waits, until ctx ends, for a probe or a pause that is about to end, so that Begin need not refuse.
func (a *Admission) Await(ctx context.Context, host string, uid uint32) {
	a.Gate.Await(ctx, host, uid, patience)
}

// Begin lets a probe of host in, or refuses it and names the probe in its way. The end of ctx ends the probe.
func (a *Admission) Begin(ctx context.Context, host string, r lease.ProbeRequest) (*Slot, error) {
	if err := Check(r); err != nil {
		return nil, err
	}
	leave, busy := a.Enter(host, r.UID, Life)
	if busy != nil {
		return nil, busy.refusal(a.Owner)
	}
	ctx, cancel := context.WithTimeout(ctx, Life)
	s := &Slot{ctx: ctx, end: cancel, epoch: time.Now(), log: a.Log.With("host", form.Name(host), "uid", r.UID), due: int(r.Connections), user: r.UID != 0}
	s.left.Store(math.MaxInt64)
	if r.UID != 0 {
		s.left.Store(flows * (userBytes + Connections*bufferSize))
	}
	a.leaves(ctx.Done())
	s.gather = time.AfterFunc(gather, s.end)
	context.AfterFunc(ctx, func() {
		s.gather.Stop()
		s.mu.Lock()
		s.due = 0 // a Take that has begun is counted, and none begins
		s.mu.Unlock()
		// The gate opens when nothing of the probe is left, so that one beginning just then measures an idle link, and relays do not add up.
		s.serving.Wait()
		leave(s.rests())
	})
	return s, nil
}

func (b *Busy) refusal(owner string) error {
	wait := b.Wait.Truncate(time.Second) + time.Second
	if b.Who == "" {
		return lease.Errorf(lease.Conflict, "owner %s has just been probed; try again in %v: probes of users leave a pause, so that they cannot fill a link", owner, wait)
	}
	return lease.Errorf(lease.Conflict, "owner %s is being probed from %s; try again in at most %v", owner, form.Name(b.Who), wait)
}

// Slot is a probe that was let in.
type Slot struct {
	ctx   context.Context
	end   context.CancelFunc
	epoch time.Time // the samples' clock begins here
	log   *slog.Logger
	left  atomic.Int64 // bytes of DATA in both directions
	moved atomic.Int64 // when DATA was first moved, by epoch; 0: it was not
	said  sync.Once    // why the probe ended
	user  bool

	mu      sync.Mutex
	due     int  // connections that may still come
	took    bool // one has come
	gather  *time.Timer
	serving sync.WaitGroup // the connections, and what carries them
}

// rests are those after the probe, which is over.
func (s *Slot) rests() (r Rests) {
	if s.took {
		r.All = rest
	}
	if first := s.moved.Load(); first > 0 {
		r.Users = leastRest
		if s.user {
			r.Users = max(leastRest, Share*(time.Since(s.epoch)-time.Duration(first)))
		}
	}
	return r
}

// moves notes that DATA is moved.
func (s *Slot) moves() {
	if s.moved.Load() == 0 {
		s.moved.CompareAndSwap(0, max(int64(time.Since(s.epoch)), 1))
	}
}

// End ends the probe: of one for which no connections could be offered.
func (s *Slot) End() { s.end() }

var errOver = errors.New("the probe is over")

// Take serves an admitted connection. Both files are Take's; it returns at once. The caller calls free when no process carries the connection
// any more: the probe is not over before that.
func (s *Slot) Take(conn, tcp *os.File) (free func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil || s.due <= 0 {
		_, _ = conn.Close(), tcp.Close()
		return nil, errOver
	}
	c, err := NewConn(conn, tcp)
	if err != nil {
		return nil, err
	}
	s.took = true
	if s.due--; s.due > 0 {
		s.gather.Reset(gather)
	} else {
		s.gather.Stop()
	}
	s.serving.Add(1)
	s.serving.Go(func() { s.run(c) })
	return sync.OnceFunc(s.serving.Done), nil
}

// run serves a connection to its end.
func (s *Slot) run(c *Conn) {
	defer s.end()
	defer c.Close()
	defer context.AfterFunc(s.ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if err := s.serve(c); !errors.Is(err, io.EOF) && s.ctx.Err() == nil {
		s.said.Do(func() { s.log.Info("probe ended", "error", err) })
	}
}

// serve answers messages until an error; the end of the connection is one.
func (s *Slot) serve(c *Conn) error {
	now := func() int64 { return int64(time.Since(s.epoch)) }
	var buf []byte
	for {
		kind, size, err := next(c.in)
		if err == nil {
			err = c.small(kind)
		}
		if err != nil {
			return err
		}
		switch kind {
		case kindPing:
			err = pong(c)
		case kindStateOf:
			st := c.state()
			_, err = c.Write(message(kindState, st.encode()))
		case kindSend:
			if buf == nil {
				buf = dataBuffer()
			}
			err = s.sendFor(c, buf)
		case kindData:
			err = s.sink(c, now, int(size))
		default:
			err = fmt.Errorf("%w: kind %d is not for an owner", errGarbage, kind)
		}
		if err != nil {
			return err
		}
	}
}

func pong(c *Conn) error {
	var b [pongSize]byte
	if _, err := io.ReadFull(c.in, b[:pingSize]); err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(b[pingSize:], uint64(time.Now().UnixNano()))
	_, err := c.Write(message(kindPong, b[:]))
	return err
}

// sendFor carries out an order for DATA, as far as bytes are left.
func (s *Slot) sendFor(c *Conn, buf []byte) error {
	var b [sendSize]byte
	if _, err := io.ReadFull(c.in, b[:]); err != nil {
		return err
	}
	d := min(time.Duration(binary.LittleEndian.Uint32(b[:]))*time.Millisecond, maxSend)
	limit := s.reserve(int64(binary.LittleEndian.Uint32(b[4:])) << 10)
	if limit > 0 {
		s.moves()
	}
	sent, err := c.send(buf, d, limit)
	s.left.Add(limit - int64(sent))
	return err
}

// reserve takes up to n of the bytes that are left.
func (s *Slot) reserve(n int64) int64 {
	for {
		left := s.left.Load()
		got := min(n, max(left, 0))
		if s.left.CompareAndSwap(left, left-got) {
			return got
		}
	}
}

// sink takes DATA, as far as bytes are left, and says when it came.
func (s *Slot) sink(c *Conn, now func() int64, first int) error {
	s.moves()
	list, _, err := c.receive(now, first, func(n int) error {
		if s.left.Add(-int64(n)) < 0 {
			return fmt.Errorf("%w: more DATA than was asked for", errGarbage)
		}
		if n < headSize+dataSize {
			return c.small(kindData)
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, err = c.Write(message(kindSamples, encodeSamples(list)))
	return err
}
