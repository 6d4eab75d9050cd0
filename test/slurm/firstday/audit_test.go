package firstday

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestAudit: of a real job the owner's log has grant and end, slurmctld's who asked; a request that cannot be had is there as well.
func TestAudit(t *testing.T) {
	t.Parallel()
	r := newRig(t).begin(t)
	id, err := r.Sbatch(r.ctx, lab.Alice, "true", "--gres=rgpu:25", "--nodelist="+r.job.Name)
	r.must(err)
	if j, err := r.WaitJob(r.ctx, id, 30*time.Second, "COMPLETED"); err != nil {
		t.Fatal(err, j)
	}
	for n, want := range map[*lab.Node][]string{r.own: {"grant", "release"}, r.Ctl: {"grant"}} {
		var events []struct{ Event, Job string }
		if err := lab.Until(r.ctx, 10*time.Second, "the log has the job", func() error {
			out, err := n.Run(r.ctx, lab.Root, "sluice", "audit", "--user", "alice", "--job", id, "--since", "1h", "--json")
			if err != nil {
				return err
			}
			if err := json.Unmarshal([]byte(out), &events); err != nil {
				return err
			}
			for _, w := range want {
				if !strings.Contains(out, `"event": "`+w+`"`) {
					return &missing{w, out}
				}
			}
			return nil
		}); err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
		for _, e := range events {
			if e.Job != id && e.Job != "" {
				t.Errorf("%s: a line of job %s", n.Name, e.Job)
			}
		}
		if out, err := n.Run(r.ctx, lab.Root, "sluice", "audit", "--user", "bob"); err == nil {
			t.Errorf("%s: bob, who has asked for nothing: %s", n.Name, out)
		}
	}
	if out, err := r.own.Run(r.ctx, lab.Alice, "sluice", "audit"); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("as alice: %v %s", err, out)
	}
}

type missing struct{ what, in string }

func (m *missing) Error() string { return "no " + m.what + " in " + m.in }
