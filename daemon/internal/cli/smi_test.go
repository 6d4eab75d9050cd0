package cli

import (
	"slices"
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
	l := lease.Status{Lease: d.leases[id], Use: []lease.Use{{Granted: 20 << 30, Used: 3 << 30}}}
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
	expect("GPU 0: [N/A] (UUID: GPU-1)\n", "-L")

	// Its owner does not answer: nothing is known but what was granted, and 0 is said of nothing.
	l.Use, l.Sessions = nil, nil
	d.stats.Leases = []lease.Status{l}
	expect("[N/A], 20480 MiB, [N/A], [N/A], [N/A]\n", "--query-gpu=name,memory.total,memory.used,memory.free,utilization.gpu", "--format=csv,noheader")
	if out, _, status := run(); status != 0 || !strings.Contains(out, "0    -     gpu01  50%    - / 20480MiB  -     GPU-1\n") {
		t.Errorf("exit status %d, %q", status, out)
	}
	// Of several owners one does not answer.
	two := l
	two.Grants = append(slices.Clone(l.Grants), lease.Grant{Owner: "gpu02", GPU: "GPU-2", Percent: 50, Mem: 10 << 30})
	two.Use = []lease.Use{{}, {Granted: 10 << 30, Used: 1 << 30}}
	two.Shares = []lease.Share{{}, {Due: 5000, Busy: time.Second}}
	two.Sessions = []lease.Session{{Client: 42, Program: "python", Use: two.Use[1:]}}
	d.stats.Leases = []lease.Status{two}
	expect("0, [N/A], [N/A]\n1, 1024 MiB, [N/A]\n", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader")
	d.stats.Leases = []lease.Status{l}

	// A lease that is over is not meant, unless it is named.
	over := strings.Repeat("c", 32)
	d.add(over, "4710")
	ended := d.leases[over]
	ended.State = lease.Ended
	d.leases[over] = ended
	expect("GPU-1\n", "--query-gpu=uuid", "--format=csv,noheader")
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
		{"--format \"noheader\": csv is missing, as in csv,noheader", []string{"--query-gpu=index", "--format=noheader"}},
		{"--format is for --query-gpu", []string{"--format=csv,noheader"}},
		{"--format is for --query-gpu", []string{"-L", "--format=csv"}},
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
		return &lease.Status{Lease: lease.Lease{Grants: make([]lease.Grant, 1)}, Sessions: make([]lease.Session, 1), Use: []lease.Use{{Granted: 1}}, Shares: []lease.Share{{Due: 5000, Busy: busy}}}
	}
	for _, c := range []struct {
		before, now, took time.Duration
		want              float64
	}{{time.Second, 1250 * time.Millisecond, 500 * time.Millisecond, 50}, {2 * time.Second, time.Second, time.Second, 0}, {0, 2 * time.Second, time.Second, 100}, {0, 0, 0, -1}, {0, 0, time.Second, 0}} {
		if g := smiGPUs(at(c.now), at(c.before), c.took, nil); len(g) != 1 || g[0].busy != c.want {
			t.Errorf("%+v: %+v", c, g)
		}
	}
}

// Of a lease of several owners nothing is said of what the absent one, or one that shares no time, would have to say.
func TestSmiOwners(t *testing.T) {
	half := func(busy time.Duration) *lease.Status {
		return &lease.Status{Lease: lease.Lease{Grants: make([]lease.Grant, 3)}, Sessions: make([]lease.Session, 1), Use: []lease.Use{{}, {Granted: 1, Used: 7}, {Granted: 1}},
			Shares: []lease.Share{{}, {Due: 5000, Busy: busy}, {}}}
	}
	g := smiGPUs(half(time.Second), half(0), 4*time.Second, nil)
	if len(g) != 3 || g[0].use != nil || g[0].busy != -1 || g[1].use == nil || g[1].use.Used != 7 || g[1].busy != 25 || g[2].use == nil || g[2].busy != -1 {
		t.Errorf("%+v", g)
	}
	// It has just come back: its earlier time is not known.
	now, before := half(time.Second), half(0)
	now.Use[0], now.Shares[0] = lease.Use{Granted: 1}, lease.Share{Due: 5000, Busy: time.Hour}
	if g := smiGPUs(now, before, time.Second, nil); g[0].use == nil || g[0].busy != -1 {
		t.Errorf("%+v", g)
	}
}
