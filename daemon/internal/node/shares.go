package node

import (
	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/workers"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// sharing returns the settings of compute time.
func sharing(cfg *config.Config) workers.Sharing {
	s := cfg.Shares
	overrun := turns.OverrunEndsFixed // auto
	switch s.Overrun.Action {
	case "warn":
		overrun = turns.OverrunGoesOn
	case "end":
		overrun = turns.OverrunEnds
	}
	return workers.Sharing{Quantum: s.Quantum, EqualActive: s.Equal == "active", Lend: s.Lend, Limit: s.Overrun.Limit, Overrun: overrun}
}

// overrun logs that a lease's work stays on a GPU beyond the site's limit. If a session is
// ended for it, the line of its end says so.
func (n *Node) overrun(o workers.Overrun) {
	l := &o.Lease
	n.overruns.Add(1)
	n.log.Warn("work stays on a GPU after its turn", "lease", l.ID, "job", l.Request.Key.String(), "gpu", o.GPU, "pid", o.PID, "for", o.Time, "limit", o.Limit, "ended", o.Ended)
	e := audit.Of(audit.Overrun, l, o.Reason)
	e.Owner = n.cfg.Load().Node
	_ = n.audit.Write(e)
}
