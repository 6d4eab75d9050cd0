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
