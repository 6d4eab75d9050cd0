package slurmconf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func small(t *testing.T, n int) Table {
	t.Helper()
	cfg := load(t, "pools: {default: {owners: [gpu03]}}")
	tab, err := New(cfg, []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{owner("gpu03", gpus("NVIDIA H200", 140<<30, n))}}})
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

const hookLines = `Prolog=/usr/lib/sluice/slurm/prolog.sh
Epilog=/usr/lib/sluice/slurm/epilog.sh
PrologSlurmctld=/usr/lib/sluice/slurm/prolog-ctld.sh
EpilogSlurmctld=/usr/lib/sluice/slurm/epilog-ctld.sh
`

// plain is a file without the comments that are ours, and the lines that were.
func plain(text []byte) string {
	var out strings.Builder
	for l := range strings.Lines(string(text)) {
		if !strings.HasPrefix(l, "#sluice-") {
			out.WriteString(l)
		}
	}
	return out.String()
}

func TestAdd(t *testing.T) {
	for name, c := range map[string]struct {
		was, want string
		nodes     []string
	}{
		"bare": {
			was: "ClusterName=prod\nNodeName=node[01-20] CPUs=4 State=UNKNOWN\n",
			want: "ClusterName=prod\nNodeName=node[01-20] CPUs=4 State=UNKNOWN Gres=rgpu:no_consume:1600\n" +
				"GresTypes=rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines,
		},
		"merged": {
			was: "grestypes = gpu # local ones\nLicenses=matlab:4,rgpu:100\nPrologFlags=Alloc,contain\nJobSubmitPlugins=lua\n" +
				"NodeName=a Gres=gpu:2 CPUs=1 # old\nNodeName=b\n" + hookLines,
			want: "grestypes =gpu,rgpu # local ones\nLicenses=matlab:4,rgpu:400\nPrologFlags=Alloc,contain\nJobSubmitPlugins=lua\n" +
				"NodeName=a Gres=gpu:2,rgpu:no_consume:1600 CPUs=1 # old\nNodeName=b Gres=rgpu:no_consume:1600\n" + hookLines,
		},
		"inherited twice": {
			was: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1\nNodeName=DEFAULT CPUs=4\nNodeName=a",
			want: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1,rgpu:no_consume:1600\nNodeName=DEFAULT CPUs=4\nNodeName=a",
		},
		"inherited by some": {
			was: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1\nNodeName=a\nNodeName=b CPUs=2\nNodeName=c Gres=gpu:2",
			want: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1\nNodeName=a\nNodeName=b CPUs=2 Gres=gpu:1,rgpu:no_consume:1600\nNodeName=c Gres=gpu:2",
			nodes: []string{"b"},
		},
		"inherited": {
			was: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1\nNodeName=a\nNodeName=b Gres=gpu:2",
			want: "GresTypes=gpu,rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines +
				"NodeName=DEFAULT Gres=gpu:1,rgpu:no_consume:1600\nNodeName=a\nNodeName=b Gres=gpu:2,rgpu:no_consume:1600",
		},
		"some": {
			was: "NodeName=a\nNodeName=b\nGresTypes=rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\nPrologFlags=Contain\n" + hookLines,
			want: "NodeName=a\nNodeName=b Gres=rgpu:no_consume:1600\nGresTypes=rgpu\nLicenses=rgpu:400\nJobSubmitPlugins=lua\n" +
				"PrologFlags=Contain\n" + hookLines,
			nodes: []string{"b"},
		},
	} {
		got, err := small(t, 4).Add("slurm.conf", []byte(c.was), c.nodes)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if plain(got) != c.want {
			t.Errorf("%s:\n%s\nnot\n%s", name, plain(got), c.want)
		}
		again, err := small(t, 4).Add("slurm.conf", got, c.nodes)
		if err != nil || string(again) != string(got) {
			t.Errorf("%s: a second time it is another: %v\n%s", name, err, again)
		}
		more, err := small(t, 5).Add("slurm.conf", got, c.nodes)
		if err != nil || !strings.Contains(plain(more), "rgpu:500") {
			t.Errorf("%s: with another GPU: %v\n%s", name, err, more)
		}
		back, err := Remove("slurm.conf", more)
		if err != nil || string(back) != c.was {
			t.Errorf("%s: removed: %v\n%q\nnot\n%q", name, err, back, c.was)
		}
	}
}

// What the site changes afterwards elsewhere stays, and what it changes in a line of ours is never lost.
func TestRemoveChanged(t *testing.T) {
	text, err := small(t, 4).Add("slurm.conf", []byte("NodeName=a CPUs=1\nLicenses=matlab:4\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	added := strings.Replace(string(text), "NodeName=a", "NodeName=new\n#x\nNodeName=a", 1)
	if _, err := Remove("slurm.conf", []byte(added)); err == nil || !strings.Contains(err.Error(), "slurm.conf:1: ") {
		t.Errorf("a line between: %v", err)
	}
	back, err := Remove("slurm.conf", append(text, "NodeName=new\n"...))
	if err != nil || string(back) != "NodeName=a CPUs=1\nLicenses=matlab:4\nNodeName=new\n" {
		t.Errorf("a line behind: %v\n%s", err, back)
	}
	if _, err := Remove("slurm.conf", []byte(strings.Replace(string(text), "CPUs=1 Gres", "CPUs=2 Gres", 1))); err == nil {
		t.Error("a changed line is removed")
	}
	if _, err := Remove("slurm.conf", []byte(strings.Replace(string(text), endMark, "", 1))); err == nil {
		t.Error("a block without its end is removed")
	}
}

func TestAddRefused(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("nodes.conf", "NodeName=a\n")
	put("own", "#!/bin/sh\ntrue\n")
	put("good", "#!/bin/sh\n/usr/lib/sluice/slurm/prolog.sh\n")
	path := filepath.Join(dir, "slurm.conf")
	for text, want := range map[string]string{
		"Prolog=" + dir + "/own\nNodeName=a\n": "is the site's own",
		"NodeName=a \\\n CPUs=1\n":             "continued by a backslash",
		"ClusterName=x\n":                      "no line with NodeName=",
		"include nodes.conf\n":                 "nodes.conf, which",
	} {
		if out, err := small(t, 4).Add(path, []byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v\n%s", text, err, out)
		}
	}
	if _, err := small(t, 4).Add(path, []byte("NodeName=a\n"), []string{"b"}); err == nil || !strings.Contains(err.Error(), "NodeName=b") {
		t.Errorf("a node that is not there: %v", err)
	}
	if _, err := small(t, 4).Add(path, []byte("Prolog="+dir+"/good\nNodeName=a\n"), nil); err != nil {
		t.Errorf("a script with our line: %v", err)
	}
}

func TestAddInclude(t *testing.T) {
	for _, was := range []string{"", "# nothing\n"} {
		text := AddInclude("/etc/slurm/plugstack.conf", []byte(was))
		if !strings.Contains(string(text), "\ninclude /etc/slurm/plugstack.conf.d/*.conf\n") {
			t.Errorf("%q", text)
		}
		if back, err := Remove("plugstack.conf", text); err != nil || string(back) != was {
			t.Errorf("removed: %v %q", err, back)
		}
	}
}

// What cannot be merged without a guess, and what the site has written among our lines, is told and left.
func TestAddRefuses(t *testing.T) {
	tab := small(t, 4)
	for _, was := range []string{
		"PrologFlags=Contain SlurmdDebug=info\nNodeName=a\n",
		"SlurmdDebug=info PrologFlags=Contain\nNodeName=a\n",
		"GresTypes=\"gpu,mps\"\nNodeName=a\n",
		"GresTypes=gpu\nNodeName=a Gres=\"gpu:4\"\n",
	} {
		if now, err := tab.Add("slurm.conf", []byte(was), nil); err == nil || !strings.Contains(err.Error(), "slurm.conf:") {
			t.Errorf("%q: %q, %v", was, now, err)
		}
	}
	now, err := tab.Add("slurm.conf", []byte("NodeName=a\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(string(now), "Licenses=rgpu:400", "Licenses=rgpu:400,matlab:4", 1)
	if edited == string(now) {
		t.Fatalf("%s", now)
	}
	if _, err := Remove("slurm.conf", []byte(edited)); err == nil || !strings.Contains(err.Error(), "were changed after") {
		t.Error(err)
	}
	if _, err := tab.Add("slurm.conf", []byte(edited), nil); err == nil {
		t.Error("the site's licence is dropped")
	}
	if none, err := Remove("plugstack.conf", nil); none != nil || err != nil {
		t.Errorf("%q, %v", none, err)
	}
}
