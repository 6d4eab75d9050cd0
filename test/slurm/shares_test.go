package slurm

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// share is what `sluice list --json` and `sluice report --json` say of one fraction's time.
type share struct {
	Due       uint32        `json:"due"` // 1/100 percent
	Held      time.Duration `json:"held"`
	Busy      time.Duration `json:"busy"`
	Waited    time.Duration `json:"waited"`
	Throttled time.Duration `json:"throttled"`
	Turns     uint64        `json:"turns"`
}

// sharing is a lease as far as its share goes.
type sharing struct {
	ID      string `json:"id"`
	Request struct {
		Key struct {
			Job, Node string
		} `json:"key"`
		Policy string `json:"policy"`
		Lend   string `json:"lend"`
	} `json:"request"`
	Grants []struct {
		Owner   string `json:"owner"`
		GPU     string `json:"gpu"`
		Percent uint32 `json:"percent"`
	} `json:"grants"`
	Shares []share `json:"shares"`
}

// sharingOf is a job's lease as a node lists it for a user, with what its owner reads from the GPU's schedule.
func (s *site) sharingOf(n *lab.Node, u lab.User, job string) (sharing, error) {
	out, err := n.Run(s.ctx, u, "sluice", "list", "--json")
	if err != nil {
		return sharing{}, fmt.Errorf("%w: %s", err, out)
	}
	var all []sharing
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return sharing{}, err
	}
	for _, l := range all {
		if l.Request.Key.Job == job && len(l.Shares) == 1 {
			return l, nil
		}
	}
	return sharing{}, fmt.Errorf("%s has no lease of job %s with a share: %s", n.Name, job, out)
}

// shows waits until node and owner agree on a job's policy, percent, and what is due to it.
func (s *site) shows(n *lab.Node, job, policy, lend string, percent, due uint32) (l sharing) {
	s.t.Helper()
	s.until(waitLong, fmt.Sprintf("job %s has %d%%, %s, and %d%% due", job, percent, policy, due), func() error {
		var err error
		if l, err = s.sharingOf(n, lab.Alice, job); err != nil {
			return err
		}
		at, err := s.sharingOf(s.Node(l.Grants[0].Owner), lab.Root, job)
		if err != nil {
			return err
		}
		for _, x := range []sharing{l, at} {
			if x.Request.Policy != policy || x.Request.Lend != lend || x.Grants[0].Percent != percent || x.Shares[0].Due != 100*due {
				return fmt.Errorf("%+v", x)
			}
		}
		return nil
	})
	return l
}

// busy is a script that computes all the time, until the job is released.
func (s *site) busy() string {
	return fmt.Sprintf("%s 1 & p=$!\n%s\nkill -TERM $p; wait $p", s.program("steady"), s.stay())
}

// TestShares: what jobs say of the share of their GPU's time, or their partitions for them, reaches the GPU's
// schedule. A job's user and root change it while the job runs, and its report has what came of it.
func TestShares(t *testing.T) {
	s := cluster(t)
	n := s.Nodes[2] // the first job's; it has no GPU
	type asked struct {
		args, policy, lend string
		percent, due       uint32
		node               *lab.Node
		job                string
	}
	// On one GPU: two fixed ones have 40%, and the other three a third each of what is left, whatever they asked for.
	jobs := []*asked{
		{args: "--gres=rgpu:20 --rgpu-policy=fixed", policy: "fixed", percent: 20, due: 20},
		{args: "--gres=rgpu:20 --partition=half", policy: "fixed", percent: 20, due: 20},
		{args: "--gres=rgpu:30 --rgpu-policy=best-effort", policy: "best-effort", percent: 30, due: 20},
		{args: "--gres=rgpu:10 --rgpu-policy=equal", policy: "equal", percent: 10, due: 20},
		{args: "--gres=rgpu:10 --partition=half --rgpu-policy=equal-lend", policy: "equal", lend: "yes", percent: 10, due: 20},
	}
	gpus := map[string]bool{}
	for i, a := range jobs {
		a.node = s.Nodes[(2+i)%3]
		a.job = s.sbatch(s.busy(), append(strings.Fields(a.args), "--rgpu-report", "-w", a.node.Name)...)
		s.wait(a.job, "RUNNING")
	}
	for _, a := range jobs {
		gpus[s.shows(a.node, a.job, a.policy, a.lend, a.percent, a.due).Grants[0].GPU] = true
	}
	if len(gpus) != 1 {
		t.Fatalf("the jobs are on GPUs %v, want one", gpus)
	}
	for _, a := range jobs {
		s.until(waitLong, "job "+a.job+" takes turns", func() error {
			l, err := s.sharingOf(a.node, lab.Alice, a.job)
			if err == nil && (l.Shares[0].Turns == 0 || l.Shares[0].Held == 0 || l.Shares[0].Busy == 0) {
				err = fmt.Errorf("%+v", l.Shares)
			}
			return err
		})
	}

	charged := s.used("rgpu")

	// Changed by the job's user, up to what it was granted; beyond that by root, here and where the GPU is.
	job := jobs[0].job
	set := func(at *lab.Node, u lab.User, want string, args ...string) {
		t.Helper()
		out, err := at.Run(s.ctx, u, append([]string{"sluice", "set"}, args...)...)
		switch {
		case want == "" && err != nil:
			t.Errorf("sluice set %q: %v: %s", args, err, out)
		case want != "" && (err == nil || !strings.Contains(err.Error()+out, want)):
			t.Errorf("sluice set %q: %v: %s; want %q", args, err, out, want)
		}
	}
	id := s.shows(n, job, "fixed", "", 20, 20).ID
	set(n, lab.Alice, "want 1 to 20", job, "--share", "21")
	for _, bad := range []string{"0", "-1", "101", "NaN", "1e1", "18446744073709551617"} {
		set(n, lab.Alice, "want 1 to 100 percent", job, "--share="+bad)
	}
	set(n, lab.Alice, "want at most 1", job, "--share", "5,5")
	set(n, lab.Bob, "no lease", job, "--share", "5")
	set(n, lab.Bob, "not yours", id, "--share", "5")
	set(n, lab.Root, "want 1 to 30", job, "--share", "31")
	s.shows(n, job, "fixed", "", 20, 20)
	set(n, lab.Root, "", job, "--share", "30", "--lend")
	s.shows(n, job, "fixed", "yes", 30, 30)
	owner := s.Node(s.shows(n, job, "fixed", "yes", 30, 30).Grants[0].Owner)
	set(owner, lab.Root, "", job, "--policy", "equal", "--lend=false")
	s.shows(n, job, "equal", "no", 30, 20)
	set(n, lab.Alice, "", job, "--share", "1", "--policy", "fixed")
	s.shows(n, job, "fixed", "no", 1, 1)
	if got := s.used("rgpu"); got != charged {
		t.Errorf("%d licences are used, want %d as before", got, charged)
	}

	// A program that could use more than its 1% is throttled, and the report says so.
	var live sharing
	s.until(waitLong, "job "+job+" is throttled", func() (err error) {
		if live, err = s.sharingOf(n, lab.Alice, job); err == nil && live.Shares[0].Throttled < 200*time.Millisecond {
			err = fmt.Errorf("%+v", live.Shares)
		}
		return err
	})
	for _, a := range jobs {
		s.release(a.job)
	}
	for _, a := range jobs {
		contains(t, s.done(a.job), "PASS")
	}
	s.until(waitLong, "its report has its share", func() error {
		out, err := s.Ctl.Run(s.ctx, lab.Alice, "sluice", "report", "--json", job)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var rs []struct {
			Policy  string        `json:"policy"`
			Shares  []share       `json:"shares"`
			GPUTime time.Duration `json:"gpu_time"`
			Ended   time.Time     `json:"ended"`
		}
		if err := json.Unmarshal([]byte(out), &rs); err != nil {
			return err
		}
		if len(rs) != 1 || rs[0].Ended.IsZero() {
			return fmt.Errorf("%s", out)
		}
		was := live.Shares[0]
		if r := rs[0]; len(r.Shares) != 1 || r.Policy != "fixed" || r.Shares[0].Held < was.Held || r.Shares[0].Busy < was.Busy || r.Shares[0].Throttled < was.Throttled ||
			r.Shares[0].Waited < r.Shares[0].Throttled || r.GPUTime < was.Busy {
			t.Errorf("%+v while it ran, at its end %s", was, out)
		}
		return nil
	})
	// The same at the end of its output, and in Slurm's accounting.
	s.until(waitLong, "the line of its report is in its output", func() error {
		out := s.Output(lab.Alice, job)
		if matches(out, `(?m)^sluice: asked 20% granted 1% .* gpu [^ ]+ throttled (0\.[1-9]|[1-9]).* held .* waited .*$`) != 1 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	s.until(waitLong, "sacct has it", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", job, "-o", "admincomment")
		if err == nil && !strings.Contains(out, " throttled ") {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
}
