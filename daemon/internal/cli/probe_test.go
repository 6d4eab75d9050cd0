package cli

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// linkOf1G is a probe of a good link, which docs/probe.md shows.
func linkOf1G() lease.Probe {
	end := lease.ProbeEnd{Device: "eth0", DeviceSpeed: 1e9, DeviceMTU: 1500, PathMTU: 1500, Segment: 1448, SendBuffer: 4 << 20, ReceiveBuffer: 4 << 20}
	p := lease.Probe{Node: "node01", Owner: "gpu01", Exchanges: 500, RoundTrip: 200 * time.Microsecond, RoundTripMedian: 230 * time.Microsecond, RoundTrip99: time.Millisecond,
		Ahead: 12 * time.Microsecond, From: end, To: end}
	for _, n := range []uint32{1, 4} {
		for _, up := range []bool{true, false} {
			p.Flows = append(p.Flows, lease.ProbeFlow{Up: up, Connections: n, Rate: 117e6, Low: 116e6, High: 118e6, Bytes: 117e6, Time: time.Second, Segments: 81000})
		}
	}
	return p
}

func TestProbe(t *testing.T) {
	d := startDaemon(t)
	bad := linkOf1G()
	bad.Owner, bad.Flows[0].Resent, bad.From.Device, bad.Encrypted = "gpu02", 900, "e\x1bth0", true
	d.probes = map[string]lease.Probe{"gpu01": linkOf1G(), "gpu02": bad, "here": {Node: "here", Owner: "here", Local: true}}
	d.pools = []rpc.Pool{{Name: "a", Owners: []rpc.PoolOwner{{Name: "gpu02"}, {Name: "gpu01"}}}, {Name: "b", Owners: []rpc.PoolOwner{{Name: "gone", Error: "down"}, {Name: "gpu01"}}}}

	out, errs, status := d.call("probe", "gpu01")
	page, err := os.ReadFile("../../../docs/probe.md")
	if err != nil {
		t.Fatal(err)
	}
	var shown strings.Builder
	for line := range strings.Lines(string(page)) {
		if rest, ok := strings.CutPrefix(line, "    "); ok {
			shown.WriteString(rest)
		} else if shown.Len() > 0 && line == "\n" {
			shown.WriteString(line)
		} else if shown.Len() > 0 {
			break
		}
	}
	if want := strings.TrimRight(shown.String(), "\n") + "\n"; status != 0 || out != want {
		t.Errorf("exit status %d, %s\n%s\ndocs/probe.md has\n%s", status, errs, out, want)
	}
	out, _, status = d.call("probe", "gpu02")
	for _, want := range []string{"gpu02 from node01, encrypted\n", "900 of 162000 segments sent again", "\nwarn: loss: 0.56 % of the segments to gpu02 were sent again, 900 of 162000; ethtool -S for", " (docs/probe.md#loss)\n"} {
		if status != 0 || !strings.Contains(out, want) || strings.Contains(out, "\x1b") {
			t.Errorf("exit status %d, %q lacks %q", status, out, want)
		}
	}
	if out, _, status = d.call("probe", "here"); status != 0 || out != "here is this node: programs here reach it by a Unix socket and shared memory, and there is no link to measure.\n" {
		t.Errorf("exit status %d, %q", status, out)
	}
	// All of them: each once, and one that cannot be measured does not keep the others from it.
	out, _, status = d.call("probe")
	if at := strings.Index; status != 1 || at(out, "gone: gone is not an owner; see sluice list and sluice gpus\n") < 0 || at(out, "gpu01 from") < 0 || at(out, "gpu02 from") < at(out, "gpu01 from") || strings.Count(out, "gpu01 from") != 1 {
		t.Errorf("exit status %d, %q", status, out)
	}
	var all []probed
	out, _, status = d.call("probe", "--json")
	if err := json.Unmarshal([]byte(out), &all); err != nil || status != 1 || len(all) != 3 || all[0].Error == "" || all[0].Probe != nil || all[1].Probe.Flows[0].Rate != 117e6 || len(all[1].Expect) != 4 || all[2].Findings[0].Name != "loss" {
		t.Errorf("exit status %d, %v: %s", status, err, out)
	}
	if _, errs, status = d.call("probe", "none"); status != 1 || !strings.Contains(errs, "none is not an owner; see sluice list") {
		t.Errorf("exit status %d, %q", status, errs)
	}
	if _, errs, status = d.call("probe", ""); status != 1 || !strings.Contains(errs, "without a name") {
		t.Errorf("exit status %d, %q", status, errs)
	}
	if out, _, _ = d.call("__complete", "probe", "gpu01", ""); !strings.Contains(out, "gpu02\n") || strings.Contains(out, "gpu01\n") {
		t.Errorf("completion: %q", out)
	}
	d.pools = nil
	if _, errs, status = d.call("probe"); status != 1 || !strings.Contains(errs, "no pool has an owner") {
		t.Errorf("exit status %d, %q", status, errs)
	}
	d.kill()
	if _, errs, status = d.call("probe", "gpu01", "gpu02"); status != 1 || !strings.Contains(errs, "start the service sluiced") {
		t.Errorf("exit status %d, %q", status, errs)
	}
}
