package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	const rest = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21"
	for text, want := range map[string]Stat{
		"12 (sleep) S" + rest:          {4711, 'S'},
		"12 (a b) Z (c) R 1) Z" + rest: {4711, 'Z'},
		"12 () X" + rest:               {4711, 'X'},
	} {
		if got, err := parse("stat", []byte(text)); got != want || err != nil {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "12", "12 (sleep) S 1 2 3", "12 (sleep)" + rest[:len(rest)-15], "12 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 -1 20"} {
		if got, err := parse("stat", []byte(text)); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestRead(t *testing.T) {
	me, err := Read(os.Getpid())
	if err != nil || me.Start == 0 || me.Ended() {
		t.Fatalf("%+v, %v", me, err)
	}
	c := exec.Command("true")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// Ended and not reaped.
	if err := unix.Waitid(unix.P_PID, c.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if s, err := Read(c.Process.Pid); err != nil || !s.Ended() || s.Start < me.Start {
		t.Errorf("a zombie: %+v, %v", s, err)
	}
	_ = c.Wait()
	if _, err := Start(c.Process.Pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that is gone: %v", err)
	}
	if _, err := read(f); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that has ended since the file was opened: %v", err)
	}
}

func TestSlurmJob(t *testing.T) {
	for path, job := range map[string]string{
		"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n":      "42",
		"4:memory:/slurm/uid_1000/job_7/step_batch\n1:name=systemd:/x\n":     "7",
		"9:cpuset:/\n4:memory:/slurm_node1/uid_0/job_8\n":                    "8",
		"0::/user.slice/user-1000.slice/session-1.scope\n":                   "",
		"0::/user.slice/job_9/x\n":                                           "",
		"0::/system.slice/slurmstepd.scope/job_10extra/step_0/user/task_0\n": "",
	} {
		if got := SlurmJob([]byte(path)); got != job {
			t.Errorf("%q: job %q, want %q", path, got, job)
		}
	}
}

func TestSlurmStep(t *testing.T) {
	for path, step := range map[string]string{
		"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n":                     "0",
		"4:memory:/slurm/uid_1000/job_7/step_batch\n1:name=systemd:/x\n":                    "batch",
		"9:cpuset:/slurm_n1/uid_0/job_8\n4:freezer:/slurm_n1/uid_0/job_8/step_12/task_0\n":  "12",
		"0::/system.slice/slurmstepd.scope/job_42/step_3+1/user/task_0\n":                   "3",
		"0::/system.slice/slurmstepd.scope/job_42/step_3/user/slurm/job_42/step_4/task_0\n": "3",
		"0::/system.slice/slurmstepd.scope/job_42/step_extern\n":                            "extern",
		"4:memory:/slurm_node1/uid_0/job_8\n":                                               "",
		"0::/user.slice/job_9/step_1/x\n":                                                   "",
	} {
		if got := SlurmStep([]byte(path)); got != step {
			t.Errorf("%q: step %q, want %q", path, got, step)
		}
	}
}
