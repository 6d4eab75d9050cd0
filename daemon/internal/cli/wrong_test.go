package cli

import (
	"path/filepath"
	"strings"
	"testing"
)

// Commands with arguments that make no sense: each answer names the thing and what to do, and has a status that scripts cannot take for another one.
func TestWrongArguments(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"list 4711", 1, `sluice list takes no arguments, and "4711" is one; see sluice list --help`},
		{"slurm check now", 1, "sluice slurm check takes no arguments"},
		{"slurm nope", 1, `unknown command "nope" for "sluice slurm"`},
		{"health gpu01", 3, "sluice health takes no arguments"}, // 1 is a warning
		{"health --nope", 3, "unknown flag: --nope"},
		{"help nope", 1, `there is no command "nope"; see sluice --help`},
		{"completion tcsh", 1, `there is no completion for "tcsh"; give bash, fish, powershell or zsh`},
		{"explain 4711.batch", 1, "4711.batch is step batch of job 4711; give the job: 4711"},
		{"report 4711_3.0", 1, "4711_3.0 is step 0 of job 4711_3; give the job: 4711_3"},
		{"ca issue gpu01 --dir " + none, 1, "sluice ca init makes a CA, and --dir says where it is"},
	} {
		var out, errs strings.Builder
		if status := Main(strings.Fields(c.args), &out, &errs); status != c.status || !strings.Contains(errs.String(), c.want) || out.Len() != 0 {
			t.Errorf("sluice %s: status %d, %q, %q; want status %d and %q", c.args, status, out.String(), errs.String(), c.status, c.want)
		}
	}
	for args, want := range map[string]string{"help list": "sluice list [flags]", "help": "Available Commands", "completion": "bash", "help slurm check": "sluice slurm check"} {
		var out, errs strings.Builder
		if status := Main(strings.Fields(args), &out, &errs); status != 0 || !strings.Contains(out.String(), want) {
			t.Errorf("sluice %s: status %d, %.200q, %q", args, status, out.String(), errs.String())
		}
	}
}
