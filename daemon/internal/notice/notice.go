// Package notice runs a program of the site's when something has happened to a lease, so that the
// site can write a mail. The program runs as the daemon's user, one at a time, for a bounded time, and without a shell.
package notice

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

const (
	// waiting is how many notices wait for the ones before. More are dropped.
	waiting = 64
	// runTime is how long a program may run.
	runTime = 30 * time.Second
	// outTime is how long its descendants may keep its output open after its end.
	outTime = time.Second
	// most is the number of programs that are started in a minute.
	most   = 60
	minute = time.Minute
	// maxOutput is how much of the program's output is logged, in bytes.
	maxOutput = 512
)

// Notice is a program to run, and what its environment tells it.
type Notice struct {
	Command string // path of the program, which has no arguments
	Event   string // SLUICE_EVENT
	Action  string // SLUICE_ACTION
	Owner   string // SLUICE_OWNER
	Lease   lease.Lease
	Idle    time.Duration
}

// environ is the program's environment. Users choose names of jobs; all values are one line.
func (n *Notice) environ() []string {
	q := &n.Lease.Request
	var gpus []string
	var percent uint64
	var mem uint64
	for _, g := range n.Lease.Grants {
		gpus = append(gpus, g.GPU)
		percent += uint64(g.Percent)
		mem += g.Mem
	}
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, v := range [][2]string{
		{"EVENT", n.Event}, {"ACTION", n.Action}, {"OWNER", n.Owner}, {"LEASE_ID", n.Lease.ID},
		{"JOB", q.Key.Job}, {"CLUSTER", q.Key.Cluster}, {"NODE", q.Key.Node}, {"JOB_NAME", q.JobName}, {"ACCOUNT", q.Account}, {"POOL", q.Pool},
		{"UID", strconv.FormatUint(uint64(q.UID), 10)}, {"GID", strconv.FormatUint(uint64(q.GID), 10)},
		{"GPUS", strings.Join(gpus, ",")}, {"PERCENT", strconv.FormatUint(percent, 10)}, {"MEM_MIB", strconv.FormatUint(mem>>20, 10)},
		{"IDLE_SECONDS", strconv.FormatInt(int64(n.Idle/time.Second), 10)}, {"SINCE", n.Lease.Made.UTC().Format(time.RFC3339)},
	} {
		env = append(env, "SLUICE_"+v[0]+"="+form.Line(v[1], 4096))
	}
	return env
}

// Runner runs notices. Run does the work.
type Runner struct {
	log   *slog.Logger
	queue chan Notice
	now   func() time.Time
	begun []time.Time // of the programs of the last minute; Run's
}

// New returns a Runner.
func New(log *slog.Logger) *Runner {
	return &Runner{log: log, queue: make(chan Notice, waiting), now: time.Now}
}

// Send has a notice run soon. It does not wait: when too many wait already, the notice is dropped, and the log says so.
func (r *Runner) Send(n Notice) {
	select {
	case r.queue <- n:
	default:
		r.log.Warn("the site's command is not run: too many wait for it", "command", n.Command, "lease", n.Lease.ID)
	}
}

// Run runs what is sent until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case n := <-r.queue:
			if !r.pass() {
				r.log.Warn("the site's command is not run: it was run too often in the last minute", "command", n.Command, "lease", n.Lease.ID, "most", most)
				continue
			}
			if out, err := run(ctx, &n); err != nil {
				r.log.Warn("the site's command failed", "command", n.Command, "lease", n.Lease.ID, "error", err, "output", out)
			} else {
				r.log.Info("the site's command has run", "command", n.Command, "lease", n.Lease.ID, "output", out)
			}
		}
	}
}

// pass says whether one more may be started.
func (r *Runner) pass() bool {
	now := r.now()
	for len(r.begun) > 0 && now.Sub(r.begun[0]) >= minute {
		r.begun = r.begun[1:]
	}
	if len(r.begun) >= most {
		return false
	}
	r.begun = append(r.begun, now)
	return true
}

// Check refuses what is no program, and a program that others than root could change.
func Check(command string) error {
	if err := safefile.Dir(filepath.Dir(command)); err != nil {
		return err
	}
	fi, err := os.Lstat(command)
	if err != nil {
		return err
	}
	if fi.Mode().Perm()&0o100 == 0 {
		return fmt.Errorf("%s: mode %04o: it is no program; remedy: chmod u+x %[1]s", command, fi.Mode().Perm())
	}
	return safefile.File(command, 0o022)
}

// run runs the program, and returns the beginning of what it wrote.
func run(ctx context.Context, n *Notice) (string, error) {
	if err := Check(n.Command); err != nil {
		return "", err
	}
	tctx, cancel := context.WithTimeout(ctx, runTime)
	defer cancel()
	out := &beginning{}
	cmd := exec.CommandContext(tctx, n.Command)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = n.environ(), "/", out, out, outTime
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // its children too
	err := cmd.Run()
	if tctx.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("it ran for %v and was killed", runTime)
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // what it has left in the background is its own
	}
	return form.Line(strings.TrimSpace(out.String()), maxOutput), err
}

// beginning keeps the first bytes that are written to it. It is no bytes.Buffer, which would be read into past Write.
type beginning struct{ b []byte }

func (b *beginning) Write(p []byte) (int, error) {
	b.b = append(b.b, p[:min(len(p), maxOutput-len(b.b))]...)
	return len(p), nil
}

func (b *beginning) String() string { return string(b.b) }
