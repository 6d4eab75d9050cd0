package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/xid"
	"github.com/sluice-hpc/sluice/internal/boottime"
)

// The Xids of an owner's GPUs. sluice health reads them from the kernel's log itself, because the daemon's unit may not
// (ProtectKernelLogs). So a restart of the daemon loses none.

// xids returns what is known of the GPUs that the daemon at the socket lends, from the kernel's log.
func xids(ctx context.Context, socket, log string) nodeXids {
	s, err := stats(ctx, socket)
	if err != nil {
		return nodeXids{checks: []rpc.Check{notRead(fmt.Errorf("sluiced does not say which GPUs are here: %w", err))}}
	}
	return readXids(s, log)
}

// nodeXids is what the kernel's log says of a node's GPUs.
type nodeXids struct {
	checks []rpc.Check
	// GPUs, by their names in the reason of a drain. For a GPU in forgotten the log has no Xid any more, but its drain is not over; the
	// text says why. For a GPU in well the drain is over.
	forgotten map[string]string
	well      []string
}

// readXids reads the log for the GPUs of a daemon. If there is no log, as in a container, or it may not be read, as by a user, nothing
// is known of Xids: that drains no node, but a drain for an Xid stays.
func readXids(s rpc.Stats, log string) nodeXids {
	out := nodeXids{forgotten: map[string]string{}}
	gpus := slices.SortedFunc(slices.Values(s.GPUs), func(a, b rpc.GPUStats) int { return cmp.Compare(a.GPU.Index, b.GPU.Index) })
	if len(gpus) == 0 {
		return out
	}
	now := boottime.Now()
	found, err := xid.Read(log, now)
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist):
		out.checks = []rpc.Check{{Name: "xid", Level: rpc.OK, Text: "Xids are not looked for: " + err.Error(), Remedy: "run sluice health as root, outside of containers"}}
	case err != nil:
		out.checks = []rpc.Check{notRead(err)}
	}
	for _, g := range gpus {
		if err == nil {
			out.checks = append(out.checks, gpuXids(s.Node, g, found.Errors, now)...)
		}
		switch {
		case !g.GPU.Drain.IsZero():
			out.well = append(out.well, xidOf(g.GPU))
		case err != nil:
			out.forgotten[xidOf(g.GPU)] = err.Error()
		case !found.Mended(g.GPU.PCI):
			out.forgotten[xidOf(g.GPU)] = "the kernel has overwritten its oldest messages since, and none says that the driver was loaded or the GPU has recovered"
		default:
			out.well = append(out.well, xidOf(g.GPU))
		}
	}
	return out
}

// notRead is a finding that Xids are not known.
func notRead(err error) rpc.Check {
	return rpc.Check{Name: "xid", Level: rpc.Warn, Unknown: true, Text: "Xids are not known: " + err.Error(), Remedy: "see nvidia-smi and journalctl -k"}
}

// xidOf begins the finding about a GPU's Xids, in the reason of a drain as well.
func xidOf(g lease.GPU) string { return fmt.Sprintf("%s (%d): Xid ", g.UUID, g.Index) }

// gpuXids returns the findings about one GPU, one for each class of Xids that it had. The messages themselves are not shown: users
// choose the names of programs in them.
func gpuXids(node string, g rpc.GPUStats, found []xid.Error, now time.Duration) []rpc.Check {
	text := map[xid.Class][]string{}
	for _, e := range found {
		if e.PCI != g.GPU.PCI {
			continue
		}
		what, class := xid.Describe(e.Code)
		s := fmt.Sprintf("Xid %d", e.Code)
		if what != "" {
			s += " (" + what + ")"
		}
		if e.N > 1 {
			s += fmt.Sprintf(", %d times", e.N)
		}
		text[class] = append(text[class], s+fmt.Sprintf(", %s ago", elapsed(now-e.Last)))
	}
	var out []rpc.Check
	for _, c := range []struct {
		class xid.Class
		check rpc.Check
	}{
		// Once the GPU itself is drained, no job gets it, and the node's other GPUs can go on.
		{xid.Repair, rpc.Check{Name: "xid", Level: rpc.Fail, Node: g.GPU.Drain.IsZero(), Remedy: "see dmesg; " + rpc.ResetGPU(node, g.GPU.Index, g.GPU.UUID) + "; or drain and reboot the node if the GPU does not answer; dmesg --clear before the resume if the driver writes no Xid 154"}},
		{xid.Watch, rpc.Check{Name: "xid", Level: rpc.Warn, Remedy: "see dmesg, and NVIDIA's catalogue of Xids for what to do if there are more of them"}},
		{xid.Program, rpc.Check{Name: "xid", Level: rpc.OK, Remedy: "errors of programs: nothing is to be done"}},
	} {
		if len(text[c.class]) > 0 {
			c.check.Text = strings.TrimSuffix(xidOf(g.GPU), "Xid ") + strings.Join(text[c.class], "; ")
			out = append(out, c.check)
		}
	}
	return out
}
