package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// sluice is the command line on a daemon's node.
func sluice(s *site.Site, d *site.Daemon, uid int, args ...string) node.Command {
	return node.Command{Argv: append([]string{s.Opt("bin/sluice")}, args...), Env: d.Env(), UID: uid, GID: uid, Dir: "/"}
}

// TestProbe measures a link of a known rate, as a user. Whatever else the machine does, what arrives is not more than the link lets through.
// An owner that has been killed is named.
func TestProbe(t *testing.T) {
	for _, encrypt := range []string{"false", "true"} {
		t.Run("encrypt="+encrypt, func(t *testing.T) { testProbe(t, encrypt) })
	}
}

func testProbe(t *testing.T, encrypt string) {
	const bits = 100_000_000
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 1, Config: map[string]string{"encrypt": encrypt}})
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// A queue that holds whatever comes: what arrives behind a lost segment would be counted when that one has been sent again.
	for _, n := range []*node.Node{h.Node, o.Node} {
		if out, err := n.Run(ctx, node.Command{Argv: []string{"tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", fmt.Sprint(bits), "burst", "32kb", "latency", "5s"}}); err != nil {
			t.Fatalf("a link of %d bit/s: %v: %s", bits, err, out)
		}
	}
	out, err := h.Node.Run(ctx, sluice(s, h, user, "probe", o.Node.Name, "--json"))
	if err != nil {
		t.Fatal(err)
	}
	var all []struct {
		Probe    lease.Probe
		Expect   []string
		Findings []rpc.Check
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	p := all[0].Probe
	t.Logf("%+v", p)
	if p.Node != h.Node.Name || p.Owner != o.Node.Name || p.Local || p.Encrypted != (encrypt == "true") || !p.Bounded || len(p.Flows) != 4 {
		t.Errorf("%+v", p)
	}
	if p.RoundTrip <= 0 || p.Ahead.Abs() > p.RoundTrip {
		t.Errorf("a round trip of %v, a clock %v ahead, on one machine", p.RoundTrip, p.Ahead)
	}
	for _, f := range p.Flows {
		if f.Rate > bits/8 || f.Rate == 0 {
			t.Errorf("%+v on a link of %d bytes/s", f, bits/8)
		}
	}
	for _, e := range []lease.ProbeEnd{p.From, p.To} {
		if e.Device != "eth0" || e.DeviceMTU != 1500 || e.PathMTU != 1500 || e.Segment != 1448 || e.SendBuffer != 4<<20 || e.ReceiveBuffer != 4<<20 {
			t.Errorf("%+v", e)
		}
	}
	if len(all[0].Expect) < 4 || !strings.HasPrefix(all[0].Expect[0], "A call that waits takes ") {
		t.Errorf("%q", all[0].Expect)
	}
	if err := o.Kill(); err != nil {
		t.Fatal(err)
	}
	if out, err := h.Node.Run(ctx, sluice(s, h, 0, "probe", o.Node.Name)); err == nil || !strings.Contains(out, "owner "+o.Node.Name+" cannot be asked") {
		t.Errorf("an owner that is down: %v: %s", err, out)
	}
	if out, err := h.Node.Run(ctx, sluice(s, h, 0, "probe", "nobody")); err == nil || !strings.Contains(out, "nobody is not an owner of this node's pools; their owners are "+o.Node.Name) {
		t.Errorf("an owner that is none: %v: %s", err, out)
	}
}
