package containers

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// The hook's own tests, those with hostile images among them, with this root's runc and crun. What they say of
// engines is said of newer ones here.
func TestRuntimes(t *testing.T) {
	s := newSite(t)
	dir, err := filepath.Abs("../../oci-hook/test")
	if err != nil {
		t.Fatal(err)
	}
	program := s.Path("hook.test")
	if out, err := exec.Command("go", "test", "-c", "-o", program, "../../oci-hook/test").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n := s.Nodes[0]
	versions, err := n.Run(s.ctx, lab.Root, "sh", "-c", "runc --version | head -n 1; crun --version | head -n 1")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", versions)
	out, err := n.Run(s.ctx, lab.Root, "env", "-C", dir, "HOME=/root", "PATH=/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SLUICE_BUILD="+s.Options.Build,
		program, "-test.v", "-test.timeout=5m", "-test.skip", "^Test(Docker|Podman.*|Engines|Libcs|Cost|NvidiaSmi)$")
	passed, failed := strings.Count(out, "\n--- PASS"), strings.Count(out, "--- FAIL")
	t.Logf("%d tests passed", passed)
	if err != nil || failed > 0 || passed < 20 {
		t.Errorf("%v\n%s", err, out)
	}
}
