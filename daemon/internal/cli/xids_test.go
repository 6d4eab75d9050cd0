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
	const repair = "see dmesg; sluice drain gpu01:3; once no job uses gpu01, systemctl stop sluiced, nvidia-smi --gpu-reset -i GPU-a, systemctl start sluiced, and sluice resume gpu01:3; " +
		"or drain and reboot the node if the GPU does not answer; dmesg --clear before the resume if the driver writes no Xid 154"
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

// What Slurm's HealthCheckProgram finds in the log of an owner's kernel. A log that cannot be read drains no node, and ends no drain for an Xid.
func TestXidsOfNode(t *testing.T) {
	d := startDaemon(t)
	d.checks = []rpc.Check{{Name: "nvml", Level: rpc.OK, Text: "answers"}}
	d.stats = rpc.Stats{Node: "gpu01", GPUs: []rpc.GPUStats{{GPU: lease.GPU{UUID: "GPU-a", Index: 3, PCI: "00000000:3b:00.0"}}}}
	cfg := config.Default()
	cfg.Slurm.Lib = t.TempDir()
	if err := os.WriteFile(filepath.Join(cfg.Slurm.Lib, "libcuda.so.1"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	const reason = "sluice: xid: GPU-a (3): Xid 79"
	log := filepath.Join(t.TempDir(), "kmsg")
	set := func(f func()) {
		d.mu.Lock()
		defer d.mu.Unlock()
		f()
	}
	// looks says how many findings there are and how many are not known, and whether a drain for an Xid of the GPU is over.
	looks := func(what, log string, found, unknown int, over bool) nodeState {
		t.Helper()
		d.sync()
		s := (&nodeHealth{socket: d.socket, kernelLog: log}).findings(t.Context(), &cfg)
		if ended := len(s.found)+len(s.unknown) == 0 && s.xids.stillDrains(reason) == ""; len(s.found) != found || len(s.unknown) != unknown || ended != over {
			t.Errorf("%s: %+v, %q", what, s, s.xids.stillDrains(reason))
		}
		return s
	}
	written := func(seq int, message string) string {
		us := max((boottime.Now() - time.Minute).Microseconds(), 0)
		if err := os.WriteFile(log, fmt.Appendf(nil, "3,%d,%d,-;NVRM: %s", seq, us, message), 0o600); err != nil {
			t.Fatal(err)
		}
		return log
	}
	xid := func(code int) string {
		return fmt.Sprintf("Xid (PCI:0000:3b:00): %d, pid=1, name=x\x1b[2J", code)
	}
	looks("no log", log, 0, 0, false)
	looks("a log that fails", filepath.Dir(log), 0, 1, false) // a folder opens, and cannot be read
	if f := xids(t.Context(), d.socket, log).checks; len(f) != 1 || f[0].Level != rpc.OK || !strings.Contains(f[0].Text, log) {
		t.Errorf("no log: %+v", f)
	}
	if f := xids(t.Context(), d.socket, filepath.Dir(log)).checks; len(f) != 1 || f[0].Level != rpc.Warn || !f[0].Unknown {
		t.Errorf("a log that fails: %+v", f)
	}
	looks("an error of a program", written(0, xid(13)), 0, 0, true)
	looks("the log has lost its beginning", written(7, xid(13)), 0, 0, false)
	looks("the driver was loaded", written(7, "loading NVIDIA UNIX x86_64 Kernel Module"), 0, 0, true)
	looks("the GPU has recovered", written(7, "Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (a) to 0x0 (None)"), 0, 0, true)
	if f := looks("hardware", written(0, xid(79)), 1, 0, false).found; len(f) == 1 && (f[0].Name != "xid" || !strings.Contains(f[0].Text, "GPU-a (3): Xid 79") || strings.Contains(f[0].Text, "\x1b")) {
		t.Errorf("%+v", f)
	}
	set(func() {
		d.checks = []rpc.Check{{Name: "nvml", Level: rpc.Fail, Unknown: true, Text: "NVML has not answered yet"}}
	})
	looks("NVML has not answered", written(0, xid(13)), 0, 1, false)
	set(func() { d.checks = nil; d.stats.GPUs[0].GPU.Drain = lease.Drain{Since: time.Unix(1, 0)} })
	looks("the GPU is drained", written(0, xid(79)), 0, 0, true)
	looks("the GPU is drained, and the log is short", written(7, xid(13)), 0, 0, true)
	set(func() { d.stats.GPUs = nil })
	looks("a node that lends no GPU", log, 0, 0, false)
}

// A daemon that does not say which GPUs are here.
func TestXidsWithoutStats(t *testing.T) {
	if f := xids(t.Context(), filepath.Join(t.TempDir(), "none.sock"), "/nowhere").checks; len(f) != 1 || !f[0].Unknown || f[0].Node || f[0].Level != rpc.Warn {
		t.Errorf("%+v", f)
	}
}
