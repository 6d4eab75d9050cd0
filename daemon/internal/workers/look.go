package workers

// What the Pool reports of sessions: those that live, and why one has ended.

import (
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// show returns the present state of a session.
func (p *Pool) show(s *session) lease.Session {
	p.mu.Lock()
	out := s.Session
	p.mu.Unlock()
	slot, err := s.l.file.Slot(s.slot)
	if err != nil {
		return out
	}
	out.Counts = countsOf(slot)
	out.Link = lease.Link{RoundTrip: slot.RoundTrip, Resent: slot.Resent}
	for _, u := range slot.Use {
		if s.part != nil {
			u.Granted = s.part.Mem
		}
		out.Use = append(out.Use, lease.Use{Granted: u.Granted, Used: u.Used, Overhead: u.Overhead, Peak: u.Peak})
	}
	return out
}

// Sessions implements owner.Workers.
func (p *Pool) Sessions(id string) []lease.Session {
	p.mu.Lock()
	l := p.leases[id]
	var live []*session
	if l != nil {
		for s := range l.sessions {
			if s.open {
				live = append(live, s)
			}
		}
	}
	p.mu.Unlock()
	var all []lease.Session
	for _, s := range live {
		all = append(all, p.show(s))
	}
	return all
}

// Cut implements owner.Cutter.
func (p *Pool) Cut(of lease.Lease) (since, grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.leases[of.ID]
	if l == nil || l.file == nil {
		return 0, 0
	}
	for s := range l.sessions {
		if !s.open {
			continue
		}
		if slot, err := l.file.Slot(s.slot); err == nil && slot.Cut > 0 && (since == 0 || slot.Cut < since) {
			since, grace = slot.Cut, p.grace(of)
		}
	}
	return since, grace
}

// Use implements owner.Workers.
func (p *Pool) Use(id string) []lease.Use {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.leases[id]
	if l == nil || l.file == nil {
		return nil
	}
	all, err := l.use()
	if err != nil {
		p.log.Error("account", "lease", id, "error", err)
	}
	return all
}

// Processes returns the device memory of each session process according to its account, in bytes,
// by GPU and process id. It is compared with what NVML says.
func (p *Pool) Processes() map[string]map[int]uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]map[int]uint64{}
	for _, l := range p.leases {
		for s := range l.sessions {
			slot, err := l.file.Slot(s.slot)
			if err != nil || s.Worker.PID == 0 {
				continue
			}
			for d, g := range l.gpus {
				if all[g] == nil {
					all[g] = map[int]uint64{}
				}
				all[g][s.Worker.PID] = slot.Use[d].Used
			}
		}
	}
	return all
}

// memoryPassed is what the reason of a session begins with that ended because of its host memory: the worker's own, where no control group
// bounds it, begins so too (remoting/worker/hostmem.go).
const memoryPassed = "its host memory passed worker.memory_max"

// reason returns why a session ended. failed says that it did not end by itself, nor with its client or its lease.
func (p *Pool) reason(s *session) (why string, failed bool) {
	p.mu.Lock()
	why, meant := s.why, s.meant
	p.mu.Unlock()
	if why != "" {
		return why, !meant
	}
	own := ""
	if slot, err := s.l.file.Slot(s.slot); err == nil {
		own = slot.Reason
	}
	failed = control.IsOverrun(own) || strings.HasPrefix(own, memoryPassed)
	switch {
	case s.proc == nil: // an earlier daemon started it, and nobody learns its exit status; one that ends by itself says why
		switch {
		case own == "" && p.cg.outOfMemory(s.ID):
			return "killed by the kernel: " + memoryPassed, true
		case own == "" && s.open:
			return "ended without saying why, as one that is killed", true
		}
	case s.proc.Cmd.ProcessState != nil:
		ws := s.proc.Cmd.ProcessState.Sys().(syscall.WaitStatus)
		switch {
		case ws.Signaled() && p.cg.outOfMemory(s.ID):
			return "killed by the kernel: " + memoryPassed, true
		case ws.Signaled():
			return fmt.Sprintf("killed by signal %d (%s)", ws.Signal(), ws.Signal()), true
		case own == "" && ws.ExitStatus() != 0:
			return fmt.Sprintf("exit status %d, see the log", ws.ExitStatus()), true
		}
		failed = failed || ws.ExitStatus() != 0
	}
	if own == "" {
		return "ended", false
	}
	return own, failed
}
