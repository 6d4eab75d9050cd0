package node

import (
	"context"
	"math"
	"os/user"
	"path/filepath"
	"strconv"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/containers"
	"github.com/sluice-hpc/sluice/daemon/internal/jobctld"
	"github.com/sluice-hpc/sluice/daemon/internal/jobnode"
	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/jobsock"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// jobService answers Slurm's scripts: those of a node, and those of slurmctld if it runs here.
type jobService struct {
	rpc.NodeJobs
	rpc.ControllerJobs
}

// startJobs makes this node ready for Slurm's jobs, whether Slurm is installed or not: it may
// be installed later.
func (n *Node) startJobs(ctx context.Context, led *ledger.Ledger) (rpc.JobService, error) {
	cfg := n.cfg.Load()
	marks, err := jobsock.NewNotes(cfg.JobSocket())
	if err != nil {
		return nil, err
	}
	commands := slurm.New(cfg.Slurm.Bin, cfg.Slurm.Conf)
	slurmUser := n.slurmUser()
	log := n.log.With("part", "jobs")
	here, err := jobnode.New(ctx, jobnode.Config{
		Node: cfg.Node, Cluster: cfg.Cluster, User: slurmUser, Lib: cfg.Slurm.Lib, Spool: cfg.Slurm.Spool, Containers: n.files().Env,
		Host: n.host, Slurm: commands, Ledger: led, Marks: marks, State: n.jobs, Log: log,
	})
	if err != nil {
		return nil, err
	}
	n.onStop(here.Close)
	n.run("jobs", here.Run)
	svc := jobService{here, jobctld.Elsewhere{Node: cfg.Node, User: slurmUser}}
	if cfg.IsController() {
		if !commands.Installed() {
			n.log.Error("this node runs slurmctld, and scontrol is not found; set slurm.bin in sluice.yaml")
		}
		ctl, err := jobctld.New(jobctld.Config{
			Cluster: cfg.Cluster, User: slurmUser, Host: n.host, Slurm: commands, Ledger: led, State: n.jobs,
			Line: jobreport.Line, Log: log, Reconcile: cfg.Slurm.Reconcile,
		})
		if err != nil {
			return nil, err
		}
		n.onStop(ctl.Close)
		n.run("jobs of the controller", ctl.Run)
		svc.ControllerJobs = ctl
	}
	s, err := jobsock.Listen(cfg.JobSocket(), here.StepEnv, here.Knows, n.log.With("part", "job socket"))
	if err != nil {
		return nil, err
	}
	n.run("job socket", s.Serve)
	return svc, nil
}

// files returns the maker of the leases' files for container engines.
func (n *Node) files() *containers.Files {
	cfg := n.cfg.Load()
	c := containers.Config{
		Leases: filepath.Join(cfg.RunDir, "leases"), Staging: filepath.Join(cfg.RunDir, "leases.new"),
		Lib: cfg.Slurm.Lib, Hook: cfg.Containers.Hook, Content: cfg.Containers.Lib, CDI: cfg.Containers.CDIDir,
		Log: n.log.With("part", "containers"),
	}
	if c.CDI == "off" {
		c.CDI = ""
	}
	return containers.New(c)
}

// slurmUser returns SlurmUser's uid. If there is no such user, only root may run the
// controller's scripts.
func (n *Node) slurmUser() uint32 {
	name := n.cfg.Load().Slurm.User
	if id, err := strconv.ParseUint(name, 10, 32); err == nil && id < math.MaxUint32 {
		return uint32(id)
	}
	u, err := user.Lookup(name)
	if err == nil {
		if id, err := strconv.ParseUint(u.Uid, 10, 32); err == nil {
			return uint32(id)
		}
	}
	if n.cfg.Load().IsController() {
		n.log.Error("slurm.user is not known here; only root may run the controller's scripts", "user", name, "error", err)
	}
	return 0
}

// settings converts the configuration for the services of jobs.
func settings(cfg *config.Config) jobs.Settings {
	out := jobs.Settings{
		Pools: map[string]jobs.Pool{}, Partitions: map[string]jobs.Partition{},
		RoomWait: cfg.Slurm.RoomWait, Report: cfg.Slurm.Report == "auto", Silence: cfg.Lease.Silence,
	}
	for name, p := range cfg.Pools {
		out.Pools[name] = jobs.Pool{Licence: p.Licence, Types: p.Types}
	}
	for name, p := range cfg.Partitions {
		out.Partitions[name] = jobs.Partition{Policy: lease.Policy(p.Policy), Lend: lease.Lend(p.Lend), Place: lease.Place(p.Place), Mem: uint64(p.Mem)}
	}
	return out
}
