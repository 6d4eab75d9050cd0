package inventory

import (
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// seen is a look at what processes do with a GPU.
type seen struct {
	at    time.Time
	stamp uint64 // the driver's newest sample, microseconds since 1970
}

// longest is the time between two looks up to which the driver's samples are taken to
// speak of all of it: its buffer is not endless.
const longest = time.Minute

// period is more than the time between two samples of the driver.
const period = 2 * time.Second

// busy fills in how long processes have kept the GPU busy since the last look. The
// driver tells percent, averaged over all samples since then, and of live processes only
// (nvml.h, nvmlDeviceGetProcessUtilization; seen so on an H200 with driver 580, where
// 300 ms in each second are 28 to 30 %). So the percent of the time between is the answer.
func (c *child) busy(h nvml.Device, d *Device) {
	last, now := c.seen[d.UUID], time.Now()
	samples, r := h.GetProcessUtilization(last.stamp)
	if r != nvml.SUCCESS {
		samples = nil
	}
	stamp := last.stamp
	for _, s := range samples {
		if s.Pid != 0 {
			stamp = max(stamp, s.TimeStamp)
		}
	}
	gap := now.Sub(last.at)
	if r == nvml.ERROR_NOT_FOUND {
		if gap < period {
			return // the driver has not looked since; the next look is about this time too
		}
		// Nobody did anything, so the next samples are about the time from now on.
		stamp = max(stamp, uint64(now.UnixMicro()))
	}
	c.seen[d.UUID] = seen{now, stamp}
	// Without an earlier look, or after a gap that the driver's buffer may not cover, the samples do not say what happened since.
	if !last.at.IsZero() && gap <= longest {
		d.Busy = busyTimes(samples, gap)
	}
}

// busyTimes turns a driver's samples of some time into busy times, by process id.
// Entries without a process, and those of more than 100 %, are the driver's blanks.
func busyTimes(samples []nvml.ProcessUtilizationSample, gap time.Duration) []Busy {
	type mean struct{ sum, n uint64 }
	of := map[int]mean{}
	for _, s := range samples {
		if s.Pid == 0 || s.SmUtil > 100 {
			continue
		}
		m := of[int(s.Pid)]
		of[int(s.Pid)] = mean{m.sum + uint64(s.SmUtil), m.n + 1}
	}
	var out []Busy
	for pid, m := range of {
		if m.sum > 0 {
			out = append(out, Busy{pid, gap * time.Duration(m.sum) / time.Duration(100*m.n)})
		}
	}
	slices.SortFunc(out, func(a, b Busy) int { return a.PID - b.PID })
	return out
}
