package slurm

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestFairShare: what docs/admin.md says of fair share. A job is billed its percent of GPUs and nothing else, and of two accounts that
// have used the same the one with three times the shares is served first.
func TestFairShare(t *testing.T) {
	o := options()
	for k, v := range map[string]string{
		"PriorityType": "priority/multifactor", "PriorityWeightFairshare": "100000", "PriorityDecayHalfLife": "14-0",
		"PriorityCalcPeriod": "1", // a minute is the least
	} {
		o.Slurm[k] = v
	}
	o.SlurmLines = []string{`PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:64 TRESBillingWeights="CPU=0,license/rgpu=1"`}
	s, ctx := ownSite(t, o, 6*time.Minute)
	for _, args := range []string{
		"add account physics Cluster=" + s.Options.Name + " Fairshare=3", "add account chemistry Cluster=" + s.Options.Name + " Fairshare=1",
		"add user alice Account=physics", "add user bob Account=chemistry",
	} {
		_, err := s.Ctl.Run(ctx, lab.Root, append([]string{"sacctmgr", "-i"}, strings.Fields(args)...)...)
		s.must(err)
	}
	submit := func(u lab.User, account, script string, percent int) string {
		t.Helper()
		job, err := s.Sbatch(ctx, u, script, "--account="+account, fmt.Sprintf("--gres=rgpu:%d", percent))
		s.must(err)
		return job
	}

	// Both use the same: 100 percent of GPUs for as long as each other.
	one, two := submit(lab.Alice, "physics", s.holding(), 100), submit(lab.Bob, "chemistry", s.holding(), 100)
	s.wait(one, "RUNNING")
	s.wait(two, "RUNNING")
	usage := func(account string) float64 {
		out, err := s.Ctl.Run(ctx, lab.Root, "sshare", "-n", "-P", "-A", account, "-o", "Account,User,RawUsage")
		s.must(err)
		for line := range strings.Lines(out) {
			if f := strings.Split(strings.TrimSpace(line), "|"); len(f) == 3 && strings.TrimSpace(f[0]) == account && f[1] == "" {
				n, err := strconv.ParseFloat(f[2], 64)
				s.must(err)
				return n
			}
		}
		t.Fatalf("sshare: %s", out)
		return 0
	}
	s.until(2*time.Minute, "both accounts have used something", func() error {
		if a, b := usage("physics"), usage("chemistry"); a == 0 || b == 0 {
			return fmt.Errorf("%v and %v", a, b)
		}
		return nil
	})
	s.release(one, two)
	s.done(one)
	s.wait(two, "COMPLETED")
	s.until(waitLong, "a job is billed its percent", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", one, "-o", "alloctres")
		if err == nil && !(strings.Contains(out, "billing=100,") && strings.Contains(out, "license/rgpu=100")) {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
	if a, b := usage("physics"), usage("chemistry"); a < 0.8*b || b < 0.8*a {
		t.Errorf("usage %v and %v: it was to be the same", a, b)
	}

	// Each job wants the whole pool. The later one, of the account with more shares, is the first to start.
	full := submit(lab.Alice, "physics", s.holding(), units)
	s.wait(full, "RUNNING")
	bobs := submit(lab.Bob, "chemistry", s.holding(), units)
	alices := submit(lab.Alice, "physics", s.holding(), units)
	for _, j := range []string{bobs, alices} {
		s.until(waitLong, "job "+j+" waits for licences", func() error {
			got, err := s.Job(ctx, j)
			if err == nil && (got["JobState"] != "PENDING" || got["Reason"] != "Licenses" && got["Reason"] != "Priority") {
				err = fmt.Errorf("%s (%s)", got["JobState"], got["Reason"])
			}
			return err
		})
	}
	a, b := s.wait(alices, "PENDING"), s.wait(bobs, "PENDING")
	first, err := strconv.Atoi(a["Priority"])
	s.must(err)
	second, err := strconv.Atoi(b["Priority"])
	s.must(err)
	if first <= second {
		t.Errorf("priority %d of the account with 3 shares, %d of that with 1", first, second)
	}
	s.release(full)
	s.done(full)
	s.wait(alices, "RUNNING")
	s.wait(bobs, "PENDING")
	s.release(alices)
	s.done(alices)
	s.wait(bobs, "RUNNING")
	s.release(bobs)
	s.wait(bobs, "COMPLETED")
	s.clean()
}
