package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestPeerAccess runs a program whose devices reach each other's memory, over each kind of connection, and with the devices in
// another order.
func TestPeerAccess(t *testing.T) {
	const want = "peer: kernels, copies, mappings, pools, another process\nPASS\n"
	for _, o := range []workerOptions{{network: "tcp"}, {network: "unix", race: true}} {
		o.devices, o.sandbox = 2, "off"
		t.Run(o.network, func(t *testing.T) {
			w := startWorker(t, o)
			check(t, w.run(runOptions{mem: "512M"}, program("peer")), want)
			check(t, w.run(runOptions{mem: "512M", env: []string{"CUDA_VISIBLE_DEVICES=1,0"}}, program("peer")), want)
			check(t, w.run(runOptions{mem: "512M"}, built("test/nvml"), "peers"), "nvml: peers 0, 2 links, ancestor 40\n")
			check(t, w.run(runOptions{mem: "512M"}, program("peer"), "illegal"), "peer: an illegal address\nPASS\n")
			check(t, w.run(runOptions{mem: "512M"}, program("peer"), "nccl"), "peer: NCCL's shared memory is refused\nPASS\n")
			waitFor(t, time.Second, "all sessions have ended", func() bool { return len(w.sessions()) == 0 })
			if used := w.settled(time.Now().Add(time.Second)); used != 0 {
				t.Errorf("%d bytes are in use after all have ended", used)
			}
		})
	}
}

// TestPeersOfOwners: devices of two owners do not reach each other, which is said when access is enabled; copies work.
func TestPeersOfOwners(t *testing.T) {
	a := startWorker(t, workerOptions{network: "unix"})
	b := startWorker(t, workerOptions{network: "unix"})
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	list := a.direct(ctx, program("peer"), "staged")
	list.Env = append(list.Env, "SLUICE_WORKER="+a.addr+","+b.addr)
	check(t, finish(t, ctx, list), "peer: staged\nPASS\n")
	// NVML says the same; what it asks NCCL chooses its transports by.
	nvml := a.direct(ctx, built("test/nvml"), "peers")
	nvml.Env = append(nvml.Env, "SLUICE_WORKER="+a.addr+","+b.addr)
	check(t, finish(t, ctx, nvml), "nvml: peers 5, 2 links, ancestor 50\n")
	// One worker whose devices do not reach each other is no different.
	c := startWorker(t, workerOptions{network: "unix", devices: 2, env: []string{"SLUICE_SIM_PEERS=off"}})
	check(t, c.run(runOptions{mem: "512M"}, program("peer"), "staged"), "peer: staged\nPASS\n")
	check(t, c.run(runOptions{mem: "512M"}, built("test/nvml"), "peers"), "nvml: peers 5, 0 links, ancestor 40\n")
}

// TestNetworkOfNCCL: page-locked memory by which NCCL's kernels and its network thread would wait for each other is refused when NCCL
// asks for it, unless the worker shares it. A program that has NCCL's file name stands for NCCL.
func TestNetworkOfNCCL(t *testing.T) {
	nccl := filepath.Join(t.TempDir(), "libnccl.so.2")
	b, err := os.ReadFile(built("test/agent"))
	if err == nil {
		err = os.WriteFile(nccl, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	const (
		words  = 64 << 10
		queue  = 1 << 20
		link   = 8192 + 512<<10 + 4915200 + 4<<20 // of one connection
		shared = 8 << 20                          // the buffers of several
	)
	for _, network := range []string{"tcp", "unix"} {
		w := startWorker(t, workerOptions{network: network})
		for _, p := range []string{nccl, built("test/agent")} {
			cmd := w.command(context.Background(), runOptions{mem: "256M", env: []string{"SLUICE_LOG=warn"}}, p)
			a := startAgentAs(t, cmd)
			for _, n := range []int{words, queue, link, shared} {
				want := 0
				if p == nccl && network == "tcp" && n > queue {
					want = notSupported
				}
				if rc, _, _ := a.ask("host %d", n); rc != want {
					t.Errorf("%s, %s: %d bytes: CUresult %d, not %d", network, filepath.Base(p), n, rc, want)
				}
			}
			if said := strings.Contains(a.stderr.String(), "NCCL over a network is not supported"); said != (p == nccl && network == "tcp") {
				t.Errorf("%s, %s: on standard error: %q", network, filepath.Base(p), a.stderr.String())
			}
		}
	}
}
