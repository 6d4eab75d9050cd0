package jobs

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
)

// busySlurm is a slurmctld that takes no comment, and counts the questions about all jobs.
type busySlurm struct {
	*slurmtest.Fake
	lists atomic.Int32
}

func (b *busySlurm) Comment(ctx context.Context, _, _ string) error {
	<-ctx.Done()
	return ctx.Err()
}

func (b *busySlurm) Jobs(ctx context.Context) (map[string]slurm.JobState, error) {
	b.lists.Add(1)
	return b.Fake.Jobs(ctx)
}

// Whoever waits for PrologSlurmctld's answer hears in time that there is no room, however
// long the site lets jobs wait for it and however busy slurmctld is.
func TestRequeueInTime(t *testing.T) {
	st := newSite()
	st.refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	ctl := newRig(t, st, "ctl")
	ctl.cfg.Slurm = &busySlurm{Fake: ctl.slurm}
	set := settingsOf
	set.RoomWait = time.Minute
	ctl.SetSettings(set)
	ctl.slurm.Set(job("7"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if a, err := ctl.PrologController(ctx, rpc.Peer{}, runOf(job("7"))); err != nil || a.Outcome != rpc.JobRequeue || ctx.Err() != nil {
		t.Errorf("%+v, %v, %v", a, err, ctx.Err())
	}
}

// Two runs end before either could be told to the owners, each on nodes of its own.
func TestTwoRunsEnd(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	for i, nodes := range [][]string{{"n1", "n2"}, {"n2", "n3"}} {
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, rpc.JobRun{Job: "7", Restart: uint32(i), Nodes: nodes}); err != nil {
			t.Fatal(err)
		}
	}
	ctl.restart("boot-1")
	nodes := slices.Sorted(slices.Values(ctl.overs["7"].Nodes))
	if !slices.Equal(nodes, []string{"n1", "n2", "n3"}) {
		t.Errorf("%v", nodes)
	}
}

// Jobs that end one after the other do not have slurmctld asked for each.
func TestManyEnds(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	busy := &busySlurm{Fake: ctl.slurm}
	ctl.cfg.Slurm = busy
	for _, id := range []string{"1", "2"} {
		j := job(id)
		j.State = "COMPLETING"
		ctl.slurm.Set(j)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); ctl.runOver(ctx) }()
	for range 100 {
		for _, id := range []string{"1", "2"} {
			if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(job(id))); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	cancel()
	<-done
	if n := busy.lists.Load(); n > 3 {
		t.Errorf("slurmctld was asked for all its jobs %d times in half a second", n)
	}
}
