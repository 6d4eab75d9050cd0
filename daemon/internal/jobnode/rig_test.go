package jobnode

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// rig is a service and what it talks to.
type rig struct {
	*Service
	*jobstest.Node
	t *testing.T
}

func newRig(t *testing.T, st *jobstest.Site, node string) *rig {
	t.Helper()
	r := &rig{t: t, Node: jobstest.NewNode(t, st, node)}
	r.start("boot-1")
	return r
}

// start begins anew with what is on the disk.
func (r *rig) start(boot string) {
	r.t.Helper()
	led := r.Start()
	s, err := New(r.t.Context(), Config{
		Node: r.Host.Node, Cluster: "cluster", User: 64030, Lib: "/usr/lib/sluice", Spool: r.Dir + "/%n",
		Boot: boot, Host: r.Host, Slurm: r.Slurm, Ledger: led, Marks: r.Marks, State: r.State,
		Retry: time.Millisecond, Gone: time.Minute,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.Service = s
	r.t.Cleanup(s.Close)
}

// restart is another process with the same disk.
func (r *rig) restart(boot string) {
	r.t.Helper()
	r.Close()
	r.start(boot)
}

func (r *rig) prolog(run rpc.JobRun, want rpc.JobOutcome) rpc.JobAnswer {
	r.t.Helper()
	a, err := r.Prolog(r.t.Context(), rpc.Peer{}, run)
	if err != nil || a.Outcome != want {
		r.t.Fatalf("prolog: %+v, %v; want %s", a, err, want)
	}
	return a
}

// spool makes slurmd's spool directory, in which each step has a file.
func (r *rig) spool() string {
	r.t.Helper()
	dir := filepath.Join(r.Dir, r.Host.Node)
	if err := os.Mkdir(dir, 0o755); err != nil {
		r.t.Fatal(err)
	}
	return dir
}
