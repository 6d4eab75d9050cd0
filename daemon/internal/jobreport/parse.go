package jobreport

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Past is what Line wrote of a job's last run, read back.
type Past struct {
	Sum         // Sessions is 0 for a job that did not use its fraction and 1 for any other, also where Lost says that it is not known; lent time and turns are not in a line
	EarlierRuns int
	EarlierGPU  time.Duration
}

// IsReport says whether a comment of ours is a Line: a job's comment may also say that its lease is idle, or why it was requeued.
func IsReport(comment string) bool {
	f := strings.Fields(strings.ToLower(comment))
	return len(f) > 1 && f[0] == slurm.OwnPrefix && (f[1] == "asked" || f[1] == "nodes")
}

// Parse reads what Line wrote, in either case. Words that it does not know, which a later release may write, are
// skipped together with their value.
func Parse(line string) (Past, error) {
	if !IsReport(line) {
		return Past{}, fmt.Errorf("%.40q is no report", line)
	}
	p := Past{Sum: Sum{Nodes: 1, Sessions: 1}}
	f := strings.Fields(strings.ToLower(line))[1:]
	seen := map[string]bool{}
	for len(f) > 0 {
		key := f[0]
		f = f[1:]
		if seen[key] {
			return Past{}, fmt.Errorf("%s twice in %.60q", key, line)
		}
		seen[key] = true
		if key == "unused" {
			p.Sessions = 0
			continue
		}
		if len(f) == 0 {
			return Past{}, fmt.Errorf("%s without a value in %.60q", key, line)
		}
		value := f[0]
		f = f[1:]
		second := ""
		if (key == "asked" || key == "granted") && len(f) > 0 && strings.HasSuffix(f[0], "mib") {
			second, f = f[0], f[1:]
		}
		if !p.set(key, value, second) {
			return Past{}, fmt.Errorf("%s %s in %.60q", key, strings.TrimSpace(value+" "+second), line)
		}
	}
	for _, k := range []string{"asked", "granted", "peak", "gpu"} {
		if !seen[k] {
			return Past{}, fmt.Errorf("no %s in %.60q", k, line)
		}
	}
	return p, nil
}

// set takes one word with its value. It is false for a value that does not fit the word.
func (p *Past) set(key, value, second string) (ok bool) {
	switch key {
	case "nodes":
		p.Nodes, ok = whole(value)
		return ok && p.Nodes > 0
	case "asked", "granted":
		percent, okPercent := strings.CutSuffix(value, "%")
		n, err := strconv.ParseUint(percent, 10, 32)
		mem := uint64(0)
		if ok = okPercent && err == nil; ok && second != "" {
			mem, ok = mebibytes(second)
		}
		if key == "asked" {
			p.Asked, p.AskedMem = uint32(n), mem
		} else {
			p.Granted, p.Mem = uint32(n), mem
		}
	case "peak":
		p.Peak, ok = mebibytes(value)
	case "gpu":
		p.GPUTime, ok = duration(value)
	case "throttled":
		p.Share.Throttled, ok = duration(value)
	case "held":
		p.Share.Held, ok = duration(value)
		p.Turns = true
	case "waited":
		p.Share.Waited, ok = duration(value)
	case "cut-time":
		p.Counts.CutTime, ok = duration(value)
	case "earlier-gpu":
		p.EarlierGPU, ok = duration(value)
	case "lost":
		p.Lost, ok = whole(value)
	case "earlier-runs":
		p.EarlierRuns, ok = whole(value)
	case "calls":
		p.Counts.Calls, ok = count(value)
	case "waits":
		p.Counts.Waits, ok = count(value)
	case "errors":
		p.Counts.Errors, ok = count(value)
	case "cuts":
		p.Counts.Cuts, ok = count(value)
	case "overruns":
		p.Share.Overruns, ok = count(value)
	default: // in, out, saved: rounded sizes, which nobody has asked for yet
		ok = true
	}
	return ok
}

func whole(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 20)
	return int(n), err == nil
}

func count(s string) (uint64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil
}

// maxMiB is more memory than all GPUs of a site have; what is believed can be multiplied by 100.
const maxMiB = 1 << 36

// mebibytes reads a size such as 1024mib, in bytes.
func mebibytes(s string) (uint64, bool) {
	digits, ok := strings.CutSuffix(s, "mib")
	n, err := strconv.ParseUint(digits, 10, 64)
	return n << 20, ok && err == nil && n <= maxMiB
}

// duration reads what Duration wrote. No job lasts a hundred years, so sums of some thousands do not overflow.
func duration(s string) (time.Duration, bool) {
	d, err := time.ParseDuration(s)
	return d, err == nil && d >= 0 && d < 100*365*24*time.Hour
}
