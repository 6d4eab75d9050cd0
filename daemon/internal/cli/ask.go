package cli

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/pattern"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/spank/options"
)

// maxJobName is in bytes.
const maxJobName = 64

var (
	policies = form.Policies
	places   = lease.Places
)

// ask holds the options that describe the lease.
type ask struct {
	fractions percents
	mem       size
	minMem    size
	gpuType   string
	count     int
	sameOwner bool
	pool      string
	policy    string
	lend      lend
	place     string
	life      life
	grace     string
}

// request returns the lease's request. The daemon takes the user from the kernel, and fills in
// cluster and node.
func (a *ask) request(program string) (lease.Request, error) {
	if len(a.fractions) == 0 && a.mem == 0 {
		return lease.Request{}, errors.New("no fraction given; use --fraction PERCENT or --mem SIZE, or name a worker started by hand with --worker ADDR")
	}
	if a.count < 1 || a.count > form.MaxDevices {
		return lease.Request{}, fmt.Errorf("--count %d: give 1 to %d", a.count, form.MaxDevices)
	}
	policy, lends, err := a.share()
	if err != nil {
		return lease.Request{}, err
	}
	if a.place != "" && !slices.Contains(places, a.place) {
		return lease.Request{}, fmt.Errorf("place %q is not one of %s", a.place, strings.Join(places, ", "))
	}
	grace, err := a.waits()
	if err != nil {
		return lease.Request{}, err
	}
	one := a.fractions
	if len(one) == 0 {
		one = percents{0} // as many percent as the memory is
	}
	if n := len(one) * a.count; n > form.MaxDevices {
		return lease.Request{}, form.TooMany(n)
	}
	me, err := self()
	if err != nil {
		return lease.Request{}, err
	}
	r := lease.Request{
		Key:       lease.Key{Job: form.NewRunJob()},
		Type:      a.gpuType,
		MinMem:    uint64(a.minMem),
		SameOwner: a.sameOwner,
		UID:       uint32(os.Getuid()),
		GID:       uint32(os.Getgid()),
		Policy:    policy,
		Lend:      lends,
		Place:     lease.Place(a.place),
		Pool:      a.pool,
		Life:      time.Duration(a.life),
		Grace:     grace,
		JobName:   jobName(program),
		Holder:    me,
	}
	for range a.count {
		for _, p := range one {
			r.Fractions = append(r.Fractions, lease.Fraction{Percent: p, Mem: uint64(a.mem)})
		}
	}
	return r, nil
}

// share returns policy and lend. --lend comes before what the policy's name says.
func (a *ask) share() (lease.Policy, lease.Lend, error) {
	if a.policy == "" {
		return "", lease.Lend(a.lend), nil
	}
	policy, lends, err := lease.ParsePolicy(a.policy)
	if a.lend != "" {
		lends = lease.Lend(a.lend)
	}
	return policy, lends, err
}

// waits returns how long sessions wait for a lost network.
func (a *ask) waits() (time.Duration, error) {
	if a.grace == "" {
		return 0, nil
	}
	if err := options.Check("rgpu-grace", a.grace); err != nil {
		return 0, errors.New(strings.Replace(err.Error(), "--rgpu-grace=", "--grace ", 1))
	}
	d, _ := options.Duration(a.grace)
	return lease.GraceOf(d), nil
}

// lend is a flag that may go without a value. It implements pflag.Value.
type lend lease.Lend

func (l *lend) Set(s string) error {
	switch strings.ToLower(s) {
	case "true", "yes":
		*l = lend(lease.LendYes)
	case "false", "no":
		*l = lend(lease.LendNo)
	default:
		return fmt.Errorf("%q is neither true nor false", s)
	}
	return nil
}

func (l *lend) Type() string   { return "BOOL" }
func (l *lend) String() string { return string(*l) }

// lendFlag adds --lend, which alone means yes.
func lendFlag(cmd *cobra.Command, l *lend, usage string) {
	cmd.Flags().Var(l, "lend", usage)
	cmd.Flags().Lookup("lend").NoOptDefVal = "true"
}

// jobName is the program's name as one short line: the daemon accepts no other.
func jobName(program string) string { return plain(form.Line(filepath.Base(program), maxJobName)) }

// self names this process so that the daemon can tell when it has ended.
func self() (lease.Process, error) {
	start, err := process.Start(os.Getpid())
	if err != nil {
		return lease.Process{}, fmt.Errorf("start time of this process: %w; is /proc mounted?", err)
	}
	return lease.Process{PID: os.Getpid(), Start: start}, nil
}

// percents are fractions given on the command line. It implements pflag.Value.
type percents []uint32

func (p *percents) Set(s string) error {
	out, err := form.ParsePercents(s)
	if err == nil {
		*p = out
	}
	return err
}

func (p *percents) Type() string   { return "PERCENT" }
func (p *percents) String() string { return form.FormatPercents(*p) }

// life is a time given on the command line. It implements pflag.Value.
type life time.Duration

// slurmTime is how Slurm's --time is written: minutes, minutes:seconds,
// hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.
var slurmTime = pattern.New(`^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$`)

func parseLife(s string) (time.Duration, error) {
	bad := fmt.Errorf("time %q is none of: minutes as 90, hours:minutes:seconds as 1:30:00, days-hours as 1-12, or with units as 90m or 36h", s)
	if d, err := time.ParseDuration(s); err == nil {
		if d < time.Second {
			return 0, bad
		}
		return d, nil
	}
	m := slurmTime().FindStringSubmatch(s)
	if m == nil {
		return 0, bad
	}
	num := make([]float64, len(m))
	for i := 1; i < len(m); i++ {
		num[i], _ = strconv.ParseFloat("0"+m[i], 64) // digits or nothing
	}
	var sec float64
	switch {
	case m[1] != "":
		sec = num[1]*86400 + num[2]*3600 + num[3]*60 + num[4]
	case m[4] != "":
		sec = num[2]*3600 + num[3]*60 + num[4]
	default:
		sec = num[2]*60 + num[3]
	}
	if sec < 1 || sec > math.MaxInt64/float64(time.Second)/2 {
		return 0, bad
	}
	return time.Duration(sec) * time.Second, nil
}

func (l *life) Set(s string) error {
	d, err := parseLife(s)
	if err != nil {
		return err
	}
	*l = life(d)
	return nil
}

func (l *life) Type() string { return "TIME" }

func (l *life) String() string {
	if *l == 0 {
		return ""
	}
	return time.Duration(*l).String()
}
