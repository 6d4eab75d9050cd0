package owner

import (
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func TestDrain(t *testing.T) {
	n := control(newNode(t, "gpu01", 3))
	held := n.granted("h1", "1", 50)
	uuid := held.Grants[0].GPU
	drain := func(host string, d lease.DrainOrder, want lease.Code, text string) []lease.GPU {
		t.Helper()
		d.Owner = "gpu01"
		gpus, err := n.Drain(ctx, host, d)
		code(t, err, want)
		if want != "" && !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want it to say %q", err, text)
		}
		return gpus
	}
	drained := func(want ...string) {
		t.Helper()
		gpus, _ := n.gpus()
		for i, g := range gpus {
			if g.Drain.Reason != want[i] {
				t.Errorf("gpu %d: %+v, want %q", i, g.Drain, want[i])
			}
		}
	}
	drain("h1", lease.DrainOrder{Reason: "x"}, lease.Denied, "slurm.controllers")
	drain("gpu01", lease.DrainOrder{}, lease.Invalid, "needs a reason")
	drain("gpu01", lease.DrainOrder{GPU: "3", Reason: "x"}, lease.NotFound, "no GPU \"3\"")
	drain("gpu01", lease.DrainOrder{GPU: "-1", Reason: "x"}, lease.NotFound, "sluice gpus")
	drain("gpu01", lease.DrainOrder{Reason: strings.Repeat("x", form.MaxName+1)}, lease.Invalid, "bytes")
	drained("", "", "")

	// One GPU: what is there stays, and nothing new comes.
	gpus := drain("ctl", lease.DrainOrder{GPU: uuid, Reason: "fans", By: 0}, "", "")
	d := gpus[0].Drain
	if d.By != "0@ctl" || !d.Since.Equal(n.clock.Now()) || gpus[0].Leases != 1 || gpus[0].FreePercent != 50 {
		t.Errorf("%+v", gpus[0])
	}
	drained("fans", "", "")
	ask := n.want("h1", "2", 10)
	ask.Grants[0].GPU = uuid
	_, err := n.Reserve(ctx, "h1", ask, 0)
	code(t, err, lease.Conflict)
	if !strings.Contains(err.Error(), "drained since") || !strings.Contains(err.Error(), "by 0@ctl: fans") {
		t.Error(err)
	}
	if st, err := n.List(ctx, "h1"); err != nil || len(st) != 1 || st[0].State != lease.Granted {
		t.Errorf("%+v, %v", st, err)
	}
	if _, err := n.Offer(ctx, "h1", lease.SessionRequest{Lease: held.ID, Kind: wire.SessionCompute, PID: 1, UID: held.Request.UID, Program: "p"}); err != nil {
		t.Errorf("a program of a lease that stays: %v", err)
	}
	// It survives restart, crash and repetition, and keeps its date.
	n.kill()
	drain("ctl", lease.DrainOrder{GPU: "0", Reason: "fans"}, "", "")
	gpus, _ = n.gpus()
	if gpus[0].Drain != d {
		t.Errorf("%+v, want %+v", gpus[0].Drain, d)
	}
	// All of it: single drains go with a resume of all.
	drain("gpu01", lease.DrainOrder{Reason: "driver"}, "", "")
	drained("driver", "driver", "driver")
	drain("gpu01", lease.DrainOrder{GPU: "1", Resume: true}, lease.Conflict, "as a whole")
	n.kill()
	drained("driver", "driver", "driver")
	drain("ctl", lease.DrainOrder{Resume: true}, "", "")
	drain("ctl", lease.DrainOrder{Resume: true}, "", "")
	n.kill()
	drained("", "", "")
	code(t, func() error { _, err := n.Reserve(ctx, "h1", ask, 0); return err }(), "")
	// A GPU that is gone can be forgotten.
	drain("gpu01", lease.DrainOrder{GPU: "2", Reason: "sold"}, "", "")
	gone := n.devices[2].UUID
	at := func(want bool, what string, index int) {
		t.Helper()
		if got := n.DrainedAt(index); got != want {
			t.Errorf("%s: a GPU without a UUID, of index %d: drained %v", what, index, got)
		}
	}
	at(false, "the drained one has its UUID", 2)
	n.devices = n.devices[:2]
	at(true, "it was lost", 2)
	at(false, "it was lost", 1)
	n.kill()
	at(true, "after a restart", 2)
	drain("gpu01", lease.DrainOrder{GPU: gone, Resume: true}, "", "")
	at(false, "resumed", 2)
	drain("gpu01", lease.DrainOrder{Reason: "all"}, "", "")
	at(true, "all of it", 7)
	drain("gpu01", lease.DrainOrder{Resume: true}, "", "")
	drain("gpu01", lease.DrainOrder{GPU: gone, Resume: true}, lease.NotFound, "no GPU")
	var lines []string
	for _, e := range n.history() {
		if e.Event == audit.Drain || e.Event == audit.Resume {
			lines = append(lines, e.Event+" "+e.Host+" "+e.Reason)
		}
	}
	if got := strings.Join(lines, ", "); got != "drain ctl fans, drain gpu01 driver, resume ctl , resume ctl , drain gpu01 sold, resume gpu01 , drain gpu01 all, resume gpu01 " {
		t.Error(got)
	}
}
