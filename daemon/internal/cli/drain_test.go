package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestDrain(t *testing.T) {
	d := startDaemon(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"drain"}, "want one owner"},
		{[]string{"drain", "a", "b", "--reason", "x"}, "want one owner"},
		{[]string{"drain", "gpu01"}, "give --reason TEXT"},
		{[]string{"drain", "gpu01", "--reason", "  "}, "give --reason TEXT"},
		{[]string{"drain", "gpu01:", "--reason", "x"}, "no GPU behind the colon"},
		{[]string{"resume"}, "want one owner"},
		{[]string{"resume", ""}, "want one owner"},
	} {
		if _, errs, status := d.call(c.args...); status != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%q: exit status %d, %q, want %q", c.args, status, errs, c.want)
		}
	}
	out, errs, status := d.call("drain", "gpu01:3", "--reason", " ECC errors ")
	if status != 0 || !strings.Contains(out, "gpu01 3") || !strings.Contains(out, "drained since 2027-01-15T08:00:00Z by 0@gpu01: ECC errors\n") || !strings.HasSuffix(out, "\ngpu01:3 is empty: no lease has a part of it\n") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	if out, errs, status = d.call("resume", "gpu01"); status != 0 || strings.Contains(out, "drained") || !strings.Contains(out, " ok") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	d.refuse = lease.Errorf(lease.Denied, "only root drains and resumes GPUs")
	if _, errs, status = d.call("resume", "gpu01"); status != 1 || !strings.Contains(errs, "only root") {
		t.Errorf("exit status %d, %q", status, errs)
	}
}

func TestDrainWaits(t *testing.T) {
	drainLook = time.Millisecond
	d := startDaemon(t)
	drained := lease.Drain{By: "0@gpu01", Since: time.Unix(1.8e9, 0), Reason: "x"}
	look := func(leases int) lease.GPU { return lease.GPU{Leases: leases, Drain: drained} }
	d.looks = []lease.GPU{look(2)}
	out, errs, status := d.call("drain", "gpu01", "--reason", "x")
	if status != 0 || !strings.HasSuffix(out, "\ngpu01 is not empty: 2 of its parts are in leases, which keep them until they end\n") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	d.looks = []lease.GPU{look(2), look(2), look(1), look(0)}
	out, errs, status = d.call("drain", "gpu01:0", "--reason", "x", "--wait")
	if status != 0 || strings.Count(out, "gpu01:0 is not empty: 2 of") != 1 || !strings.Contains(out, "gpu01:0 is not empty: 1 of") || !strings.HasSuffix(out, "gpu01:0 is empty: no lease has a part of it\n") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	// Another administrator's word counts.
	d.looks = []lease.GPU{look(1), look(1), {Leases: 1}}
	if out, errs, status = d.call("drain", "gpu01", "--reason", "x", "--wait"); status != 1 || !strings.Contains(errs, "gpu01 was resumed meanwhile") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	d.looks = []lease.GPU{look(1)}
	if out, errs, status = d.call("drain", "gpu02", "--reason", "x", "--wait"); status != 1 || !strings.Contains(errs, "no pool of this node has gpu02") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
}
