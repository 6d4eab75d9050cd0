// Package audittest holds an audit log against the rules of leases.
package audittest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Rules says what History holds a log against.
type Rules struct {
	// Owner's lines are checked, and no others: a node's log has its host's too,
	// and those name no owner.
	Owner string
	// Mem is what each GPU can grant, in bytes; a GPU that is missing is checked
	// for its percent alone.
	Mem map[string]uint64
	// Final: the history is whole, so whatever began has ended.
	Final bool
}

// History reads the lines of a log, in its order, and says what in those of one
// owner breaks the rules:
//
//   - the leases on a GPU never hold more than 100 percent of it, nor its memory, with
//     what Set has changed
//   - a lease is granted once, and its end is written once
//   - nothing is granted to a key that is over
//   - sessions begin and end within their lease's life
func History(lines []audit.Event, r Rules) []error {
	c := checker{rules: r, leases: make(map[string]*checked), over: make(map[string]uint64), percent: make(map[string]uint32), mem: make(map[string]uint64)}
	for i := range lines {
		if lines[i].Owner == r.Owner {
			c.line(&lines[i])
		}
	}
	if r.Final {
		for id, l := range c.leases {
			if !l.ended {
				c.bad(&audit.Event{Lease: id}, "has no end")
			}
		}
	}
	return c.errs
}

type checker struct {
	rules   Rules
	errs    []error
	leases  map[string]*checked
	over    map[string]uint64 // key: the last incarnation that is over, plus 1
	percent map[string]uint32
	mem     map[string]uint64
}

type checked struct {
	held, granted, ended bool
	gpus                 []lease.Grant // as the last line said
	sessions             []string
}

func (c *checker) bad(e *audit.Event, format string, a ...any) {
	if len(c.errs) < 100 {
		c.errs = append(c.errs, fmt.Errorf("line %d, %s of lease %s (%s): %s", e.Seq, e.Event, e.Lease, e.Key, fmt.Sprintf(format, a...)))
	}
}

func (c *checker) line(e *audit.Event) {
	l := c.leases[e.Lease]
	switch e.Event {
	case audit.Reserve, audit.Grant, audit.Set, audit.Release, audit.Reclaim:
		if l == nil {
			l = &checked{}
			c.leases[e.Lease] = l
		}
	case audit.SessionOpen:
		if l == nil || !l.granted || l.ended {
			c.bad(e, "session %s outside of the lease's life", e.Session)
			return
		}
		l.sessions = append(l.sessions, e.Session)
		return
	case audit.SessionEnd:
		// The end alone is seen of a session whose daemon was killed before it
		// could write the beginning; it is twice seen if killed after the end.
		if l != nil {
			l.sessions = slices.DeleteFunc(l.sessions, func(s string) bool { return s == e.Session })
		}
		return
	default:
		return
	}
	switch e.Event {
	case audit.Reserve, audit.Grant:
		switch {
		case l.ended:
			c.bad(e, "after its end")
			return
		case e.Event == audit.Grant && l.granted:
			c.bad(e, "granted twice")
		case c.over[e.Key] > e.Incarnation:
			c.bad(e, "its key was over")
		}
		l.granted = l.granted || e.Event == audit.Grant
		if l.held {
			return
		}
		l.held = true
		c.take(e, l)
	case audit.Set:
		if !l.granted || l.ended {
			c.bad(e, "outside of the lease's life")
			return
		}
		c.leave(l)
		c.take(e, l)
	case audit.Release, audit.Reclaim:
		if l.ended {
			c.bad(e, "ended twice")
			return
		}
		l.ended = true
		if len(l.sessions) > 0 {
			c.bad(e, "its sessions %s still live", strings.Join(l.sessions, " "))
		}
		if e.Over {
			c.over[e.Key] = max(c.over[e.Key], e.Incarnation+1)
		}
		// A crash can have kept the line of a reservation from the log, but of a
		// grant it can not.
		if l.held {
			c.leave(l)
		}
	}
}

// take has a lease hold what the line says.
func (c *checker) take(e *audit.Event, l *checked) {
	l.gpus = e.GPUs
	for _, g := range e.GPUs {
		c.percent[g.GPU] += g.Percent
		c.mem[g.GPU] += g.Mem
		if c.percent[g.GPU] > 100 {
			c.bad(e, "gpu %s is at %d%%", g.GPU, c.percent[g.GPU])
		}
		if m, ok := c.rules.Mem[g.GPU]; ok && c.mem[g.GPU] > m {
			c.bad(e, "gpu %s is at %d of %d bytes", g.GPU, c.mem[g.GPU], m)
		}
	}
}

// leave undoes take.
func (c *checker) leave(l *checked) {
	for _, g := range l.gpus {
		c.percent[g.GPU] -= g.Percent
		c.mem[g.GPU] -= g.Mem
	}
	l.gpus = nil
}
