package cli

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestSet(t *testing.T) {
	d := startDaemon(t)
	d.add(idA, "4711")
	d.add(idB, "4712")
	// What makes no sense is refused with what does, and nothing is asked.
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "want one lease"},
		{[]string{"4711"}, "nothing to change; give --share PERCENT (1 to 100), --policy or --lend"},
		{[]string{"4711", "--share", "0"}, "want 1 to 100 percent"},
		{[]string{"4711", "--share", "101"}, "want 1 to 100 percent"},
		{[]string{"4711", "--share", "50,x"}, `share "x"`},
		{[]string{"4711", "--policy", "fair"}, "best-effort, equal, equal-lend, fixed, fixed-lend"},
		{[]string{"4711", "--lend=perhaps"}, "neither true nor false"},
		{[]string{"4713", "--lend"}, `no lease "4713"`},
	} {
		if _, errs, status := d.call(append([]string{"set"}, c.args...)...); status != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%q: exit status %d, %q, want %q", c.args, status, errs, c.want)
		}
	}
	if len(d.changes) != 0 {
		t.Errorf("%+v", d.changes)
	}
	out, errs, status := d.call("set", "4711", "--share", "40", "--policy", "fixed-lend")
	if status != 0 || out != idA+" 40%:20G fixed-lend\n" {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	if out, errs, status = d.call("set", idB[:6], "--share", "30%", "--policy", "fixed-lend", "--lend=no"); status != 0 || !strings.HasSuffix(out, "30%:20G fixed\n") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	d.sync()
	c := d.changes[1]
	if len(d.changes) != 2 || c.Lease != idB || c.Share(0) != 30 || c.Policy != lease.Fixed || c.Lend != lease.LendNo || c.By != uint32(os.Getuid()) || c.Beyond != (os.Getuid() == 0) {
		t.Errorf("%+v", d.changes)
	}
	d.mu.Lock()
	d.refuse = lease.Errorf(lease.Denied, "share of 90%%: want 1 to 50 for fraction 0; only root gives more")
	d.mu.Unlock()
	if _, errs, status := d.call("set", "4711", "--share", "90"); status != 1 || !strings.Contains(errs, "want 1 to 50") {
		t.Errorf("exit status %d, %q", status, errs)
	}
}
