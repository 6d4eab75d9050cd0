package slurm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// report is what sluice report --json prints of one lease.
type report struct {
	Lease string `json:"lease"`
	Key   struct {
		Node        string `json:"node"`
		Incarnation uint64 `json:"incarnation"`
	} `json:"key"`
	Grants []struct{ Percent, Mem uint64 } `json:"grants"`
	Use    []struct{ Peak uint64 }         `json:"use"`
	Counts struct {
		Calls   uint64 `json:"calls"`
		BytesIn uint64 `json:"bytes_in"`
	} `json:"counts"`
	Sessions uint64        `json:"sessions"`
	GPUTime  time.Duration `json:"gpu_time"`
	Ended    time.Time     `json:"ended"`
	Reason   string        `json:"reason"`
}

// reports are a job's as a user is told them on the controller.
func (s *site) reports(u lab.User, job string) (rs []report, err error) {
	out, err := s.Ctl.Run(s.ctx, u, "sluice", "report", "--json", job)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return rs, json.Unmarshal([]byte(out), &rs)
}

// TestReportNumbers: what a job has used on two nodes is in its reports, to the call and
// to the second of GPU time, whether it still runs or has ended.
func TestReportNumbers(t *testing.T) {
	s := cluster(t)
	job := s.sbatch(fmt.Sprintf("srun -N1 -n1 -w %s --overlap %s\ntimeout -s KILL 5 %s sync\n%s", s.Nodes[1].Name, s.program("vecadd"), s.program("wait"), s.holding()),
		"-N2", "-w", s.Nodes[0].Name+","+s.Nodes[1].Name, "--gres=rgpu:40", "--rgpu-mem=2G")
	busy := func(rs []report) (d time.Duration) {
		for _, r := range rs {
			d += r.GPUTime
		}
		return d
	}
	check := func(rs []report) error {
		var sessions uint64
		nodes := map[string]bool{}
		for _, r := range rs {
			nodes[r.Key.Node] = true
			sessions += r.Sessions
			if len(r.Grants) != 1 || r.Grants[0].Percent != 40 || r.Grants[0].Mem != 2<<30 || len(r.Use) != 1 || r.Use[0].Peak == 0 || r.Use[0].Peak > 2<<30 || r.Counts.Calls == 0 || r.Counts.BytesIn == 0 {
				return fmt.Errorf("report %+v", r)
			}
		}
		// The kernel runs for a minute, its program for five seconds.
		if b := busy(rs); len(nodes) != 2 || len(rs) != 2 || sessions != 3 || b < 3500*time.Millisecond || b > 6500*time.Millisecond {
			return fmt.Errorf("%d reports, of nodes %v, %d sessions, %v of GPUs", len(rs), nodes, sessions, b)
		}
		return nil
	}
	s.until(30*time.Second, "the reports of the running job are right", func() error {
		rs, err := s.reports(lab.Alice, job)
		if err != nil {
			return err
		}
		return check(rs)
	})
	live, err := s.reports(lab.Alice, job)
	s.must(err)
	if _, err := s.reports(lab.Bob, job); err == nil || !strings.Contains(err.Error(), "not yours") {
		t.Errorf("bob is told of alice's job: %v", err)
	}
	if out, err := s.Ctl.Run(t.Context(), lab.Root, "scontrol", "update", "jobid="+job, "admincomment=See ticket 7"); err != nil {
		t.Fatal(err, out)
	}
	s.release(job)
	s.done(job)
	s.until(waitLong, "its leases have ended", func() error {
		rs, err := s.reports(lab.Alice, job)
		if err != nil {
			return err
		}
		for _, r := range rs {
			if r.Ended.IsZero() || r.Reason == "" {
				return fmt.Errorf("%s lives", r.Lease)
			}
		}
		if b := busy(rs); b < busy(live) {
			t.Errorf("%v of the GPUs at the end, %v before", b, busy(live))
		}
		return check(rs)
	})
	// sacctmgr writes everything small.
	s.until(waitLong, "sacct has the sum, behind what an administrator wrote", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", job, "-o", "admincomment")
		if err == nil && !strings.HasPrefix(strings.ToLower(out), "see ticket 7; sluice: nodes 2 asked 80% 4096mib granted 80% 4096mib peak ") {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
	// The list of jobs has it for alice, for root and for nobody else, without any daemon.
	listed := func(u lab.User, refusal string, args ...string) {
		t.Helper()
		out, err := s.Ctl.Run(t.Context(), u, append([]string{"sluice", "report", "--socket", "/none", "--since", "1h"}, args...)...)
		line := regexp.MustCompile(`(?m)^` + job + ` +alice +COMPLETED .* 80%/2 nodes +4G `).FindString(out)
		said := out
		if err != nil {
			said += err.Error()
		}
		switch {
		case refusal == "" && (err != nil || line == ""):
			t.Errorf("%s %q does not list alice's job: %v\n%s", u.Name, args, err, out)
		case refusal != "" && line != "":
			t.Errorf("%s %q lists alice's job:\n%s", u.Name, args, out)
		case refusal != "" && !(err == nil && strings.HasPrefix(out, "jobs of bob") || strings.Contains(said, refusal)): // bob may have jobs of other tests
			t.Errorf("%s %q: %v, want %q\n%s", u.Name, args, err, refusal, out)
		}
	}
	const none, others = "no job with a fraction of bob", "jobs of others are for root, SlurmUser, Slurm's operators, and coordinators"
	listed(lab.Alice, "")
	listed(lab.Root, "", "--user", "alice")
	listed(lab.Slurm, "", "--all")
	listed(lab.Bob, none)
	listed(lab.Bob, none, "--account", "research") // its own of that account
	listed(lab.Bob, others, "--user", "alice")
	listed(lab.Bob, others, "--all")
}

// TestReportOutput: the line stands once at the end of the file that the batch script
// wrote, however that is named, and in nothing else.
func TestReportOutput(t *testing.T) {
	s := cluster(t)
	home := s.Path("home", "alice")
	const line = "sluice: asked 20% granted 20% "
	count := func(path string, want int) {
		t.Helper()
		s.until(waitLong, "the report is in "+path, func() error {
			b, err := os.ReadFile(filepath.Join(home, path))
			if n := strings.Count(string(b), line); err != nil || n != want {
				return fmt.Errorf("%v: %d times in %q", err, n, b)
			}
			if want > 0 && !strings.HasPrefix(string(b[strings.LastIndex(strings.TrimSuffix(string(b), "\n"), "\n")+1:]), line) {
				return fmt.Errorf("not the last line of %q", b)
			}
			return nil
		})
	}
	submit := func(args ...string) string {
		t.Helper()
		return s.sbatch("printf 'no end of line'", append(args, "--gres=rgpu:20", "--rgpu-report", "-D", home)...)
	}
	s.must(os.MkdirAll(filepath.Join(home, "out dir"), 0o755))
	s.must(os.Chown(filepath.Join(home, "out dir"), lab.Alice.UID, lab.Alice.UID))
	target := filepath.Join(home, "target")
	s.must(os.WriteFile(target, nil, 0o666))
	s.must(os.Chown(target, lab.Alice.UID, lab.Alice.UID))
	s.must(os.Symlink(target, filepath.Join(home, "link")))

	array := submit("--array=3-4", "-J", "fit", "-o", "out dir/%x-%A_%4a.%u.%N.txt", "-w", s.Nodes[0].Name)
	named := submit("-o", "named-%j.txt", "-e", "named-%j.err")
	linked := submit("-o", "link")
	null := submit("-o", "/dev/null")
	quiet := s.sbatch("echo quiet", "--gres=rgpu:20", "-D", home)
	s.done(named)
	for _, task := range []string{"0003", "0004"} {
		count("out dir/fit-"+array+"_"+task+".alice."+s.Nodes[0].Name+".txt", 1)
	}
	count("named-"+named+".txt", 1)
	count("named-"+named+".err", 0)
	for _, job := range []string{linked, null, quiet} {
		s.done(job)
	}
	s.clean()
	count("target", 0) // a link is not followed: it may have been put there since
	count("slurm-"+quiet+".out", 0)
	if b, err := os.ReadFile(target); err != nil || string(b) != "no end of line" {
		t.Errorf("%v, %q", err, b)
	}
	// Without a script there is no file, and nothing is said of it.
	out, err := s.alice("srun", "--gres=rgpu:20", "--rgpu-report", "echo", "hello")
	if err != nil || out != "hello\n" {
		t.Errorf("srun: %v, %q", err, out)
	}
	var drained int
	for _, n := range s.Nodes {
		o, err := s.Scontrol(s.ctx, "-o", "show", "node", n.Name)
		s.must(err)
		drained += strings.Count(o, "DRAIN")
	}
	if drained > 0 {
		t.Errorf("%d nodes drained", drained)
	}
}

// TestReportRuns: a job that was requeued has the reports of all its runs, and the line
// is the last run's.
func TestReportRuns(t *testing.T) {
	s := cluster(t)
	job := s.sbatch(s.holding(), "--gres=rgpu:30", "--requeue")
	ready := func(runs int) {
		t.Helper()
		s.until(time.Minute, fmt.Sprint(runs, " runs are known"), func() error {
			rs, err := s.reports(lab.Alice, job)
			if err != nil {
				return err
			}
			if len(rs) != runs || rs[runs-1].Sessions != 1 || !rs[runs-1].Ended.IsZero() {
				return fmt.Errorf("%+v", rs)
			}
			return nil
		})
	}
	ready(1)
	_, err := s.Scontrol(s.ctx, "requeue", job)
	s.must(err)
	s.until(waitLong, "it may begin again", func() error {
		j, err := s.Job(s.ctx, job)
		if err == nil && j["JobState"] != "PENDING" {
			err = fmt.Errorf("it is %s", j["JobState"])
		}
		return err
	})
	_, err = s.Scontrol(s.ctx, "update", "jobid="+job, "starttime=now")
	s.must(err)
	ready(2)
	rs, err := s.reports(lab.Alice, job)
	s.must(err)
	if rs[0].Key.Incarnation >= rs[1].Key.Incarnation || rs[0].Lease == rs[1].Lease || rs[0].Ended.IsZero() {
		t.Errorf("%+v", rs)
	}
	s.release(job)
	s.done(job)
	s.until(waitLong, "the last run is in sacct", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", job, "-o", "admincomment")
		if err == nil && !strings.HasPrefix(out, "sluice: asked 30% granted 30% ") {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
}
