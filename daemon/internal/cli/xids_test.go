package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/xid"
	"github.com/sluice-hpc/sluice/internal/boottime"
)

func TestGPUXids(t *testing.T) {
	gpu := rpc.GPUStats{GPU: lease.GPU{UUID: "GPU-a", Index: 3, PCI: "00000000:3b:00.0"}}
	drained := gpu
	drained.GPU.Drain = lease.Drain{By: "0@gpu01", Since: time.Unix(1, 0)}
	const now = 30 * time.Hour
	at := func(pci string, code, n int) xid.Error {
		return xid.Error{PCI: pci, Code: code, N: n, Last: now - 90*time.Second}
	}
	const a, b = "00000000:3b:00.0", "00000000:41:00.0"
	const repair = "see dmesg; sluice drain gpu01:3, then reset the GPU, or reboot if it does not answer; afterwards dmesg --clear"
	for what, c := range map[string]struct {
		gpu   rpc.GPUStats
		found []xid.Error
		want  string // level, whether it drains the node, text; remedy
	}{
		"none":                      {gpu, nil, ""},
		"of another GPU":            {gpu, []xid.Error{at(b, 79, 1)}, ""},
		"of hardware":               {gpu, []xid.Error{at(a, 48, 1), at(a, 79, 2)}, "fail true GPU-a (3): Xid 48 (uncorrectable ECC error), 0:01:30 ago; Xid 79 (the GPU has fallen off the bus), 2 times, 0:01:30 ago; " + repair + "\n"},
		"of hardware, GPU drained":  {drained, []xid.Error{at(a, 79, 1)}, "fail false GPU-a (3): Xid 79 (the GPU has fallen off the bus), 0:01:30 ago; " + repair + "\n"},
		"of a program":              {gpu, []xid.Error{at(a, 13, 9), at(a, 31, 1)}, "ok false GPU-a (3): Xid 13, 9 times, 0:01:30 ago; Xid 31, 0:01:30 ago; errors of programs: nothing is to be done\n"},
		"one that nobody knows yet": {gpu, []xid.Error{at(a, 999, 1)}, "ok false GPU-a (3): Xid 999, 0:01:30 ago; errors of programs: nothing is to be done\n"},
		"of all classes": {gpu, []xid.Error{at(a, 31, 1), at(a, 63, 1), at(a, 95, 1)}, "fail true GPU-a (3): Xid 95 (uncontained ECC error), 0:01:30 ago; " + repair + "\n" +
			"warn false GPU-a (3): Xid 63 (a row is to be remapped, or a page retired), 0:01:30 ago; see dmesg, and NVIDIA's catalogue of Xids for what to do if there are more of them\n" +
			"ok false GPU-a (3): Xid 31, 0:01:30 ago; errors of programs: nothing is to be done\n"},
	} {
		var got string
		for _, f := range gpuXids("gpu01", c.gpu, c.found, now) {
			got += fmt.Sprintf("%s %v %s; %s\n", f.Level, f.Node, f.Text, f.Remedy)
		}
		if got != c.want {
			t.Errorf("%s:\n%swant:\n%s", what, got, c.want)
		}
	}
}

// What Slurm's HealthCheckProgram finds in the log of an owner's kernel, and that a log that cannot be read is no reason to drain.
func TestXidsOfNode(t *testing.T) {
	d := startDaemon(t)
	d.checks = []rpc.Check{{Name: "nvml", Level: rpc.OK, Text: "answers"}}
	d.stats = rpc.Stats{Node: "gpu01", GPUs: []rpc.GPUStats{{GPU: lease.GPU{UUID: "GPU-a", Index: 3, PCI: "00000000:3b:00.0"}}}}
	cfg := config.Default()
	cfg.Slurm.Lib = t.TempDir()
	if err := os.WriteFile(filepath.Join(cfg.Slurm.Lib, "libcuda.so.1"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(t.TempDir(), "kmsg")
	written := func(code int) {
		us := (boottime.Now() - time.Minute).Microseconds()
		if err := os.WriteFile(log, fmt.Appendf(nil, "3,1,%d,-;NVRM: Xid (PCI:0000:3b:00): %d, pid=1, name=x\x1b[2J", max(us, 0), code), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found := func() []rpc.Check {
		d.sync()
		return (&nodeHealth{socket: d.socket, kernelLog: log}).findings(t.Context(), &cfg)
	}
	if f := found(); len(f) != 0 {
		t.Errorf("no log: %+v", f)
	}
	if f := xids(t.Context(), d.socket, log); len(f) != 1 || f[0].Level != rpc.OK || !strings.Contains(f[0].Text, log) {
		t.Errorf("no log: %+v", f)
	}
	if f := xids(t.Context(), d.socket, filepath.Dir(log)); len(f) != 1 || f[0].Level != rpc.Warn { // a folder opens, and cannot be read
		t.Errorf("a log that fails: %+v", f)
	}
	written(13)
	if f := found(); len(f) != 0 {
		t.Errorf("an error of a program: %+v", f)
	}
	written(79)
	if f := found(); len(f) != 1 || f[0].Name != "xid" || !strings.Contains(f[0].Text, "GPU-a (3): Xid 79") || strings.Contains(f[0].Text, "\x1b") {
		t.Errorf("%+v", f)
	}
	d.mu.Lock()
	d.stats.GPUs = nil
	d.mu.Unlock()
	if f := found(); len(f) != 0 {
		t.Errorf("a node that lends no GPU: %+v", f)
	}
}
