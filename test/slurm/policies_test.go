package slurm

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestPolicies: a job beyond a quota is requeued or refused with the reason, and a job that leaves its GPU idle says so in its
// AdminComment until its report takes the comment's place.
func TestPolicies(t *testing.T) {
	o := options()
	o.Sluice["quotas"] = "[{slurm: true, percent: 100}, {account: nobody, leases: 0}]"
	o.Sluice["lease.idle.after"], o.Sluice["lease.idle.action"] = "10s", "lend"
	s, ctx := ownSite(t, o, 5*time.Minute)
	comment := func(job string, parts ...string) {
		t.Helper()
		s.until(waitLong, fmt.Sprintf("the comment of job %s has %q", job, parts), func() error {
			j, err := s.Job(ctx, job)
			for _, p := range parts {
				if err == nil && !strings.Contains(j["AdminComment"], p) {
					err = fmt.Errorf("%s: %q", j["JobState"], j["AdminComment"])
				}
			}
			return err
		})
	}

	first := s.running("--gres=rgpu:80")
	second := s.sbatch("true", "--gres=rgpu:60")
	comment(second, "sluice: requeued: ", "quota: each user may hold 100% of GPUs of all pools together, 80% held, 60% asked")
	never := s.sbatch("true", "--gres=rgpu:60", "-N2")
	s.wait(never, "FAILED", "CANCELLED")
	contains(t, s.Output(lab.Alice, never), "sluice:", "100% of GPUs of all pools together, 120% asked: no lease that ends will make room")
	bobs, err := s.Sbatch(ctx, lab.Bob, "true", "--gres=rgpu:60")
	s.must(err)
	s.wait(bobs, "COMPLETED")

	comment(first, "sluice: idle: its GPU on ", " has had no work from node ")
	s.release(first)
	s.done(first)
	s.until(waitLong, "the report has taken the comment's place", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", first, "-o", "admincomment")
		if err == nil && !strings.HasPrefix(out, "sluice: asked 80%") {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
	out, err := s.Ctl.Run(ctx, lab.Root, "sluice", "explain", second)
	s.must(err)
	contains(t, out, "quota: each user may hold 100%")
	s.done(second)
	s.clean()
}
