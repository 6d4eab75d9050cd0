package cli

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func TestHealthAll(t *testing.T) {
	d := startDaemon(t)
	conf := filepath.Join(t.TempDir(), "sluice.yaml")
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "scontrol"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(conf, []byte("node: ctl\nslurm:\n  bin: "+bin+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	warn := rpc.NodesCheck{Check: rpc.Check{Name: "disk", Level: rpc.Warn, Text: "is full", Remedy: "make room"}, Nodes: []string{"gpu03", "gpu01", "gpu02"}}
	bad := rpc.NodesCheck{Check: rpc.Check{Name: "gpu\x1b[2J", Level: rpc.Fail, Text: "lost\nfail  gpu09: forged: a line"}, Nodes: []string{"gpu7"}}
	for _, c := range []struct {
		all    rpc.HealthAll
		status int
		want   string
	}{
		{rpc.HealthAll{Asked: 1, Well: 1}, 0, "1 node asked: 1 well, 0 with warnings, 0 with failures, 0 without an answer\n"},
		{rpc.HealthAll{Asked: 4, Well: 1, Warned: 3, Findings: []rpc.NodesCheck{warn}}, 1, "warn  gpu[01-03]: disk: is full; make room\n4 nodes asked: 1 well, 3 with"},
		{rpc.HealthAll{Asked: 5, Warned: 3, Failed: 1, Unheard: 1, LeftOut: 7, Findings: []rpc.NodesCheck{bad, warn}}, 2, "fail  gpu7: gpu?[2J: lost fail  gpu09: forged: a line\nwarn  gpu[01-03]: disk: is full; make room\n7 more findings are left out, the least severe: see sluice health on the nodes\n5 nodes"},
		{rpc.HealthAll{Asked: 5, Warned: 5, LeftOut: 1, Findings: []rpc.NodesCheck{warn}}, 1, "warn  gpu[01-03]: disk: is full; make room\n1 more finding is left out"},
		{rpc.HealthAll{Asked: 5, Well: 4, Failed: 1, LeftOut: 1}, 2, "1 more finding is left out"},
		{rpc.HealthAll{Asked: 5, Well: 4, Unheard: 1, Findings: []rpc.NodesCheck{warn}}, 1, "warn  gpu"}, // it refused
		{rpc.HealthAll{}, 3, ""},
	} {
		d.mu.Lock()
		d.all = c.all
		d.mu.Unlock()
		out, errs, status := d.call("health", "--all", "--config", conf)
		if status != c.status || !strings.HasPrefix(out, c.want) || c.want == "" && out != "" {
			t.Errorf("%+v: exit status %d\n%s%s", c.all, status, out, errs)
		}
	}
	d.mu.Lock()
	d.all = rpc.HealthAll{Asked: 4, Well: 1, Warned: 3, Findings: []rpc.NodesCheck{warn}}
	d.mu.Unlock()
	out, _, status := d.call("health", "--all", "--json", "--config", conf)
	var got rpc.HealthAll
	if err := json.Unmarshal([]byte(out), &got); err != nil || status != 1 || got.Asked != 4 || len(got.Findings) != 1 || len(got.Findings[0].Nodes) != 3 || got.Findings[0].Name != "disk" {
		t.Errorf("%v, exit status %d: %s", err, status, out)
	}
	d.mu.Lock()
	d.all = rpc.HealthAll{Asked: 4, Well: 4}
	d.mu.Unlock()
	if out, _, status := d.call("health", "--all", "--json", "--config", conf); status != 0 || !strings.Contains(out, `"findings": []`) {
		t.Errorf("exit status %d: %s", status, out)
	}
	// That drained nodes may be missing is said.
	if err := os.Remove(filepath.Join(bin, "scontrol")); err != nil {
		t.Fatal(err)
	}
	for at, want := range map[string]string{conf: "scontrol is not in " + bin, conf + ".none": "no such file"} {
		if out, _, status := d.call("health", "--all", "--config", at); status != 1 || !strings.HasPrefix(out, "warn  slurmctld: slurm: which nodes are drained is not known: ") || !strings.Contains(out, want) {
			t.Errorf("%s: exit status %d: %s", at, status, out)
		}
	}
	for _, other := range []string{"--quiet", "--node", "--drain"} {
		if _, errs, status := d.call("health", "--all", other); status != 3 || !strings.Contains(errs, "none of the others can be") {
			t.Errorf("with %s: exit status %d, %s", other, status, errs)
		}
	}
	d.mu.Lock()
	d.refuse = lease.Errorf(lease.Denied, "the health of all nodes is for root and SlurmUser")
	d.mu.Unlock()
	if out, errs, status := d.call("health", "--all", "--config", conf); status != 3 || out != "" || !strings.Contains(errs, "is for root and SlurmUser") {
		t.Errorf("refused: exit status %d, %q, %q", status, out, errs)
	}
	d.kill()
	if _, errs, status := d.call("health", "--all"); status != 3 || !strings.Contains(errs, "has stopped") {
		t.Errorf("no daemon: exit status %d, %q", status, errs)
	}
}

type drained struct {
	nodes map[string]string
	err   error
}

func (d drained) DrainsWith(_ context.Context, prefix string) (map[string]string, error) {
	if prefix != "sluice: " {
		return nil, errors.New("prefix " + prefix)
	}
	return d.nodes, d.err
}

// Nodes that Slurm drained for us are findings, the same reason of several once.
func TestHealthAllDrains(t *testing.T) {
	all := rpc.HealthAll{Findings: []rpc.NodesCheck{{Check: rpc.Check{Level: rpc.Fail}}, {Check: rpc.Check{Level: rpc.Warn}}}}
	addDrains(t.Context(), &all, drained{nodes: map[string]string{"n2": "sluice: a", "n1": "sluice: a", "n3": "sluice: b"}})
	if len(all.Findings) != 4 || all.Findings[1].Name != "drained" || !slices.Equal(all.Findings[1].Nodes, []string{"n1", "n2"}) || all.Findings[2].Text != "sluice: b" || all.Findings[3].Level != rpc.Warn {
		t.Errorf("%+v", all.Findings)
	}
	all = rpc.HealthAll{}
	addDrains(t.Context(), &all, drained{err: errors.New("slurmctld is away")})
	if len(all.Findings) != 1 || all.Findings[0].Level != rpc.Warn || !strings.Contains(all.Findings[0].Text, "slurmctld is away") {
		t.Errorf("%+v", all.Findings)
	}
}
