package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func TestSmi(t *testing.T) {
	d := startDaemon(t)
	run := func(args ...string) (string, string, int) { return d.call(append([]string{"smi"}, args...)...) }
	if _, errs, status := run(); status != 1 || !strings.Contains(errs, "no lease of yours on this node; get one with srun") {
		t.Errorf("exit status %d, %q", status, errs)
	}
	id := strings.Repeat("a", 32)
	d.add(id, "4711")
	l := lease.Status{Lease: d.leases[id], Use: []lease.Use{{Used: 3 << 30}}}
	d.stats = rpc.Stats{Time: time.Now(), Leases: []lease.Status{l}}
	d.pools = []rpc.Pool{{Name: "a", Owners: []rpc.PoolOwner{{Name: "gpu01", Inventory: lease.Inventory{GPUs: []lease.GPU{{UUID: "GPU-1", Name: "NVIDIA \x1bH200"}}}}}}}
	expect := func(want string, args ...string) {
		t.Helper()
		if out, errs, status := run(args...); status != 0 || out != want {
			t.Errorf("%q: exit status %d, %s\n%s\nwant\n%s", args, status, errs, out, want)
		}
	}
	head := "lease aaaaaaaaaaaa of job 4711\nGPU  NAME          OWNER  SHARE  MEMORY              BUSY  UUID\n"
	expect(head + "0    NVIDIA ?H200  gpu01  50%    3072MiB / 20480MiB  0%    GPU-1\n")
	expect("GPU 0: NVIDIA ?H200 (UUID: GPU-1)\n", "-L", "4711")
	expect("index, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n0, 3072 MiB, 20480 MiB, 0 %\n", "--query-gpu=index,memory.used, memory.total,utilization.gpu")
	expect("3072, 17408, GPU-1\n", "--query-gpu=memory.used,memory.free,gpu_uuid", "--format=csv,noheader,nounits", "aaaa")

	// With sessions: what they have, and a utilisation that is not known where time is not shared.
	l.Sessions = []lease.Session{{Client: 42, Program: "py\nthon", Use: []lease.Use{{Used: 1 << 30}}}}
	d.stats.Leases, d.pools = []lease.Status{l}, nil
	out, _, status := run()
	for _, want := range []string{"0    -     gpu01", " -     GPU-1\n", "\n\nGPU  PID  PROGRAM  MEMORY\n0    42   py thon  1024MiB\n"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("exit status %d, %q lacks %q", status, out, want)
		}
	}
	expect("[N/A]\n", "--query-gpu=utilization.gpu", "--format=csv,noheader")
	d.add(strings.Repeat("b", 32), "4712")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"2 leases on this node: aaaaaaaaaaaa,bbbbbbbbbbbb; name one of them", nil},
		{"no lease \"99\" of yours", []string{"99"}},
		{"lease bbbbbbbbbbbb is not on this node", []string{"4712"}}, // gone between the two questions
		{"no field \"fan.speed\"; see sluice smi --help", []string{"--query-gpu=index,fan.speed", "4711"}},
		{"--format \"xml\": want csv", []string{"--query-gpu=index", "--format=xml", "4711"}},
		{"[list-gpus query-gpu]", []string{"-L", "--query-gpu=index"}},
	} {
		if _, errs, status := run(c.args...); status != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%q: exit status %d, %q, want %q", c.args, status, errs, c.want)
		}
	}
}

// The utilisation is the part of the time between two looks in which the lease computed.
func TestSmiBusy(t *testing.T) {
	at := func(busy time.Duration) *lease.Status {
		return &lease.Status{Lease: lease.Lease{Grants: make([]lease.Grant, 1)}, Sessions: make([]lease.Session, 1), Shares: []lease.Share{{Busy: busy}}}
	}
	for _, c := range []struct {
		before, now, took time.Duration
		want              float64
	}{{time.Second, 1250 * time.Millisecond, 500 * time.Millisecond, 50}, {2 * time.Second, time.Second, time.Second, 0}, {0, 2 * time.Second, time.Second, 100}, {0, 0, 0, -1}} {
		if g := smiGPUs(at(c.now), at(c.before), c.took, nil); len(g) != 1 || g[0].busy != c.want {
			t.Errorf("%+v: %+v", c, g)
		}
	}
}
