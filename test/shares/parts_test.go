package shares

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
)

// stepJob is the job whose steps have parts of its lease. Nothing but its steps' requests is known of it.
const stepJob = "42"

// fakeSlurm answers what a step's node asks of slurmctld: step N asks for the percent in the file N.
const fakeSlurm = `#!/bin/sh
case "${0##*/} $*" in
squeue*) echo "` + stepJob + `|` + stepJob + `|N/A|" ;;
*show*config*) printf 'ClusterName = test\nProctrackType = proctrack/cgroup\n' ;;
*show*step*) for last; do :; done; echo "StepId=$last Network=(null) TresPerNode=gres:rgpu:$(cat "${0%/*}/${last##*.}")" ;;
*) exit 1 ;;
esac
`

// steps is a job with steps: a lease, and what says which step a process belongs to.
type steps struct {
	*world
	slurm  string // directory of the commands
	socket string
}

func newSteps(w *world, percent uint32, policy string) *steps {
	w.t.Helper()
	s := &steps{world: w, slurm: w.s.Opt("slurm")}
	if err := os.MkdirAll(s.slurm, 0o755); err != nil {
		w.t.Fatal(err)
	}
	for _, command := range []string{"squeue", "scontrol"} {
		if err := os.WriteFile(filepath.Join(s.slurm, command), []byte(fakeSlurm), 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	err := w.host.Kill()
	if err == nil {
		err = w.host.Configure(map[string]string{"slurm.bin": s.slurm})
	}
	if err == nil {
		_, err = w.host.Up(ctx)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	socket, release, err := w.host.Acquire(ctx, stepJob, user, percent, policy)
	if err != nil {
		w.t.Fatal(err)
	}
	s.socket = socket
	w.t.Cleanup(func() { _ = release() })
	return s
}

// begin is slurmstepd of a step that asks for so many percent. It returns the daemon's answer.
func (s *steps) begin(step, percent int) string {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.slurm, fmt.Sprint(step)), []byte(fmt.Sprint(percent)), 0o644); err != nil {
		s.t.Fatal(err)
	}
	c, err := net.Dial("unix", s.host.Node.Path("/run/sluice/job.sock"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := fmt.Fprintf(c, "SLUICE-J 1 env %s %d gres\n", stepJob, step); err != nil {
		s.t.Fatal(err)
	}
	answer, _ := io.ReadAll(c)
	return string(answer)
}

// end kills the one program of a step, and waits until the step's part, as sluice list shows it, is the lease's again.
func (s *steps) end(n *tenant, part string) {
	s.t.Helper()
	n.end(syscall.SIGKILL)
	n.w.eventually("the step's session is over", func() error {
		if out := n.w.sluice("list", "--sessions"); strings.Contains(out, part) {
			return errors.New(out)
		}
		return nil
	})
}

// launch starts a tenant in a step. A step that is no number is the batch script or such.
func (s *steps) launch(step string, sh share) *tenant {
	s.t.Helper()
	top := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(top); err != nil {
		top = "/sys/fs/cgroup"
	}
	dir := filepath.Join(top, fmt.Sprintf("slurm-shares-%d", os.Getpid()), "job_"+stepJob, "step_"+step)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		for at, n := dir, 0; n < 3; n++ {
			_ = os.Remove(at)
			at = filepath.Dir(at)
		}
	})
	n := s.launchBy(sh, func(program ...string) node.Command {
		return node.Command{Argv: program, Env: s.host.Env("SLUICE_SOCKET="+s.socket, "LD_LIBRARY_PATH="+s.s.Opt("shim")), UID: user, GID: user, Dir: "/", Cgroup: dir}
	})
	n.begun()
	return n
}

// TestParts: a step has the part of its job's share that it has asked for, whatever the job's other steps and other leases do, and the
// programs of the job without a part have the rest.
func TestParts(t *testing.T) {
	w := newWorld(t)
	s := newSteps(w, 50, "fixed")
	rival := w.start(share{50, "fixed", "gemm"})[0]
	for step, percent := range map[int]int{1: 10, 2: 40} {
		if got := s.begin(step, percent); !strings.HasPrefix(got, "ok ") {
			t.Fatalf("step %d: %s", step, got)
		}
	}
	ten, forty := s.launch("1", share{10, "fixed", "gemm"}), s.launch("2", share{40, "fixed", "small"})
	hold := func(want wants) {
		t.Helper()
		w.run(settle)
		from, to := w.run(window)
		w.held(want, from, to)
	}
	hold(wants{ten: 10, forty: 40, rival: 50})
	if got := s.begin(3, 1); !strings.HasPrefix(got, "error ") || !strings.Contains(got, "0% and ") {
		t.Errorf("a step that asks for more than is left: %s", got)
	}
	s.end(forty, "40%+")
	rest := s.launch("batch", share{40, "fixed", "gemm"})
	hold(wants{ten: 10, rest: 40, rival: 50})
	s.end(ten, "10%+")
	hold(wants{rest: 50, rival: 50})
	for _, n := range []*tenant{rest, rival} {
		n.end(syscall.SIGTERM)
	}
}
