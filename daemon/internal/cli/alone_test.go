package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A Prolog without a daemon notes the jobs that need it, and fails for none.
func TestPrologAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	bin := t.TempDir()
	// It answers each field of --Format by its name, "|" behind it.
	squeue := `#!/bin/sh
for a; do
	case $a in
	--jobs=7) id=7 l=rgpu_a100:50,x:1 ;;
	--jobs=8) id=8 l=x:1 ;;
	--jobs=*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
	--Format=*) f=${a#--Format=} ;;
	esac
done
IFS=,
for a in $f; do
	case $a in
	JobID:*) v=$id ;; State:*) v=RUNNING ;; Licenses:*) v=$l ;; NodeList:*) v=n1 ;; Partition:*) v=main ;; tres-per-node:*) v=gres:rgpu:50 ;; tres-*) v=N/A ;; *) v=0 ;;
	esac
	printf "%s|" "$v"
done
echo
`
	if err := os.WriteFile(filepath.Join(bin, "squeue"), []byte(squeue), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "sluice.yaml")
	if err := os.WriteFile(file, []byte("slurm:\n  bin: "+bin+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		job  string
		env  []string
		note bool
		say  string
	}{
		{"7", nil, true, ""},
		{"8", nil, false, ""},
		{"9", nil, false, "not known whether the job needs a GPU"},
		{"10", []string{"SLURM_JOB_LICENSES=rgpu:50", "SLURM_JOB_START_TIME=1"}, true, ""},
		{"11", []string{"SLURM_JOB_LICENSES=x:50", "SLURM_JOB_START_TIME=1"}, false, ""},
		{"12", []string{"SLURM_JOB_START_TIME=1"}, false, ""},
	} {
		run := filepath.Join(dir, fmt.Sprint(i))
		cmd := sluice("prolog", "--config", file, "--socket", filepath.Join(run, "sluiced.sock"))
		cmd.Env = append(append(cmd.Env, "SLURM_JOB_ID="+c.job, "SLURM_JOB_UID=65534"), c.env...)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "no sluiced at socket") || !strings.Contains(string(out), c.say) {
			t.Errorf("job %s: %v, %s", c.job, err, out)
		}
		if _, err := os.Stat(filepath.Join(run, "jobs", c.job)); (err == nil) != c.note {
			t.Errorf("job %s: note %v, want %v: %s", c.job, err == nil, c.note, out)
		}
	}
}
