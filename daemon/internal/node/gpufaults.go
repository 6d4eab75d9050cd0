package node

import (
	"fmt"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// The GPUs' own errors, as of the last look at NVML. Only errors that need a reset, a reboot or a repair drain the node, and only
// until the GPU itself is drained: then no job gets that GPU any more.

// gpuFaults returns the findings about one GPU of an owner. drained says that sluice drain has taken it out.
func gpuFaults(owner string, d inventory.Device, drained bool) []rpc.Check {
	var out []rpc.Check
	name := fmt.Sprintf("%s (%d)", d.UUID, d.Index)
	add := func(what string, level rpc.Level, node bool, text, remedy string) {
		out = append(out, rpc.Check{Name: what, Level: level, Node: node, Text: name + ": " + text, Remedy: remedy})
	}
	drain := fmt.Sprintf("sluice drain %s:%d", owner, d.Index)
	reset := rpc.ResetGPU(owner, d.Index, d.UUID)
	if d.UUID == "" {
		name = fmt.Sprintf("the GPU with index %d", d.Index)
	}
	if d.Lost {
		add("gpu", rpc.Fail, !drained, d.Error, "see dmesg; drain the node and reboot it, and have the GPU looked at if it stays away; restart sluiced if it was taken out")
		return out // what else was known of it is old
	}
	if d.Unread {
		add("gpu", rpc.Fail, false, d.Error, "see dmesg and nvidia-smi; it is used again once it is healthy")
		out[0].Unknown = !drained
		return out
	}
	f := d.Faults
	if n := f.Uncorrected; n != nil && *n > 0 {
		text := fmt.Sprintf("uncorrected ECC errors since the driver was loaded: %d", *n)
		if f.UncorrectedEver != nil {
			text += fmt.Sprintf(", ever: %d", *f.UncorrectedEver)
		}
		add("ecc", rpc.Warn, false, text, "programs that used that memory have ended; if there are more of them, "+reset)
	}
	switch r := f.Rows; {
	case r == nil:
	case r.Failed:
		add("remap", rpc.Fail, !drained, fmt.Sprintf("a row of its memory could not be remapped; remapped so far: %d", r.Remapped), drain+", and have it replaced")
	case r.Pending:
		add("remap", rpc.Fail, !drained, fmt.Sprintf("a row of its memory is remapped at the next reset; remapped so far: %d", r.Remapped), reset)
	}
	if f.PagesPending != nil && *f.PagesPending {
		add("remap", rpc.Fail, !drained, "a page of its memory is retired at the next reset", reset)
	}
	hot(d, add)
	if s := f.Slowdown; s != nil && s.Any {
		var why []string
		if s.Thermal {
			why = append(why, "it is too hot")
		}
		if s.Brake {
			why = append(why, "the power supply has its brake on")
		}
		if len(why) == 0 {
			why = append(why, "of heat or of current, it does not say which")
		}
		add("clocks", rpc.Warn, false, "the hardware has lowered its clocks, because "+strings.Join(why, " and "),
			"see the fans, the air and the power supplies, and nvidia-smi -q -d PERFORMANCE; programs are slower until then")
	}
	return out
}

// hot compares the temperature with the GPU's own limits.
func hot(d inventory.Device, add func(what string, level rpc.Level, node bool, text, remedy string)) {
	t, slow, end := d.Temperature, d.Faults.SlowdownAt, d.Faults.ShutdownAt
	const remedy = "see the fans and the air; sluice drain keeps new leases away"
	switch {
	case t == nil:
	case end != nil && *end > 0 && *t >= *end:
		add("thermal", rpc.Fail, false, fmt.Sprintf("%d degrees C, and it switches itself off at %d", *t, *end), remedy)
	case slow != nil && *slow > 0 && *t >= *slow:
		add("thermal", rpc.Warn, false, fmt.Sprintf("%d degrees C, and it lowers its clocks at %d", *t, *slow), remedy)
	}
}
