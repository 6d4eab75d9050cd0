package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/pattern"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

// auditQuery is what of the log is wanted. What is not set is any.
type auditQuery struct {
	file, config     string
	user, job, lease string
	since, until     string
	events           []string
	asJSON           bool
	uid              *uint32
	from, to         time.Time
	leases           map[string]bool // those of the user's or the job's
	damaged          map[string][]int
	last             int
}

func newAudit() *cobra.Command {
	var q auditQuery
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Query the audit log of this node: who asked for what, what was granted, refused or changed",
		Long: `Print the lines of this node's audit log that fit all options, oldest first, from the files that
were rotated too. An owner's log has the leases on its GPUs, those of all nodes. The log of a node where jobs
run has the leases of these jobs, and that of slurmctld's node what jobs asked for at their start.

It reads the files, so that it needs no daemon, and the rights that the files need: root. Users see
their own jobs by sluice explain. Lines that are damaged are skipped, and counted on standard error.

Times are those of this machine: 2h, 30m or 7d ago, today, yesterday, 2026-11-23, 2026-11-23T14:00,
or 14:00 today. JOB is Slurm's number, or the run-... of sluice run; LEASE the beginning of an id.`,
		Example: "  sluice audit --user alice --since 2h\n  sluice audit --job 4711\n  sluice audit --since today --event refuse,reclaim --json | jq -r '.[].reason'",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := q.parse(time.Now()); err != nil {
				return err
			}
			return q.run(cmd)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&q.user, "user", "u", "", "only of this user, by name or number")
	f.StringVarP(&q.job, "job", "j", "", "only of this job")
	f.StringVarP(&q.lease, "lease", "l", "", "only of this lease, named by its id or the beginning of it")
	f.StringVarP(&q.since, "since", "S", "", "only from this time on")
	f.StringVarP(&q.until, "until", "E", "", "only before this time")
	f.StringSliceVarP(&q.events, "event", "e", nil, "only these events: "+strings.Join(audit.Events(), ", "))
	f.IntVarP(&q.last, "last", "n", 0, "print at most this many lines, the last ones; 0: all")
	f.StringVar(&q.file, "file", "", "log to read (default: audit.file of the configuration)")
	f.StringVarP(&q.config, "config", "c", config.DefaultPath, "configuration of sluiced")
	f.BoolVar(&q.asJSON, "json", false, "print JSON")
	_ = cmd.RegisterFlagCompletionFunc("event", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return audit.Events(), cobra.ShellCompDirectiveNoFileComp
	})
	_ = cmd.RegisterFlagCompletionFunc("since", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{"today", "yesterday", "1h", "1d", "7d"}, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

// parse reads the options.
func (q *auditQuery) parse(now time.Time) error {
	var err error
	if q.from, err = pointInTime("--since", q.since, now); err != nil {
		return err
	}
	if q.to, err = pointInTime("--until", q.until, now); err != nil {
		return err
	}
	if !q.from.IsZero() && !q.to.IsZero() && !q.from.Before(q.to) {
		return fmt.Errorf("--since %s is not before --until %s", q.since, q.until)
	}
	for _, e := range q.events {
		if !slices.Contains(audit.Events(), e) {
			return fmt.Errorf("event %q is none of %s", e, strings.Join(audit.Events(), ", "))
		}
	}
	if q.last < 0 {
		return fmt.Errorf("--last %d: give a number from 1", q.last)
	}
	if q.user != "" {
		n, err := userNumber(q.user)
		if err != nil {
			return err
		}
		q.uid = &n
	}
	if q.file != "" {
		return nil
	}
	cfg, err := config.Load(q.config)
	if err != nil {
		return fmt.Errorf("where the audit log is: %w; or name it by --file", err)
	}
	q.file = cfg.Audit.File
	return nil
}

// userNumber returns the uid of a user, given by name or number.
func userNumber(name string) (uint32, error) {
	number := name
	if u, err := user.Lookup(name); err == nil {
		number = u.Uid
	}
	n, ok := form.Number(number)
	if !ok {
		return 0, fmt.Errorf("user %q is not known on this node; give the number", name)
	}
	return n, nil
}

var (
	ago   = pattern.New(`^(\d+)d$`)
	clock = pattern.New(`^\d\d?:\d\d(:\d\d)?$`)
)

// pointInTime reads a time as the options have it; "" is not a time.
func pointInTime(option, s string, now time.Time) (time.Time, error) {
	midnight := time.Date(now.Year(), now.Month(), now.Day(), 0, 0, 0, 0, now.Location())
	switch {
	case s == "":
		return time.Time{}, nil
	case s == "now":
		return now, nil
	case s == "today":
		return midnight, nil
	case s == "yesterday":
		return midnight.AddDate(0, 0, -1), nil
	case clock().MatchString(s):
		for _, layout := range []string{"15:04", "15:04:05"} {
			if t, err := time.Parse(layout, s); err == nil {
				return midnight.Add(time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute + time.Duration(t.Second())*time.Second), nil
			}
		}
	case ago().MatchString(s):
		if n, err := strconv.Atoi(s[:len(s)-1]); err == nil && n < 100*365 {
			return now.AddDate(0, 0, -n), nil
		}
	}
	if d, err := time.ParseDuration(s); err == nil && d > 0 {
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t, nil
	}
	for _, layout := range []string{time.DateOnly, "2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", time.DateTime} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%s %q is not a time: give 2h, 30m or 7d ago, today, yesterday, 2026-11-23, 2026-11-23T14:00 or 14:00", option, s)
}

// fits says whether a line is one of those that are asked for.
func (q *auditQuery) fits(e *audit.Event) bool {
	switch {
	case !q.from.IsZero() && e.Time.Before(q.from), !q.to.IsZero() && !e.Time.Before(q.to):
		return false
	case len(q.events) > 0 && !slices.Contains(q.events, e.Event):
		return false
	case q.lease != "" && !strings.HasPrefix(e.Lease, q.lease):
		return false
	}
	return q.theirs(e) || q.leases[e.Lease] && (e.UID == nil || q.uid == nil || *e.UID == *q.uid)
}

// theirs says whether a line itself names the user and the job. Not every line of a lease does.
func (q *auditQuery) theirs(e *audit.Event) bool {
	return (q.uid == nil || e.UID != nil && *e.UID == *q.uid) && (q.job == "" || lease.ParseKey(e.Key, 0).Job == q.job)
}

// named says of a line that is not decoded yet whether it may name the user and the job.
func (q *auditQuery) named(line []byte) bool {
	if q.uid != nil && !bytes.Contains(line, fmt.Appendf(nil, `"uid":%d`, *q.uid)) {
		return false
	}
	return q.job == "" || bytes.Contains(line, []byte("/"+q.job+"@"))
}

// maybe says of a line that is not decoded yet whether it may fit.
func (q *auditQuery) maybe(line []byte) bool {
	if q.lease != "" && !bytes.Contains(line, []byte(`"lease":"`+q.lease)) {
		return false
	}
	return q.named(line) || q.leases[audit.LeaseOf(line)]
}

func (q *auditQuery) run(cmd *cobra.Command) error {
	ctx := cmd.Context()
	if err := q.there(); err != nil {
		return err
	}
	if q.uid != nil || q.job != "" { // lines of their sessions name nothing but the lease
		q.leases = map[string]bool{}
		err := audit.Select(ctx, q.file, q.named, func(e *audit.Event) bool {
			if e.Lease != "" && q.theirs(e) {
				q.leases[e.Lease] = true
			}
			return true
		})
		if err != nil {
			return q.denied(err)
		}
	}
	events := []audit.Event{}
	q.damaged = map[string][]int{}
	err := audit.Query(ctx, q.file, q.maybe, func(e *audit.Event) bool {
		if q.fits(e) {
			if q.last > 0 && len(events) >= 2*q.last {
				events = slices.Delete(events, 0, len(events)-q.last+1)
			}
			events = append(events, *e)
		}
		return true
	}, func(d audit.Damage) {
		q.damaged[d.File] = append(q.damaged[d.File], d.Line)
	})
	if err != nil {
		return q.denied(err)
	}
	if q.last > 0 && len(events) > q.last {
		events = events[len(events)-q.last:]
	}
	q.warn(cmd)
	if len(events) == 0 && !q.asJSON {
		return fmt.Errorf("%s has no line that fits; each node has a log of its own: ask on the owner, the job's node or slurmctld's", q.file)
	}
	return q.print(cmd, events)
}

// warn tells of what was skipped.
func (q *auditQuery) warn(cmd *cobra.Command) {
	const some = 5
	for _, f := range slices.Sorted(maps.Keys(q.damaged)) {
		lines := q.damaged[f]
		text := join(lines[:min(len(lines), some)], strconv.Itoa)
		if len(lines) > some {
			text += ",..."
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "sluice: %s: %d damaged lines are skipped: %s\n", f, len(lines), text)
	}
}

// there returns an error if there is no log, or it may not be read.
func (q *auditQuery) there() error {
	f, err := os.Open(q.file)
	if err == nil {
		return f.Close()
	}
	return q.denied(err)
}

func (q *auditQuery) denied(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("audit log: %w; it is for root to read: sudo sluice audit, or sluice explain JOB for a job of yours", err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("audit log: %w; sluiced makes it at its first start, where audit.file in sluice.yaml says (%s)", err, filepath.Dir(q.file))
	case errors.Is(err, context.Canceled):
		return err
	}
	return err
}

// audited is a line as --json prints it.
type audited struct {
	audit.Event
	Job string `json:"job,omitempty"`
}

func (q *auditQuery) print(cmd *cobra.Command, events []audit.Event) error {
	if q.asJSON {
		out := make([]audited, len(events))
		for i, e := range events {
			out[i] = audited{e, lease.ParseKey(e.Key, 0).Job}
		}
		return printJSON(cmd.OutOrStdout(), out)
	}
	users := &usernames.Names{}
	var rows [][]string
	for i := range events {
		e := &events[i]
		who := ""
		if e.UID != nil {
			who = users.Name(*e.UID)
		}
		why := e.Reason
		if e.Program != "" {
			why = strings.TrimSpace(e.Program + " " + why)
		}
		if e.Skipped > 0 {
			why += fmt.Sprintf(" (and %d more before)", e.Skipped)
		}
		rows = append(rows, []string{e.Time.Local().Format(time.RFC3339), e.Event, who, lease.ParseKey(e.Key, 0).Job, short(e.Lease), e.Host, e.Owner,
			join(e.GPUs, func(g lease.Grant) string { return fractionText(g) + " of " + short(g.GPU) }), why})
	}
	return table(cmd.OutOrStdout(), "TIME EVENT USER JOB LEASE HOST OWNER WHAT REASON", rows)
}
