package workers

// Sessions that outlive their connections: owner.Attacher.

import (
	"errors"
	"os"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

// selfEnd is how long a session may take to end by itself after its client's process has ended.
const selfEnd = 300 * time.Millisecond

// Attachable implements owner.Attacher.
func (p *Pool) Attachable(id string, n int, client uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.leases[id]; l != nil && !l.ending {
		for s := range l.sessions {
			if s.slot == n && s.Client != client {
				return lease.Errorf(lease.Denied, "session %d of lease %s is not of process %d", n, id, client)
			}
			if s.slot == n {
				return nil
			}
		}
	}
	return lease.Errorf(lease.NotFound, "lease %s has no session %d: it has ended", id, n)
}

// Attach implements owner.Attacher.
func (p *Pool) Attach(id string, n int, conn *os.File) error {
	return p.pass(id, n, conn, (*exchange.Broker).Attach)
}

// Bulk implements owner.Attacher.
func (p *Pool) Bulk(id string, n int, conn *os.File) error {
	return p.pass(id, n, conn, (*exchange.Broker).Bulk)
}

// pass passes a connection whose HELLO nobody has read to a session.
func (p *Pool) pass(id string, n int, conn *os.File, how func(b *exchange.Broker, slot, fd int, raw bool) error) error {
	p.mu.Lock()
	l := p.leases[id]
	p.mu.Unlock()
	if l == nil {
		return lease.Errorf(lease.NotFound, "lease %s has no sessions", id)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var aerr error
	if err := raw.Control(func(fd uintptr) { aerr = how(l.broker, n, int(fd), true) }); err != nil {
		return err
	}
	if errors.Is(aerr, exchange.ErrAbsent) {
		return lease.Errorf(lease.NotFound, "lease %s has no session %d: it has ended", id, n)
	}
	return aerr
}

// Trace implements owner.Attacher.
func (p *Pool) Trace(id string, pid uint32, conn *os.File) error {
	p.mu.Lock()
	l, slot := p.leases[id], -1
	if l != nil {
		for s := range l.sessions {
			if s.Client == pid && wire.SessionComputes(s.Kind) {
				slot = s.slot
			}
		}
	}
	p.mu.Unlock()
	if slot < 0 {
		return lease.Errorf(lease.NotFound, "process %d has no session in lease %s here", pid, id)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var terr error
	if err := raw.Control(func(fd uintptr) { terr = l.broker.Trace(slot, int(fd)) }); err != nil {
		return err
	}
	if errors.Is(terr, exchange.ErrAbsent) {
		return lease.Errorf(lease.NotFound, "the session of process %d has ended", pid)
	}
	return terr
}

// EndClient implements owner.Attacher.
func (p *Pool) EndClient(id string, pid uint32) {
	p.mu.Lock()
	var all []*session
	if l := p.leases[id]; l != nil {
		for s := range l.sessions {
			if s.Client == pid {
				all = append(all, s)
			}
		}
	}
	p.mu.Unlock()
	for _, s := range all {
		go func() {
			select {
			case <-s.done:
				return
			case <-time.After(selfEnd):
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if s.why == "" {
				s.why, s.meant = "client ended", true
			}
			s.kill()
		}()
	}
}
