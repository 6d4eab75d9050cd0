package lab

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Sbatch submits a script of the user's, read from standard input, and answers the job's number. What it prints lies in
// the user's home folder, see Output.
func (l *Lab) Sbatch(ctx context.Context, u User, script string, args ...string) (string, error) {
	if !strings.HasPrefix(script, "#!") {
		script = "#!/bin/sh\n" + script + "\n"
	}
	out, err := l.Ctl.RunIn(ctx, u, script, append([]string{"sbatch", "--parsable"}, args...)...)
	if err != nil {
		return "", err
	}
	job, _, _ := strings.Cut(strings.TrimSpace(out), ";")
	return job, nil
}

// Output is what a batch job has printed so far.
func (l *Lab) Output(u User, job string) string {
	b, err := os.ReadFile(l.Path("home", u.Name, "slurm-"+job+".out"))
	if err != nil {
		return ""
	}
	return string(b)
}

// Scontrol runs scontrol on the controller, as root.
func (l *Lab) Scontrol(ctx context.Context, args ...string) (string, error) {
	return l.Ctl.Run(ctx, Root, append([]string{"scontrol"}, args...)...)
}

// Job is a job's record, as scontrol -o show job tells it.
func (l *Lab) Job(ctx context.Context, id string) (map[string]string, error) {
	out, err := l.Scontrol(ctx, "-o", "show", "job", id)
	if err != nil {
		return nil, err
	}
	return fields(strings.TrimSpace(out)), nil
}

// fields takes a line of KEY=VALUE apart. Values have blanks at times, so a field without = belongs to the one before.
func fields(line string) map[string]string {
	m := map[string]string{}
	last := ""
	for f := range strings.SplitSeq(line, " ") {
		k, v, ok := strings.Cut(f, "=")
		if ok && k != "" && k == strings.Trim(k, "\"'") {
			m[k] = v
			last = k
		} else if last != "" {
			m[last] += " " + f
		}
	}
	for k, v := range m {
		m[k] = strings.TrimRight(v, " ")
	}
	return m
}

// WaitJob waits until the job's state is one of these (RUNNING, COMPLETED, ...) and answers its record.
func (l *Lab) WaitJob(ctx context.Context, id string, limit time.Duration, states ...string) (map[string]string, error) {
	var j map[string]string
	err := Until(ctx, limit, "job "+id+" is "+strings.Join(states, " or "), func() (err error) {
		if j, err = l.Job(ctx, id); err != nil {
			return err
		}
		for _, s := range states {
			if j["JobState"] == s {
				return nil
			}
		}
		return fmt.Errorf("it is %s (%s)", j["JobState"], j["Reason"])
	})
	return j, err
}

// Licence is the use of one of Slurm's licences.
type Licence struct{ Total, Used, Reserved int }

// Licences are all of them by name.
func (l *Lab) Licences(ctx context.Context) (map[string]Licence, error) {
	out, err := l.Scontrol(ctx, "-o", "show", "licenses")
	if err != nil {
		return nil, err
	}
	m := map[string]Licence{}
	for line := range strings.Lines(out) {
		f := fields(strings.TrimSpace(line))
		if f["LicenseName"] == "" {
			continue
		}
		var v Licence
		v.Total, _ = strconv.Atoi(f["Total"])
		v.Used, _ = strconv.Atoi(f["Used"])
		v.Reserved, _ = strconv.Atoi(f["Reserved"])
		m[f["LicenseName"]] = v
	}
	return m, nil
}
