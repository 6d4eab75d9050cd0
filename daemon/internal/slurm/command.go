package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// callTime bounds one command whose caller is more patient. Slurm's own commands
	// go on asking a slurmctld that is away for longer.
	callTime = 10 * time.Second
	// maxOutput is far beyond the list of a million jobs, in bytes.
	maxOutput = 256 << 20
	// maxComment is what of a comment is written, in bytes.
	maxComment = 1024
	// atOnce bounds the commands that run beside each other, and commentsAtOnce those
	// of them that comment jobs: slurmctld may have these wait for its database, and the
	// start of jobs must not.
	atOnce         = 4
	commentsAtOnce = 2
)

// Commands is Slurm by its commands. It is to be made by New.
type Commands struct {
	dirs []string
	env  []string
	gate chan struct{}
	// comments is the gate of commands that comment jobs.
	comments chan struct{}
}

var _ Controller = (*Commands)(nil)

// New makes a Controller. bin is the directory of scontrol, "" to look for it; conf is
// slurm.conf's path, "" for Slurm's own.
func New(bin, conf string) *Commands {
	c := &Commands{dirs: []string{bin}, gate: make(chan struct{}, atOnce), comments: make(chan struct{}, commentsAtOnce)}
	if bin == "" {
		c.dirs = append(filepath.SplitList(os.Getenv("PATH")), "/usr/bin", "/usr/local/bin", "/opt/slurm/bin")
	}
	// SQUEUE_FORMAT, SLURM_TIME_FORMAT and such of whoever started the daemon must not
	// change what is parsed here.
	c.env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
	for _, k := range []string{"SLURM_CONF", "SLURM_CONF_SERVER"} {
		if v := os.Getenv(k); v != "" && conf == "" {
			c.env = append(c.env, k+"="+v)
		}
	}
	if conf != "" {
		c.env = append(c.env, "SLURM_CONF="+conf)
	}
	return c
}

// Installed says whether Slurm's commands are here.
func (c *Commands) Installed() bool {
	_, err := c.path("scontrol")
	return err == nil
}

func (c *Commands) path(name string) (string, error) {
	for _, d := range c.dirs {
		if !filepath.IsAbs(d) {
			continue
		}
		p := filepath.Join(d, name)
		if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not in %s; set slurm.bin in sluice.yaml", name, strings.Join(c.dirs, ", "))
}

// failure is a command that said no.
type failure struct {
	what string
	said string
	err  error
}

func (f *failure) Error() string {
	if f.said == "" {
		return fmt.Sprintf("%s: %v", f.what, f.err)
	}
	return fmt.Sprintf("%s: %s", f.what, f.said)
}

func (f *failure) Unwrap() error { return f.err }

// said is whether a command failed with one of these words.
func said(err error, words ...string) bool {
	var f *failure
	if !errors.As(err, &f) {
		return false
	}
	for _, w := range words {
		if strings.Contains(strings.ToLower(f.said), w) {
			return true
		}
	}
	return false
}

// bounded keeps what fits and remembers that more came.
type bounded struct {
	bytes.Buffer
	max  int
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	if room := b.max - b.Len(); len(p) > room {
		b.over = true
		b.Buffer.Write(p[:max(0, room)])
		return len(p), nil
	}
	return b.Buffer.Write(p)
}

func (c *Commands) run(ctx context.Context, name string, args ...string) (string, error) {
	return c.through(ctx, c.gate, name, args...)
}

func (c *Commands) through(ctx context.Context, gate chan struct{}, name string, args ...string) (string, error) {
	path, err := c.path(name)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	select {
	case gate <- struct{}{}:
		defer func() { <-gate }()
	case <-ctx.Done():
		return "", fmt.Errorf("%s: %w", name, ctx.Err())
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = c.env, "/", time.Second
	out, errOut := bounded{max: maxOutput}, bounded{max: 4 << 10}
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	what := name + " " + args[0]
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("%s: no answer: %w", what, ctx.Err())
	case err != nil:
		text := errOut.String()
		if strings.TrimSpace(text) == "" { // scontrol says some of it on stdout
			text = out.String()
		}
		return "", &failure{what, firstLine(text), err}
	case out.over:
		return "", fmt.Errorf("%s: an answer of more than %d bytes", what, maxOutput)
	}
	return out.String(), nil
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s[:min(len(s), 300)]
}

// Job implements Controller. Of a federation only this cluster is asked: squeue answers
// for all of it with what the others know when this one does not answer.
func (c *Commands) Job(ctx context.Context, id string) (Job, error) {
	if _, err := form.ParseJobID(id); err != nil {
		return Job{}, err
	}
	out, err := c.run(ctx, "squeue", "--local", "--noheader", "--states=all", "--jobs="+id, "--Format="+jobFormat)
	if said(err, "invalid job id") {
		return Job{}, fmt.Errorf("job %s: %w", id, ErrGone)
	}
	if err != nil {
		return Job{}, err
	}
	return parseJob(id, out)
}

// Step implements Controller.
func (c *Commands) Step(ctx context.Context, job, step string) (Step, error) {
	if _, ok := form.Number(step); !ok {
		return Step{}, fmt.Errorf("%q is not a step", job+"."+step)
	}
	name, err := c.task(ctx, job)
	if err != nil {
		return Step{}, err
	}
	// 26.05 does not find the steps of an array's task 0 by its name, and the number of an array's last task is the array's: see task.
	for _, n := range slices.Compact([]string{name, job}) {
		out, err := c.run(ctx, "scontrol", "--local", "--oneliner", "show", "step", n+"."+step)
		switch {
		case said(err, "invalid job id", "not found"):
		case err != nil:
			return Step{}, err
		default:
			return parseStep(name+"."+step, out)
		}
	}
	return Step{}, fmt.Errorf("step %s.%s: %w", job, step, ErrGone)
}

// Jobs implements Controller.
func (c *Commands) Jobs(ctx context.Context) (map[string]JobState, error) {
	out, err := c.run(ctx, "squeue", "--local", "--noheader", "--states=all", "--Format="+stateFormat)
	if err != nil {
		return nil, err
	}
	return parseJobs(out)
}

// Licences implements Controller.
func (c *Commands) Licences(ctx context.Context) (map[string]Licence, error) {
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "licenses")
	if err != nil {
		return nil, err
	}
	return parseLicenceList(out)
}

// Reserve implements Controller. slurmctld is told only what it does not have already:
// each change is a line of its log and a write of its state.
func (c *Commands) Reserve(ctx context.Context, name, licence string, count uint64) error {
	res := "reservationname=" + name
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "reservation", name)
	there := err == nil && strings.Contains(out, "ReservationName="+name+" ")
	if err != nil && !said(err, "not found", "invalid", "no reservation") {
		return err
	}
	want := "Licenses=" + licence + ":" + strconv.FormatUint(count, 10)
	switch {
	case count == 0 && !there, there && strings.Contains(out, " "+want+" "):
		return nil
	case count == 0:
		_, err = c.run(ctx, "scontrol", "delete", res)
	case there:
		_, err = c.run(ctx, "scontrol", "update", res, want)
	default:
		_, err = c.run(ctx, "scontrol", "create", "reservation", res, "starttime=now", "duration=UNLIMITED", "flags=license_only", want, "users=root")
	}
	return err
}

// task is how Slurm's commands name this job and no other: the last task of an array has
// the array's number, by which they mean all of its tasks.
func (c *Commands) task(ctx context.Context, id string) (string, error) {
	if _, err := form.ParseJobID(id); err != nil {
		return "", err
	}
	out, err := c.run(ctx, "squeue", "--local", "--noheader", "--states=all", "--jobs="+id, "--Format="+taskFormat)
	if said(err, "invalid job id") {
		return "", fmt.Errorf("job %s: %w", id, ErrGone)
	}
	if err != nil {
		return "", err
	}
	return parseTask(id, out)
}

// Number returns the job id of a task of an array (61_0) or of a component of a heterogeneous job (61+1), as
// squeue names them. The accounting is asked about one that slurmctld no longer knows.
func (c *Commands) Number(ctx context.Context, name string) (string, error) {
	if !IsTask(name) {
		return "", fmt.Errorf("%q is no task of an array", name)
	}
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "job", name)
	id, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(out), "JobId="), " ")
	if err == nil && form.JobID(id).Valid() {
		return id, nil
	}
	out, err = c.run(ctx, "sacct", "--noheader", "--parsable2", "--allocations", "--jobs="+name, "--format=JobIDRaw")
	if err != nil {
		return "", err
	}
	if id = firstLine(out); !form.JobID(id).Valid() {
		return "", fmt.Errorf("job %s: %w", name, ErrGone)
	}
	return id, nil
}

// IsTask says whether a job is named as a task of an array or a component of a heterogeneous job.
func IsTask(name string) bool {
	i := strings.IndexAny(name, "_+")
	return i > 0 && form.JobID(name[:i]).Valid() && (name[i+1:] == "0" || form.JobID(name[i+1:]).Valid())
}

// Part is a task of an array job, or a component of a heterogeneous job.
type Part struct {
	ID   string // its own; that of one part is the whole job's
	Name string // as squeue names it: 61_0, 61+1, or 61_[4-9] for tasks of an array that have not started
}

// Parts returns the parts of an array job or a heterogeneous job, in the order of their numbers, from the accounting. There are none for
// any other job, which a single part is too.
func (c *Commands) Parts(ctx context.Context, id string) ([]Part, error) {
	if _, err := form.ParseJobID(id); err != nil {
		return nil, err
	}
	out, err := c.run(ctx, "sacct", "--noheader", "--parsable2", "--allocations", "--jobs="+id, "--format=JobIDRaw,JobID")
	if err != nil {
		return nil, err
	}
	return parseParts(id, out), nil
}

// Requeue implements Controller.
func (c *Commands) Requeue(ctx context.Context, id string) error {
	name, err := c.task(ctx, id)
	if err != nil {
		return err
	}
	_, err = c.run(ctx, "scontrol", "requeue", name)
	switch {
	case said(err, "invalid job id"):
		return fmt.Errorf("job %s: %w", id, ErrGone)
	case said(err, "only batch jobs", "disabled"):
		return fmt.Errorf("job %s: %w: %w", id, ErrNoRequeue, err)
	}
	return err
}

// Notify implements Controller.
func (c *Commands) Notify(ctx context.Context, id, text string) error {
	if _, err := form.ParseJobID(id); err != nil {
		return err
	}
	_, err := c.run(ctx, "scontrol", "notify", id, plain(text))
	return err
}

// Comment implements Controller. A slurmctld of 22.05 that was stopped while it waited for
// a job's entry in the database waits for that again when it is started, without an end, and
// takes no update of the job; the accounting does. Others write into the accounting alone, so both are read before.
func (c *Commands) Comment(ctx context.Context, id, text string) error {
	if _, err := form.ParseJobID(id); err != nil {
		return err
	}
	text = plain(text)
	name, there, err := c.commented(ctx, id)
	inAccounting, already, again := c.accounted(ctx, id)
	if none(there) {
		there = already
	}
	text, ours := merge(there, text)
	if !ours {
		return fmt.Errorf("job %s: the AdminComment has text of somebody else, %.20q, and is left alone", id, there)
	}
	if err == nil {
		_, err = c.through(ctx, c.comments, "scontrol", "update", "jobid="+name, "admincomment="+text)
	}
	gone, waits := errors.Is(err, ErrGone), said(err, "db index")
	if !gone && !waits && !said(err, "already finished", "already completed", "completing", "invalid job id") {
		return later(err)
	}
	if gone {
		if again != nil {
			return form.OfJob(id, fmt.Errorf("%w; and in the accounting: %w", err, later(again)))
		}
		name = inAccounting
	}
	// The job's record has gone to the accounting, if there is any.
	_, again = c.through(ctx, c.comments, "sacctmgr", "--immediate", "--quiet", "modify", "job", "where", "jobid="+name, "set", "AdminComment="+text)
	switch {
	case again == nil:
		return nil
	case waits || said(again, "nothing modified", "affect anything"): // it has not heard of the job yet
		return form.OfJob(id, fmt.Errorf("%w; and in the accounting: %w; %w", err, again, ErrLater))
	}
	return form.OfJob(id, fmt.Errorf("%w; and in the accounting: %w", err, later(again)))
}

// commented is how Slurm's commands name the job, see task, and the AdminComment that slurmctld has of it.
func (c *Commands) commented(ctx context.Context, id string) (name, comment string, err error) {
	out, err := c.through(ctx, c.comments, "squeue", "--local", "--noheader", "--states=all", "--jobs="+id, "--Format="+commentFormat)
	if said(err, "invalid job id") {
		return "", "", fmt.Errorf("job %s: %w", id, ErrGone)
	}
	if err != nil {
		return "", "", err
	}
	return parseCommented(id, out)
}

// accounted is how the accounting names the job, and the AdminComment that it has of it.
func (c *Commands) accounted(ctx context.Context, id string) (name, comment string, err error) {
	out, err := c.through(ctx, c.comments, "sacct", "--noheader", "--parsable2", "--allocations", "--jobs="+id, "--format=JobIDRaw,JobID,AdminComment")
	if err != nil {
		return "", "", err
	}
	return parseAccounted(id, out)
}

// OwnPrefix begins every AdminComment of ours.
const OwnPrefix = "sluice:"

// separator stands before OwnPrefix where there is text of somebody else.
const separator = "; "

// split is what others wrote into an AdminComment, and our part of it; each may be "". sacctmgr may have written it in
// lower case, which OwnPrefix is.
func split(comment string) (others, ours string) {
	if strings.HasPrefix(comment, OwnPrefix) {
		return "", comment
	}
	if i := strings.Index(comment, separator+OwnPrefix); i >= 0 {
		return comment[:i], comment[i+len(separator):]
	}
	return comment, ""
}

// merge is an AdminComment that keeps what others wrote into it, and has text, which begins with OwnPrefix, in place of
// what we wrote before. It is false where nothing can be added: to what a program reads, such as
// the JS1:... of Jobstats or JSON, and to what Slurm's commands might not take back as it is.
func merge(there, text string) (string, bool) {
	there, _ = split(strings.TrimSpace(there))
	if none(there) {
		return text, true
	}
	if !strings.Contains(there, " ") || strings.ContainsAny(there[:1], "{[") || strings.ContainsAny(there, "\"'`\\\n") {
		return "", false
	}
	return there + separator + text, true
}

// refusals are parts of the answers after which another try is of no use: the caller may not do it, or there is no accounting.
var refusals = []string{"denied", "accounting storage is disabled", "not running a supported accounting_storage"}

// later marks an error after which the same command may succeed: any error of Slurm's commands but refusals. The commands
// report a slurmctld or a database that goes away in many ways, and some do not mention it: scontrol says
// "Unexpected message received".
func later(err error) error {
	var f *failure
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrGone) || errors.As(err, &f) && !said(err, refusals...) {
		return fmt.Errorf("%w; %w", err, ErrLater)
	}
	return err
}

// plain is a text as Slurm's commands take it for one value: a line without quotes.
func plain(s string) string {
	return form.Line(strings.Map(func(r rune) rune {
		if strings.ContainsRune("\"'`\\", r) {
			return -1
		}
		return r
	}, s), maxComment)
}

// Config implements Controller.
func (c *Commands) Config(ctx context.Context) (map[string]string, error) {
	out, err := c.run(ctx, "scontrol", "show", "config")
	if err != nil {
		return nil, err
	}
	m := parseConfig(out)
	if m["ClusterName"] == "" {
		return nil, errors.New("scontrol show config: no ClusterName in it")
	}
	return m, nil
}
