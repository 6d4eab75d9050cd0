package leasesock

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestWhoMay(t *testing.T) {
	l := &lease.Lease{ID: "x", Request: lease.Request{UID: 1000, Key: lease.Key{Job: "42"}}}
	for _, c := range []struct {
		who caller
		ok  bool
	}{
		{caller{uid: 1000, fd: -1}, true},
		{caller{uid: 0, fd: -1}, true},
		{caller{uid: 1001, fd: -1}, false},
		{caller{uid: 1001, pid: os.Getpid(), fd: -1}, false},
		{caller{uid: 1000, pid: os.Getpid(), fd: -1}, true},
	} {
		if err := c.who.may(l); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c.who, err)
		}
	}
}

// A container's user ids are some of the user's own, in a namespace that is his.
func TestMappedUser(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}, Pdeathsig: syscall.SIGKILL}
	cmd.Path, cmd.Args = "/usr/bin/unshare", []string{"unshare", "--user", "sleep", "100"}
	if err := cmd.Start(); err != nil {
		t.Fatal("cannot start a process in a user namespace: ", err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for end := time.Now().Add(5 * time.Second); !nsOwnedBy(cmd.Process.Pid, 1000); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the namespace is not seen as uid 1000's")
		}
	}
	if nsOwnedBy(cmd.Process.Pid, 1001) || nsOwnedBy(os.Getpid(), 0) {
		t.Fatal("a namespace of somebody else passes")
	}
	// As newuidmap does it: the user is root in there, and has subordinate users.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/uid_map", cmd.Process.Pid), []byte("0 1000 1\n1 100000 65536\n"), 0); err != nil {
		t.Fatal(err)
	}
	l := &lease.Lease{Request: lease.Request{UID: 1000, Key: lease.Key{Job: "1"}}}
	for uid, ok := range map[uint32]bool{1000: true, 100000: true, 100999: true, 165535: true, 165536: false, 99999: false, 1001: false} {
		if err := (&caller{uid: uid, pid: cmd.Process.Pid, fd: -1}).may(l); (err == nil) != ok {
			t.Errorf("uid %d: %v", uid, err)
		}
	}
	l.Request.UID = 1001
	if err := (&caller{uid: 100999, pid: cmd.Process.Pid, fd: -1}).may(l); err == nil {
		t.Error("a lease of another user's")
	}
}

// A process of the lease's user is refused if its cgroup shows that it belongs to another job.
func TestOtherJob(t *testing.T) {
	const in = "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n"
	for own, ok := range map[string]bool{"4711": true, "4712": false, "471": false, "run-1": true} {
		l := &lease.Lease{ID: "1", Request: lease.Request{UID: 1000, Key: lease.Key{Job: own}}}
		if err := mayInJob([]byte(in), l); (err == nil) != ok || err != nil && lease.CodeOf(err) != lease.Denied {
			t.Errorf("a process of job 4711 and a lease of job %s: %v", own, err)
		}
		if err := mayInJob([]byte("0::/user.slice/user-1000.slice\n"), l); err != nil {
			t.Errorf("a process outside of Slurm and a lease of job %s: %v", own, err)
		}
	}
}
