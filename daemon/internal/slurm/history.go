package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// What Slurm's accounting has of jobs that ended. It may have millions of them, so sacct's lines are read
// as they come, and none is kept here.

const (
	// historyTime bounds sacct about many jobs. slurmdbd takes seconds for some hundred thousand.
	historyTime = 2 * time.Minute
	// maxRecord is far beyond a line of sacct with the longest AdminComment, in bytes.
	maxRecord = 64 << 10
)

// Past is a job that ended, as Slurm's accounting has it. A job's name is not in it: its user may write anything into
// it, a line's end too.
type Past struct {
	ID         string // raw: of an array's task its own
	Name       string // as squeue names it: 4711, 4711_3 or 4711+1
	User       string // "" where the accounting's machine does not know the user
	Account    string
	State      State
	Start, End time.Time
	Elapsed    time.Duration // of the last run
	Comment    string        // our part of the AdminComment, "" for none
}

// PastQuery selects jobs that ended.
type PastQuery struct {
	UID          *uint32 // nil: of all users
	Account      string  // "": of any
	Since, Until time.Time
}

// pastFields are those of pastFormat. An AdminComment may have bars, and is the last.
const (
	pastFields = 9
	pastFormat = "JobIDRaw,JobID,User,Account,State,Start,End,ElapsedRaw,AdminComment"
)

// Past calls each with every job that ended in [q.Since, q.Until), in sacct's order. Of a job with several runs that is
// the last. Damaged is how many of sacct's lines were none; they are skipped. Which jobs of others sacct shows is
// slurmdbd's to decide, see PrivateData in slurmdbd.conf.
func (c *Commands) Past(ctx context.Context, q PastQuery, each func(Past)) (damaged int, err error) {
	// sacct reads a time of day in its own time zone, and a distance from now in any.
	now := time.Now()
	distance := func(t time.Time) string {
		return fmt.Sprintf("now-%dseconds", max(0, int64(now.Sub(t)/time.Second)))
	}
	args := []string{"--noheader", "--parsable2", "--allocations", "--starttime=" + distance(q.Since.Add(-time.Second)), "--endtime=" + distance(q.Until), "--format=" + pastFormat}
	if q.UID == nil {
		args = append(args, "--allusers")
	} else {
		args = append(args, "--uid="+strconv.FormatUint(uint64(*q.UID), 10))
	}
	if q.Account != "" {
		args = append(args, "--accounts="+q.Account)
	}
	lost, err := c.lines(ctx, historyTime, func(line string) {
		p, ok := parsePast(line)
		switch {
		case !ok:
			damaged++
		case !p.End.IsZero() && !p.End.Before(q.Since) && p.End.Before(q.Until):
			each(p)
		}
	}, "sacct", args...)
	return damaged + lost, err
}

// parsePast reads a line in pastFormat, with times in seconds since 1970.
func parsePast(line string) (Past, bool) {
	f := strings.SplitN(line, "|", pastFields)
	if len(f) != pastFields || !form.JobID(f[0]).Valid() || f[1] == "" || f[4] == "" {
		return Past{}, false
	}
	start, okStart := epoch(f[5])
	end, okEnd := epoch(f[6])
	elapsed, err := strconv.ParseInt(f[7], 10, 32)
	if !okStart || !okEnd || err != nil || elapsed < 0 {
		return Past{}, false
	}
	state, _, _ := strings.Cut(f[4], " ") // CANCELLED by 1000
	p := Past{ID: f[0], Name: f[1], User: f[2], Account: f[3], State: State(state), Start: start, End: end, Elapsed: time.Duration(elapsed) * time.Second}
	_, p.Comment = split(f[8])
	return p, true
}

// epoch reads a time as SLURM_TIME_FORMAT=%s prints it; one that is not known is zero.
func epoch(s string) (time.Time, bool) {
	switch s {
	case "", "Unknown", "None", "N/A", "0":
		return time.Time{}, true
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > 1<<40 {
		return time.Time{}, false
	}
	return time.Unix(n, 0), true
}

// lines runs a command of Slurm's that may say very much, and calls each with every line of it. Lost is how many were
// longer than maxRecord, or had no end.
func (c *Commands) lines(ctx context.Context, limit time.Duration, each func(string), name string, args ...string) (lost int, err error) {
	path, err := c.path(name)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = append([]string{"SLURM_TIME_FORMAT=%s"}, c.env...), "/", time.Second
	out, errOut := lineWriter{each: each}, bounded{max: 4 << 10}
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return 0, fmt.Errorf("%s: no answer within %v: %w; ask for a shorter time", name, limit, ctx.Err())
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case err != nil:
		return 0, &failure{name, firstLine(errOut.String()), err}
	}
	out.end()
	return out.lost, nil
}

// lineWriter cuts what is written to it into lines.
type lineWriter struct {
	each func(string)
	part []byte // of a line whose end has not come yet
	long bool   // that line is too long, and its beginning was dropped
	lost int
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for {
		i := bytes.IndexByte(p, '\n')
		rest := p
		if i >= 0 {
			rest = p[:i]
		}
		if w.long = w.long || len(w.part)+len(rest) > maxRecord; w.long {
			w.part = w.part[:0]
		} else {
			w.part = append(w.part, rest...)
		}
		if i < 0 {
			return n, nil
		}
		switch {
		case w.long:
			w.lost++
		case len(w.part) > 0:
			w.each(string(w.part))
		}
		w.part, w.long, p = w.part[:0], false, p[i+1:]
	}
}

// end counts a last line that was cut short.
func (w *lineWriter) end() {
	if w.long || len(w.part) > 0 {
		w.lost++
	}
}

// Rights says whose jobs a user may see as an operator or coordinator of Slurm's accounting.
type Rights struct {
	All      bool     // an operator or administrator
	Accounts []string // of which the user is a coordinator
}

// RightsOf asks the accounting. A user that it does not know has none.
func (c *Commands) RightsOf(ctx context.Context, user string) (Rights, error) {
	if user == "" || strings.ContainsAny(user, ",= \t\n") {
		return Rights{}, fmt.Errorf("user %q: not a name", user)
	}
	out, err := c.run(ctx, "sacctmgr", "--noheader", "--parsable2", "show", "user", "where", "name="+user, "withcoord", "format=AdminLevel,Coordinators")
	if err != nil {
		return Rights{}, err
	}
	return parseRights(out), nil
}

func parseRights(out string) Rights {
	level, accounts, _ := strings.Cut(firstLine(out), "|")
	r := Rights{All: strings.HasPrefix(level, "Operator") || strings.HasPrefix(level, "Admin")}
	for _, a := range strings.Split(accounts, ",") {
		if a != "" {
			r.Accounts = append(r.Accounts, a)
		}
	}
	return r
}
