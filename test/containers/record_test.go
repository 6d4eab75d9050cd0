//go:build sources || cri

package containers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// record begins the raw log of a test, if SLUICE_LOGS names a folder for it: the line of all raw logs, which versions ran, and what the
// command prints on the node.
func (s *site) record(name, command string) {
	dir := os.Getenv("SLUICE_LOGS")
	if dir == "" {
		return
	}
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := f.Close(); err != nil {
			s.t.Error(err)
		}
	})
	out, err := s.Nodes[0].Run(s.ctx, lab.Alice, "sh", "-c", "sluice version; srun --version; cut -d' ' -f2- /.sources; "+command)
	if err != nil {
		s.t.Fatal(err)
	}
	head, err := exec.Command("../../bench/rawlog.py", "gpu=simulated", "driver=none").Output()
	if err != nil {
		s.t.Fatal(err)
	}
	fmt.Fprintf(f, "%s# %s: a GPU of %d MiB, simulated\n%s\n", head, s.t.Name(), gpuMem>>20, out)
	s.log = f
}

// typed runs the steps on a machine as that user, outside of any job and each behind the same lines of begin.
func (s *site) typed(n *lab.Node, u lab.User, begin string, steps []step) {
	s.t.Helper()
	for _, x := range steps {
		out, err := n.Command(s.ctx, u, "bash", "-c", begin+x.command).CombinedOutput()
		s.check(x, string(out), err == nil)
	}
}
