package slurm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// commands puts scripts in the place of Slurm's. Each writes its arguments to a file.
func commands(t *testing.T, scripts map[string]string) (*Commands, func() string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	for name, body := range scripts {
		text := "#!/bin/sh\n{ printf %s " + name + "; printf ' [%s]' \"$@\"; echo; } >>" + log + "\n" + body + "\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return New(dir, "/etc/other.conf"), func() string {
		b, _ := os.ReadFile(log)
		_ = os.Remove(log)
		return string(b)
	}
}

func TestCommands(t *testing.T) {
	ctx := t.Context()
	c, asked := commands(t, map[string]string{
		"squeue":   `test "$SLURM_CONF$LC_ALL" = /etc/other.confC || exit 9; test "$1" = --local || exit 8; case "$*" in *--jobs=9*ArrayTaskID*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; *--jobs=5*ArrayTaskID*) printf '6|5|1|\n5|5|2|\n';; *--jobs=*ArrayTaskID*) j=${4#--jobs=}; echo "$j|$j|N/A|";; *--jobs=9*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; *--jobs=8*) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1;; *--jobs=*) echo '7|0|RUNNING|n1|5|6|1|1|main|rgpu:50|gres/rgpu:50|N/A|N/A|N/A|';; *) echo '7|0|RUNNING|n1|';; esac`,
		"scontrol": `case "$*" in *"show config") printf 'ClusterName = c\n';; "requeue 9") echo "Invalid job id specified for job 9" >&2; exit 1;; "requeue 8") echo "Only batch jobs are accepted or processed for job 8" >&2; exit 1;; esac`,
	})
	t.Setenv("SQUEUE_FORMAT", "%i")
	if j, err := c.Job(ctx, "7"); err != nil || j.UID != 5 || j.Gres[0].Count != 50 {
		t.Errorf("%+v, %v", j, err)
	}
	if _, err := c.Job(ctx, "9"); !errors.Is(err, ErrGone) {
		t.Errorf("a job that is gone: %v", err)
	}
	if _, err := c.Job(ctx, "8"); err == nil || errors.Is(err, ErrGone) || !strings.Contains(err.Error(), "Unable to contact") {
		t.Errorf("a slurmctld that is away: %v", err)
	}
	for _, bad := range []string{"", "0", "7,8", "-x", "7 8", "99999999999"} {
		if _, err := c.Job(ctx, bad); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if jobs, err := c.Jobs(ctx); err != nil || len(jobs) != 1 {
		t.Errorf("%v, %v", jobs, err)
	}
	if err := c.Requeue(ctx, "7"); err != nil {
		t.Error(err)
	}
	if err := c.Requeue(ctx, "8"); !errors.Is(err, ErrNoRequeue) {
		t.Errorf("no batch job: %v", err)
	}
	if err := c.Requeue(ctx, "9"); !errors.Is(err, ErrGone) {
		t.Errorf("gone: %v", err)
	}
	asked()
	const ask = "squeue [--local] [--noheader] [--states=all] [--jobs=%s] [--Format=" + taskFormat + "]\n"
	if err := c.Requeue(ctx, "5"); err != nil || asked() != fmt.Sprintf(ask+"scontrol [requeue] [5_2]\n", "5") {
		t.Error("requeue of an array's last task:", err)
	}
}

// A comment goes to slurmctld or, where that has forgotten the job or waits, to the accounting. Text of others in either
// stays.
func TestComment(t *testing.T) {
	c, asked := commands(t, map[string]string{
		"squeue": `case "$4" in --jobs=9|--jobs=23|--jobs=24) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; --jobs=5) printf '6|5|1|of another|\n5|5|2||\n';;
			--jobs=11) printf '11|11|N/A|JS1:H4sIAAA=|\n';; --jobs=12) printf '12|12|N/A|see ticket 7 | bar|\n';; --jobs=13) printf '13|13|N/A|see ticket 7; sluice: requeued: old|\n';;
			--jobs=14) printf '14|14|N/A|sluice: requeued: old|\n';; --jobs=16) printf '16|16|N/A|two\nlines|\n';; --jobs=17) printf '17|17|N/A|it is "so"|\n';;
			*) j=${4#--jobs=}; echo "$j|$j|N/A|(null)|";; esac`,
		"scontrol": `case "$*" in *"jobid=8"*) echo "Job has already finished for job 8" >&2; exit 1;; *"jobid=4"*) echo "Job update not available right now, the DB index is being set, try again in a bit for job 4" >&2; exit 1;;
			*"jobid=18"*) echo "Unexpected message received for job 18" >&2; exit 1;; *"jobid=19"*) exit 1;; *"jobid=20"*) echo "Access/permission denied for job 20" >&2; exit 1;; *"jobid=2"[12]*) echo "Job has already finished" >&2; exit 1;; esac`,
		"sacctmgr": `case "$*" in *jobid=21*) echo "You are not running a supported accounting_storage plugin" >&2; exit 1;; *jobid=22*) echo " Error with request: Unspecified error" >&2; exit 1;; *jobid=4*x*) echo "sacctmgr: error: Request didn't affect anything"; exit 1;; esac`,
		"sacct":    `case "$*" in *--jobs=7*|*--jobs=21*|*--jobs=24*) echo "Slurm accounting storage is disabled" >&2; exit 1;; *--jobs=15*) echo '15|15|JS1:abc=';; *) printf '10|9_1|\n9|9_2|\n8|8|by an admin\n';; esac`,
	})
	const (
		ask   = "squeue [--local] [--noheader] [--states=all] [--jobs=%s] [--Format=" + commentFormat + "]\n"
		old   = "sacct [--noheader] [--parsable2] [--allocations] [--jobs=%s] [--format=JobIDRaw,JobID,AdminComment]\n"
		tell  = "scontrol [update] [jobid=%s] [admincomment=%s]\n"
		later = "it may do so later"
		keep  = "sacctmgr [--immediate] [--quiet] [modify] [job] [where] [jobid=%s] [set] [AdminComment=%s]\n"
	)
	for _, x := range []struct {
		job, text string
		err       string
		want      string
	}{
		{"7", "sluice: a 'b' \"c\"\nd", "", fmt.Sprintf(tell, "7", "sluice: a b c d")},
		{"8", "sluice: of one that has ended", "", fmt.Sprintf(tell+keep, "8", "by an admin; sluice: of one that has ended", "8", "by an admin; sluice: of one that has ended")},
		// The last task of an array has the array's number.
		{"5", "sluice: of a task", "", fmt.Sprintf(tell, "5_2", "sluice: of a task")},
		{"9", "sluice: of one long gone", "", fmt.Sprintf(keep, "9_2", "sluice: of one long gone")},
		{"4", "sluice: before the database", "", fmt.Sprintf(tell+keep, "4", "sluice: before the database", "4", "sluice: before the database")},
		{"4", "sluice: x", later, fmt.Sprintf(tell+keep, "4", "sluice: x", "4", "sluice: x")},
		{"11", "sluice: x", "left alone", ""},
		{"12", "sluice: x", "", fmt.Sprintf(tell, "12", "see ticket 7 | bar; sluice: x")},
		{"13", "sluice: x", "", fmt.Sprintf(tell, "13", "see ticket 7; sluice: x")},
		{"14", "sluice: x", "", fmt.Sprintf(tell, "14", "sluice: x")},
		{"15", "sluice: x", "left alone", ""}, // by way of the accounting, which slurmctld does not know
		{"16", "sluice: x", "left alone", ""},
		{"17", "sluice: x", "left alone", ""},
		// What scontrol says of a slurmctld that goes away, nothing at all, and a database that fails.
		{"18", "sluice: x", later, fmt.Sprintf(tell, "18", "sluice: x")},
		{"19", "sluice: x", later, fmt.Sprintf(tell, "19", "sluice: x")},
		{"22", "sluice: x", later, fmt.Sprintf(tell+keep, "22", "sluice: x", "22", "sluice: x")},
		{"23", "sluice: of one that the accounting may not have yet", later, ""},
		// These stay.
		{"20", "sluice: x", "denied", fmt.Sprintf(tell, "20", "sluice: x")},
		{"21", "sluice: x", "not running", fmt.Sprintf(tell+keep, "21", "sluice: x", "21", "sluice: x")},
		{"24", "sluice: x", "disabled", ""},
	} {
		err := c.Comment(t.Context(), x.job, x.text)
		if err != nil && strings.Count(err.Error(), "job "+x.job+": ") > 1 {
			t.Errorf("the job is named twice: %v", err)
		}
		want := fmt.Sprintf(ask+old, x.job, x.job) + x.want
		if got := asked(); got != want || errors.Is(err, ErrLater) != (x.err == later) || (err == nil) != (x.err == "") || err != nil && !strings.Contains(err.Error(), x.err) {
			t.Errorf("comment of job %s: %v\n%s, want\n%s", x.job, err, got, want)
		}
	}
}

func TestReserve(t *testing.T) {
	ctx := t.Context()
	const show = "scontrol [--oneliner] [show] [reservation] [sluice_rgpu]\n"
	c, asked := commands(t, map[string]string{"scontrol": `case "$*" in *show*) echo "Reservation sluice_rgpu not found"; exit 1;; esac`})
	if err := c.Reserve(ctx, "sluice_rgpu", "rgpu", 50); err != nil {
		t.Error(err)
	}
	if got, want := asked(), show+"scontrol [create] [reservation] [reservationname=sluice_rgpu] [starttime=now] [duration=UNLIMITED] [flags=license_only] [Licenses=rgpu:50] [users=root]\n"; got != want {
		t.Errorf("create: %s", got)
	}
	if err := c.Reserve(ctx, "sluice_rgpu", "rgpu", 0); err != nil || asked() != show {
		t.Error("nothing to remove", err)
	}
	c, asked = commands(t, map[string]string{"scontrol": `case "$*" in *show*) echo "ReservationName=sluice_rgpu StartTime=now Licenses=rgpu:50 State=ACTIVE";; esac`})
	for _, x := range []struct {
		count uint64
		want  string
	}{
		{50, ""},
		{5, "scontrol [update] [reservationname=sluice_rgpu] [Licenses=rgpu:5]\n"},
		{0, "scontrol [delete] [reservationname=sluice_rgpu]\n"},
	} {
		if err := c.Reserve(ctx, "sluice_rgpu", "rgpu", x.count); err != nil {
			t.Error(err)
		}
		if got := asked(); got != show+x.want {
			t.Errorf("%d: %s", x.count, got)
		}
	}
	c, _ = commands(t, map[string]string{"scontrol": `echo "Unable to contact slurm controller" >&2; exit 1`})
	if err := c.Reserve(ctx, "sluice_rgpu", "rgpu", 50); err == nil {
		t.Error("a slurmctld that is away")
	}
}

func TestHangs(t *testing.T) {
	c, _ := commands(t, map[string]string{"squeue": "sleep 60"})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := c.Jobs(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("a command that hangs held its caller for %v", d)
	}
	if _, err := New("/nonexistent", "").Jobs(t.Context()); err == nil || !strings.Contains(err.Error(), "slurm.bin") {
		t.Errorf("no commands: %v", err)
	}
}

// Squeue names a task of an array by the array, and leases are named by the task's own number.
func TestNumber(t *testing.T) {
	c, asked := commands(t, map[string]string{
		"scontrol": `case "$*" in *" 61_0") echo 'JobId=63 ArrayJobId=61 ArrayTaskId=0 JobName=x';; *" 70+1") echo 'JobId=71 HetJobId=70 HetJobOffset=1 JobName=x';; *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; esac`,
		"sacct":    `case "$*" in *--jobs=61_4*) echo 65;; esac`,
	})
	for name, want := range map[string]string{"61_0": "63", "70+1": "71", "61_4": "65"} {
		if got, err := c.Number(t.Context(), name); err != nil || got != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := c.Number(t.Context(), "61_9"); !errors.Is(err, ErrGone) {
		t.Errorf("a task that nobody knows: %v", err)
	}
	asked()
	for _, bad := range []string{"", "61", "_1", "61_", "61_-1", "61_x", "-a_1", "0_1", "61_1;x", "run-1_2"} {
		if got, err := c.Number(t.Context(), bad); err == nil || IsTask(bad) {
			t.Errorf("%q is %q", bad, got)
		}
	}
	if said := asked(); said != "" {
		t.Errorf("Slurm was asked: %s", said)
	}
}

// The accounting lists the parts of arrays and of heterogeneous jobs by the number of the whole job, which one of them has too.
func TestParts(t *testing.T) {
	c, asked := commands(t, map[string]string{"sacct": `case "$*" in
		*--jobs=61\ *) printf '63|61_10\n62|61_2\n61|61_[11-13,15]\n64|610_1\n65|6\nx|61_3\n66\n|\n\n67|61_\n68|61.0\n69|61_x|\n';;
		*--jobs=70\ *) printf '71|70+1\n70|70+0\n';;
		*--jobs=62\ *) echo '62|61_2';;
		*--jobs=80\ *) echo '80|80';;
		*--jobs=90\ *) echo "Slurm accounting storage is disabled" >&2; exit 1;; esac`})
	for id, want := range map[string]string{"61": "[{62 61_2} {63 61_10} {61 61_[11-13,15]}]", "70": "[{70 70+0} {71 70+1}]", "62": "[]", "80": "[]", "81": "[]"} {
		if got, err := c.Parts(t.Context(), id); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%s: %v, %v, want %s", id, got, err, want)
		}
	}
	if _, err := c.Parts(t.Context(), "90"); err == nil || !strings.Contains(err.Error(), "storage is disabled") {
		t.Errorf("no accounting: %v", err)
	}
	asked()
	for _, bad := range []string{"", "61_1", "run-1", "-x", "7,8"} {
		if got, err := c.Parts(t.Context(), bad); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
	if said := asked(); said != "" {
		t.Errorf("Slurm was asked: %s", said)
	}
	if _, err := New("/nonexistent", "").Parts(t.Context(), "61"); err == nil || !strings.Contains(err.Error(), "slurm.bin") {
		t.Errorf("no commands: %v", err)
	}
}
