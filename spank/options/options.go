// Package options is the one table of the options that the SPANK plug-in adds to
// srun, sbatch and salloc. The plug-in's C table and the user's guide are generated
// from it, and so is what job_submit.lua knows of them; the daemon and its command line use
// it as it is. Values are requests: Prolog and daemon check them against what Slurm granted.
package options

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Kind says how an option's value is read.
type Kind string

// The kinds.
const (
	Size   Kind = "size"   // a whole number with M, G or T, powers of 1024
	Choice Kind = "choice" // one of Choices
	Name   Kind = "name"   // a pool's name
	Time   Kind = "time"   // 0, or a whole number with s, m or h
	Flag   Kind = "flag"   // no value; the value passed on is "1"
)

// Option is one option, given as --Name.
type Option struct {
	Name    string
	Arg     string // what stands for the value in --help; "" for a flag
	Env     string // Slurm's job control variable; Prolog and Epilog see it as SPANK_Env
	Kind    Kind
	Choices []string
	Step    bool   // of a step, or of all steps of a job; the plug-in alone acts on it
	Help    string // one line of srun --help
	More    string // what the user's guide says beyond Help
}

// The range of a Size, in MiB.
const (
	MinMiB = 2
	MaxMiB = 16 << 20
)

// MaxSeconds is the longest Time.
const MaxSeconds = 24 * 60 * 60

// Limits of an answer on the job socket, in bytes: the text of an error, and the changes of a task's environment.
const (
	TextMax = 1024
	BodyMax = 64 * 1024
)

// Bindings are what a task may see of its job's GPUs.
var Bindings = []string{"all", "task"}

// Table is all of them, in the order of --help.
var Table = []Option{
	{
		Name: "rgpu-mem", Arg: "SIZE", Env: "RGPU_MEM", Kind: Size,
		Help: "device memory of each fraction, as 20G",
		More: "powers of 1024, from 2M to 16T. Without it, the same share of the GPU's memory as of the GPU. For a step with a --gres of its own: its part of the job's memory",
	},
	{
		Name: "rgpu-policy", Arg: "POLICY", Env: "RGPU_POLICY", Kind: Choice,
		Choices: form.Policies,
		Help:    "compute share: fixed, equal or best-effort",
		More:    "`fixed-lend` and `equal-lend` lend time without work to other leases. The partition's policy otherwise",
	},
	{
		Name: "rgpu-pool", Arg: "NAME", Env: "RGPU_POOL", Kind: Name,
		Help: "take the GPUs from this pool",
		More: "the partition's pool otherwise; `sluice gpus` lists them",
	},
	{
		Name: "rgpu-grace", Arg: "TIME", Env: "RGPU_GRACE", Kind: Time,
		Help: "how long to wait for a lost network, as 30m",
		More: "s, m or h, up to 24h; with 0 a program ends with its connection. The pool's time otherwise, 5 minutes where it has none",
	},
	{
		Name: "rgpu-bind", Arg: "HOW", Env: "RGPU_BIND", Kind: Choice, Step: true,
		Choices: Bindings,
		Help:    "all: each task sees all GPUs; task: its part of them",
		More: "`task` sets `CUDA_VISIBLE_DEVICES` for each task of a step, as `--gpus-per-task` does: the GPUs are divided among the tasks of a node in their order. " +
			"Give it to a job, for all of its steps, or to a step",
	},
	{
		Name: "rgpu-spread", Env: "RGPU_SPREAD", Kind: Flag,
		Help: "take the emptiest GPUs first, not the fullest",
	},
	{
		Name: "rgpu-report", Env: "RGPU_REPORT", Kind: Flag,
		Help: "report GPU use at the end of the job's output",
		More: "`sluice report JOB` shows the same afterwards",
	},
}

// Check says what is wrong with a value of the option named name, nil if nothing is. It
// answers as the plug-in does; for the other side of the protocol, since users can
// send Slurm any value past the plug-in.
func Check(name, value string) error {
	for _, o := range Table {
		if o.Name == name {
			if !o.valid(value) {
				return fmt.Errorf("--%s=%s: want %s", name, value, o.Want())
			}
			return nil
		}
	}
	return fmt.Errorf("--%s is not an option of Sluice's", name)
}

// MiB is the value of a Size in MiB; ok is false if it is none, or out of range. It has a
// unit, unlike other sizes: a number without one is MiB for Slurm's own --mem, and bytes
// elsewhere.
func MiB(value string) (n uint64, ok bool) {
	unit := strings.TrimRight(strings.TrimRight(value, "bB"), "iI")
	if unit == "" || !strings.ContainsRune("mMgGtT", rune(unit[len(unit)-1])) {
		return 0, false
	}
	b, err := form.ParseBytes(value)
	n = uint64(b) >> 20
	return n, err == nil && n >= MinMiB && n <= MaxMiB
}

// Duration is the value of a Time; ok is false if it is none, or out of range.
func Duration(value string) (d time.Duration, ok bool) {
	if value == "0" {
		return 0, true
	}
	digits := strings.TrimRight(value, "smh")
	if len(value) != len(digits)+1 || len(digits) > 5 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	d = time.Duration(n) * map[byte]time.Duration{'s': time.Second, 'm': time.Minute, 'h': time.Hour}[value[len(digits)]]
	return d, err == nil && d <= MaxSeconds*time.Second
}

// Passed reads the options that a job was given from the environment of Slurm's scripts, by
// name without "rgpu-". Values are as they came, cut to what any good one has.
func Passed(env func(string) (string, bool)) map[string]string {
	out := map[string]string{}
	for i := range Table {
		o := &Table[i]
		if v, ok := env("SPANK_" + o.Env); ok && v != "" {
			out[strings.TrimPrefix(o.Name, "rgpu-")] = form.Name(v)
		}
	}
	return out
}

// CheckPassed is Check for what Passed gives.
func CheckPassed(passed map[string]string) error {
	for i := range Table {
		o := &Table[i]
		if v := passed[strings.TrimPrefix(o.Name, "rgpu-")]; v != "" {
			if err := Check(o.Name, v); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o *Option) valid(v string) bool {
	switch o.Kind {
	case Size:
		_, ok := MiB(v)
		return ok
	case Time:
		_, ok := Duration(v)
		return ok
	case Choice:
		for _, c := range o.Choices {
			if v == c {
				return true
			}
		}
		return false
	case Name:
		return form.IsPlainName(v)
	}
	return v == "1"
}

// Want is the valid range, as a refusal tells it.
func (o *Option) Want() string {
	switch o.Kind {
	case Size:
		return "a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G"
	case Time:
		return "0, or a whole number with s, m or h behind it up to 24h, as 30m"
	case Choice:
		return "one of " + strings.Join(o.Choices, ", ")
	case Name:
		return "a pool's name: " + form.PlainNameWant
	}
	return "no value"
}
