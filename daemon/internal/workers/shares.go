package workers

// Compute time: every GPU has a board (package turns), on which every granted lease has
// a seat, and sessions take turns on it by themselves. What is done here is around that.
//
//	Share        seats of a lease made, or given another policy; from its grant on, since
//	             policy equal counts leases, whether they have sessions or not
//	Start        its seats, and the board's two files, go with the START message
//	a session    has ended: its place on the board is cleared
//	Forget       seats given back; until then they tell what the lease has had
//	SetSharing   a reload: all seats are told anew
//	WatchTurns   work that stays on a GPU far beyond its turn
//
// The boards' files outlive the daemon. The next one finds seats there by the lease's
// name; those of leases that it does not know are told by Leases, for the owner to end.
//
// mu guards all of it, boards too.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Sharing says how compute time is shared.
type Sharing struct {
	Quantum     time.Duration // of a turn
	EqualActive bool          // policy equal counts leases with work, not all
	Lend        bool          // leases that say nothing lend
	Limit       time.Duration // of work beyond its turn, 0 for none
	End         bool          // beyond it the session ends
}

// Overrun tells of work that stayed on a GPU longer than it may.
type Overrun struct {
	Lease  lease.Lease
	GPU    string
	PID    int // the session's process, 0 if it is not known
	Time   time.Duration
	Limit  time.Duration
	Ended  bool // its session was ended for it
	Reason string
}

const policySuffix = ".policy"

// seated is a lease with seats.
type seated struct {
	lease lease.Lease    // without grants until Share has told of it
	seats map[string]int // by GPU
	err   error          // why it has not all of them
}

// openBoards opens the boards that an earlier daemon left.
func (p *Pool) openBoards() error {
	p.seats, p.boards, p.over = map[string]*seated{}, map[string]*turns.Board{}, map[overrunKey]bool{}
	if p.cfg.Turns == "" {
		return nil
	}
	if err := os.MkdirAll(p.cfg.Turns, 0o700); err != nil {
		return fmt.Errorf("turns: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(p.cfg.Turns, "*"+policySuffix))
	if err != nil {
		return fmt.Errorf("turns: %w", err)
	}
	for _, f := range files {
		gpu := strings.TrimSuffix(filepath.Base(f), policySuffix)
		b, err := p.board(gpu)
		if err != nil {
			// Sessions that live go on with it; new ones are refused until it is mended.
			p.log.Error("board of a GPU cannot be used", "gpu", gpu, "error", err)
			continue
		}
		for _, c := range b.Read() {
			s := p.seats[c.Lease]
			if s == nil {
				s = &seated{lease: lease.Lease{ID: c.Lease}, seats: map[string]int{}}
				p.seats[c.Lease] = s
			}
			s.seats[gpu] = c.Seat
		}
	}
	return nil
}

// board is a GPU's; mu is held, but for the start.
func (p *Pool) board(gpu string) (*turns.Board, error) {
	if b := p.boards[gpu]; b != nil {
		return b, nil
	}
	b, err := turns.Create(p.cfg.Turns, gpu, p.site())
	if err != nil {
		return nil, fmt.Errorf("gpu %s: %w", gpu, err)
	}
	p.boards[gpu] = b
	return b, nil
}

func (p *Pool) site() turns.Site {
	return turns.Site{Quantum: p.sharing.Quantum, EqualActive: p.sharing.EqualActive}
}

// policy is a grant's, as boards have it.
func (p *Pool) policy(l *lease.Lease, g lease.Grant) turns.Policy {
	q := l.Request
	out := turns.Policy{Kind: turns.BestEffort, Weight: g.Percent * (turns.Whole / 100), Lend: q.Lend == lease.LendYes || q.Lend == lease.LendSite && p.sharing.Lend}
	switch q.Policy {
	case lease.Fixed:
		out.Kind = turns.Fixed
	case lease.Equal:
		out.Kind = turns.Equal
	}
	return out
}

// Share implements owner.Workers.
func (p *Pool) Share(l lease.Lease) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.Turns == "" {
		return nil
	}
	return p.share(l)
}

// share seats a lease; mu is held.
func (p *Pool) share(l lease.Lease) error {
	s := p.seats[l.ID]
	if s == nil {
		s = &seated{seats: map[string]int{}}
		p.seats[l.ID] = s
	}
	s.lease = l
	var errs []error
	for _, g := range l.Grants {
		b, err := p.board(g.GPU)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		n, err := b.Seat(l.ID, p.policy(&l, g))
		if err != nil {
			errs = append(errs, fmt.Errorf("gpu %s: %w", g.GPU, err))
			continue
		}
		s.seats[g.GPU] = n
	}
	s.err = errors.Join(errs...)
	return s.err
}

// Unseated are the leases that have no place on their GPUs' boards, and why: no session
// of them is started.
func (p *Pool) Unseated() map[string]error {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]error{}
	for id, s := range p.seats {
		if s.err != nil {
			out[id] = s.err
		}
	}
	return out
}

// places are the seats of a lease as the START message has them, and copies of the
// files to go with it, for the caller to close: the boards may be let go of meanwhile.
// Without turns there are none of both.
func (p *Pool) places(l lease.Lease) (at []control.Turn, files []*os.File, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.cfg.Turns == "":
		return nil, nil, nil
	case p.closed:
		return nil, nil, errors.New("the daemon is stopping")
	}
	s := p.seats[l.ID]
	if s != nil && len(s.lease.Grants) > 0 {
		l = s.lease // Set may have changed it since the caller looked
	}
	if s == nil || s.err != nil || len(s.lease.Grants) == 0 {
		if err := p.share(l); err != nil {
			return nil, nil, fmt.Errorf("its share of compute time cannot be kept: %w", err)
		}
	}
	for _, g := range l.Grants {
		at = append(at, control.Turn{Seat: p.seats[l.ID].seats[g.GPU]})
		policy, state := p.boards[g.GPU].Files()
		for _, f := range []*os.File{policy, state} {
			fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				for _, f := range files {
					f.Close()
				}
				return nil, nil, fmt.Errorf("board of GPU %s: %w", g.GPU, err)
			}
			files = append(files, os.NewFile(uintptr(fd), f.Name()))
		}
	}
	return at, files, nil
}

// vacate clears the places of a session whose process has ended; mu is held.
func (p *Pool) vacate(s *session) {
	if s.Worker.PID == 0 {
		return
	}
	for _, g := range s.l.gpus {
		if b := p.boards[g]; b != nil {
			b.Gone(s.Worker.PID, s.Worker.Start)
		}
	}
}

// unseat gives the seats of a lease back; mu is held.
func (p *Pool) unseat(id string) {
	s := p.seats[id]
	if s == nil {
		return
	}
	for gpu, n := range s.seats {
		if b := p.boards[gpu]; b != nil {
			b.Leave(n)
		}
	}
	delete(p.seats, id)
}

// Shares implements owner.Workers.
func (p *Pool) Shares(id string) []lease.Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sharesOf(id)
}

func (p *Pool) sharesOf(id string) []lease.Share {
	s := p.seats[id]
	if s == nil || len(s.lease.Grants) == 0 {
		return nil
	}
	out := make([]lease.Share, len(s.lease.Grants))
	for i, g := range s.lease.Grants {
		b, n := p.boards[g.GPU], s.seats[g.GPU]
		if b == nil {
			continue
		}
		for _, c := range b.Read() {
			if c.Seat != n || c.Lease != id {
				continue
			}
			out[i] = lease.Share{
				Due: c.Share, Held: c.Held, Busy: c.Busy, Waited: c.Waited, Throttled: c.Throttled, Lent: c.Lent, Borrowed: c.Borrowed,
				Longest: c.Longest, Turns: c.Turns, Overruns: c.Overruns, Revoked: c.Revoked,
			}
		}
	}
	return out
}

// SetSharing changes how time is shared, from the next turns on.
func (p *Pool) SetSharing(s Sharing) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sharing = s
	if p.cfg.Turns == "" {
		return
	}
	for _, b := range p.boards {
		b.SetSite(p.site())
	}
	for id, at := range p.seats {
		if len(at.lease.Grants) == 0 {
			continue
		}
		if err := p.share(at.lease); err != nil {
			p.log.Error("a lease's share of compute time cannot be kept", "lease", id, "error", err)
		}
	}
}

// overrunKey is whose work stays on a GPU.
type overrunKey struct {
	gpu   string
	lease string
	pid   int
}

// WatchTurns looks after the boards until ctx ends: what sessions left that ended
// unseen, and work beyond the site's limit, of which tell hears once.
func (p *Pool) WatchTurns(ctx context.Context, tell func(Overrun)) error {
	if p.cfg.Turns == "" {
		return nil
	}
	swept := time.Time{}
	for {
		if now := time.Now(); now.Sub(swept) >= time.Second {
			swept = now
			p.sweepBoards()
		}
		limit := time.Second
		for _, o := range p.overruns() {
			tell(o)
		}
		p.mu.Lock()
		if l := p.sharing.Limit; l > 0 {
			limit = l
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(max(limit/4, 25*time.Millisecond), time.Second)):
		}
	}
}

func (p *Pool) sweepBoards() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.boards {
		b.Sweep()
	}
}

// overruns finds what goes beyond the limit and was not told yet, and ends its sessions
// where the site wants that.
func (p *Pool) overruns() []Overrun {
	p.mu.Lock()
	defer p.mu.Unlock()
	limit := p.sharing.Limit
	if limit <= 0 {
		return nil
	}
	var found []Overrun
	still := map[overrunKey]bool{}
	for gpu, b := range p.boards {
		for _, c := range b.Read() {
			if c.Overrun <= limit {
				continue
			}
			k := overrunKey{gpu, c.Lease, c.OverrunPID}
			ending, told := p.over[k]
			still[k] = ending || p.sharing.End
			if told && ending == still[k] { // unless the site wants it ended since
				continue
			}
			o := Overrun{Lease: lease.Lease{ID: c.Lease}, GPU: gpu, PID: c.OverrunPID, Time: c.Overrun, Limit: limit}
			if s := p.seats[c.Lease]; s != nil {
				o.Lease = s.lease
			}
			o.Reason = fmt.Sprintf("its work stayed on GPU %s for %v after its turn; shares.overrun.limit is %v", gpu, c.Overrun.Round(time.Millisecond), limit)
			if p.sharing.End {
				o.Ended = p.endOverrun(c.Lease, c.OverrunPID, o.Reason)
			}
			found = append(found, o)
		}
	}
	p.over = still
	return found
}

// endOverrun ends a session, or all of the lease's where it is not known which it is. It
// says whether there was one; mu is held.
func (p *Pool) endOverrun(id string, pid int, reason string) (some bool) {
	l := p.leases[id]
	if l == nil {
		return false
	}
	for s := range l.sessions {
		if pid != 0 && s.Worker.PID != pid {
			continue
		}
		if s.why == "" {
			s.why = reason
		}
		s.kill()
		some = true
	}
	return some
}

// closeBoards lets go of the boards; their files and who uses them go on.
func (p *Pool) closeBoards() {
	for _, b := range p.boards {
		b.Close()
	}
	p.boards = map[string]*turns.Board{}
}
