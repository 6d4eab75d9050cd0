package jobctld

import (
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// rig is a service and what it talks to.
type rig struct {
	*Service
	*jobstest.Node
	t *testing.T
}

func newRig(t *testing.T, st *jobstest.Site) *rig {
	t.Helper()
	r := &rig{t: t, Node: jobstest.NewNode(t, st, "ctl")}
	r.start()
	return r
}

// start begins anew with what is on the disk.
func (r *rig) start() {
	r.t.Helper()
	led := r.Start()
	s, err := New(Config{
		Cluster: "cluster", User: 64030, Host: r.Host, Slurm: r.Slurm, Ledger: led, State: r.State, Retry: time.Millisecond,
		Line: func(l []lease.Report) string {
			if len(l) == 0 {
				return ""
			}
			return "used by " + l[0].Key.Job
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.Service = s
	r.t.Cleanup(s.Close)
}

// restart is another process with the same disk.
func (r *rig) restart() {
	r.t.Helper()
	r.Close()
	r.start()
}
