package worker

// The stand-alone worker's boards: one for each device, with a seat for each lease.

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Turns says how a stand-alone worker shares its devices' time.
type Turns struct {
	Site     turns.Site
	Kind     turns.Kind
	Lend     bool
	Percents []int // of the leases, in the order in which they come; the last one counts for the rest
}

type boards struct {
	cfg  *Turns
	list []*turns.Board
	mu   sync.Mutex
	n    int // leases so far
}

func newBoards(cfg *Turns, devices int) (*boards, error) {
	b := &boards{cfg: cfg}
	for range devices {
		board, err := turns.CreateAnonymous(cfg.Site)
		if err != nil {
			return nil, err
		}
		b.list = append(b.list, board)
	}
	return b, nil
}

// sweep clears up after sessions while nobody waits for them, until ctx ends.
func (b *boards) sweep(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, board := range b.list {
			board.Sweep()
		}
	}
}

// seat gives a lease its seats.
func (b *boards) seat(lease string) ([]int, error) {
	if b == nil {
		return nil, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p := turns.Policy{Kind: b.cfg.Kind, Lend: b.cfg.Lend, Weight: turns.Whole}
	if n := len(b.cfg.Percents); n > 0 {
		p.Weight = uint32(b.cfg.Percents[min(b.n, n-1)]) * turns.Whole / 100
	}
	b.n++
	var seats []int
	for _, board := range b.list {
		s, err := board.Seat(fmt.Sprintf("%s-%d", lease, b.n), p)
		if err != nil {
			b.leave(seats)
			return nil, err
		}
		seats = append(seats, s)
	}
	return seats, nil
}

func (b *boards) leave(seats []int) {
	for i, s := range seats {
		b.list[i].Leave(s)
	}
}

// give adds what a session needs to its START.
func (b *boards) give(seats, fds []int) ([]control.Turn, []int) {
	var ts []control.Turn
	for i, s := range seats {
		policy, state := b.list[i].Files()
		ts = append(ts, control.Turn{Seat: s})
		fds = append(fds, int(policy.Fd()), int(state.Fd()))
	}
	return ts, fds
}

// gone clears up after a session's process.
func (b *boards) gone(pid int) {
	if b == nil {
		return
	}
	for _, board := range b.list {
		board.Gone(pid, 0)
	}
}
