package slurm

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Output is the file that a batch script's standard output goes to, as Slurm names it,
// and the node that the script runs on; an empty path for a job without a script, or one
// that has been submitted with none. The path is the user's word, and so is all else in
// the answer that this reads: it is for nobody but the user.
func (c *Commands) Output(ctx context.Context, id string) (path, node string, err error) {
	if _, err := form.ParseJobID(id); err != nil {
		return "", "", err
	}
	out, err := c.run(ctx, "scontrol", "show", "job", id)
	if said(err, "invalid job id") {
		return "", "", fmt.Errorf("job %s: %w", id, ErrGone)
	}
	if err != nil {
		return "", "", err
	}
	path, node = parseOutput(id, out)
	return path, node, nil
}

// parseOutput reads the record of a job; that of an array shows all its tasks.
func parseOutput(id, out string) (path, node string) {
	f := map[string]string{}
	mine := false
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\n")
		if rest, ok := strings.CutPrefix(line, "JobId="); ok {
			mine = rest == id || strings.HasPrefix(rest, id+" ")
			line = "   " + line
		}
		if line, ok := strings.CutPrefix(line, "   "); mine && ok {
			// In these two anything may stand, to the end of the line.
			if v, ok := strings.CutPrefix(line, "StdOut="); ok {
				f["StdOut"] = v
				continue
			}
			line, v, ok := strings.Cut(line, " JobName=")
			if ok {
				f["JobName"] = v
			}
			for _, w := range strings.Fields(line) {
				if k, v, ok := strings.Cut(w, "="); ok && k != "StdOut" {
					f[k] = v
				}
			}
		}
	}
	if f["BatchFlag"] == "0" || f["BatchFlag"] == "" || f["StdOut"] == "" || f["StdOut"] == "(null)" {
		return "", ""
	}
	user, _, _ := strings.Cut(f["UserId"], "(")
	master := f["ArrayJobId"]
	if master == "" {
		master = id
	}
	task := f["ArrayTaskId"]
	if task == "" {
		task = strconv.FormatUint(1<<32-2, 10) // as slurmstepd has it: NO_VAL
	}
	tasks, _ := strconv.ParseUint(task, 10, 64)
	return expandPath(f["StdOut"], map[byte]string{
		'A': master, 'a': task, 'b': strconv.FormatUint(tasks%10, 10), 'j': id, 'J': id, 'N': f["BatchHost"], 'n': "0", 't': "0", 's': "batch",
		'u': user, 'x': f["JobName"], '%': "%",
	}), f["BatchHost"]
}

// expandPath replaces what Slurm replaces in names of files, sbatch(1), filename pattern. Some
// releases of scontrol have done some of it already.
func expandPath(path string, of map[byte]string) string {
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] != '%' {
			b.WriteByte(path[i])
			continue
		}
		j := i + 1
		for j < len(path) && j < i+3 && path[j] >= '0' && path[j] <= '9' {
			j++
		}
		v, ok := "", false
		if j < len(path) {
			v, ok = of[path[j]]
		}
		if !ok {
			b.WriteByte('%')
			continue
		}
		width, _ := strconv.Atoi(path[i+1 : j])
		if _, err := strconv.ParseUint(v, 10, 64); err == nil && len(v) < min(width, 10) {
			b.WriteString(strings.Repeat("0", min(width, 10)-len(v)))
		}
		b.WriteString(v)
		i = j
	}
	return b.String()
}
