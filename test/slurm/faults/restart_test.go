package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestAccounting has what a cluster with accounting is told of its jobs, and slurmctld started anew at moments of which
// some releases remember the wrong thing. What Slurm itself gets wrong then is shown here, with what we make of it.
func TestAccounting(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "Alloc,Contain", more: lab.Options{Accounting: true, Sluice: map[string]string{"slurm.reconcile": "1h"}}}, []row{
		{"slurmctld restarted while a job completes", restartCompleting},
		{"slurmctld restarted while it asks the database", restartAsking},
		{"slurmctld restarted after a report", restartReported},
		{"slurmctld killed while it is given a report", killReporting},
		{"report of an array's last task", reportOfTask},
	})
}

// reported waits until the accounting has a job's report.
func (r *rig) reported(t *testing.T, job string) {
	t.Helper()
	r.until(t, 90*time.Second, "job "+job+" has its report", func() error {
		out, err := r.Ctl.Run(r.ctx, lab.Root, "sacct", "-n", "-X", "-P", "-j", job, "-o", "State,AdminComment")
		if err == nil && !strings.Contains(out, "|sluice: asked ") {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	})
}

// Of a slurmctld that goes away amid an update, scontrol says only "Unexpected message received".
func killReporting(t *testing.T, r *rig) {
	r.restartCtld(t) // 26.05 does not start without a file that it first writes when it ends
	j := r.sbatch(t, long, ask)
	r.begun(t, j)
	r.numbered(t, j)
	r.Ctl.Signal("slurmdbd", syscall.SIGSTOP) // the accounting is asked first, which is when slurmctld is stopped
	resume := func() { r.Ctl.Signal("slurmdbd", syscall.SIGCONT) }
	defer resume()
	r.scancel(t, j)
	r.state(t, j, 40*time.Second, "CANCELLED")
	r.saved(t, time.Now())
	r.until(t, 20*time.Second, "sacct runs", func() error {
		if len(r.Ctl.PIDs("sacct")) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	r.Ctl.Signal("slurmctld", syscall.SIGSTOP)
	resume()
	r.until(t, 20*time.Second, "scontrol has connected", func() error {
		for _, pid := range r.Ctl.PIDs("scontrol") {
			if connected(pid) {
				return nil
			}
		}
		return errors.New("it has not")
	})
	r.killCtld(t)
	r.startCtld(t)
	r.reported(t, j)
}

// connected says whether a process has an established TCP connection.
func connected(pid int) bool {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	table, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
	for _, l := range links {
		inode, ok := strings.CutPrefix(target(l), "socket:[")
		for line := range strings.Lines(string(table)) {
			if f := strings.Fields(line); ok && len(f) > 9 && f[3] == "01" && f[9] == strings.TrimSuffix(inode, "]") {
				return true
			}
		}
	}
	return false
}

// target is what a symbolic link says, "" if it has gone.
func target(link string) string {
	s, _ := os.Readlink(link)
	return s
}

// The last task of an array has the array's number, by which Slurm's commands mean all of its tasks.
func reportOfTask(t *testing.T, r *rig) {
	j := r.sbatch(t, long, "--gres=rgpu:20", "-a1-3")
	tasks := []string{}
	r.until(t, 40*time.Second, "three tasks run", func() error { return r.running(j, 3, &tasks) })
	r.scancel(t, j+"_3")
	r.reported(t, j+"_3")
	for _, task := range []string{j + "_1", j + "_2"} {
		if job := r.state(t, task, time.Second, "RUNNING"); strings.Contains(job["AdminComment"], "sluice") {
			t.Errorf("job %s runs and says %q", task, job["AdminComment"])
		}
	}
	want := fmt.Sprintf("sluice: job %[1]s is an array: this is its task %[1]s_3; others: %[1]s_1, %[1]s_2\n", j)
	for _, command := range []string{"explain", "report"} {
		if out, err := r.Ctl.Run(r.ctx, lab.Alice, "sh", "-c", "exec sluice "+command+" "+j+" 2>&1"); err != nil || !strings.HasPrefix(out, want) {
			t.Errorf("sluice %s: %v, %s", command, err, out)
		}
	}
	r.scancel(t, j)
}

func (r *rig) restartCtld(t *testing.T) {
	t.Helper()
	if err := r.Ctl.Stop("slurmctld"); err != nil {
		t.Fatal(err)
	}
	r.startCtld(t)
}

// numbered waits until slurmctld does not ask the database for a job's number: meanwhile it takes no update of the job.
func (r *rig) numbered(t *testing.T, job string) {
	t.Helper()
	r.until(t, 40*time.Second, "slurmctld does not ask for the number of job "+job+" in the database", func() error {
		_, err := r.Scontrol(r.ctx, "update", "JobId="+job, "Comment=x")
		return err
	})
}

// recorded waits until slurmctld has asked the database for a job's number, that of its last run, and has it. It asks
// every five seconds for those of new and of requeued jobs, which take updates until then. One of 22.05 that is stopped
// while it asks takes no update of the job afterwards; restartAsking is about that.
func (r *rig) recorded(t *testing.T, job string) {
	t.Helper()
	r.until(t, 40*time.Second, "the database has the last run of job "+job, func() error {
		submitted := r.state(t, job, time.Second, "PENDING")["SubmitTime"]
		out, err := r.Ctl.Run(r.ctx, lab.Root, "sacct", "-D", "-n", "-X", "-P", "-j", job, "-o", "Submit")
		if err == nil && !slices.Contains(strings.Fields(out), submitted) {
			err = fmt.Errorf("it was submitted at %s, in the database at %q", submitted, strings.Fields(out))
		}
		return err
	})
	r.numbered(t, job)
}

// Up to 24.11 slurmctld does not give a completing job its licences again when it is started, and still takes them
// back from it at the end: from others, so that it lets in more than there is. The pool does not.
func restartCompleting(t *testing.T, r *rig) {
	used := func() int {
		t.Helper()
		return must[map[string]lab.Licence](t)(r.Licences(r.ctx))["rgpu"].Used
	}
	a := r.sbatch(t, long, "--gres=rgpu:100")
	b := r.sbatch(t, long, "--gres=rgpu:100")
	r.begun(t, a)
	r.begun(t, b)
	r.set(t, "hold", "")
	r.set(t, "Epilog.before", `[ "$SLURM_JOB_ID" != `+b+` ] || while [ -e $base/hold ]; do /bin/sleep 0.1; done`)
	r.scancel(t, b)
	r.seen(t, b, "Epilog", "", false, 1)
	if k := used(); k != 200 {
		t.Errorf("%d licences are in use before the restart", k)
	}
	r.restartCtld(t)
	r.unset(t, "hold")
	r.state(t, b, 40*time.Second, "CANCELLED")
	wrong := used() != 100
	c := r.sbatch(t, long, "--gres=rgpu:200")
	if wrong {
		t.Logf("this release says that %d of 100 licences are in use", used())
		r.turnedAway(t, c)
		r.holds(t, a, 1, time.Second)
		r.holds(t, c, 0, 5*time.Second)
		// What an administrator can do.
		r.recorded(t, c)
		r.restartCtld(t)
		if k := used(); k != 100 {
			t.Errorf("%d licences are in use after another restart", k)
		}
	} else {
		t.Log("this release counts right")
	}
	r.scancel(t, a)
	if wrong {
		r.now(t, c)
	}
	r.begun(t, c)
	r.holds(t, c, 1, 5*time.Second)
	r.scancel(t, c)
}

// A slurmctld of 22.05 that was stopped while it waited for a job's number in the database waits for it ever after,
// and takes no update of that job. Its report is written all the same, and other jobs are not held up.
func restartAsking(t *testing.T, r *rig) {
	r.Ctl.Signal("slurmdbd", syscall.SIGSTOP)
	resume := func() { r.Ctl.Signal("slurmdbd", syscall.SIGCONT) }
	defer resume()
	j := r.sbatch(t, long, ask)
	r.begun(t, j)
	// slurmctld looks every five seconds for jobs that have no number yet.
	asks := func() error {
		_, err := r.Scontrol(r.ctx, "update", "JobId="+j, "Comment=x")
		if err != nil && strings.Contains(err.Error(), "DB index") {
			return nil
		}
		return errors.Join(errors.New("it takes updates"), err)
	}
	if err := lab.Until(r.ctx, 8*time.Second, "slurmctld waits for the database", asks); err != nil {
		t.Logf("this release need not ask: %v", err)
	}
	// It saves its state, with that it waits, before it waits for the database to end.
	began := time.Now()
	r.Ctl.Signal("slurmctld", syscall.SIGTERM)
	r.saved(t, began)
	resume()
	if err := r.Ctl.Stop("slurmctld"); err != nil {
		t.Fatal(err)
	}
	r.startCtld(t)
	r.scancel(t, j)
	// slurmctld still has its record: once that has gone, its comments are of the accounting anyway.
	r.reported(t, j)
}

// requeuedFor begins the AdminComment of a job for which there was no room.
const requeuedFor = "sluice: requeued: "

// A slurmctld that is started tells the accounting once more of the jobs that have ended and that it still knows, also
// their AdminComments as it has them: not what was changed in the accounting meanwhile.
func restartReported(t *testing.T, r *rig) {
	comment := func(j string) string {
		t.Helper()
		out := must[string](t)(r.Ctl.Run(r.ctx, lab.Root, "sacct", "-n", "-X", "-P", "-j", j, "-o", "AdminComment"))
		return strings.TrimSpace(out)
	}
	free := r.fill(t)
	j := r.sbatch(t, "true", ask)
	r.turnedAway(t, j)
	free()
	r.now(t, j)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.reported(t, j)
	said := comment(j)
	r.restartCtld(t)
	// Its last word on the job, which a later one follows.
	other := r.sbatch(t, "true")
	r.state(t, other, 40*time.Second, "COMPLETED")
	r.until(t, 40*time.Second, "the accounting has the later job's end", func() error {
		out, err := r.Ctl.Run(r.ctx, lab.Root, "sacct", "-n", "-X", "-P", "-j", other, "-o", "State")
		if err == nil && !strings.Contains(out, "COMPLETED") {
			err = fmt.Errorf("it is %q", out)
		}
		return err
	})
	switch now := comment(j); {
	case strings.EqualFold(now, said): // sacctmgr writes small letters
		t.Log("it is kept")
	case strings.HasPrefix(now, requeuedFor):
		t.Log("the older comment is back")
	default:
		t.Errorf("%q has become %q", said, now)
	}
}
