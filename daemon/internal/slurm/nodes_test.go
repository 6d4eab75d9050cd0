package slurm

import (
	"maps"
	"testing"
)

func TestParseNodes(t *testing.T) {
	text := "NodeName=n1 Arch=x86_64 CPUAlloc=0 Gres=rgpu:h200:6400,gpu:4(S:0-1) GresDrain=N/A OS=Linux 6.1 #1 SMP Gres=x Comment=NodeName=n9 \n" +
		"NodeName=n2 Gres=(null) NodeAddr=n2\n\n"
	got, err := parseNodes(text)
	if want := map[string]string{"n1": "rgpu:h200:6400,gpu:4(S:0-1)", "n2": ""}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := parseNodes("No nodes in the system\n"); err == nil {
		t.Error("no nodes are no error")
	}
}

func TestParseNodeState(t *testing.T) {
	for line, want := range map[string][2]string{
		"NodeName=n1 Gres=rgpu:1600 State=IDLE+DRAIN ThreadsPerCore=1 Reason=sluice: disk: full; make room [root@2026-11-23T06:00:00]\n": {"IDLE+DRAIN", "sluice: disk: full; make room"},
		"NodeName=n1 State=IDLE ThreadsPerCore=1 Comment=x Reason=y\n":                                                                   {"IDLE", "y"},
		"NodeName=n1 State=DOWN* Reason=Not responding [slurm@2026-11-23T06:00:00] Comment=State=IDLE [a]\n":                             {"DOWN*", "Not responding"},
		"NodeName=n1 State=ALLOCATED ThreadsPerCore=1 TmpDisk=0\n":                                                                       {"ALLOCATED", ""},
	} {
		if state, reason, err := parseNodeState(line); err != nil || state != want[0] || reason != want[1] {
			t.Errorf("%q: %q, %q, %v", line, state, reason, err)
		}
	}
	if _, _, err := parseNodeState("No such node\n"); err == nil {
		t.Error("no state is no error")
	}
}
