package prolog

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/internal/form/formtest"
)

// Slurm's builds link one or another: Debian 12's has 5.1, later ones 5.3 or 5.4.
func TestLua(t *testing.T) {
	for _, name := range []string{"sluice.lua", "sluice_test.lua"} { // go test sees what a test reads, not what its children do
		if _, err := os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	for _, table := range []string{"sizes.txt", "times.txt", "charges.txt", "counts.txt", "licences.txt"} {
		formtest.Each(t, table, func(string, string) {})
	}
	for _, lua := range []string{"lua5.1", "lua5.3"} {
		t.Run(lua, func(t *testing.T) {
			seed := fmt.Sprint(time.Now().UnixNano() % 1e9)
			out, err := exec.Command(lua, "sluice_test.lua", ".", filepath.Join(t.TempDir(), "pools.lua"), seed, formtest.Dir()).CombinedOutput()
			if errors.Is(err, exec.ErrNotFound) {
				t.Fatalf("%v; install it: apt-get install %s", err, lua)
			}
			if err != nil {
				t.Fatalf("seed %s: %v\n%s", seed, err, out)
			}
			t.Logf("seed %s: %s", seed, strings.TrimSpace(string(out)))
		})
	}
}

// The script for a site without its own is the one that the guide shows, short enough
// to be read in a moment.
func TestJobSubmitLoads(t *testing.T) {
	text, err := os.ReadFile("job_submit.lua")
	if err != nil {
		t.Fatal(err)
	}
	const installed = "/usr/lib/sluice/slurm/sluice.lua"
	if !strings.Contains(string(text), installed) {
		t.Fatalf("job_submit.lua does not load %s", installed)
	}
	guide, err := os.ReadFile("../docs/admin.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "sluice.") && !strings.HasPrefix(line, "--") && !strings.Contains(string(guide), "    "+line) {
			t.Errorf("docs/admin.md does not show %q", line)
		}
	}
	dir := t.TempDir()
	script := filepath.Join(dir, "job_submit.lua")
	here, err := filepath.Abs("sluice.lua")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script, []byte(strings.Replace(string(text), installed, here, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	check := `slurm = { SUCCESS = 0, ERROR = -1, log_user = function() end, log_info = function() end, log_error = function() end }
assert(dofile(arg[1]) == 0)
assert(slurm_job_submit({}, {}, 0) == 0)
assert(slurm_job_submit({ licenses = "rgpu:1" }, {}, 1) == -1)
assert(slurm_job_modify({ licenses = "rgpu:1" }, {}, {}, 1) == -1)
assert(slurm_job_modify({ licenses = "rgpu:1" }, {}, {}, 0) == 0)`
	run := filepath.Join(dir, "run.lua")
	if err := os.WriteFile(run, []byte(check), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("lua5.3", run, script).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// Slurm gives its scripts no PATH and takes their status at its word. The one that may
// say no is PrologSlurmctld's, by 1; whatever else goes wrong must cost nobody a node or
// a job.
func TestScriptsStatus(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		script, verb string
		status       map[string]int // of sluice: of the script
	}{
		{"prolog.sh", "prolog", map[string]int{"exit 0": 0, "exit 1": 0, "exit 2": 0, "kill -9 $$": 0}},
		{"epilog.sh", "epilog", map[string]int{"exit 0": 0, "exit 1": 0, "exit 2": 0, "kill -9 $$": 0}},
		{"prolog-ctld.sh", "prolog-ctld", map[string]int{"exit 0": 0, "exit 1": 1, "exit 2": 0, "kill -9 $$": 0}},
		{"epilog-ctld.sh", "epilog-ctld", map[string]int{"exit 0": 0, "exit 1": 0, "exit 2": 0, "kill -9 $$": 0}},
	} {
		text, err := os.ReadFile(c.script)
		if err != nil {
			t.Fatal(err)
		}
		const installed = "/usr/bin/sluice "
		if strings.Count(string(text), installed) != 1 {
			t.Fatalf("%s does not run %sonce", c.script, installed)
		}
		fake, script := filepath.Join(dir, "sluice"), filepath.Join(dir, c.script)
		if err := os.WriteFile(script, []byte(strings.Replace(string(text), installed, fake+" ", 1)), 0o700); err != nil {
			t.Fatal(err)
		}
		run := func(what string, want int) {
			cmd := exec.Command(script)
			cmd.Env = []string{"SLURM_JOB_ID=1"}
			if out, _ := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != want {
				t.Errorf("%s, sluice %s: status %d, want %d\n%s", c.script, what, cmd.ProcessState.ExitCode(), want, out)
			}
		}
		for what, want := range c.status {
			body := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = %s ] || exit 1\n%s\n", c.verb, what)
			if err := os.WriteFile(fake, []byte(body), 0o700); err != nil {
				t.Fatal(err)
			}
			run(what, want)
		}
		if err := os.Remove(fake); err != nil {
			t.Fatal(err)
		}
		run("is missing", 0)
	}
}
