package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"
)

const (
	// callTime bounds one command whose caller is more patient. Slurm's own commands
	// go on asking a slurmctld that is away for longer.
	callTime = 10 * time.Second
	// maxOutput is far beyond the list of a million jobs, in bytes.
	maxOutput = 256 << 20
	// maxComment is what of a comment is written, in bytes.
	maxComment = 1024
	// atOnce bounds the commands that run beside each other.
	atOnce = 4
)

// Commands is Slurm by its commands. It is to be made by New.
type Commands struct {
	dirs []string
	env  []string
	gate chan struct{}
}

var _ Controller = (*Commands)(nil)

// New makes a Controller. bin is the directory of scontrol, "" to look for it; conf is
// slurm.conf's path, "" for Slurm's own.
func New(bin, conf string) *Commands {
	c := &Commands{dirs: []string{bin}, gate: make(chan struct{}, atOnce)}
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
	path, err := c.path(name)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	select {
	case c.gate <- struct{}{}:
		defer func() { <-c.gate }()
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
	if !IsJobID(id) {
		return Job{}, fmt.Errorf("%q is no job id", id)
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

// Requeue implements Controller.
func (c *Commands) Requeue(ctx context.Context, id string) error {
	if !IsJobID(id) {
		return fmt.Errorf("%q is no job id", id)
	}
	_, err := c.run(ctx, "scontrol", "requeue", id)
	switch {
	case said(err, "invalid job id"):
		return fmt.Errorf("job %s: %w", id, ErrGone)
	case said(err, "only batch jobs", "disabled"):
		return fmt.Errorf("job %s: %w: %w", id, ErrNoRequeue, err)
	}
	return err
}

// Comment implements Controller.
func (c *Commands) Comment(ctx context.Context, id, text string) error {
	if !IsJobID(id) {
		return fmt.Errorf("%q is no job id", id)
	}
	text = plain(text)
	_, err := c.run(ctx, "scontrol", "update", "jobid="+id, "admincomment="+text)
	if !said(err, "already finished", "already completed", "completing", "invalid job id") {
		return err
	}
	// The job's record has gone to the accounting, if there is any.
	_, again := c.run(ctx, "sacctmgr", "--immediate", "--quiet", "modify", "job", "where", "jobid="+id, "set", "AdminComment="+text)
	if again != nil {
		return fmt.Errorf("job %s: %w; and in the accounting: %w", id, err, again)
	}
	return nil
}

// plain is text as Slurm's commands take it for one value: a line without quotes.
func plain(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r == '"' || r == '\'' || r == '`' || r == '\\':
			return -1
		case unicode.IsControl(r):
			return ' '
		}
		return r
	}, s)
	return strings.ToValidUTF8(s[:min(len(s), maxComment)], "")
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
