package slurmconf

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// settings are the lines that say something, those that a site has to think about too.
var settings = regexp.MustCompile(`(?m)^#?([A-Z][A-Za-z]+=\S.*)$`)

func lines(text string) []string {
	var out []string
	for _, m := range settings.FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	return out
}

// What a site copies is what the command would tell it.
func TestEtcSlurmConf(t *testing.T) {
	text, err := os.ReadFile("../../../etc/slurm/slurm.conf")
	if err != nil {
		t.Fatal(err)
	}
	cfg := load(t, "pools: {default: {owners: [gpu03]}}")
	tab, err := New(cfg, []rpc.Pool{{Name: "default", Owners: pools()[1].Owners}})
	if err != nil {
		t.Fatal(err)
	}
	got := slices.DeleteFunc(lines(string(text)), func(l string) bool { return strings.Contains(l, "a100") }) // the example with types
	if want := lines(string(tab.Conf(cfg))); !slices.Equal(got, want) {
		t.Errorf("etc/slurm/slurm.conf:\n%s\nsluice slurm conf:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../../etc/examples/*.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d examples: %v", len(files), err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		cfg := load(t, string(text))
		if cfg.Lease.Silence.Minutes() != 4 || len(cfg.Slurm.Controllers) == 0 {
			t.Errorf("%s: silence %v, controllers %v", f, cfg.Lease.Silence, cfg.Slurm.Controllers)
		}
		if filepath.Base(f) != "partitions.yaml" {
			continue
		}
		have := []rpc.Pool{
			{Name: "default", Owners: []rpc.PoolOwner{owner("gpu01", gpus("NVIDIA H200", 140<<30, 8)), owner("gpu02", gpus("NVIDIA A100-SXM4-80GB", 79<<30, 8))}},
			{Name: "teaching", Owners: []rpc.PoolOwner{owner("gpu03", gpus("NVIDIA L40S", 44<<30, 4))}},
		}
		tab, err := New(cfg, have)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines(string(tab.Conf(cfg))) {
			if (strings.HasPrefix(l, "Licenses=") || strings.HasPrefix(l, "NodeName=")) && !strings.Contains(string(text), l) {
				t.Errorf("%s does not say %s", f, l)
			}
		}
	}
}

// The configuration that the guide shows is one that the daemon takes.
func TestGuide(t *testing.T) {
	text, err := os.ReadFile("../../../docs/admin.md")
	if err != nil {
		t.Fatal(err)
	}
	i := strings.Index(string(text), "\n    cluster: prod")
	if i < 0 {
		t.Fatal("docs/admin.md shows no sluice.yaml that begins with cluster: prod")
	}
	yaml := "\n"
	for line := range strings.Lines(string(text[i+1:])) {
		if !strings.HasPrefix(line, "    ") {
			break
		}
		yaml += line
	}
	cfg := load(t, strings.ReplaceAll(yaml, "\n    ", "\n"))
	if len(cfg.Slurm.Controllers) != 2 || len(cfg.Pools["default"].Owners) != 2 || cfg.Lease.Silence.Minutes() != 4 {
		t.Errorf("docs/admin.md: %+v %+v %v", cfg.Slurm, cfg.Pools, cfg.Lease.Silence)
	}
}
