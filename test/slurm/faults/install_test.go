package faults

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// installed adds what a site installs of Sluice for Slurm. With SLUICE_LAB=none it is Slurm alone, as which the
// rows say what Slurm itself does.
func installed(o lab.Options) lab.Options {
	o.NoSluice = os.Getenv("SLUICE_LAB") == "none"
	o.Jobs = !o.NoSluice
	return o
}

// release is that of the Slurm under test, as 22.05.
func release(t *testing.T) string {
	t.Helper()
	root := os.Getenv("SLUICE_SLURM_ROOT")
	if root == "" {
		root = "/"
	}
	out, err := exec.Command("chroot", root, "slurmctld", "-V").Output()
	if err != nil {
		t.Fatal(err)
	}
	v := string(out) // slurm-wlm 22.05.8
	v = strings.TrimSpace(v[strings.LastIndexByte(v, ' ')+1:])
	return v[:min(5, len(v))]
}
