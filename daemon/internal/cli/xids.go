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

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/xid"
	"github.com/sluice-hpc/sluice/internal/boottime"
)

// The Xids of an owner's GPUs. sluice health reads them itself, from the kernel's log, because the daemon's unit may not
// (ProtectKernelLogs): so they are there after a restart of the daemon too.

// xids returns the findings about the GPUs that the daemon at the socket lends, from the kernel's log.
func xids(ctx context.Context, socket, log string) []rpc.Check {
	s, err := stats(ctx, socket)
	if err != nil || len(s.GPUs) == 0 {
		return nil // a daemon that does not answer is a finding of its own
	}
	now := boottime.Now()
	found, err := xid.Read(log, now)
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist): // a user asks, or this is a container
		return []rpc.Check{{Name: "xid", Level: rpc.OK, Text: "Xids are not looked for: " + err.Error(), Remedy: "run sluice health as root, outside of containers"}}
	case err != nil:
		return []rpc.Check{{Name: "xid", Level: rpc.Warn, Text: "Xids are not looked for: " + err.Error(), Remedy: "see nvidia-smi and journalctl -k"}}
	}
	var out []rpc.Check
	for _, g := range slices.SortedFunc(slices.Values(s.GPUs), func(a, b rpc.GPUStats) int { return cmp.Compare(a.GPU.Index, b.GPU.Index) }) {
		out = append(out, gpuXids(s.Node, g, found, now)...)
	}
	return out
}

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
		{xid.Repair, rpc.Check{Name: "xid", Level: rpc.Fail, Node: g.GPU.Drain.IsZero(), Remedy: fmt.Sprintf("see dmesg; sluice drain %s:%d, then reset the GPU, or reboot if it does not answer; afterwards dmesg --clear", node, g.GPU.Index)}},
		{xid.Watch, rpc.Check{Name: "xid", Level: rpc.Warn, Remedy: "see dmesg, and NVIDIA's catalogue of Xids for what to do if there are more of them"}},
		{xid.Program, rpc.Check{Name: "xid", Level: rpc.OK, Remedy: "errors of programs: nothing is to be done"}},
	} {
		if len(text[c.class]) > 0 {
			c.check.Text = fmt.Sprintf("%s (%d): %s", g.GPU.UUID, g.GPU.Index, strings.Join(text[c.class], "; "))
			out = append(out, c.check)
		}
	}
	return out
}
